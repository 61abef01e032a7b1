"""The points from which the course of a cycle can be drawn again."""

import math

import pytest

from hdet.records import schedule_export
from hdet.records.lr_trace import LRTrace


def test_a_flat_course_is_two_points() -> None:
    course = LRTrace()
    for step in range(10, 20):
        course.add(step, [0.1, 0.2], None)
    assert course.points() == {"steps": [10, 19], "lrs": [[0.1, 0.1], [0.2, 0.2]], "momenta": None}


def test_a_curve_keeps_its_ends_and_points_between() -> None:
    course = LRTrace()
    for step in range(1000):
        course.add(step, [math.sin(step / 2000)], [0.9 - step / 1e4])
    points = course.points()
    assert (points["steps"][0], points["steps"][-1]) == (0, 999)
    assert len(points["steps"]) < 300
    assert points["momenta"][0][-1] == 0.9 - 999 / 1e4
    for step in range(1000):
        value = schedule_export.at(points["steps"], points["lrs"][0], step)
        assert value == pytest.approx(math.sin(step / 2000), abs=1e-6)


def test_every_turn_is_kept() -> None:
    course = LRTrace()
    for step in range(200):
        course.add(step, [1.0 if step < 73 else 0.1, step % 20], None)
    points = course.points()
    for step in range(200):
        assert schedule_export.at(points["steps"], points["lrs"][0], step) == (
            1.0 if step < 73 else 0.1
        )
        assert schedule_export.at(points["steps"], points["lrs"][1], step) == pytest.approx(
            step % 20
        )
    assert len(points["steps"]) <= 22


def test_short_and_empty_cycles() -> None:
    course = LRTrace()
    assert course.points() == {"steps": [], "lrs": [], "momenta": []}
    course.add(7, [0.1], None)
    assert course.points() == {"steps": [7], "lrs": [[0.1]], "momenta": None}
    course.clear()
    assert course.points()["steps"] == []
