"""What rounds observe: scores and losses, their errors, bad batches, and the log of them all."""

import json
import math
import random
from statistics import fmean

import pytest

from hdet.lr_search.constants import SINGLE_SCORE_NOISE
from hdet.lr_search.observations import (
    LossSummary,
    Observation,
    Observations,
    RoundLog,
    hit_by_bad_batch,
    observations_of_round,
)


def by_scores(rows: list[list[float]], finite: list[bool] | None = None) -> list[Observation]:
    """The observations of a round that is compared by scores."""
    num = len(rows)
    factors = [10.0**place for place in range(num)]
    return observations_of_round(factors, [None] * num, [None] * num, rows, finite or [True] * num)


def by_losses(losses: list[float | None], errors: list[float | None]) -> list[Observation]:
    """The observations of a round that is compared by training losses."""
    factors = [10.0**place for place in range(len(losses))]
    return observations_of_round(factors, losses, errors, None, [True] * len(losses))


def test_score_of_a_replica_is_the_mean_over_its_batches() -> None:
    points = by_scores([[1.0, 3.0], [2.0, 6.0], [5.0, 5.0]])
    assert [point.score for point in points] == [2.0, 4.0, 5.0]
    assert [point.factor for point in points] == [1.0, 10.0, 100.0]


def test_difficulty_that_all_batches_share_is_no_error() -> None:
    hard = [1.0, 5.0, 2.0, 9.0]
    points = by_scores([[h + shift for h in hard] for shift in (0.0, 0.1, 0.2, 0.5)])
    assert max(point.error for point in points) == pytest.approx(0.0, abs=1e-12)


def test_error_of_scores_is_the_standard_error_against_the_others() -> None:
    chance = random.Random(0)
    errors = []
    for _ in range(100):
        common = [chance.gauss(0, 5) for _ in range(16)]
        rows = [[c + chance.gauss(0, 1) for c in common] for _ in range(8)]
        errors.append(fmean(point.error for point in by_scores(rows)))
    assert 0.8 / 4 < fmean(errors) < 1.2 / 4


def test_error_of_two_replicas_is_that_of_their_difference() -> None:
    points = by_scores([[1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 4.0, 4.0]])
    assert points[0].error == points[1].error > 0


def test_single_score_per_replica_counts_as_noisy() -> None:
    points = by_scores([[2.5], [2.0], [4.0]])
    assert [point.error for point in points] == [SINGLE_SCORE_NOISE * 2.0] * 3


def test_replicas_that_diverged_do_not_blur_the_errors_of_the_others() -> None:
    chance = random.Random(0)
    rows = [[chance.gauss(2, 0.01) for _ in range(8)] for _ in range(5)]
    wild = [[chance.gauss(1e6, 1e5) for _ in range(8)] for _ in range(3)]
    assert max(point.error for point in by_scores([*rows, *wild])[:5]) < 0.02


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e305])
def test_score_that_is_not_finite_or_overflows_is_none(bad: float) -> None:
    points = by_scores([[1.0, 1.0], [1.0, bad], [2.0, 2.0]])
    assert [point.score for point in points] == [1.0, None, 2.0]
    assert not any(point.bad_batch for point in points)


def test_weights_that_are_not_finite_have_no_score() -> None:
    points = by_scores([[1.0, 1.0], [0.5, 0.5]], finite=[True, False])
    assert points[1].score is None
    assert not points[1].bad_batch


def test_round_in_which_no_score_is_finite_has_no_errors() -> None:
    points = by_scores([[math.nan, 1.0], [math.inf, 1.0]])
    assert [(point.score, point.error) for point in points] == [(None, 0.0)] * 2


def test_loss_that_is_not_finite_with_finite_weights_may_be_a_bad_batch() -> None:
    points = by_losses([2.0, math.nan, None, 1.0], [0.1] * 4)
    assert [point.bad_batch for point in points] == [False, True, True, False]
    broken = observations_of_round([1.0, 10.0], [2.0, math.nan], [0.1] * 2, None, [True, False])
    assert not broken[1].bad_batch


def test_weights_broken_by_a_bad_batch_are_no_explosion() -> None:
    seen = observations_of_round(
        [1.0, 10.0], [2.0, math.nan], [0.1] * 2, None, [True, False], [False, True]
    )
    assert [point.bad_batch for point in seen] == [False, True]


