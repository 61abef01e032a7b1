"""False alarms and misses of the guard on simulated runs: which losses it takes for failures."""

import pytest

from tests.control.loss_streams import BY_DESIGN, FAILURES, Told

SEEDS = range(5)
HEALTHY = ("falling", "falling, one cycle", "plateau")
RISES_IN_TIME = ("curriculum", "drift in time", "falls, then drifts in time", "queue in time")
FALLS_FIRST = ("ppo", "curriculum", "falls, then drifts in time")


def told(name: str, cycles: int = 60) -> list[Told]:
    stream = {**BY_DESIGN, **FAILURES}[name]
    return [stream.watched(seed, cycles=cycles) for seed in SEEDS]


@pytest.mark.parametrize("name", HEALTHY)
def test_guard_never_acts_in_a_healthy_run(name: str) -> None:
    assert [run.rollbacks for run in told(name, 300)] == [0] * len(SEEDS)


@pytest.mark.parametrize("name", BY_DESIGN)
def test_learning_rate_is_lowered_by_a_bounded_factor_where_losses_rise_by_design(
    name: str,
) -> None:
    """Without the bound, an oscillation ends at 1e-94 times the learning rate."""
    for run in told(name, 300):
        assert not run.stopped
        assert run.lowest > 1e-5
        assert run.rollbacks <= 16


@pytest.mark.parametrize("name", FALLS_FIRST)
def test_much_lower_rate_that_fails_too_is_not_the_cause_once_the_run_has_gained(
    name: str,
) -> None:
    for run in told(name, 300):
        assert run.lowest >= 1 / 64
        assert run.last == pytest.approx(1.0)
        assert run.accepted


@pytest.mark.parametrize("name", RISES_IN_TIME)
def test_guard_gives_the_learning_rate_back_where_the_data_rise(name: str) -> None:
    for run in told(name, 60):
        assert run.last == pytest.approx(1.0)
        assert run.num_low <= 12


@pytest.mark.parametrize("name", FAILURES)
def test_run_above_the_edge_of_stability_ends_below_it_and_has_learnt(name: str) -> None:
    for run in told(name, 300):
        assert run.accepted == 0
        assert run.last / FAILURES[name].edge < 1.6
        assert run.last / FAILURES[name].edge > 1 / 8
        assert run.loss < 1.2
