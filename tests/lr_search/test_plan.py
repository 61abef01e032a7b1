"""The search for a learning rate: from scores to a choice, wherever it starts."""

import json
import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hdet
from hdet.lr_search.constants import (
    FLOOR_BELOW_DIVERGENCE,
    FLOOR_BELOW_DIVERGENCE_SGD,
    REFINE_STEPS,
)
from hdet.lr_search.estimator import Estimate
from hdet.lr_search.grids import SweepGrid
from hdet.lr_search.observations import Observation, observations_of_round
from hdet.lr_search.plan import Search
from hdet.lr_search.reasons import Reason
from hdet.lr_search.response import SweepResult, divergence_threshold, judge_sweep, refine_choice
from hdet.lr_search.scout import AllRatesDiverged
from hdet.lr_search.transfer import (
    GradientNorms,
    RoundChoice,
    batch_scaling,
    extrapolate_to_horizon,
)
from hdet.scheduler.schedule_clock import ScheduleClock

BEST = 0.01


def curve(lr: float) -> float | None:
    """What a few steps come to: slow, then good, then worse, then nothing."""
    if lr > 1000 * BEST:
        return None
    gain = 3 / (1 + (BEST / 4 / lr) ** 1.5)
    return 5 - gain + (lr / BEST / 30) ** 2


def search(
    start: float,
    score: Callable[[float], float | None] = curve,
    num_replicas: int = 8,
    total_steps: int | None = 5000,
    optimizer: str = "AdamW",
    rule: Literal["auto", "sqrt", "linear", "none"] = "auto",
    start_score: float | None = None,
) -> Search:
    """A whole search from a given learning rate; the factor is in units of it."""
    found = Search(
        hdet.Scout(batch_rule=rule),
        num_replicas=num_replicas,
        total_steps=total_steps,
        optimizer=optimizer,
    )
    for _ in range(100):
        if found.is_over:
            return found
        points = [Observation(factor, score(start * factor)) for factor in found.factors]
        found.record_round(points, None, start_score)
    raise AssertionError("never ends")


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 8, 16, 64])
@pytest.mark.parametrize("off", [1e-3, 1e-2, 0.1, 1 / 3, 1, 3, 10, 100, 1000])
def test_search_finds_the_same_learning_rate_from_any_start(off: float, num_replicas: int) -> None:
    found = search(BEST * off, num_replicas=num_replicas, total_steps=100_000, start_score=5.0)
    assert found.found is not None
    assert BEST / 2 < found.found * BEST * off < BEST * 2


@pytest.mark.parametrize("off", [1 / 120, 1 / 100, 100])
@pytest.mark.parametrize(("num_replicas", "total_steps"), [(2, 1000), (3, 800), (4, 500)])
def test_search_with_few_replicas_shifts_by_a_part_of_a_sweep_if_time_is_short(
    num_replicas: int, total_steps: int, off: float
) -> None:
    """Where a second sweep does not fit, a part of it does."""
    found = search(BEST * off, num_replicas=num_replicas, total_steps=total_steps, start_score=5.0)
    assert found.found is not None
    assert Reason.NO_TIME not in found.reasons
    assert BEST / 2 < found.found * BEST * off < BEST * 2
    assert found.used <= 0.03 * total_steps


def test_search_continues_a_partial_sweep_after_a_resume() -> None:
    scout = hdet.Scout()
    one = Search(scout, num_replicas=2, total_steps=1000)
    seen: list[float] = []
    while not one.is_over:
        results = json.loads(json.dumps(one.state_dict()))
        one = Search(scout, num_replicas=2, total_steps=1000)
        one.load_state_dict(results)
        seen += one.factors
        points = [Observation(factor, curve(BEST / 300 * factor)) for factor in one.factors]
        one.record_round(points, None, 5.0)
    whole = search(BEST / 300, num_replicas=2, total_steps=1000, start_score=5.0)
    assert one.found == whole.found
    assert len(set(seen)) == len(seen) - 2  # two of the first sweep are tried again


@pytest.mark.parametrize(("total_steps", "is_hasty"), [(300, True), (1500, False)])
def test_choice_of_short_rounds_stays_away_from_the_divergence_threshold(
    total_steps: int, is_hasty: bool
) -> None:
    """The best of five steps is many times more than a run can bear."""
    found = search(BEST, lambda lr: curve(lr / 20), total_steps=total_steps, start_score=5.0)
    assert found.divergence is not None
    begin = found.estimate(peak=2.0)
    assert (begin.reason is Reason.ROUNDS_TOO_SHORT) == is_hasty
    assert (begin.factor > found.divergence / 30 * 1.001) != is_hasty
    assert begin.factor > found.divergence / 46


@pytest.mark.parametrize("edge", [2.0, 3.2, 8.0])
def test_lost_learning_rates_do_not_raise_the_choice_of_short_rounds(edge: float) -> None:
    hasty = Search(hdet.Scout(), num_replicas=8, total_steps=300)
    hasty.found, hasty.lowest_lost, hasty.divergence = 1.5, edge, 72.0
    assert hasty.estimate().factor == pytest.approx(72 / 60)


@given(st.floats(0.01, 100), st.floats(-50, 50))
def test_scale_and_shift_of_scores_hardly_change_the_choice(scale: float, shift: float) -> None:
    def other(shift: float) -> float | None:
        def score(lr: float) -> float | None:
            known = curve(lr)
            return None if known is None else scale * known + shift

        return search(BEST, score).found

    assert other(0.0) == pytest.approx(search(BEST).found, rel=1e-6)
    # A constant moves where scores are twice as high, and with it what is tried closely.
    assert other(shift) == pytest.approx(search(BEST).found, rel=0.2)


