"""The steps that a search may take, and the length of its rounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hdet
from hdet.lr_search.budget import StepBudget, check_room, sweep_steps
from hdet.lr_search.constants import MAX_SWEEPS, MIN_ROUND_STEPS, SWEEP_STEPS
from hdet.lr_search.grids import SweepGrid


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
    assert budget.limit == share * total_steps
    if steps > MIN_ROUND_STEPS:
        assert 2 * grid.num_rounds * steps <= budget.limit


def test_more_replicas_need_fewer_rounds_and_have_room_in_shorter_runs() -> None:
    check_room(hdet.Scout(), num_replicas=8, total_steps=134)
    with pytest.raises(ValueError, match="trying 6 learning rates takes 12 steps"):
        check_room(hdet.Scout(), num_replicas=2, total_steps=134)


def test_rounds_have_the_length_that_was_asked_for() -> None:
    scout = hdet.Scout(steps=25)
    for total_steps in (100, 10_000, None):
        assert sweep_steps(scout, total_steps, 8) == 25


def test_length_that_was_asked_for_may_exceed_the_share_but_not_the_run() -> None:
    scout = hdet.Scout(steps=25)
    assert StepBudget(scout, num_replicas=8, total_steps=100).limit == 50
    assert StepBudget(scout, num_replicas=8, total_steps=26).limit == 25
    assert StepBudget(scout, num_replicas=8, total_steps=10_000).limit == 300
    with pytest.raises(ValueError, match=r"must be shorter than the run \(25 steps\)"):
        StepBudget(scout, num_replicas=8, total_steps=25)


def test_run_of_unknown_length_has_room_for_all_sweeps() -> None:
    budget = StepBudget(hdet.Scout(), num_replicas=3, total_steps=None)
    assert budget.round_steps == SWEEP_STEPS
    assert budget.limit == MAX_SWEEPS * 2 * SWEEP_STEPS


def test_budget_is_used_up_to_its_last_step() -> None:
    budget = StepBudget(hdet.Scout(), num_replicas=8, total_steps=1000)
    budget.used = 20
    assert budget.fits(10)
    assert not budget.fits(11)


@pytest.mark.parametrize("total_steps", [0, 12, 100])
def test_run_without_room_for_one_sweep_is_refused(total_steps: int) -> None:
    with pytest.raises(ValueError, match="`scout` must fit in its `share`"):
        check_room(hdet.Scout(), num_replicas=2, total_steps=total_steps)
    with pytest.raises(ValueError, match="`scout` must be shorter than the run"):
        check_room(hdet.Scout(steps=50), num_replicas=2, total_steps=total_steps)
