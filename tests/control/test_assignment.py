"""Multipliers and assignments: eqs. 1 and 9, and nothing random about them."""

import random
from collections import Counter

import pytest
import torch

from hdet.control.assignment import assignment, multipliers, spread_out


def test_multipliers_are_those_of_the_paper() -> None:
    fan = multipliers(8, 1 / 9)
    assert fan[0] == pytest.approx(8 / 9)
    assert fan[-1] == pytest.approx(10 / 9)
    assert sum(fan) / 8 == pytest.approx(1)
    assert multipliers(2, 0.5) == (0.5, 1.5)


def test_assignment_depends_on_seed_cycle_and_knob() -> None:
    first = assignment(8, seed=0, cycle=1, knob="lr/a")
    assert first == assignment(8, seed=0, cycle=1, knob="lr/a")
    others = [
        assignment(8, seed=1, cycle=1, knob="lr/a"),
        assignment(8, seed=0, cycle=2, knob="lr/a"),
        assignment(8, seed=0, cycle=1, knob="lr/b"),
    ]
    assert all(other != first for other in others)


def test_assignments_are_uniform() -> None:
    """Each of the 6 permutations of 3 replicas, about equally often: chi-squared, 5 degrees."""
    counts = Counter(assignment(3, seed=0, cycle=c, knob="k") for c in range(6000))
    assert len(counts) == 6
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 20.5  # p = 0.001


def test_assignment_draws_from_no_random_generator() -> None:
    before = (random.getstate(), torch.get_rng_state())
    assignment(8, seed=0, cycle=1, knob="k")
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_multipliers_without_a_cycle_are_in_the_order_of_the_replicas() -> None:
    assert spread_out(4, 0.3, seed=0, cycle=None, knob="k") == multipliers(4, 0.3)