@pytest.mark.parametrize("num_replicas", [2, 8, 64])
@pytest.mark.parametrize("total_steps", [1000, 1500, 10_000])
def test_search_stays_within_its_share_of_the_run(total_steps: int, num_replicas: int) -> None:
    for off in (1e-3, 1.0, 100.0):
        found = search(BEST * off, num_replicas=num_replicas, total_steps=total_steps)
        assert 0 < found.used <= 0.03 * total_steps


def test_choice_keeps_a_margin_to_the_lowest_lost_learning_rate() -> None:
    scores = [5.0, 4.9, 4.5, 3.0, 2.0, None, None, None]
    points = [Observation(10.0**place, score) for place, score in enumerate(scores)]
    result = judge_sweep(points)
    assert result.lowest_lost == 1e5
    assert result.factor is not None
    assert result.factor <= 1e5 / 4


def test_estimate_for_the_full_batch_stays_below_what_is_lost() -> None:
    found = search(BEST, num_replicas=4, rule="sqrt")
    assert found.found is not None
    assert found.lowest_lost is not None
    assert found.estimate().factor == pytest.approx(2 * found.found)
    assert found.estimate(peak=1.5).factor == pytest.approx(3 * found.found)
    assert found.divergence is not None
    lost = min(found.lowest_lost, found.divergence)
    assert found.estimate(peak=40.0).factor == pytest.approx(lost / 2)
    lost_too = Search(hdet.Scout(), num_replicas=4, total_steps=5000)
    lost_too.lowest_lost = 2.0
    assert lost_too.estimate(highest=10.0).factor == pytest.approx(2.0 / 4 / 10)
    # Of a schedule that rises above the given learning rate, that is where it rises to.
    assert found.estimate(peak=2.5, highest=12.0).factor == pytest.approx(lost / 24)
    assert search(BEST, num_replicas=4, rule="none").estimate().factor == found.found


def test_lost_learning_rate_below_the_best_score_limits_the_choice() -> None:
    scores = [5.0, 4.9, 4.5, None, 2.0, 3.0, None, None]
    result = judge_sweep([Observation(10.0**place, score) for place, score in enumerate(scores)])
    assert result.lowest_lost == 1e3
    assert result.factor is not None
    assert result.factor <= 1e3 / 4


def test_good_score_above_a_lost_learning_rate_is_ignored() -> None:
    """A model that was blown up and only guesses may score better than one that was not trained."""
    scores = [1.0, 2.5, 78.0, 0.92, 2e6, 4e6, None, None]
    result = judge_sweep(
        [Observation(10.0**place, score) for place, score in enumerate(scores)], 1.4
    )
    assert result.shift == -1
    assert result.lowest_lost == 10


def test_range_that_is_too_high_shifts_down() -> None:
    scores = [0.95, 0.94, 0.96, 0.94, 0.95, 0.97, 0.98, 0.95]
    result = judge_sweep(
        [Observation(10.0**place, score) for place, score in enumerate(scores)], 1.4
    )
    assert (result.shift, result.factor) == (-1, 1.0)


def test_range_whose_finite_part_is_flat_but_good_shifts_down() -> None:
    points = [
        Observation(1.0, 1.04, 0.05),
        Observation(10.0, 1.05, 0.05),
        Observation(100.0, 40.0, 0.05),
    ]
    assert judge_sweep(points, 1.4).shift == -1
    flat = [Observation(1.0, 1.39, 0.05), Observation(10.0, 1.4, 0.05), points[2]]
    result = judge_sweep(flat, 1.4)
    assert (result.shift, result.factor, result.lowest_lost) == (0, None, 100.0)


def test_divergence_threshold_decides_where_nothing_is_gained() -> None:
    found = Search(hdet.Scout(), num_replicas=8, total_steps=5000)
    while not found.is_over:
        found.record_round(
            [Observation(factor, 2 + factor, 0.001) for factor in found.factors], None, 2.0
        )
    assert Reason.ONLY_NOISE in found.reasons
    assert found.lowest_lost is not None
    assert 0.0025 < found.lowest_lost < 0.01
    assert found.divergence == pytest.approx(2.0)
    assert found.estimate().factor == pytest.approx(2 / FLOOR_BELOW_DIVERGENCE)


def test_single_good_score_above_a_lost_learning_rate_is_no_gain() -> None:
    scores = [1.46, 1.42, 1.44, 80, 1.0, None, None, None]
    points = [Observation(10.0**place, score, 0.05) for place, score in enumerate(scores)]
    result = judge_sweep(points, 1.4)
    assert (result.factor, result.shift, result.lowest_lost) == (None, 0, 1e3)
    sure = judge_sweep([point._replace(error=0.0) for point in points], 1.4)
    assert (sure.factor, sure.shift, sure.lowest_lost) == (None, -1, 1e3)


@pytest.mark.parametrize("score", [-0.1, 5.5])
def test_flat_range_that_is_worse_than_the_start_shifts_down(score: float) -> None:
    points = [Observation(10.0**place, score, 0.02) for place in range(8)]
    assert judge_sweep(points, score - 0.8).shift == -1
    assert judge_sweep(points, score + 0.8).shift == -1
    assert judge_sweep(points, score).shift == +1


