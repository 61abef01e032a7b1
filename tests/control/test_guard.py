"""Which replicas are healthy, when a run fails, and what ceiling its learning rate gets."""

import math
import random
import re
from statistics import fmean, stdev

import pytest

import hdet
from hdet.control.guard import Guard
from hdet.control.guard_monitor import (
    NEW_DATA_AFTER,
    PROBATION_CYCLES,
    SPARE_EVERY,
    VANISHED_SHARE,
    GuardMonitor,
)
from hdet.control.replica_health import check_health


def test_replica_is_excluded_for_a_loss_or_weights_that_are_not_finite() -> None:
    result = check_health([1.0, math.inf, 1.0, None], [True, True, False, True], step=7)
    assert result.healthy == (0, 3)
    assert result.excluded == {1: "loss is inf", 2: "weights are not finite"}


def test_replica_with_a_loss_far_above_the_others_is_an_outlier() -> None:
    monitor = monitor_after(FALLING)
    assert monitor.outliers([2.5, 2.6, 2.4, 2.5], [0.1] * 4) == {}
    found = monitor.outliers([2.5, 2.6, 9.0, 2.4, math.nan], [0.1] * 5)
    assert found == {2: "loss 9 lies far above 2.55, that of the others"}
    assert monitor.outliers([2.5, 2.6, 9.0, 2.4], [2.0] * 4) == {}  # noise
    assert monitor.outliers([2.5, 2.6, 2.75, 2.6], [0.0] * 4) == {}  # a tenth of the gain is more
    assert monitor.outliers([2.5, 9.0, None, 2.5], [0.0] * 4) == {}  # three may not know
    result = check_health([2.5, 2.6, 9.0, math.nan], [True] * 4, step=1).without({2: "far"})
    assert result.healthy == (0, 1)
    assert result.comparable == (0, 1, 2)
    assert result.excluded == {3: "loss is nan", 2: "far"}


def test_error_names_the_causes_if_no_replica_is_healthy() -> None:
    with pytest.raises(
        hdet.ReplicasLost, match=r"no replica has finite weights .* at step 7 .*replica 1: loss"
    ):
        check_health([math.nan, math.nan], [True, True], step=7)


FALLING = [5.0, 4.0, 3.4, 3.0, 2.8, 2.7, 2.6, 2.55, 2.5]


def monitor_after(losses: list[float], *, lr: float = 1.0, error: float = 0.01) -> GuardMonitor:
    monitor = GuardMonitor(Guard())
    monitor.set_first_loss(losses[0], error)
    for loss in losses:
        assert monitor.check_cycle(loss, error, lr=lr) is None
    return monitor


def fail(monitor: GuardMonitor, loss: float, *, lr: float, ahead: float) -> float:
    """A cycle that must fail; returns the factor on the scale."""
    assert monitor.check_cycle(loss, 0.01, lr=lr) is not None
    return monitor.scale_factor(lr, ahead)


# What a failure is --------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [2.45, 2.6, 2.7])
def test_loss_near_the_level_is_no_failure(loss: float) -> None:
    assert monitor_after(FALLING).check_cycle(loss, 0.01) is None


@pytest.mark.parametrize("loss", [3.0, 4.2, 20.0, math.nan, math.inf])
def test_loss_that_gives_back_a_tenth_of_the_gain_is_a_failure(loss: float) -> None:
    monitor = monitor_after(FALLING)
    assert "loss" in (monitor.check_cycle(loss, 0.01) or "")
    assert monitor.consecutive_rollbacks == 1


def test_reason_of_a_failure_names_loss_limit_and_best_level() -> None:
    reason = monitor_after(FALLING).check_cycle(1955.2) or ""
    assert re.fullmatch(r"mean loss 1955 exceeds the limit 2\.\d+ \(best level 2\.6\)", reason)


