"""The search for a learning rate: which learning rates it tries, when it ends, and its state."""

import json
import math
import random
from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hdet
from hdet.lr_search.constants import (
    MARGIN_TO_DIVERGENCE,
    MAX_SWEEPS,
    MIN_ROUND_STEPS,
    PRIOR_ERROR,
    SWEEP_POINTS,
)
from hdet.lr_search.observations import Observation, observations_of_round
from hdet.lr_search.plan import Search
from hdet.lr_search.prior import Prior
from hdet.lr_search.reasons import Reason
from hdet.lr_search.scout import AllRatesDiverged
from tests.lr_search.simulation import BEST, START_SCORE, USUAL, curve, searched

SHARE = hdet.Scout().share


def new_search(num_replicas: int = 8, total_steps: int | None = 1500, **options: Any) -> Search:
    """A search that has tried nothing."""
    settings = {"scout": hdet.Scout(), "num_replicas": num_replicas, "total_steps": total_steps}
    return Search(**{**settings, **options})


def rounds_of(num_replicas: int) -> int:
    """The rounds of a sweep."""
    return math.ceil(SWEEP_POINTS / num_replicas)


def record(
    search: Search, score: Callable[[float], float | None] = curve, start: float | None = None
) -> None:
    """Record one round of a search."""
    search.record_round([Observation(f, score(f), 0.001) for f in search.factors], start)


def tried(search: Search) -> list[float]:
    return [point.factor for point in search.observations.points]


@pytest.mark.parametrize("num_replicas", range(1, 17))
@pytest.mark.parametrize("given_lr", [1e-5, 1.0, 1e4])
def test_search_finds_the_same_learning_rate_from_any_given_one(
    given_lr: float, num_replicas: int
) -> None:
    search = searched(given=given_lr, num_replicas=num_replicas)
    assert len(tried(search)) >= SWEEP_POINTS
    assert BEST / 2 < search.estimate().factor * given_lr < BEST * 2
    assert search.reasons == (Reason.SWEPT,)


@given(st.floats(-6, 6), st.integers(1, 16))
def test_unit_of_learning_rates_does_not_change_the_search(by: float, num_replicas: int) -> None:
    plain = searched(num_replicas=num_replicas)
    other = searched(num_replicas=num_replicas, given=10**by)
    expected = plain.estimate(peak=2.0)
    result = other.estimate(peak=2.0)
    assert result.factor * 10**by == pytest.approx(expected.factor, rel=1e-3)
    assert result.within == pytest.approx(expected.within, rel=1e-3)
    assert other.used == plain.used


@pytest.mark.parametrize("off", [1e-2, 0.1, 10.0, 100.0])
@pytest.mark.parametrize("num_replicas", [1, 2, 4, 8, 16])
def test_search_without_a_prior_finds_the_best_around_the_given_learning_rate(
    num_replicas: int, off: float
) -> None:
    search = searched(given=BEST * off, prior=None, num_replicas=num_replicas)
    assert BEST / 2 < search.estimate().factor * BEST * off < BEST * 3


def test_first_sweep_is_centred_at_the_prior() -> None:
    search = new_search(prior=Prior(-3.0, PRIOR_ERROR))
    assert math.log10(min(search.factors)) == pytest.approx(-5.0)
    assert math.log10(max(search.factors)) == pytest.approx(-1.0)
    around_given = new_search()
    assert min(around_given.factors) * max(around_given.factors) == pytest.approx(1.0)


def test_best_inside_of_the_range_ends_after_one_sweep() -> None:
    search = searched()
    assert len(tried(search)) == 8
    assert search.used == 8
    assert search.num_steps > 0  # also after the end of the search


def test_best_at_the_top_sweeps_up_if_the_budget_allows_it() -> None:
    prior = USUAL._replace(mean=-5.0)
    search = searched(prior=prior, total_steps=5000)
    assert max(tried(search)) > 0.1
    assert BEST / 2 < search.estimate().factor < BEST * 2
    assert search.reasons == (Reason.SWEPT,)


def test_best_at_the_bottom_sweeps_down_if_the_budget_allows_it() -> None:
    prior = USUAL._replace(mean=0.5)
    search = searched(lambda lr: curve(lr) if lr < 1 else None, prior=prior, total_steps=5000)
    assert min(tried(search)) < BEST / 10
    assert BEST / 3 < search.estimate().factor < BEST * 2


@pytest.mark.parametrize("slope", [-1.0, 1.0])
def test_best_at_an_end_without_budget_ends_for_lack_of_time(slope: float) -> None:
    """A sweep that shows no best inside takes up the whole budget of a short run."""
    total_steps = math.ceil(MIN_ROUND_STEPS / SHARE)  # eight replicas try a sweep in one round
    search = searched(lambda lr: slope * math.log10(lr), prior=None, total_steps=total_steps)
    assert search.reasons == (Reason.NO_TIME,)
    assert len(tried(search)) == 8