def test_search_ends_when_resumed_in_a_run_too_short_to_refine() -> None:
    long = Search(hdet.Scout(), num_replicas=8, total_steps=3000)
    long.record_round([Observation(factor, curve(BEST * factor)) for factor in long.factors])
    short = Search(hdet.Scout(), num_replicas=8, total_steps=450)
    short.load_state_dict(long.state_dict())
    assert short.is_over
    assert short.found == pytest.approx(long.state_dict()["rough"][0])


def test_interrupted_rounds_stay_within_the_budget() -> None:
    for num_replicas, total in ((2, 1600), (4, 2000), (8, 1500)):
        found = Search(hdet.Scout(), num_replicas=num_replicas, total_steps=total)
        turn = 0
        while not found.is_over:
            turn += 1
            if turn % 2:
                found.interrupt(found.num_steps // 2)
            else:
                found.record_round(
                    [Observation(factor, curve(BEST * factor)) for factor in found.factors]
                )
        assert found.used <= 0.03 * total


def test_single_score_per_replica_counts_as_noisy() -> None:
    """A rise by a thousandth is neither an edge nor an explosion."""
    scores = [[2.29641], [2.29640], [2.29637], [2.29660], [2.29889], [2.29889]]
    factors = [0.01, 0.1, 1.0, 10.0, 30.0, 100.0]
    points = observations_of_round(factors, [None] * 6, [None] * 6, scores, [True] * 6)
    result = judge_sweep(points, 2.2964)
    assert result.factor is None and result.lowest_lost is None and result.shift == 1


def test_chance_between_two_replicas_is_rarely_a_choice() -> None:
    chance = random.Random(0)
    taken = 0
    for _ in range(300):
        rows = [[chance.gauss(0, 1) for _ in range(16)] for _ in range(2)]
        points = observations_of_round((1.0, 10.0), [None] * 2, [None] * 2, rows, [True, True])
        taken += judge_sweep(points).factor is not None
    assert taken < 0.1 * 300


def noisy_losses(start: float, chance: random.Random, spread: float = 0.1) -> float:
    """What a search by training losses begins a run with that is best at 1 and explodes at 8.

    Every replica sees batches of its own, and few of them.
    """
    found = Search(hdet.Scout(), num_replicas=8, total_steps=800, optimizer="AdamW")
    while not found.is_over:
        num = found.num_steps // 2
        rows = [
            [
                2.6
                - 0.25 * -math.expm1(-8 * start * factor * step / 12)
                + 0.5 * (start * factor / 4) ** 2
                + chance.gauss(0, spread)
                for step in range(num, 2 * num)
            ]
            for factor in found.factors
        ]
        errors = [stdev(row) / math.sqrt(num) for row in rows]
        points = observations_of_round(
            found.factors, list(map(fmean, rows)), errors, None, [True] * 8
        )
        found.record_round(points, None, fmean(2.6 + chance.gauss(0, spread) for _ in range(8)))
    return found.estimate(peak=2.0).factor * start


@pytest.mark.parametrize("start", [1e-3, 1e-2, 1.0, 100.0])
def test_search_by_noisy_losses_rarely_loses_a_run(start: float) -> None:
    """A lucky first batch makes all look worse than none, and three losses do not know their noise:
    such runs began a million times too low."""
    chance = random.Random(0)
    begun = [noisy_losses(start, chance) for _ in range(100)]
    assert sum(not 0.1 < lr < 4 for lr in begun) <= 2


def test_single_bad_score_among_good_ones_is_not_lost() -> None:
    """From a run of fine-tuning: a learning rate that moves nothing has seen hard batches."""
    scores = [2.75, 2.87, 2.57, 2.64, 2.55, 2.54, 2.37, 2.68, 4.7, 7.38, 13.2, 32.5, 367.0, None]
    points = [Observation(10.0**place, score, 0.07) for place, score in enumerate(scores)]
    result = judge_sweep(points, 2.555)
    assert result.lowest_lost == 1e8
    alone = [*points[:8], points[8]._replace(score=4.7)]
    assert judge_sweep(alone, 2.555).lowest_lost == 1e8  # no higher learning rate contradicts it


def test_single_loss_that_is_not_finite_is_not_lost() -> None:
    """If its weights are finite, and what lies above is sound; several in a row are one."""
    losses = [2.0, 1.9, math.nan, 1.2, 1.0, 1.5, 9.0, 90.0]
    factors = [10.0**place for place in range(8)]
    points = observations_of_round(factors, losses, [0.01] * 8, None, [True] * 8)
    result = judge_sweep(points, 2.0)
    assert result.lowest_lost == 1e6
    assert result.factor is not None
    assert 1e3 < result.factor <= 1e4
    broken = observations_of_round(
        factors, losses, [0.01] * 8, None, [True, True, False, *[True] * 5]
    )
    assert judge_sweep(broken, 2.0).lowest_lost == 1e2
    several = observations_of_round(
        factors, [*losses[:3], *[math.nan] * 5], [0.01] * 8, None, [True] * 8
    )
    assert judge_sweep(several, 2.0).lowest_lost == 1e2


def test_loss_that_grows_by_design_keeps_the_given_learning_rate() -> None:
    found = Search(hdet.Scout(), num_replicas=8, total_steps=5000)
    while not found.is_over:
        found.record_round(
            [Observation(factor, 3.0 + found.used / 100) for factor in found.factors], None, 2.0
        )
    assert found.estimate().factor == 1.0


def test_refinement_tries_learning_rates_around_the_choice_in_longer_rounds() -> None:
    found = Search(hdet.Scout(), num_replicas=8, total_steps=1500)
    lengths = []
    while not found.is_over:
        lengths.append(found.num_steps)
        found.record_round([Observation(factor, curve(BEST * factor)) for factor in found.factors])
    assert lengths == [11, 24]
    assert found.found is not None
    close = [point.factor for point in found.refined_observations]
    assert max(close) / min(close) == pytest.approx(16)
    assert min(close) < found.found < max(close)


def fall(lr: float, steps: int) -> float:
    """The loss of weights that have far to go: the best learning rate of k steps is 1 / k."""
    return 2 - 1 / (1 + math.log(lr * steps) ** 2)


@pytest.mark.parametrize("total_steps", [600, 800, 1500])
def test_choice_of_short_rounds_is_extrapolated_to_full_rounds(total_steps: int) -> None:
    """Every length of a run begins with what full rounds choose, where the choice is 1 / steps."""

    def found(total: int) -> float:
        own = Search(hdet.Scout(), num_replicas=8, total_steps=total)
        length = 0
        while not own.is_over:
            length = own.num_steps
            scores = [(factor, fall(0.02 * factor, length)) for factor in own.factors]
            own.record_round(
                [Observation(*score) for score in scores], GradientNorms(1.0, 1.0), 2.0
            )
        assert own.found is not None
        assert (Reason.LOWERED_FOR_LONGER_ROUNDS in own.reasons) == (length < REFINE_STEPS)
        return own.found

    assert found(total_steps) == pytest.approx(found(100_000), rel=0.15)


def test_extrapolation_is_limited_and_weaker_with_noisy_gradients() -> None:
    coarse, close = RoundChoice(8.0, 6), RoundChoice(2.0, 12)
    assert extrapolate_to_horizon(coarse, close, 24) == pytest.approx(
        1.0
    )  # never faster than 1 / steps
    noisy = extrapolate_to_horizon(coarse, close, 24, noise=1e6)
    assert noisy == pytest.approx(2.0, rel=1e-3)
    assert 1.0 < extrapolate_to_horizon(coarse, close, 24, noise=2.0) < noisy


@pytest.mark.parametrize(
    ("optimizer", "is_seen"), [("AdamW", True), ("Adafactor", True), ("SGD", False)]
)
def test_brief_search_goes_on_if_the_given_learning_rate_diverges(
    optimizer: str, is_seen: bool
) -> None:
    """From a run of vision at forty times the best: nothing gains, and the given one explodes."""
    scores = [2.372, 2.366, 2.318, 3.079, 10.69, 20.3, 98.2, 2.8e7]
    errors = [0.035, 0.019, 0.016, 0.065, 1.65, 1.86, 10.6, 8e5]
    look = Search(hdet.Scout(), num_replicas=8, total_steps=1000, optimizer=optimizer, brief=True)
    rows = zip(look.factors, scores, errors, strict=True)
    look.record_round([Observation(*row) for row in rows], GradientNorms(8.0, 1.9), 2.380)
    assert look.is_over is not is_seen


def test_refinement_averages_the_chance_of_single_replicas() -> None:
    """The chance of single replicas moves the choice less than the choice of one of them would."""
    chance = random.Random(1)
    choices = []
    for _ in range(200):
        factors = [2 ** (place / 2) for place in range(8)]
        points = [
            Observation(f, (math.log2(f) - 2) ** 2 + chance.gauss(0, 0.5), 0.1) for f in factors
        ]
        first_choice = SweepResult(1.0, 0, (), None, 9.0)
        choices.append(math.log2(refine_choice(points, first_choice).factor or math.nan))
    # Where the parabola has gained all but 7 % of 9.
    assert abs(sum(choices) / len(choices) - (2 - math.sqrt(0.63))) < 0.15
    assert stdev(choices) < 0.35


def test_refinement_finds_a_gain_that_only_the_fitted_curve_shows() -> None:
    """From a run of fine-tuning: each score for itself is chance, their curve is not."""
    scores = [2.468, 2.419, 2.407, 2.410, 2.374, 2.370, 2.473, 2.338]
    points = [Observation(2.0 ** (place / 2), score, 0.072) for place, score in enumerate(scores)]
    first_choice = SweepResult(None, 0, (), 100.0, 2.544)
    assert judge_sweep(points, 2.544).factor is None
    assert refine_choice(points, first_choice).factor is not None
    unsure = [point._replace(error=0.15) for point in points]
    assert refine_choice(unsure, first_choice).factor is None


def test_refinement_does_not_follow_a_slope_within_its_error() -> None:
    """From a run of vision by losses: all gain, and which of them most is chance."""
    scores = [2.190, 2.210, 2.381, 2.294, 2.165, 2.174, 2.296, 2.210]
    points = [Observation(2.0 ** (place / 2), score, 0.053) for place, score in enumerate(scores)]
    first_choice = SweepResult(1.0, 0, (), 400.0, 2.405)
    assert refine_choice(points, first_choice).factor == 1.0
    sure = [point._replace(error=0.001) for point in points]
    assert (refine_choice(sure, first_choice).factor or 0) > 4.0


@pytest.mark.parametrize("num", [6, 8, 16])
def test_fitted_curve_through_noise_is_rarely_a_gain(num: int) -> None:
    chance = random.Random(0)
    factors = [16 ** (place / (num - 1)) for place in range(num)]
    believed = 0
    for _ in range(500):
        points = [Observation(factor, chance.gauss(2, 0.1), 0.1) for factor in factors]
        believed += refine_choice(points, SweepResult(None, 0, (), None, 2.0)).factor is not None
    assert believed < 0.1 * 500


def test_noise_of_diverged_replicas_does_not_excuse_their_scores() -> None:
    """From a run on feeds: in a round where most diverged all were called noisy, and none lost."""
    scores = [2.1, 2.06, 2.09, 2.06, 2.03, 1.9, 3.67, 234.0, 6e4, 2e6]
    errors = [0.05] * 6 + [2e4] * 4
    points = [
        Observation(10.0**n, *pair) for n, pair in enumerate(zip(scores, errors, strict=True))
    ]
    assert judge_sweep(points, 2.1).lowest_lost == 1e6


def test_range_in_which_all_replicas_diverge_shifts_down() -> None:
    """From a run at ten thousand times the best learning rate, by losses alone."""
    losses = [47.3, 60.7, 5418.0, 44848.0, 5.5e8, 2.2e12, 9.9e15, 2.8e19]
    errors = [20.0, 30.0, 4430.0, 35100.0, 5e8, 2e12, 9e15, 2.8e19]
    points = observations_of_round([10.0**n for n in range(8)], losses, errors, None, [True] * 8)
    assert judge_sweep(points, 8.7).shift == -1


def test_start_score_by_losses_is_the_mean_of_all_rounds() -> None:
    """The first losses of a few replicas are chance: those of all rounds are less so."""
    found = Search(hdet.Scout(), num_replicas=8, total_steps=1500)
    results = iter([2.0, 3.0, 4.0])
    while not found.is_over:
        found.record_round(
            [Observation(f, curve(BEST * f)) for f in found.factors], None, 3 + next(results)
        )
    assert found.start_score == 5.5


def test_batch_scaling_grows_with_the_gradient_noise() -> None:
    alike, noisy = GradientNorms(1.0, 1.0), GradientNorms(8.0, 1.0)
    assert batch_scaling("auto", "AdamW", 8, alike.noise(8)) == pytest.approx(1.0)
    assert batch_scaling("auto", "SGD", 8, noisy.noise(8)) == pytest.approx(8.0, rel=1e-4)
    assert 1 < batch_scaling("auto", "AdamW", 8, GradientNorms(2.0, 1.0).noise(8)) < 8


def squares(factor: float) -> float:
    """Worse than the best by the square of the learning rate: explodes where that is the level."""
    return 1.0 + factor**2


@pytest.mark.parametrize(("gain", "level"), [(0.1, 7.0), (9.0, 10.0), (math.inf, 10.0)])
def test_divergence_threshold_is_at_twice_the_start_or_twenty_gains_above_it(
    gain: float, level: float
) -> None:
    points = [Observation(4.0**place, squares(4.0**place)) for place in range(-12, 4)]
    assert divergence_threshold(points, 5.0, gain) == pytest.approx(
        math.sqrt(level - 1.0), rel=1e-3
    )


@given(st.floats(0.01, 100), st.floats(0, 1e4))
def test_constant_in_the_loss_hardly_moves_the_divergence_threshold(
    scale: float, shift: float
) -> None:
    def found(gain: float, scale: float, shift: float) -> float:
        points = [Observation(4.0**p, scale * squares(4.0**p) + shift) for p in range(-12, 12)]
        place = divergence_threshold(points, scale * 5.0 + shift, scale * gain)
        assert place is not None
        return place

    assert found(4.0, scale, 0.0) == pytest.approx(found(4.0, 1.0, 0.0))
    assert found(4.0, scale, shift) <= 84**0.5 * 1.001  # twenty gains above the start
    assert found(4.0, scale, -1e6) == pytest.approx(84**0.5, rel=1e-3)


def test_hard_batch_does_not_make_a_loss_near_zero_diverge() -> None:
    """Twice of nothing is nothing: one replica among sound ones, within its noise, may be luck."""
    scores = [0.01, 0.03, -0.1, -0.3, -0.5, -0.2]
    points = [Observation(10.0**place, score, 0.02) for place, score in enumerate(scores)]
    assert divergence_threshold(points, 0.014, 0.5) is None
    assert divergence_threshold([*points, Observation(1e6, 3.0, 0.02)], 0.014, 0.5) is None
    sure = [point._replace(error=0.001) for point in points]
    assert divergence_threshold(sure, 0.014, 0.5) is not None


def test_scores_that_only_overflow_give_no_divergence_threshold() -> None:
    """An error rate cannot be twice as high: what overflows may lie thousands of times too high."""
    points = [
        Observation(1.0, 0.9),
        Observation(10.0, 0.4),
        Observation(100.0, 0.9),
        Observation(1000.0, None),
    ]
    assert divergence_threshold(points, 0.9, 0.5) is None
    assert divergence_threshold(points[:3], 0.9, 0.5) is None
    assert divergence_threshold([Observation(1.0, None)], 5.0, 1.0) is None


def late(lr: float) -> float:
    """What gains at once lies a thousand times below what explodes."""
    gain = 0.5 / (1 + (BEST / 4 / lr) ** 1.5)
    return 5 - gain + 0.2 * min(lr / BEST / 4, 5.0) + (lr / BEST / 1000) ** 2


@pytest.mark.parametrize("off", [1e-3, 1e-2, 0.1, 1.0, 10.0, 1000.0])
def test_estimate_far_below_the_divergence_threshold_is_raised(off: float) -> None:
    found = search(BEST * off, late)
    assert found.found is not None
    assert found.divergence is not None
    assert 1000 < found.divergence * off < 3000
    begin = found.estimate(peak=2.0)
    assert begin.factor == pytest.approx(2 * found.divergence / FLOOR_BELOW_DIVERGENCE)
    assert begin.reason is Reason.BELOW_FLOOR
    assert not found.refined_observations  # it would change nothing
    plain = search(BEST * off, late, optimizer="SGD").estimate()
    assert plain.factor == pytest.approx(found.divergence / FLOOR_BELOW_DIVERGENCE_SGD)
    alone = search(BEST * off, late, rule="none")
    assert alone.estimate().factor == alone.found  # another batch altogether


def test_search_extends_up_once_for_the_divergence_threshold() -> None:
    found = search(BEST, lambda lr: min(late(lr), 4.9), total_steps=100_000, rule="none")
    assert found.divergence is None
    assert max(point.factor for point in found.points) == pytest.approx(100 * 10 ** (24 / 7))
    assert found.estimate().factor == found.found


def test_divergence_threshold_decides_where_scores_show_nothing() -> None:
    found = Search(hdet.Scout(), num_replicas=8, total_steps=1500)
    while not found.is_over:
        tiny = 0.01 if found.used == 0 else -0.01  # nothing that a closer look would confirm
        scores = [2.0 - tiny * min(factor, 1.0) + factor**2 / 100 for factor in found.factors]
        points = [
            Observation(f, score, 0.1) for f, score in zip(found.factors, scores, strict=True)
        ]
        found.record_round(points, None, 2.0)
    assert found.found is None
    assert Reason.ONLY_NOISE in found.reasons
    begin = found.estimate()
    assert begin.factor == pytest.approx(200**0.5 / FLOOR_BELOW_DIVERGENCE, rel=0.1)
    assert begin.reason is Reason.BELOW_FLOOR


def test_refinement_lies_below_the_divergence_threshold_where_sweeps_show_nothing() -> None:
    """Longer rounds there may tell what the short ones did not."""
    found = Search(hdet.Scout(), num_replicas=8, total_steps=1500, optimizer="AdamW")
    noise = 0.5
    while not found.is_over:
        gains = [min(factor / 0.05, 1.0) * (0.01 if noise else 1.0) for factor in found.factors]
        pairs = zip(found.factors, gains, strict=True)
        points = [Observation(f, 2.0 - gain + (f / 10) ** 2, noise) for f, gain in pairs]
        found.record_round(points, None, 2.0)
        noise = 0.0
    assert min(point.factor for point in found.refined_observations) < 0.05
    assert found.divergence is not None
    assert max(point.factor for point in found.refined_observations) < found.divergence / 27
    assert found.found is not None
    assert 0.04 < found.found < 0.1


def test_noise_below_the_divergence_threshold_is_rarely_a_gain() -> None:
    chance, taken = random.Random(3), 0
    for _ in range(200):
        found = Search(hdet.Scout(), num_replicas=8, total_steps=1500, optimizer="AdamW")
        while not found.is_over:
            scores = [chance.gauss(2, 0.01) if f < 50 else 50.0 for f in found.factors]
            points = [Observation(f, s, 0.01) for f, s in zip(found.factors, scores, strict=True)]
            found.record_round(points, None, 2.0)
        taken += found.found is not None
    assert taken < 0.1 * 200


def test_good_scores_above_the_divergence_threshold_do_not_hide_it() -> None:
    def lucky(lr: float) -> float | None:
        if lr < 3:
            return 2 - min(lr, 1 / lr)
        return 20.0 if lr < 50 else 0.5 if lr < 200 else None

    found = search(1.0, lucky, start_score=2.0, optimizer="SGD")
    assert found.divergence is not None
    assert found.divergence < 7.2
    assert found.estimate(peak=2.5).factor <= found.divergence / 2


def test_estimate_stays_below_a_divergence_threshold_between_two_points() -> None:
    """A quadratic with many curvatures, trained by SGD: beyond twice the inverse of the largest."""
    found = Search(hdet.Scout(), num_replicas=8, total_steps=1500, optimizer="SGD")
    while not found.is_over:
        scores = [
            sum((1 - factor * 10 ** (-k / 5)) ** (2 * found.num_steps) for k in range(16)) / 16
            for factor in found.factors
        ]
        points = [
            Observation(f, s if s < 1e300 else None)
            for f, s in zip(found.factors, scores, strict=True)
        ]
        found.record_round(points, None, 1.0)
    assert found.divergence is not None
    assert found.estimate(peak=2.08).factor <= found.divergence / 2 < 2.0


def test_learning_rates_lost_in_the_refinement_lower_the_choice() -> None:
    found = Search(hdet.Scout(), num_replicas=8, total_steps=1500, optimizer="SGD")
    found.record_round(
        [Observation(f, 2 - min(f, 1 / f) if f < 30 else 10) for f in found.factors], None, 2.0
    )
    lowest = min(found.factors)
    found.record_round([Observation(f, None) for f in found.factors])
    assert found.is_over
    assert found.lowest_lost == lowest
    assert found.found == lowest / 4


@pytest.mark.parametrize("start_score", [1e-26, -5.0, 1e250])
def test_search_works_with_scores_of_any_size(start_score: float) -> None:
    size = abs(start_score)

    def score(lr: float) -> float | None:
        return start_score - size * min(lr, 1 / lr) if lr < 3 else start_score + size * lr**9

    found = search(1.0, lambda lr: score(lr) if lr < 90 else None, start_score=start_score)
    assert found.found is not None
    assert found.estimate().factor > 0


def test_overflow_without_a_gain_keeps_the_given_learning_rate() -> None:
    """Nothing is gained anywhere: the given learning rate is kept, whatever overflows."""
    chance = random.Random(0)
    for start_score in (5.0, -5.0):
        found = Search(hdet.Scout(), num_replicas=8, total_steps=5000)
        while not found.is_over:
            scores = [
                start_score + chance.gauss(0, 0.01) if f < 50 else None for f in found.factors
            ]
            points = [Observation(f, s, 0.01) for f, s in zip(found.factors, scores, strict=True)]
            found.record_round(points, None, start_score)
        assert found.divergence is None
        assert found.estimate().factor == 1.0


@pytest.mark.parametrize("total_steps", [1000, 4000])
def test_overflow_does_not_raise_the_estimate_of_an_error_rate(total_steps: int) -> None:
    def error(lr: float) -> float | None:
        return 0.9 - 0.5 / (1 + abs(math.log(lr / BEST))) if lr < 1e5 * BEST else None

    found = search(BEST, error, total_steps=total_steps)
    assert found.divergence is None
    assert 0.1 < found.estimate(peak=2.0).factor < 30


@pytest.mark.parametrize("growth", [0.2, 1.0])
def test_loss_that_grows_by_design_has_no_divergence_threshold(growth: float) -> None:
    points = [Observation(10.0**place, 0.7 + 9 * growth, 0.05) for place in range(-4, 4)]
    assert divergence_threshold(points, 0.7, math.inf) is None


def test_refinement_with_a_noisy_best_keeps_most_of_the_gain() -> None:
    first_choice = SweepResult(1.0, 0, (), None, 1.0)
    points = [
        Observation(0.125, 0.99, 0.01),
        Observation(0.25, 0.95, 0.01),
        Observation(0.5, 0.5, 2.0),
    ]
    assert (refine_choice(points, first_choice).factor or 0) > 0.25


def test_choice_is_the_lowest_of_nearly_equal_scores() -> None:
    scores = [5.55, 5.5, 5.2, 3.9, 3.44, 3.88, 3.4, 4.6, 120.0]
    result = judge_sweep(
        [Observation(10.0 ** (place / 2), score) for place, score in enumerate(scores)]
    )
    assert result.factor is not None
    assert 10**1.5 < result.factor <= 10**2


def test_batch_rules_without_known_noise() -> None:
    assert batch_scaling("auto", "AdamW", 4) == 2
    assert batch_scaling("auto", "SGD", 4) == 4
    assert batch_scaling("sqrt", "SGD", 4) == 2


def test_equal_scores_keep_the_given_learning_rate() -> None:
    for num_replicas in (4, 8, 64):
        found = search(1.0, lambda lr: 1.0, num_replicas=num_replicas)
        assert Reason.ONLY_NOISE in found.reasons
        assert found.estimate().factor == 1.0
        assert found.num_steps > 0  # also after the end of the search


@pytest.mark.parametrize("num", [8, 16, 64])
def test_noise_is_rarely_a_difference_between_scores(num: int) -> None:
    chance = random.Random(num)
    taken = 0
    for _ in range(400):
        points = [Observation(2.0**place, chance.gauss(0, 1), 1.0) for place in range(num)]
        taken += judge_sweep(points).factor is not None
    assert taken < 0.06 * 400


def test_search_shifts_down_once_and_then_refuses_if_all_learning_rates_diverge() -> None:
    with pytest.raises(
        AllRatesDiverged, match=r"diverges at every learning rate .* from 3.73e-06 to 100 times"
    ):
        search(1.0, lambda lr: None)


def test_search_ends_with_the_budget_if_the_best_lies_always_further() -> None:
    found = search(1.0, lambda lr: -math.log(lr), total_steps=1500)
    assert found.found == max(point.factor for point in found.points)
    assert Reason.NO_TIME in found.reasons


def test_search_without_known_run_length_ends() -> None:
    def down(lr: float) -> float:
        return math.log(lr)

    def up(lr: float) -> float:
        return -math.log(lr)

    for score in (down, up):
        assert search(1.0, score, total_steps=None).is_over


@pytest.mark.parametrize("total_steps", [12, 100])
def test_search_refuses_a_run_without_room_for_one_sweep(total_steps: int) -> None:
    with pytest.raises(ValueError, match="`scout` must fit in its `share`"):
        Search(hdet.Scout(), num_replicas=2, total_steps=total_steps)
    with pytest.raises(ValueError, match="`scout` must be shorter than the run"):
        Search(hdet.Scout(steps=25), num_replicas=2, total_steps=total_steps)


def test_search_that_is_always_interrupted_ends() -> None:
    found = Search(hdet.Scout(), num_replicas=8, total_steps=1500)
    for _ in range(100):
        found.interrupt(5)
    assert found.is_over
    assert found.estimate().factor == 1.0
    assert Reason.INTERRUPTED in found.reasons


def test_search_continues_from_its_state() -> None:
    whole = Search(hdet.Scout(), num_replicas=2, total_steps=100_000)
    cut = Search(hdet.Scout(), num_replicas=2, total_steps=100_000)
    while not whole.is_over:
        for one in (whole, cut):
            one.record_round(
                [Observation(factor, curve(BEST * 100 * factor)) for factor in one.factors]
            )
        results = json.loads(json.dumps(cut.state_dict()))
        if not whole.is_over:
            cut = Search(hdet.Scout(), num_replicas=2, total_steps=100_000)
            cut.load_state_dict(results)
    assert (cut.found, cut.reasons) == (whole.found, whole.reasons)


def test_search_with_other_replicas_starts_again_within_the_rest_of_the_budget() -> None:
    four = Search(hdet.Scout(), num_replicas=4, total_steps=1500)
    four.record_round([Observation(factor, curve(factor)) for factor in four.factors])
    eight = Search(hdet.Scout(), num_replicas=8, total_steps=1500)
    eight.load_state_dict(four.state_dict())
    assert not eight.points
    eight.interrupt(45 - four.num_steps - eight.num_steps + 1)
    assert eight.is_over


def test_sweep_grid_covers_the_range_in_several_rounds() -> None:
    grid = SweepGrid(4.0, 3)
    places = [grid.places(5, number, grid.num_rounds) for number in range(grid.num_rounds)]
    assert sorted(place for one in places for place in one) == list(range(5, 5 + grid.num))
    assert all(len(one) == 3 for one in places)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decades": 0}, "`decades` must be in"),
        ({"decades": 400}, "`decades` must be in"),
        ({"share": 1.5}, "`share` must be in"),
        ({"steps": 2}, "`steps` must be at least 4"),
        ({"batch_rule": "cubic"}, "`batch_rule` must be one of"),
    ],
)
def test_scout_refuses_bad_settings(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hdet.Scout(**options)  # type: ignore[arg-type]


@given(st.integers(0, 90), st.integers(91, 400))
def test_schedule_clock_ends_with_the_run_after_a_search(scouted: int, total: int) -> None:
    clock = ScheduleClock(0, total)
    clock.scouted(scouted)
    moves = [clock.due(step) for step in range(scouted + 1, total + 1)]
    assert sum(moves) == total
    assert min(moves) >= 1
    assert max(moves) - min(moves) <= 1


def test_jumps_of_diverged_replicas_are_not_the_noise_of_the_lowest() -> None:
    """Losses of a run on feeds from a hundred times the best: but for the lowest all diverge, and
    their jumps are no noise of it. It went up for more, found nothing and kept what was given."""
    losses = [2.16, 4.95, 3.63, 1499.0, 2.3e5, 3.6e7, 3.8e8, 1.4e11]
    errors = [0.1, 2.0, 1.4, 901.0, 1.7e5, 3.0e7, 7.7e10, 1.1e11]
    search = Search(hdet.Scout(), num_replicas=8, total_steps=1040, optimizer="AdamW")
    points = observations_of_round(search.factors, losses, errors, None, [True] * 8)
    assert points[0].error < 2
    search.record_round(points, GradientNorms(1.0, 0.4), 2.097)
    assert search.divergence is None  # not yet over: it looks closely, below that
    assert max(search.factors) < 0.05
    search.record_round(
        [Observation(factor, 2.1, 0.1) for factor in search.factors], GradientNorms(1.0, 0.4), 2.1
    )
    assert search.is_over
    assert search.divergence == pytest.approx(0.145, rel=0.1)
    assert search.estimate(peak=2.08).factor < 0.01


@pytest.mark.parametrize(("score", "is_known"), [(3.0, True), (-2.0, False)])
def test_uncertain_explosion_counts_only_if_no_higher_learning_rate_gains(
    score: float, is_known: bool
) -> None:
    unsure = [Observation(1.0, 2.0, 1.0), Observation(10.0, 4.5, 2.0)]
    points = [*unsure, Observation(100.0, score, 1.0), Observation(1e3, 900.0, 9.0)]
    found = divergence_threshold(points, 2.0, math.inf)
    assert (found is not None) == is_known
    assert found is None or 100 < found < 1e3


def test_choice_without_a_confirming_refinement_stays_away_from_the_divergence_threshold() -> None:
    def begun(close: Sequence[float], optimizer: str = "AdamW") -> Estimate:
        search = Search(hdet.Scout(), num_replicas=8, total_steps=1500, optimizer=optimizer)
        # The best of the sweep lies next to where scores explode.
        scores = [2.0, 2.0, 1.99, 1.95, 1.9, 1.8, 1.2, 90.0]
        points = [
            Observation(f, score, 0.01) for f, score in zip(search.factors, scores, strict=True)
        ]
        search.record_round(points, GradientNorms(1.0, 1.0), 2.0)
        results = zip(search.factors, close, strict=True)
        search.record_round(
            [Observation(f, score, 0.05) for f, score in results], GradientNorms(1.0, 1.0)
        )
        assert search.is_over
        assert search.divergence is not None
        begin = search.estimate()
        return begin._replace(factor=begin.factor / search.divergence)

    flat = begun([2.0, 2.1, 1.95, 2.05, 2.0, 2.1, 1.9, 2.05])
    assert flat.reason is Reason.ROUNDS_TOO_SHORT
    assert flat.factor == pytest.approx(1 / 60, rel=1e-6)
    assert begun([2.0, 1.9, 1.8, 1.7, 1.6, 1.5, 1.4, 1.5]).reason is not Reason.ROUNDS_TOO_SHORT
    assert (
        begun([2.0] * 8, "SGD").reason is not Reason.ROUNDS_TOO_SHORT
    )  # the rule was not measured with SGD
