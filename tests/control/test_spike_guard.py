"""Which replicas are fit, and what a spike is."""

import math
import random
import re
from statistics import fmean, stdev

import pytest

import hdet
from hdet.control.replica_health import check_health
from hdet.control.spike_guard import NEW_DATA_AFTER, NOISE_CYCLES, Guard, SpikeMonitor


def test_replica_is_excluded_for_a_loss_or_weights_that_are_not_finite() -> None:
    result = check_health([1.0, math.inf, 1.0, None], [True, True, False, True], step=7)
    assert result.healthy == (0, 3)
    assert result.excluded == {1: "loss is inf", 2: "weights are not finite"}


def test_replica_with_a_loss_far_above_the_others_is_an_outlier() -> None:
    watch = watch_of(FALLING)
    assert watch.outliers([2.5, 2.6, 2.4, 2.5], [0.1] * 4) == {}
    found = watch.outliers([2.5, 2.6, 9.0, 2.4, math.nan], [0.1] * 5)
    assert found == {2: "loss 9 lies far above 2.55, that of the others"}
    assert watch.outliers([2.5, 2.6, 9.0, 2.4], [2.0] * 4) == {}  # noise
    assert watch.outliers([2.5, 2.6, 2.75, 2.6], [0.0] * 4) == {}  # a tenth of the gain is more
    assert watch.outliers([2.5, 9.0, None, 2.5], [0.0] * 4) == {}  # three may not know
    result = check_health([2.5, 2.6, 9.0, math.nan], [True] * 4, step=1).without({2: "far"})
    assert result.healthy == (0, 1)
    assert result.comparable == (0, 1, 2)
    assert result.excluded == {3: "loss is nan", 2: "far"}


def test_error_names_the_causes_if_no_replica_is_healthy() -> None:
    with pytest.raises(
        hdet.ReplicasLost, match=r"no replica has finite weights .* at step 7 .*replica 1: loss"
    ):
        check_health([math.nan, math.nan], [True, True], step=7)


def watch_of(losses: list[float], **options: float) -> SpikeMonitor:
    watch = SpikeMonitor(Guard(**options))  # type: ignore[arg-type]
    watch.set_first_loss(losses[0])
    for loss in losses:
        assert watch.check_cycle(loss) is None
    return watch


FALLING = [5.0, 4.0, 3.4, 3.0, 2.8, 2.7, 2.6, 2.55, 2.5]


@pytest.mark.parametrize("loss", [2.45, 2.6, 2.7])
def test_ordinary_loss_is_no_spike(loss: float) -> None:
    assert watch_of(FALLING).check_cycle(loss) is None


@pytest.mark.parametrize("loss", [4.2, 20.0, math.nan, math.inf])
def test_loss_that_gives_back_much_of_the_gain_is_a_spike(loss: float) -> None:
    watch = watch_of(FALLING)
    assert "loss" in (watch.check_cycle(loss) or "")
    assert watch.consecutive_rollbacks == 1


def test_reason_of_a_spike_names_loss_limit_and_recent_level() -> None:
    reason = watch_of(FALLING).check_cycle(1955.2) or ""
    pattern = r"mean loss 1955 exceeds the limit [\d.]+ \(recent level 2\.[45]\d*\)"
    assert re.fullmatch(pattern, reason)


def test_small_spike_is_rolled_back_once_and_does_not_lower_the_scale() -> None:
    watch = watch_of(FALLING)
    assert watch.check_cycle(3.2, 0.01) is not None
    assert watch.scale_factor() == 1.0
    assert watch.check_cycle(3.2, 0.01) is None  # again, with other batches: that is how it is now
    assert watch.scale_correction == 1.0


def test_large_spike_after_a_small_one_lowers_the_scale() -> None:
    watch = watch_of(FALLING)
    assert watch.check_cycle(3.2, 0.01) is not None
    assert watch.check_cycle(90.0, 0.01) is not None
    assert watch.scale_factor() == 0.5


def test_small_spikes_of_recurring_hard_data_are_rarely_rolled_back() -> None:
    """Every other cycle is of another kind: what is undone of it is never learnt."""
    watch = watch_of(FALLING)
    undone = [
        watch.check_cycle(2.5 if cycle % 2 else 3.2, 0.01) is not None for cycle in range(400)
    ]
    assert sum(undone) <= 400 / NOISE_CYCLES + 1


def test_loss_without_an_error_is_no_small_spike() -> None:
    assert watch_of(FALLING).check_cycle(3.2) is None


def test_recorded_spike_of_a_language_model_is_detected() -> None:
    """From a run that came back from it by itself, and ended 30 % behind."""
    losses = [4.64, 3.71, 3.11, 2.91, 2.76, 2.68]
    watch = SpikeMonitor(hdet.Guard())
    watch.set_first_loss(5.56, 0.01)
    for loss in losses:
        assert watch.check_cycle(loss, 0.02) is None
    assert watch.check_cycle(3.24, 0.03) is not None


def test_noisy_loss_must_rise_further_to_be_a_spike() -> None:
    calm, noisy = watch_of([5.0, *[2.0, 2.1] * 8]), watch_of([5.0, *[2.0, 2.8] * 8])
    assert calm.check_cycle(4.0) is not None
    assert noisy.check_cycle(4.0) is None


def test_constant_in_the_loss_does_not_change_spikes() -> None:
    for shift in (-100.0, 0.0, 100.0):
        watch = watch_of([loss + shift for loss in FALLING])
        assert watch.check_cycle(2.6 + shift) is None
        assert watch.check_cycle(4.2 + shift) is not None