@pytest.mark.parametrize("slope", [-1.0, 1.0])
@pytest.mark.parametrize("total_steps", [None, 10**9])
def test_best_that_lies_always_further_ends_after_the_last_sweep(
    slope: float, total_steps: int | None
) -> None:
    search = searched(
        lambda lr: slope * math.log10(lr), prior=None, total_steps=total_steps, start_score=99.0
    )
    assert search.reasons == (Reason.NO_TIME,)
    assert len(tried(search)) == MAX_SWEEPS * 8


def test_search_does_not_turn_back() -> None:
    """A search that went up does not sweep down, where it has been."""
    search = new_search(total_steps=100_000)
    record(search, lambda lr: 5 - math.log10(lr) / 9, 6.0)
    assert min(search.factors) > 100
    record(search, lambda lr: 9.0, 6.0)
    assert search.is_over


def test_nothing_gained_and_nothing_exploded_sweeps_up() -> None:
    search = new_search(total_steps=100_000)
    record(search, lambda lr: 5.0, 5.0)
    assert not search.is_over
    assert min(search.factors) > 100


def test_nothing_gained_below_an_explosion_ends_the_search() -> None:
    search = new_search(total_steps=100_000)
    record(search, lambda lr: 5.0 if lr < 10 else None, 5.0)
    assert search.reasons == (Reason.SWEPT,)
    assert search.divergence is not None
    assert search.estimate().factor < 1


@pytest.mark.parametrize("num_replicas", [1, 3, 8])
@pytest.mark.parametrize("bad", [None, 1e9])
def test_range_that_explodes_sweeps_down_also_beyond_the_budget(
    bad: float | None, num_replicas: int
) -> None:
    def score(lr: float) -> float | None:
        return curve(lr) if lr < 1 else bad

    prior = USUAL._replace(mean=3.5)
    search = searched(score, prior=prior, num_replicas=num_replicas, total_steps=1000)
    assert min(tried(search)) < 1
    assert search.divergence is not None
    assert search.estimate().factor <= search.divergence / MARGIN_TO_DIVERGENCE


@pytest.mark.parametrize("start_score", [None, 5.0])
def test_search_refuses_if_all_learning_rates_diverge_after_sweeps_down(
    start_score: float | None,
) -> None:
    with pytest.raises(
        AllRatesDiverged, match=r"diverges at every learning rate .* from 1.93e-16 to 100 times"
    ):
        searched(lambda lr: None, prior=None, start_score=start_score)


def test_bad_batch_of_the_lowest_does_not_hide_that_all_others_explode() -> None:
    search = new_search()
    points = [Observation(f, 50.0) for f in search.factors]
    points[0] = Observation(search.factors[0], None, bad_batch=True)
    search.record_round(points, 1.0)
    assert not search.is_over
    assert max(search.factors) < 0.01


def test_bad_batch_in_the_middle_does_not_change_where_the_search_looks() -> None:
    search = new_search(prior=USUAL)
    points = [Observation(f, curve(f), 0.001) for f in search.factors]
    points[2] = Observation(points[2].factor, None, bad_batch=True)
    search.record_round(points, START_SCORE)
    assert search.reasons == (Reason.SWEPT,)
    assert BEST / 2 < search.estimate().factor < BEST * 2


@pytest.mark.parametrize("num_replicas", [2, 8, 64])
@pytest.mark.parametrize("total_steps", [1000, 1500, 10_000])
def test_search_stays_within_its_share_of_the_run(total_steps: int, num_replicas: int) -> None:
    for off in (1e-3, 1.0, 100.0):
        search = searched(
            given=BEST * off, prior=None, num_replicas=num_replicas, total_steps=total_steps
        )
        assert 0 < search.used <= SHARE * total_steps