def test_slow_rise_is_a_failure_though_no_cycle_is_far_above_the_one_before() -> None:
    """Losses of a conv net under a learning rate that warms up."""
    monitor = monitor_after([2.3, 1.2, 0.8, 0.7, 0.64])
    seen = [monitor.check_cycle(loss, 0.02) is None for loss in (0.65, 0.80, 1.07)]
    assert seen == [True, True, False]


def test_rise_from_a_checkpoint_is_a_failure_before_anything_is_gained() -> None:
    monitor = GuardMonitor(Guard())
    monitor.set_first_loss(1.05, 0.01)
    assert monitor.check_cycle(1.33, 0.01) is not None


def test_noisy_loss_must_rise_further_to_be_a_failure() -> None:
    assert monitor_after(FALLING, error=0.01).check_cycle(3.2, 0.01) is not None
    assert monitor_after(FALLING, error=0.3).check_cycle(3.2, 0.3) is None


def test_constant_in_the_loss_does_not_change_failures_after_a_gain() -> None:
    for shift in (-100.0, 0.0, 100.0):
        monitor = monitor_after([loss + shift for loss in FALLING])
        assert monitor.check_cycle(2.6 + shift, 0.01) is None
        assert monitor.check_cycle(4.2 + shift, 0.01) is not None


def test_vanished_gradients_are_a_failure_only_before_anything_is_gained() -> None:
    """A dead net has the loss of one that has not begun."""
    monitor = GuardMonitor(Guard())
    monitor.set_first_loss(2.3, 0.01)
    assert monitor.check_cycle(2.3, 0.01, vanished=0.1) is None
    reason = monitor.check_cycle(2.3, 0.01, vanished=VANISHED_SHARE)
    assert reason == "the gradients of 50% of the tensors have vanished"
    assert monitor_after(FALLING).check_cycle(2.5, 0.01, vanished=1.0) is None


def test_model_that_is_dead_at_any_learning_rate_is_accepted() -> None:
    monitor = GuardMonitor(Guard())
    monitor.set_first_loss(2.3, 0.01)
    fails = [monitor.check_cycle(2.3, 0.01, vanished=1.0) is not None for _ in range(20)]
    assert sum(fails) == NEW_DATA_AFTER
    assert monitor.abstains


@pytest.mark.parametrize("kind", ["plateau", "zero", "heavy", "lognormal", "falling"])
@pytest.mark.parametrize("num", [1, 20])
def test_healthy_run_is_rarely_rolled_back(kind: str, num: int) -> None:
    """Eight replicas, sixty cycles of `num` steps, noise as large as the loss."""
    assert len(rolled_back(kind, num)) <= (4 if num == 1 else 1)


def test_loss_that_rises_by_design_is_accepted_after_a_few_rollbacks() -> None:
    hits = rolled_back("rising", 20)
    assert max(hits) <= 2 * NEW_DATA_AFTER


def rolled_back(kind: str, num: int) -> list[int]:
    """The number of rollbacks of each of 20 runs that had any."""
    chance, hits = random.Random(0), []
    draw = {
        "plateau": lambda cycle: chance.gauss(2, 1),
        "zero": lambda cycle: chance.gauss(0, 1),
        "heavy": lambda cycle: 2 + chance.gauss(0, 1) / math.sqrt(chance.gammavariate(2, 0.5)),
        "lognormal": lambda cycle: chance.lognormvariate(0, 1),
        "rising": lambda cycle: chance.gauss(cycle / 10, 0.3),
        "falling": lambda cycle: chance.gauss(10 / (1 + cycle) + 2, 0.3),
    }[kind]
    for _ in range(20):
        monitor = GuardMonitor(hdet.Guard())
        first = [draw(0) for _ in range(8)]
        monitor.set_first_loss(fmean(first), stdev(first) / math.sqrt(8))
        taken = 0
        for cycle in range(60):
            rows = [[draw(cycle) for _ in range(num)] for _ in range(8)]
            errors = [stdev(row) / math.sqrt(num) for row in rows] if num > 1 else None
            error = math.hypot(*errors) / 8 if errors else None
            taken += monitor.check_cycle(fmean(map(fmean, rows)), error) is not None
        hits += [taken] if taken else []
    return hits


