"""The steps that a search may take, and the length of its rounds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hdet
from hdet.lr_search.budget import StepBudget, check_room, sweep_steps
from hdet.lr_search.constants import (
    MAX_SWEEPS,
    MIN_ROUND_STEPS,
    NUM_SWEEPS_ASKED_FOR,
    SWEEP_STEPS,
    SWEEPS_PER_BUDGET,
)
from hdet.lr_search.grids import SweepGrid

SHARE = hdet.Scout().share


def least_room(num_replicas: int) -> int:
    """The steps of the shortest run that has room for one sweep."""
    return math.ceil(shortest_sweep(num_replicas) / SHARE)


def shortest_sweep(num_replicas: int) -> int:
    return SweepGrid(hdet.Scout().decades, num_replicas).num_rounds * MIN_ROUND_STEPS


@given(st.integers(1, 16), st.integers(1, 100_000), st.floats(0.001, 0.9))
def test_round_length_and_limit_stay_in_range_wherever_one_sweep_fits(
    num_replicas: int, total_steps: int, share: float
) -> None:
    scout = hdet.Scout(share=share)
    grid = SweepGrid(scout.decades, num_replicas)
    steps = sweep_steps(scout, total_steps, num_replicas)
    assert MIN_ROUND_STEPS <= steps <= SWEEP_STEPS
    if grid.num_rounds * steps > share * total_steps:
        with pytest.raises(ValueError, match="`scout` must fit in its `share`"):
            check_room(scout, num_replicas=num_replicas, total_steps=total_steps)
        assert steps == MIN_ROUND_STEPS
        return
    budget = StepBudget(scout, num_replicas=num_replicas, total_steps=total_steps)
    assert budget.limit == min(share * total_steps, total_steps - 1)
    if steps > MIN_ROUND_STEPS:
        assert SWEEPS_PER_BUDGET * grid.num_rounds * steps <= share * total_steps


def test_more_replicas_need_fewer_rounds_and_have_room_in_shorter_runs() -> None:
    least = least_room(8)
    check_room(hdet.Scout(), num_replicas=8, total_steps=least)
    words = f"trying 6 learning rates takes {shortest_sweep(2)} steps"
    with pytest.raises(ValueError, match=words):
        check_room(hdet.Scout(), num_replicas=2, total_steps=least)


@pytest.mark.parametrize("num_replicas", [1, 2, 4, 8])
def test_room_begins_where_the_share_holds_the_shortest_sweep(num_replicas: int) -> None:
    least = least_room(num_replicas)
    check_room(hdet.Scout(), num_replicas=num_replicas, total_steps=least)
    with pytest.raises(ValueError, match="`scout` must fit in its `share`"):
        check_room(hdet.Scout(), num_replicas=num_replicas, total_steps=least - 1)


def test_rounds_have_the_length_that_was_asked_for() -> None:
    scout = hdet.Scout(steps=25)
    for total_steps in (100, 10_000, None):
        assert sweep_steps(scout, total_steps, 8) == 25


def test_length_that_was_asked_for_may_exceed_the_share_but_not_the_run() -> None:
    scout = hdet.Scout(steps=25)
    assert StepBudget(scout, num_replicas=8, total_steps=100).limit == NUM_SWEEPS_ASKED_FOR * 25
    assert StepBudget(scout, num_replicas=8, total_steps=26).limit == 25
    assert StepBudget(scout, num_replicas=8, total_steps=10_000).limit == SHARE * 10_000
    with pytest.raises(ValueError, match=r"must be shorter than the run \(25 steps\)"):
        StepBudget(scout, num_replicas=8, total_steps=25)


def test_run_of_unknown_length_has_room_for_all_sweeps() -> None:
    budget = StepBudget(hdet.Scout(), num_replicas=3, total_steps=None)
    assert budget.round_steps == SWEEP_STEPS
    assert budget.limit == MAX_SWEEPS * 2 * SWEEP_STEPS


def test_budget_is_used_up_to_its_last_step() -> None:
    budget = StepBudget(hdet.Scout(share=0.03), num_replicas=8, total_steps=1000)
    budget.used = 20
    assert budget.fits(10)
    assert not budget.fits(11)


@pytest.mark.parametrize("scout", [hdet.Scout(share=0.5), hdet.Scout(steps=30)])
def test_need_may_exceed_the_limit_but_leaves_a_step_to_the_run(scout: hdet.Scout) -> None:
    budget = StepBudget(scout, num_replicas=8, total_steps=100)
    budget.used = 60
    assert not budget.fits(39)
    assert budget.fits_in_run(39)
    assert not budget.fits_in_run(40)
    assert StepBudget(scout, num_replicas=8, total_steps=None).fits_in_run(10**9)


def test_share_of_nearly_one_leaves_a_step_to_the_run() -> None:
    assert StepBudget(hdet.Scout(share=0.999), num_replicas=8, total_steps=100).limit == 99


@pytest.mark.parametrize("total_steps", [0, 1, 12, least_room(2) - 1])
def test_run_without_room_for_one_sweep_is_refused(total_steps: int) -> None:
    with pytest.raises(ValueError, match="`scout` must fit in its `share`"):
        check_room(hdet.Scout(), num_replicas=2, total_steps=total_steps)
    with pytest.raises(ValueError, match="`scout` must be shorter than the run"):
        check_room(hdet.Scout(steps=999), num_replicas=2, total_steps=total_steps)