def test_errors_of_a_few_losses_are_at_least_that_of_the_better_half() -> None:
    points = by_losses([1.0, 1.1, 1.2, 1.3], [0.3, 0.1, None, 0.9])
    common = math.hypot(0.3, 0.1) / math.sqrt(2)
    assert [point.error for point in points] == pytest.approx([0.3, common, common, 0.9])


def test_jumps_of_diverged_replicas_are_not_the_noise_of_the_lowest() -> None:
    """All learning rates but the lowest diverge: half of the better half is not noise."""
    losses: list[float | None] = [2.16, 4.95, 3.63, 1499.0, 2.3e5, 3.6e7, 3.8e8, 1.4e11]
    errors: list[float | None] = [0.1, 2.0, 1.4, 901.0, 1.7e5, 3.0e7, 7.7e10, 1.1e11]
    assert by_losses(losses, errors)[0].error < 2


def test_huge_errors_do_not_overflow() -> None:
    points = by_losses([1e250, 2e250], [1e250, 1e250])
    assert points[0].error == pytest.approx(1e250)


def test_shift_moves_a_finite_score_only() -> None:
    assert Observation(1.0, 2.0, 0.1).shifted_by(0.5) == Observation(1.0, 2.5, 0.1)
    assert Observation(1.0, None).shifted_by(0.5) == Observation(1.0, None)


def steady(last: float = 1.0) -> LossSummary:
    """The losses of a replica that finished a round of 8 steps."""
    return LossSummary(8, 2.0, last)


@pytest.mark.parametrize(
    ("losses", "is_hit"),
    [
        (steady(), False),
        (LossSummary(5, 2.0, 1.9), True),  # good until the batch
        (LossSummary(5, 2.0, 90.0), False),  # its losses rose first
        (LossSummary(0, math.nan, math.nan), True),  # the first batch, before any step
        (LossSummary(1, 2.0, 2.0), True),  # a higher learning rate went on
    ],
)
def test_bad_batch_is_suspected_where_losses_were_good(losses: LossSummary, is_hit: bool) -> None:
    assert hit_by_bad_batch([losses, steady()], 8, [0.1, 1.0])[0] is is_hit


def test_replica_that_broke_after_one_step_of_the_highest_learning_rate_diverged() -> None:
    broken = LossSummary(1, 2.0, 2.0)
    assert hit_by_bad_batch([steady(), broken], 8, [0.1, 1.0]) == [False, False]


def test_reference_is_the_score_of_the_start_or_of_the_lowest_learning_rate() -> None:
    points = [Observation(0.1, None), Observation(1.0, 3.0), Observation(10.0, 2.0)]
    assert Observations(points, 5.0).reference == 5.0
    assert Observations(points).reference == 3.0
    assert math.isnan(Observations(points[:1]).reference)
    assert math.isnan(Observations([]).reference)


def test_log_sorts_rounds_by_learning_rate_and_keeps_the_last_of_a_place() -> None:
    log = RoundLog()
    log.add([1, 3], [Observation(1.0, 5.0), Observation(3.0, 4.0)], None)
    log.add([2, 3], [Observation(2.0, 6.0), Observation(3.0, 1.0)], None)
    assert [point.score for point in log.observations.points] == [5.0, 6.0, 1.0]
    assert sorted(log.places) == [1, 2, 3]


def test_start_score_is_the_mean_of_all_rounds_that_have_a_finite_one() -> None:
    log = RoundLog()
    for number, score in enumerate([2.0, None, math.nan, math.inf, 4.0, 1e305]):
        log.add([number], [Observation(1.0 + number, 1.0)], score)
    assert log.observations.start_score == 3.0


def test_log_is_restored_from_its_state_in_json() -> None:
    log, other = RoundLog(), RoundLog()
    log.add([-3, 2], [Observation(0.1, None, 0.0, True), Observation(1.7, 4.0, 0.1)], 2.5)
    other.load_state_dict(json.loads(json.dumps(log.state_dict())))
    assert other.observations == log.observations
    assert other.places == log.places


def test_errors_are_at_least_what_the_first_losses_of_rounds_differ_by() -> None:
    """A round of three steps is judged by two losses, which do not show their noise."""
    log = RoundLog()
    for place, start in enumerate([1.0, 1.4, 0.6]):
        log.add([place], [Observation(10.0**place, 0.9, 0.001)], start)
    assert [point.error for point in log.observations.points] == [pytest.approx(0.4)] * 3
    two = RoundLog()
    for place, start in enumerate([1.0, 1.4]):
        two.add([place], [Observation(10.0**place, 0.9, 0.001)], start)
    assert [point.error for point in two.observations.points] == [0.001] * 2