def test_only_the_best_cycles_are_worth_a_snapshot() -> None:
    monitor = monitor_after(FALLING)
    seen = []
    for loss in (2.55, 2.4, 2.6):
        assert monitor.check_cycle(loss, 0.01) is None
        seen.append(monitor.is_best)
    assert seen == [False, True, False]


# The ceiling --------------------------------------------------------------------------------------


def test_rest_of_the_schedule_peaks_at_a_quarter_of_the_learning_rate_that_failed() -> None:
    monitor = monitor_after(FALLING, lr=0.2)
    assert fail(monitor, 9.0, lr=0.4, ahead=1.0) == pytest.approx(0.1)
    assert monitor.ceiling == pytest.approx(0.1)


def test_second_failure_in_a_row_lowers_the_ceiling_to_a_sixteenth() -> None:
    monitor = monitor_after(FALLING, lr=0.2)
    first = fail(monitor, 9.0, lr=0.4, ahead=1.0)
    second = fail(monitor, 9.0, lr=0.4 * first, ahead=first)
    assert first * second == pytest.approx(0.4 * first / 16)


def test_ceiling_does_not_raise_a_schedule_that_is_below_it_already() -> None:
    assert fail(monitor_after(FALLING, lr=0.2), 9.0, lr=0.4, ahead=0.01) == 1.0


def test_learning_rate_that_has_trained_well_is_spared_once() -> None:
    monitor = monitor_after(FALLING, lr=1.0)
    assert fail(monitor, 9.0, lr=1.0, ahead=1.0) == 1.0
    assert monitor.ceiling == math.inf
    assert fail(monitor, 9.0, lr=1.0, ahead=1.0) == 0.25
    monitor = monitor_after(FALLING, lr=1.0)
    fail(monitor, 9.0, lr=1.0, ahead=1.0)
    for _ in range(3):
        monitor.check_cycle(2.5, 0.01, lr=1.0)
    assert fail(monitor, 9.0, lr=1.0, ahead=1.0) == 0.25  # too soon to come from the data again
    for _ in range(SPARE_EVERY):
        assert monitor.check_cycle(2.5, 0.01, lr=1.0) is None
    assert fail(monitor, 9.0, lr=1.0, ahead=1.0) == 1.0


def test_learning_rate_that_trained_well_before_gets_one_more_chance() -> None:
    monitor, scale = monitor_after(FALLING, lr=1.0), 1.0
    for _ in range(2):
        scale *= fail(monitor, 9.0, lr=scale, ahead=scale)
    assert scale == 0.25
    for _ in range(PROBATION_CYCLES):
        assert scale == 0.25
        assert monitor.check_cycle(2.5, 0.01, lr=scale) is None
        scale *= monitor.scale_correction
    assert scale == 1.0
    assert monitor.ceiling == math.inf
    scale *= fail(monitor, 9.0, lr=scale, ahead=scale)
    assert scale == 0.25
    for _ in range(3 * PROBATION_CYCLES):
        assert monitor.check_cycle(2.5, 0.01, lr=scale) is None
        scale *= monitor.scale_correction
    assert scale == 0.25


def test_new_learning_rate_that_failed_gets_no_second_chance() -> None:
    monitor = monitor_after(FALLING, lr=0.2)
    fail(monitor, 9.0, lr=0.4, ahead=1.0)
    for _ in range(3 * PROBATION_CYCLES):
        assert monitor.check_cycle(2.5, 0.01, lr=0.1) is None
        assert monitor.scale_correction == 1.0


