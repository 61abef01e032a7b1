"""What rounds say about the best learning rate: where they gain most, and where they explode."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.lr_search.constants import (
    BEST_UNDER_PEAK,
    DIVERGENCE_ERROR,
    DIVERGENCE_OVER_BEST,
    GAIN_ERROR,
    SIZE_ERROR,
    SIZE_POWER,
)
from hdet.lr_search.evidence import (
    belief_of_divergence,
    belief_of_gains,
    divergence_of,
    gain_peak,
)
from hdet.lr_search.observations import Observation, observations_of_round

LOGS = [-2 + place / 4 for place in range(17)]


def points_of(
    score: Callable[[float], float | None], error: float = 0.0, by: float = 0.0
) -> list[Observation]:
    """Observations over four decades; the score is a function of the logarithm."""
    return [Observation(10 ** (log + by), score(log), error) for log in LOGS]


@pytest.mark.parametrize("top", [-1.0, 0.0, 0.75])
def test_parabola_of_gains_peaks_at_its_top(top: float) -> None:
    points = points_of(lambda log: 1 - (0.5 - (log - top) ** 2 / 4))
    peak, belief = gain_peak(points, 1.0), belief_of_gains(points, 1.0)
    assert peak is not None and belief is not None
    assert peak.log_lr == pytest.approx(top, abs=0.02)
    assert belief.mean == pytest.approx(top - BEST_UNDER_PEAK, abs=0.02)
    assert peak.share == pytest.approx(0.5)


@given(st.floats(0.01, 100), st.floats(-4, 4))
def test_peak_follows_the_learning_rate_and_not_the_scale_of_scores(
    scale: float, by: float
) -> None:
    def score(log: float) -> float:
        return scale * (1 - 0.4 * math.exp(-((log - 0.3) ** 2)))

    plain = gain_peak(points_of(lambda log: score(log) / scale, 0.01), 1.0)
    other = gain_peak(points_of(score, 0.01 * scale, by), scale)
    assert plain is not None and other is not None
    assert other.log_lr - by == pytest.approx(plain.log_lr, abs=1e-6)
    assert other.share == pytest.approx(plain.share)


@given(st.floats(-50, 50))
def test_constant_in_the_scores_does_not_move_the_peak(shift: float) -> None:
    def score(log: float) -> float:
        return 1 - 0.4 * math.exp(-((log - 0.3) ** 2))

    plain = gain_peak(points_of(score), 1.0)
    other = gain_peak(points_of(lambda log: score(log) + shift), 1.0 + shift)
    assert plain is not None and other is not None
    assert other.log_lr == pytest.approx(plain.log_lr, abs=1e-6)


def test_nothing_gained_has_no_peak() -> None:
    assert gain_peak([], 1.0) is None
    assert gain_peak(points_of(lambda log: 1.0), 1.0) is None
    assert gain_peak(points_of(lambda log: 1.0 + abs(log)), 1.0) is None
    assert gain_peak(points_of(lambda log: None), math.nan) is None
    assert belief_of_gains(points_of(lambda log: 1.5), 1.0) is None


def test_small_gains_are_uncertain_evidence() -> None:
    errors = []
    for gain in (0.9, 0.15, 0.05, 0.01):
        points = [Observation(10**log, 1 - gain * math.exp(-(log**2))) for log in LOGS]
        belief = belief_of_gains(points, 1.0)
        assert belief is not None
        errors.append(belief.error)
    assert errors == sorted(errors)
    assert errors[0] == pytest.approx(GAIN_ERROR, rel=0.02)
    assert errors[-1] > 40


def test_gains_of_larger_models_point_higher_and_are_less_certain() -> None:
    points = points_of(lambda log: 1 - 0.9 * math.exp(-(log**2)))
    small, large = belief_of_gains(points, 1.0), belief_of_gains(points, 1.0, decades=2.0)
    assert small is not None and large is not None
    assert large.mean - small.mean == pytest.approx(2 * SIZE_POWER)
    assert large.error == pytest.approx(math.hypot(small.error, 2 * SIZE_ERROR))


def test_noisy_scores_share_the_weight_of_the_best() -> None:
    """The best of noisy scores is chance: those within the noise count nearly as much."""
    scores = [0.9, 0.8, 0.75, 0.7, 0.74, 0.8]
    sure = [Observation(10.0**place, score) for place, score in enumerate(scores)]
    noisy = [point._replace(error=1.0) for point in sure]
    sure_peak, noisy_peak = gain_peak(sure, 1.0), gain_peak(noisy, 1.0)
    assert sure_peak is not None and noisy_peak is not None
    assert sure_peak.log_lr > noisy_peak.log_lr == pytest.approx(2.5, abs=0.05)


@pytest.mark.parametrize("score", [1e200, 1e299, -1e200])
def test_huge_scores_and_errors_do_not_overflow(score: float) -> None:
    points = [Observation(0.1, 0.5, 0.1), Observation(100.0, score, abs(score) / 10)]
    assert gain_peak(points, 1.0) is not None
    assert (divergence_of(points, 1.0) is None) == (score < 0)


@pytest.mark.parametrize("start", [1e-26, -5.0, 0.0, 1e250])
def test_scores_of_any_size_have_a_peak_and_a_divergence(start: float) -> None:
    size = abs(start) or 1.0

    def score(log: float) -> float:
        return start + size * (-math.exp(-(log**2)) if log < 1 else 10.0)

    belief = belief_of_gains(points_of(score), start)
    assert belief is not None
    assert belief.mean == pytest.approx(-BEST_UNDER_PEAK, abs=0.1)
    assert divergence_of(points_of(score), start) == pytest.approx(10**0.875)


def test_divergence_lies_between_the_last_sound_and_the_first_exploded() -> None:
    points = points_of(lambda log: 0.9 if log < 1 else 2.1)
    assert divergence_of(points, 1.0) == pytest.approx(10**0.875)


@pytest.mark.parametrize(
    ("start", "score", "explodes"),
    [(1.0, 1.99, False), (1.0, 2.01, True), (-5.0, -0.1, False), (-5.0, 0.1, True)],
)
def test_score_explodes_if_worse_than_the_start_by_its_size(
    start: float, score: float, explodes: bool
) -> None:
    points = [Observation(1.0, start), Observation(10.0, score)]
    assert (divergence_of(points, start) is not None) is explodes


def test_nothing_exploded_has_no_divergence() -> None:
    assert divergence_of([], 1.0) is None
    assert divergence_of(points_of(lambda log: 1.0), 1.0) is None


def test_explosion_everywhere_puts_the_divergence_at_the_lowest() -> None:
    for start in (1.0, math.nan):
        assert divergence_of(points_of(lambda log: None), start) == pytest.approx(0.01)


def test_sound_score_above_a_bad_one_says_that_chance_made_it_bad() -> None:
    """A learning rate that moves nothing has seen hard batches."""
    scores = [2.5, 2.6, 7.0, 2.5, 2.4, 9.0]
    points = [Observation(10.0**place, score) for place, score in enumerate(scores)]
    assert divergence_of(points, 2.6) == pytest.approx(10**4.5)


def test_bad_batch_is_no_explosion() -> None:
    losses = [2.0, 1.9, math.nan, 1.2, 1.0, 1.5, 9.0, 90.0]
    factors = [10.0**place for place in range(8)]
    points = observations_of_round(factors, losses, [0.01] * 8, None, [True] * 8)
    assert divergence_of(points, 2.0) == pytest.approx(10**5.5)
    alone = [Observation(1.0, 2.0), Observation(10.0, None, bad_batch=True)]
    assert divergence_of(alone, 2.0) is None


def test_losses_of_a_range_in_which_all_diverge_explode_from_the_lowest_on() -> None:
    losses = [47.3, 60.7, 5418.0, 44848.0, 5.5e8, 2.2e12, 9.9e15, 2.8e19]
    errors = [20.0, 30.0, 4430.0, 35100.0, 5e8, 2e12, 9e15, 2.8e19]
    points = observations_of_round([10.0**n for n in range(8)], losses, errors, None, [True] * 8)
    assert divergence_of(points, 8.7) == 1.0


def test_best_learning_rate_is_believed_some_way_below_the_divergence() -> None:
    assert belief_of_divergence(None) is None
    assert belief_of_divergence(100.0) == (2 - DIVERGENCE_OVER_BEST, DIVERGENCE_ERROR)


def test_noise_below_the_divergence_is_weak_evidence() -> None:
    chance = random.Random(3)
    for _ in range(200):
        belief = belief_of_gains(points_of(lambda log: chance.gauss(2, 0.01), 0.01), 2.0)
        assert belief is not None
        assert belief.error > 10 * GAIN_ERROR