@pytest.mark.parametrize("num_replicas", [1, 3, 8])
@pytest.mark.parametrize("given_steps", [None, 7, 30])
def test_sweeps_down_from_an_explosion_leave_a_step_to_the_run(
    num_replicas: int, given_steps: int | None
) -> None:
    """Where all learning rates explode, a search that has no room for more refuses."""
    scout = hdet.Scout(share=0.99, steps=given_steps)
    for total_steps in (61, 240, 361, 1000):
        if given_steps is not None and given_steps * rounds_of(num_replicas) >= total_steps:
            continue
        search = new_search(num_replicas, total_steps, scout=scout)
        sweep = search.num_steps * rounds_of(num_replicas)
        with pytest.raises(AllRatesDiverged):
            for _ in range(100):
                record(search, lambda lr: None, 1.0)
        assert search.used == min((total_steps - 1) // sweep, MAX_SWEEPS) * sweep


def test_interrupted_search_below_an_explosion_leaves_a_step_to_the_run() -> None:
    search = new_search(8, 31, scout=hdet.Scout(steps=10))
    record(search, lambda lr: None, 1.0)
    record(search, lambda lr: None, 1.0)
    search.interrupt(9)
    assert search.reasons == (Reason.INTERRUPTED,)
    assert search.used == 29
    assert search.estimate().factor <= min(tried(search)) / MARGIN_TO_DIVERGENCE


def test_interrupted_rounds_stay_within_the_budget() -> None:
    for num_replicas, total_steps in ((1, 2500), (2, 1600), (4, 2000), (8, 1500)):
        search = new_search(num_replicas, total_steps)
        turn = 0
        while not search.is_over:
            turn += 1
            if turn % 2:
                search.interrupt(search.num_steps // 2)
            else:
                record(search)
        assert search.used <= SHARE * total_steps


def test_interrupted_round_is_repeated() -> None:
    search = new_search(2)
    record(search)
    before = search.factors
    search.interrupt(3)
    assert search.factors == before
    assert not search.is_over


def test_search_that_is_always_interrupted_ends_and_keeps_the_given_learning_rate() -> None:
    search = new_search(prior=USUAL)
    for _ in range(100):
        search.interrupt(5)
    assert search.is_over
    assert search.reasons == (Reason.INTERRUPTED,)
    assert search.estimate(peak=2.0).factor == 1.0
    assert search.divergence is None


def test_steps_that_fit_beside_the_rounds_ahead_can_be_spared() -> None:
    search = new_search(2, 2000)
    spare = int(SHARE * 2000) - 3 * search.num_steps  # a sweep takes three rounds
    assert search.can_spare(spare)
    assert not search.can_spare(spare + 1)
    record(search)
    assert search.can_spare(spare)
    while not search.is_over:
        record(search)
    assert not search.can_spare(0)


def test_start_score_by_losses_is_the_mean_of_all_rounds() -> None:
    """The first losses of a few replicas are chance: those of all rounds are less so."""
    search = new_search(4, prior=USUAL)
    for start in (5.0, 6.0):
        record(search, start=start)
    assert search.is_over
    assert search.start_score == 5.5


def test_last_factors_are_those_of_the_last_complete_round() -> None:
    search = new_search(2)
    first = search.factors
    record(search)
    search.interrupt(1)
    assert search.last_factors == first


def test_equal_scores_keep_the_given_learning_rate() -> None:
    for num_replicas in (1, 4, 8, 64):
        search = searched(lambda lr: 1.0, prior=None, start_score=None, num_replicas=num_replicas)
        found = search.estimate(peak=2.0)
        assert (found.factor, found.reason) == (1.0, Reason.NOTHING_FOUND)


def test_loss_that_grows_by_design_keeps_the_given_learning_rate() -> None:
    search = new_search(total_steps=5000)
    while not search.is_over:
        record(search, lambda lr: 3.0 + search.used / 100, 2.0)
    assert search.estimate().factor == 1.0


@pytest.mark.parametrize("start_score", [1e-26, -5.0, 1e250])
def test_search_works_with_scores_of_any_size(start_score: float) -> None:
    size = abs(start_score)

    def score(lr: float) -> float | None:
        if lr > 90:
            return None
        return start_score + size * (-min(lr, 1 / lr) if lr < 3 else lr**9)

    search = searched(score, prior=None, start_score=start_score, error=0.0)
    assert 0.3 < search.estimate().factor < 3


def test_overflow_without_a_gain_stays_below_the_divergence() -> None:
    chance = random.Random(0)
    for start_score in (5.0, -5.0):
        search = searched(
            lambda lr, mean=start_score: chance.gauss(mean, 0.01) if lr < 50 else None,  # type: ignore[misc]
            prior=None,
            start_score=start_score,
            error=0.01,
        )
        assert search.divergence is not None
        assert search.estimate().factor <= search.divergence / MARGIN_TO_DIVERGENCE


def test_estimate_stays_below_the_divergence_of_a_quadratic() -> None:
    """A quadratic of many curvatures diverges with SGD above twice the inverse of the largest."""
    search = new_search()
    while not search.is_over:
        steps = 2 * search.num_steps
        record(
            search,
            lambda lr, steps=steps: (  # type: ignore[misc]
                sum((1 - lr * 10 ** (-k / 5)) ** steps for k in range(16)) / 16
            ),
            1.0,
        )
    assert search.divergence is not None
    assert search.estimate(peak=2.08).factor <= search.divergence / MARGIN_TO_DIVERGENCE < 2.0


def noisy_losses(given_lr: float, chance: random.Random, spread: float = 0.1) -> float:
    """The first learning rate of a run that is best at 1 and explodes at 8, by training losses.

    Every replica sees batches of its own, and few of them.
    """
    search = new_search(total_steps=800, prior=Prior(-math.log10(given_lr), PRIOR_ERROR))
    while not search.is_over:
        num = search.num_steps // 2
        rows = [
            [
                2.6
                - 0.25 * -math.expm1(-8 * given_lr * factor * step / 12)
                + 0.5 * (given_lr * factor / 4) ** 2
                + chance.gauss(0, spread)
                for step in range(num, 2 * num)
            ]
            for factor in search.factors
        ]
        errors = [stdev(row) / math.sqrt(num) for row in rows]
        points = observations_of_round(
            search.factors, list(map(fmean, rows)), errors, None, [True] * 8
        )
        search.record_round(points, fmean(2.6 + chance.gauss(0, spread) for _ in range(8)))
    return search.estimate(peak=2.0).factor * given_lr


@pytest.mark.parametrize("given_lr", [1e-3, 1e-2, 1.0, 100.0])
def test_search_by_noisy_losses_rarely_loses_a_run(given_lr: float) -> None:
    """A lucky first batch makes all look worse than none, and a few losses hide their noise."""
    chance = random.Random(0)
    found = [noisy_losses(given_lr, chance) for _ in range(100)]
    assert sum(not 0.1 < lr < 4 for lr in found) <= 2


@given(
    st.lists(st.one_of(st.none(), st.floats(-9, 9), st.just(1e299)), min_size=70, max_size=70),
    st.integers(1, 16),
    st.one_of(st.none(), st.floats(-9, 9), st.just(math.nan), st.just(math.inf)),
)
def test_search_ends_with_a_sound_estimate_or_refuses_for_any_scores(
    scores: list[float | None], num_replicas: int, start_score: float | None
) -> None:
    search, queue = new_search(num_replicas, 5000, prior=USUAL), iter(scores)
    try:
        while not search.is_over:
            record(search, lambda lr: next(queue, 1.0), start_score)
    except AllRatesDiverged:
        return
    assert 0 < search.estimate(peak=2.0).factor < math.inf
    if search.divergence is not None:
        assert search.estimate(peak=2.0).factor <= search.divergence / MARGIN_TO_DIVERGENCE * (
            1 + 1e-9
        )


def saved(search: Search) -> dict[str, Any]:
    """The state of a search, as a file holds it."""
    state: dict[str, Any] = json.loads(json.dumps(search.state_dict()))
    return state


@pytest.mark.parametrize("mean", [-2.0, -5.0, 3.5])
@pytest.mark.parametrize("num_replicas", [1, 2, 5, 8])
def test_search_that_is_resumed_after_each_round_gives_the_same_estimate(
    num_replicas: int, mean: float
) -> None:
    prior = Prior(mean, PRIOR_ERROR)
    whole = searched(prior=prior, num_replicas=num_replicas)
    cut = new_search(num_replicas, 5000, prior=prior)
    while not cut.is_over:
        record(cut, start=START_SCORE)
        state = saved(cut)
        cut = new_search(num_replicas, 5000, prior=prior)
        cut.load_state_dict(state)
    assert cut.observations == whole.observations
    assert (cut.used, cut.reasons) == (whole.used, whole.reasons)
    assert cut.estimate(peak=2.0) == whole.estimate(peak=2.0)


def test_state_of_an_unfinished_sweep_continues_with_the_next_round() -> None:
    one, other = new_search(2), new_search(2)
    record(one)
    other.load_state_dict(saved(one))
    assert other.factors == one.factors
    assert other.observations == one.observations


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_state_of_a_longer_run_ends_the_search_before_the_run_ends(num_replicas: int) -> None:
    search = new_search(2, 5000)
    record(search)
    left = rounds_of(num_replicas) * MIN_ROUND_STEPS
    scout = hdet.Scout(share=0.99, steps=MIN_ROUND_STEPS)
    resumed = new_search(num_replicas, left + 1, scout=scout)
    resumed.load_state_dict(saved(search))
    assert resumed.reasons == (Reason.INTERRUPTED,)


@pytest.mark.parametrize(
    ("num_replicas", "decades", "prior"),
    [(8, 4.0, USUAL), (4, 4.0, None), (4, 3.0, USUAL)],
    ids=["other replicas", "other prior", "other range"],
)
def test_state_of_another_grid_starts_over_with_the_steps_that_are_left(
    num_replicas: int, decades: float, prior: Prior | None
) -> None:
    search = new_search(4, prior=USUAL)
    record(search)
    other = Search(
        hdet.Scout(decades=decades), num_replicas=num_replicas, total_steps=1500, prior=prior
    )
    first = other.factors
    other.load_state_dict(saved(search))
    assert other.factors == first
    assert not other.observations.points
    assert other.used == search.used
    ahead = rounds_of(num_replicas) * other.num_steps
    other.interrupt(int(SHARE * 1500) - search.used - ahead + 1)
    assert other.is_over