def test_first_cycle_is_compared_with_the_first_loss() -> None:
    watch = SpikeMonitor(Guard())
    watch.set_first_loss(5.0)
    assert watch.check_cycle(5.5) is None
    watch = SpikeMonitor(Guard())
    watch.set_first_loss(5.0)
    assert watch.check_cycle(50.0) is not None


def test_consecutive_spikes_lower_the_scale_further_until_a_good_cycle() -> None:
    watch = watch_of(FALLING, retries=2)
    factors = []
    for _ in range(3):
        watch.check_cycle(90.0)
        factors.append(watch.scale_factor())
    assert factors == [0.5, 0.25, 0.125]
    assert watch.is_out_of_retries
    assert watch.check_cycle(2.5) is None
    assert not watch.is_out_of_retries


@pytest.mark.parametrize("kind", ["plateau", "zero", "heavy", "lognormal", "rising", "falling"])
@pytest.mark.parametrize("num", [1, 20])
def test_healthy_run_is_rarely_rolled_back(kind: str, num: int) -> None:
    """Eight replicas, thirty cycles of `steps` steps, noise as large as the loss."""
    chance, hits = random.Random(0), 0
    draw = {
        "plateau": lambda cycle: chance.gauss(2, 1),
        "zero": lambda cycle: chance.gauss(0, 1),
        "heavy": lambda cycle: 2 + chance.gauss(0, 1) / math.sqrt(chance.gammavariate(2, 0.5)),
        "lognormal": lambda cycle: chance.lognormvariate(0, 1),
        "rising": lambda cycle: chance.gauss(cycle / 10, 0.3),
        "falling": lambda cycle: chance.gauss(10 / (1 + cycle) + 2, 0.3),
    }[kind]
    for _ in range(20):
        watch = SpikeMonitor(hdet.Guard())
        first = [draw(0) for _ in range(8)]
        watch.set_first_loss(fmean(first), stdev(first) / math.sqrt(8))
        taken = False
        for cycle in range(30):
            rows = [[draw(cycle) for _ in range(num)] for _ in range(8)]
            errors = [stdev(row) / math.sqrt(num) for row in rows] if num > 1 else None
            error = math.hypot(*errors) / 8 if errors else None
            taken |= watch.check_cycle(fmean(map(fmean, rows)), error) is not None
        hits += taken
    assert hits <= (4 if num == 1 else 2)


def test_scale_is_raised_again_after_consecutive_spikes_except_for_one_step() -> None:
    """As long as nothing spikes again on the way."""
    watch, scale = watch_of(FALLING), 1.0
    for _ in range(4):
        assert watch.check_cycle(90.0) is not None
        scale *= watch.scale_factor()
    assert scale == 0.5**10
    for _ in range(12):
        assert watch.check_cycle(2.5) is None
        scale *= watch.scale_correction
    assert scale == 0.5
    watch, scale = watch_of(FALLING), 1.0
    for loss in (90.0, 90.0, 90.0, 2.5, 2.5, 90.0, *[2.5] * 9):
        factor = watch.scale_factor if watch.check_cycle(loss) else lambda: watch.scale_correction
        scale *= factor()
    assert scale == 0.5**6 * 4 / 2


def test_run_that_stops_has_its_scale_one_step_below_the_start() -> None:
    watch, scale = watch_of(FALLING), 1.0
    while True:
        watch.check_cycle(90.0 * 2**watch.consecutive_rollbacks)
        if watch.is_out_of_retries:
            break
        scale *= watch.scale_factor()
    scale *= watch.end_rollbacks()
    assert scale == 0.5
    assert watch.consecutive_rollbacks == 0


def test_variation_within_a_cycle_is_no_spike_in_the_second_cycle() -> None:
    watch = SpikeMonitor(hdet.Guard())
    watch.set_first_loss(1.5)
    assert watch.check_cycle(0.92, 0.1) is None
    assert watch.check_cycle(1.5, 0.1) is None
    sure = SpikeMonitor(hdet.Guard())
    sure.set_first_loss(1.5)
    assert sure.check_cycle(0.92, 0.001) is None
    assert sure.check_cycle(1.5, 0.001) is not None


def test_loss_that_stays_high_at_any_learning_rate_is_new_data() -> None:
    """And gets its learning rate back; what is good is learnt anew."""
    watch = SpikeMonitor(hdet.Guard())
    for loss in (3.0, 2.0, 1.5, 1.4, 1.3):
        assert watch.check_cycle(loss) is None
    scale = 1.0
    for _ in range(NEW_DATA_AFTER):
        assert watch.check_cycle(5.7) is not None
        scale *= watch.scale_factor()
    assert watch.check_cycle(5.75) is None
    assert scale * watch.scale_correction == pytest.approx(1.0)
    assert watch.check_cycle(5.6) is None
    assert watch.scale_correction == 1.0
    assert watch.check_cycle(60.0) is not None


def test_loss_that_falls_with_the_learning_rate_is_not_new_data() -> None:
    watch = SpikeMonitor(hdet.Guard())
    for loss in (3.0, 2.0, 1.5, 1.4, 1.3):
        assert watch.check_cycle(loss) is None
    for turn in range(NEW_DATA_AFTER + 1):
        assert watch.check_cycle(5.0 + 64 / 2**turn) is not None


def test_spike_monitor_continues_from_its_state() -> None:
    watch, other = watch_of(FALLING), SpikeMonitor(Guard())
    watch.check_cycle(90.0)
    other.load_state_dict(watch.state_dict())
    assert other.state_dict() == watch.state_dict()
    assert other.check_cycle(4.2) is not None
