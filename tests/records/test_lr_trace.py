"""The trace of a cycle: the points from which its learning rates can be drawn."""

import math

import pytest

from hdet.records import schedule_export
from hdet.records.events import LRTracePoints
from hdet.records.lr_trace import LRTrace


def test_constant_lr_is_two_points() -> None:
    trace = LRTrace()
    for step in range(10, 20):
        trace.add(step, [0.1, 0.2], None)
    assert trace.points() == LRTracePoints(steps=(10, 19), lrs=((0.1, 0.1), (0.2, 0.2)))


def test_curve_keeps_its_ends_and_enough_points_between() -> None:
    trace = LRTrace()
    for step in range(1000):
        trace.add(step, [math.sin(step / 2000)], [0.9 - step / 1e4])
    points = trace.points()
    assert (points.steps[0], points.steps[-1]) == (0, 999)
    assert len(points.steps) < 300
    assert points.momenta is not None
    assert points.momenta[0][-1] == 0.9 - 999 / 1e4
    for step in range(1000):
        value = schedule_export.at(points.steps, points.lrs[0], step)
        assert value == pytest.approx(math.sin(step / 2000), abs=1e-6)


def test_every_jump_is_kept() -> None:
    trace = LRTrace()
    for step in range(200):
        trace.add(step, [1.0 if step < 73 else 0.1, step % 20], None)
    points = trace.points()
    for step in range(200):
        assert schedule_export.at(points.steps, points.lrs[0], step) == (1.0 if step < 73 else 0.1)
        assert schedule_export.at(points.steps, points.lrs[1], step) == pytest.approx(step % 20)
    assert len(points.steps) <= 22


def test_short_and_empty_cycles_have_few_points() -> None:
    trace = LRTrace()
    assert trace.points() == LRTracePoints(momenta=())
    trace.add(7, [0.1], None)
    assert trace.points() == LRTracePoints(steps=(7,), lrs=((0.1,),))
    trace.clear()
    assert trace.points().steps == ()
