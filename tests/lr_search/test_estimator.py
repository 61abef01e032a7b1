"""The estimate as a pure function: how prior, gains and divergence decide together."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.lr_search.constants import (
    BEST_UNDER_PEAK,
    CAUTION,
    DIVERGENCE_ERROR,
    DIVERGENCE_OVER_BEST,
    GAIN_ERROR,
    MARGIN_TO_DIVERGENCE,
    PRIOR_ERROR,
    UNKNOWN_ERROR,
)
from hdet.lr_search.estimator import Estimate, SearchContext, _combined, estimate
from hdet.lr_search.evidence import Belief, divergence_of
from hdet.lr_search.observations import Observation, Observations
from hdet.lr_search.prior import Prior
from hdet.lr_search.reasons import Reason
from tests.lr_search.simulation import searched

LOGS = [-2 + 4 * place / 7 for place in range(8)]
PRIOR = Prior(0.0, PRIOR_ERROR)


def bell(top: float, gain: float = 0.6, by: float = 0.0) -> list[Observation]:
    """Scores of a start of 1 that gain most at `top`, over four decades around `by`."""
    return [
        Observation(10 ** (log + by), 1 - gain * math.exp(-((log + by - top) ** 2)), 0.001)
        for log in LOGS
    ]


def mean_of(found: Estimate) -> float:
    """The logarithm of the learning rate that an estimate deems best, before caution."""
    return math.log10(found.factor) + CAUTION * math.log10(found.within)


def test_two_beliefs_that_agree_with_the_prior_give_their_precision_weighted_mean() -> None:
    beliefs = [Belief(0.1, 0.05), Belief(-0.2, 0.1)]
    weights = [1 / belief.error**2 for belief in beliefs]
    pairs = zip(weights, beliefs, strict=True)
    expected = sum(weight * belief.mean for weight, belief in pairs) / sum(weights)
    for prior in (None, Prior(expected, 1.0)):
        mean, error = _combined(beliefs, prior)
        assert mean == pytest.approx(expected, abs=1e-3)
        assert error == pytest.approx(1 / math.sqrt(sum(weights)), rel=0.02)


def test_unknown_prior_is_a_wide_one_at_the_given_learning_rate() -> None:
    mean, error = _combined([Belief(1.5, 3.0)], None)
    assert mean == pytest.approx(0.75, abs=0.01)
    assert error == pytest.approx(3 / math.sqrt(2), rel=0.01)


def test_belief_without_information_leaves_the_prior() -> None:
    mean, _ = _combined([Belief(30.0, 1e9)], Prior(-2.0, 0.1))
    assert mean == pytest.approx(-2.0, abs=0.02)
    mean, error = _combined([Belief(1.5, 1e9)], None)
    assert mean == pytest.approx(0.0, abs=0.01)
    assert error == pytest.approx(3.0, rel=0.01)


@given(st.floats(-6, 6), st.floats(0.1, 2), st.floats(-3, 3), st.floats(0.1, 1.5))
def test_combined_mean_lies_between_prior_and_belief(
    belief: float, belief_error: float, prior: float, prior_error: float
) -> None:
    mean, error = _combined([Belief(belief, belief_error)], Prior(prior, prior_error))
    assert min(belief, prior) - 0.02 <= mean <= max(belief, prior) + 0.02
    assert error > 0


@pytest.mark.parametrize("top", [-4.0, 4.0])
def test_prior_that_is_contradicted_by_four_decades_gives_way(top: float) -> None:
    found = estimate(Observations(bell(top, by=top), 1.0), SearchContext(PRIOR))
    assert mean_of(found) == pytest.approx(top - BEST_UNDER_PEAK, abs=0.15)
    assert found.shares["gains"] > 0.9
    assert found.reason is Reason.FOUND


def test_gains_near_the_prior_are_combined_with_it() -> None:
    found = estimate(Observations(bell(0.5 + BEST_UNDER_PEAK), 1.0), SearchContext(PRIOR))
    assert 0.2 < mean_of(found) < 0.5
    assert found.shares["gains"] > found.shares["prior"] > 0.2


def test_gains_without_a_prior_decide_alone() -> None:
    found = estimate(Observations(bell(-1.0), 1.0), SearchContext())
    assert mean_of(found) == pytest.approx(-1.0 - BEST_UNDER_PEAK, abs=0.03)
    assert math.log10(found.within) == pytest.approx(GAIN_ERROR, rel=0.05)
    assert not found.is_guess


def test_stated_factor_is_never_below_the_error_of_a_prior() -> None:
    sure = estimate(Observations(bell(0.0), 1.0), SearchContext(PRIOR))
    assert sure.within < sure.stated_within == 10**PRIOR_ERROR
    unsure = estimate(Observations([Observation(1.0, 2.0)], 2.0), SearchContext(PRIOR))
    assert unsure.stated_within == unsure.within > 10**PRIOR_ERROR


def test_estimate_is_a_guess_where_the_prior_counts_for_more_than_what_was_seen() -> None:
    found = Estimate(9.0, Reason.BELOW_DIVERGENCE, 2.0, {"prior": 0.5, "gains": 0.5})
    assert not found.is_guess
    assert found._replace(shares={"prior": 0.51, "gains": 0.49}).is_guess


def test_explosion_alone_decides_some_way_below_it() -> None:
    points = [Observation(1.0, 1.0), Observation(100.0, None)]
    found = estimate(Observations(points, 1.0), SearchContext())
    precision = DIVERGENCE_ERROR**-2
    share = precision / (precision + UNKNOWN_ERROR**-2)
    assert mean_of(found) == pytest.approx((1 - DIVERGENCE_OVER_BEST) * share, abs=0.02)
    assert found.reason is Reason.FOUND
    assert found.shares["divergence"] == pytest.approx(share)


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5])
def test_plateau_of_noise_returns_nearly_the_prior(noise: float) -> None:
    chance = random.Random(0)
    shifts, guesses = [], []
    for _ in range(100):
        points = [Observation(10**log, chance.gauss(1, noise), noise) for log in LOGS]
        found = estimate(Observations(points, 1.0), SearchContext(PRIOR))
        shifts.append(abs(mean_of(found)))
        guesses.append(found.is_guess and found.reason is Reason.MOSTLY_USUAL)
    assert sum(shift < 0.1 for shift in shifts) >= 90
    assert sum(guesses) >= 90


def test_plateau_of_noise_without_a_prior_keeps_the_given_learning_rate() -> None:
    chance = random.Random(0)
    for _ in range(100):
        points = [Observation(10**log, chance.gauss(2, 0.01), 0.01) for log in LOGS]
        found = estimate(Observations(points, 2.0), SearchContext(peak=2.0))
        assert (found.factor, found.reason) == (1.0, Reason.NOTHING_FOUND)


@pytest.mark.parametrize("start", [None, 2.0])
@pytest.mark.parametrize("points", [[], [Observation(1.0, 2.0)], [Observation(1.0, 3.0)]])
def test_nothing_gained_and_no_prior_keeps_the_given_learning_rate(
    points: list[Observation], start: float | None
) -> None:
    found = estimate(Observations(points, start), SearchContext(peak=2.0))
    assert found == Estimate(1.0, Reason.NOTHING_FOUND)
    assert found.is_guess


def test_given_learning_rate_beyond_the_bounds_is_not_kept_where_nothing_was_found() -> None:
    found = estimate(Observations([], 2.0), SearchContext(bounds=(2.0, 9.0)))
    assert (found.factor, found.reason) == (2.0, Reason.WITHIN_BOUNDS)
    assert found.is_guess


def test_prior_does_not_decide_without_any_observation() -> None:
    found = estimate(Observations([], 2.0), SearchContext(Prior(-2.0, 0.3)))
    assert found == Estimate(1.0, Reason.NOTHING_FOUND)


def test_estimate_is_the_peak_of_the_schedule_over_its_mean_times_higher() -> None:
    observed = Observations(bell(0.0), 1.0)
    plain = estimate(observed, SearchContext(PRIOR))
    peaked = estimate(observed, SearchContext(PRIOR, peak=2.0))
    assert peaked.factor == pytest.approx(2 * plain.factor)
    assert peaked.within == plain.within


def test_estimate_starts_below_the_mean_by_a_share_of_its_error() -> None:
    found = estimate(Observations([Observation(1.0, 2.0)], 2.0), SearchContext(PRIOR))
    assert found.within > 10**PRIOR_ERROR
    assert math.log10(found.factor) == pytest.approx(-CAUTION * math.log10(found.within))


def test_estimate_stays_below_half_of_the_divergence() -> None:
    points = [Observation(1.0, 0.5), Observation(4.0, None)]
    observed, limit = Observations(points, 1.0), 2.0 / MARGIN_TO_DIVERGENCE
    context = SearchContext(Prior(2.0, 0.01), peak=10.0)
    found = estimate(observed, context)
    assert found.factor == pytest.approx(limit)
    assert found.reason is Reason.BELOW_DIVERGENCE
    # A schedule that rises above the given learning rate explodes where it is highest.
    raised = estimate(observed, context._replace(highest=12.0))
    assert raised.factor == pytest.approx(limit / 12)
    assert estimate(observed, context._replace(highest=0.1)).factor == pytest.approx(limit)


@pytest.mark.parametrize("start", [None, 1.0])
@pytest.mark.parametrize("prior", [None, Prior(0.0, 0.35), Prior(3.0, 0.1)])
def test_estimate_stays_below_half_of_the_lowest_if_all_explode(
    prior: Prior | None, start: float | None
) -> None:
    points = [Observation(0.01, None), Observation(0.1, None)]
    assert estimate(Observations(points, start), SearchContext(prior)).factor <= 0.005


SCORES = st.one_of(st.none(), st.floats(-1e3, 1e3), st.sampled_from([1e-9, 1e200, -1e200, 1e299]))
ROWS = st.lists(st.tuples(SCORES, st.floats(0, 1e3), st.booleans()), max_size=12)
PRIORS = st.one_of(
    st.none(), st.builds(Prior, st.floats(-6, 6), st.floats(0.05, 2), st.floats(0, 6))
)


def observed_of(rows: list[tuple[float | None, float, bool]], start: float | None) -> Observations:
    """Observations over five decades. A bad batch has no score."""
    points = [
        Observation(10 ** (place / 2 - 2), None if bad else score, error, bad)
        for place, (score, error, bad) in enumerate(rows)
    ]
    return Observations(points, start)


@given(
    ROWS,
    st.one_of(st.none(), st.floats(-1e3, 1e3)),
    PRIORS,
    st.floats(1, 2.5),
    st.floats(0.01, 20),
)
def test_estimate_is_finite_and_below_half_of_the_divergence_for_any_observations(
    rows: list[tuple[float | None, float, bool]],
    start: float | None,
    prior: Prior | None,
    peak: float,
    highest: float,
) -> None:
    observed = observed_of(rows, start)
    found = estimate(observed, SearchContext(prior, peak, highest))
    assert 0 < found.factor < math.inf
    assert found.within >= 1
    assert not found.shares or sum(found.shares.values()) == pytest.approx(1)
    assert found.text
    divergence = divergence_of(observed.points, observed.reference)
    if divergence is not None:
        assert found.factor * max(highest, 1) <= divergence / 2 * (1 + 1e-9)


@given(ROWS, st.floats(-1e3, 1e3), PRIORS, st.floats(-3, 0), st.floats(0, 3), st.floats(1, 2.5))
def test_estimate_stays_within_the_bounds_for_any_observations(
    rows: list[tuple[float | None, float, bool]],
    start: float,
    prior: Prior | None,
    low: float,
    high: float,
    peak: float,
) -> None:
    bounds = (10**low, 10**high)
    context = SearchContext(prior, peak, bounds=bounds)
    found = estimate(observed_of(rows, start), context)
    assert bounds[0] <= found.factor <= bounds[1]
    free = estimate(observed_of(rows, start), context._replace(bounds=(0.0, math.inf)))
    is_limited = not bounds[0] <= free.factor <= bounds[1]
    assert (found.reason is Reason.WITHIN_BOUNDS) is is_limited


@given(st.floats(-6, 6), st.floats(-2, 2), st.booleans())
def test_unit_of_learning_rates_does_not_change_the_result(
    by: float, top: float, explodes: bool
) -> None:
    """A given learning rate that is 10**by times higher has factors that much lower."""
    points = [*bell(top), Observation(1e3, None if explodes else 1.0)]
    plain = estimate(Observations(points, 1.0), SearchContext(PRIOR))
    other = estimate(
        Observations([p._replace(factor=p.factor / 10**by) for p in points], 1.0),
        SearchContext(PRIOR._replace(mean=-by)),
    )
    assert other.factor * 10**by == pytest.approx(plain.factor, rel=1e-3)
    assert other.within == pytest.approx(plain.within, rel=1e-3)
    assert other.reason is plain.reason


@given(st.floats(0.001, 1000), st.floats(-2, 2))
def test_scale_of_scores_does_not_change_the_result(scale: float, top: float) -> None:
    points = [*bell(top), Observation(1e3, 9.0)]
    scaled = [p._replace(score=scale * (p.score or 0.0), error=scale * p.error) for p in points]
    plain = estimate(Observations(points, 1.0), SearchContext(PRIOR))
    other = estimate(Observations(scaled, scale), SearchContext(PRIOR))
    assert other.factor == pytest.approx(plain.factor, rel=1e-6)


@pytest.mark.parametrize("shift", [-0.5, 0.5, 5.0])
def test_constant_in_the_scores_only_changes_how_much_the_gains_count(shift: float) -> None:
    """Gains are compared with the size of the score, so a constant makes them more or less sure."""
    shifted = [point.shifted_by(shift) for point in bell(1.0)]
    plain = estimate(Observations(bell(1.0), 1.0), SearchContext(PRIOR))
    other = estimate(Observations(shifted, 1.0 + shift), SearchContext(PRIOR))
    assert (other.shares["gains"] < plain.shares["gains"]) is (shift > 0)
    assert min(0, 1.0 - BEST_UNDER_PEAK) < mean_of(other) < max(0, 1.0 - BEST_UNDER_PEAK)


def test_start_at_a_plateau_counts_less_than_one_that_gains() -> None:
    shares = [
        estimate(Observations(bell(0.0, gain), 1.0), SearchContext(PRIOR)).shares["gains"]
        for gain in (0.01, 0.05, 0.1, 0.3, 0.9)
    ]
    assert shares == sorted(shares)
    assert shares[0] < 0.01
    assert shares[-1] > 0.5


def errors_of_searches(noise: float, gain: float, num: int) -> list[float]:
    """Errors of estimates in units of the errors that they state.

    The best learning rate, the peak of the gains and the explosion are drawn as the constants say.
    """
    chance = random.Random(0)
    errors = []
    for _ in range(num):
        best = chance.gauss(0, PRIOR_ERROR)
        top = best + BEST_UNDER_PEAK + chance.gauss(0, GAIN_ERROR)
        edge = best + DIVERGENCE_OVER_BEST + chance.gauss(0, DIVERGENCE_ERROR)

        def score(lr: float, top: float = top, edge: float = edge) -> float | None:
            log = math.log10(lr)
            clean = 1 - gain * math.exp(-((log - top) ** 2))
            return clean + chance.gauss(0, noise) if log < edge else None

        search = searched(score, prior=PRIOR, start_score=1.0, error=noise)
        found = search.estimate()
        errors.append((mean_of(found) - best) / math.log10(found.within))
    return errors


@pytest.mark.parametrize(
    ("noise", "gain"),
    [(0.001, 0.4), (0.01, 0.05), (0.05, 0.4), (0.05, 0.05), (0.3, 0.4), (0.3, 0.05)],
)
def test_stated_error_covers_the_best_learning_rate(noise: float, gain: float) -> None:
    errors = errors_of_searches(noise, gain, 200)
    assert sum(abs(error) < 2 for error in errors) >= 0.8 * len(errors)
    assert sum(abs(error) < 0.25 for error in errors) <= 0.5 * len(errors)