def test_run_is_out_of_retries_after_its_last_rollback() -> None:
    monitor = GuardMonitor(Guard(retries=2))
    monitor.set_first_loss(5.0, 0.01)
    for retry in range(3):
        assert not monitor.is_out_of_retries
        fail(monitor, 90.0 * 4**retry, lr=1.0, ahead=1.0)
    assert monitor.is_out_of_retries


def test_run_that_stops_has_its_scale_one_step_below_the_start() -> None:
    monitor, scale = monitor_after(FALLING), 1.0
    while True:
        assert monitor.check_cycle(90.0 / 1.4**monitor.consecutive_rollbacks, 0.01) is not None
        if monitor.is_out_of_retries:
            break
        scale *= monitor.scale_factor(scale, scale)
    scale *= monitor.end_rollbacks()
    assert scale == pytest.approx(0.25)
    assert monitor.consecutive_rollbacks == 0


# New data -----------------------------------------------------------------------------------------


def test_loss_that_stays_high_at_any_learning_rate_is_new_data() -> None:
    """And gets its learning rate back; what is good is learnt anew."""
    monitor, scale = monitor_after([3.0, 2.0, 1.5, 1.4, 1.3]), 1.0
    for _ in range(NEW_DATA_AFTER):
        scale *= fail(monitor, 5.7, lr=scale, ahead=scale)
    assert monitor.check_cycle(5.75, 0.01) is None
    assert monitor.sees_new_data
    assert scale * monitor.scale_correction == pytest.approx(1.0)
    assert monitor.check_cycle(5.6, 0.01) is None
    assert monitor.scale_correction == 1.0


def test_loss_that_falls_with_the_learning_rate_is_not_new_data() -> None:
    monitor = monitor_after([3.0, 2.0, 1.5, 1.4, 1.3])
    for turn in range(NEW_DATA_AFTER + 1):
        assert monitor.check_cycle(5.0 + 64 / 2**turn, 0.01) is not None


def test_guard_that_abstains_acts_again_after_a_gain() -> None:
    monitor = GuardMonitor(Guard())
    monitor.set_first_loss(1.0, 0.01)
    for _ in range(NEW_DATA_AFTER + 1):
        monitor.check_cycle(2.0, 0.01)
    assert monitor.abstains
    assert monitor.check_cycle(30.0, 0.01) is None
    assert monitor.check_cycle(math.nan) is not None
    for loss in (0.5, 0.3, 0.2):
        assert monitor.check_cycle(loss, 0.01) is None
    assert monitor.check_cycle(30.0, 0.01) is not None


# States -------------------------------------------------------------------------------------------


def test_monitor_continues_from_its_state() -> None:
    monitor, other = monitor_after(FALLING, lr=0.2), GuardMonitor(Guard())
    fail(monitor, 90.0, lr=0.4, ahead=1.0)
    other.load_state_dict(monitor.state_dict())
    assert other.state_dict() == monitor.state_dict()
    assert other.check_cycle(4.2, 0.01, lr=0.1) is not None
    assert other.scale_factor(0.1, 0.1) == monitor.ceiling / 16 / 0.1


def test_monitor_continues_from_a_state_of_before_there_was_a_ceiling() -> None:
    monitor = GuardMonitor(Guard())
    monitor.load_state_dict(
        {"good": FALLING[1:], "errors": [0.01], "first": 5.0, "first_error": 0.02, "in_a_row": 0}
    )
    assert monitor.ceiling == math.inf
    assert monitor.check_cycle(2.6, 0.01) is None
    assert monitor.check_cycle(9.0, 0.01) is not None


def test_failure_at_a_learning_rate_of_zero_lowers_nothing() -> None:
    monitor = GuardMonitor(Guard())
    monitor.set_first_loss(1.0, 0.1)
    for _ in range(4):
        monitor.check_cycle(9.0, 0.1, lr=0.0)
        if monitor.consecutive_rollbacks:
            assert monitor.scale_factor(0.0, 1.0) == 1.0
    assert monitor.scale_correction == 1.0
