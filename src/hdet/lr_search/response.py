"""The response of scores to the learning rate: choice, refinement, divergence threshold."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from hdet.control.regression import orthogonal_residual
from hdet.lr_search.constants import (
    EXPLOSION_IN_GAINS,
    FLAT_WITHIN_ERRORS,
    LEVEL_OVER_LOWEST,
    LOST_SHARE,
    MARGIN_TO_LOST,
    MAX_EXCUSED_NOISE,
    MAX_FLAT_GAIN_SHARE,
    MAXIMUM_MARGIN,
    MIN_PARABOLA_POINTS,
    MIN_SIGNIFICANCE,
    NEARLY_BEST_SHARE,
    PARABOLA_SIGNIFICANCE,
    RANGE_MARGIN,
)
from hdet.lr_search.observations import Observation
from hdet.lr_search.reasons import Reason, reasons_of_state


class SweepResult(NamedTuple):
    """The result of a sweep or of a refinement.

    Attributes:
        factor: The choice, also if the search should look further; None if scores prefer none.
        shift: Where the best may lie: below the range (-1), above it (+1), or inside (0).
        reasons: Why.
        lowest_lost: The lowest learning rate that is lost; None if none is.
        reference: The score of weights that have not moved.
    """

    factor: float | None
    shift: int
    reasons: tuple[Reason, ...]
    lowest_lost: float | None = None
    reference: float = math.nan

    def state(self) -> list[Any]:
        """The fields as plain data, for a saved state."""
        values = [reason.value for reason in self.reasons]
        return [self.factor, self.shift, values, self.lowest_lost, self.reference]


def sweep_result_of_state(saved: Sequence[Any]) -> SweepResult:
    """The result that a saved state holds."""
    factor, shift, reasons, *rest = saved
    return SweepResult(factor, shift, reasons_of_state(reasons), *rest)


def judge_sweep(points: Sequence[Observation], start_score: float | None = None) -> SweepResult:
    """Choose the lowest learning rate that gains nearly as much as the best, or a shift.

    Args:
        points: The observations of all sweeps.
        start_score: The score of the weights before the search. The default is the score of the
            lowest learning rate, whose weights have hardly moved.
    """
    points = sorted(points)
    sound, broken = _below_first_broken(points)
    if not sound:
        return SweepResult(None, -1, (Reason.LOWEST_IS_LOST,), broken)
    lowest = sound[0]
    reference = _score(lowest) if start_score is None else start_score
    if start_score is not None and min(map(_score, sound)) >= reference + _explosion_rise(
        reference, math.inf
    ):
        return SweepResult(None, -1, (Reason.ALL_EXPLODE,), lowest.factor, reference)
    edge = _lowest_lost(points, reference) or broken
    # A good score above the edge is luck: a broken model that only guesses may have one.
    sound = [point for point in sound if edge is None or point.factor < edge]
    if not sound:
        return SweepResult(None, -1, (Reason.ALL_WORSE_THAN_START,), edge, reference)
    is_flat = len(sound) > 1 and not _differ(sound, reference)
    # If only the losses of lost learning rates differ, any gain is luck.
    is_flat = is_flat or (start_score is not None and not _gains(sound, reference))
    if is_flat and edge is None:
        return SweepResult(None, +1, (Reason.ONLY_NOISE,))
    if start_score is not None and _worsens(sound, reference):
        return SweepResult(None, -1, (Reason.NO_GAIN,), edge, reference)
    if is_flat:
        return SweepResult(None, 0, (Reason.ONLY_NOISE,), edge, reference)
    best = min(sound, key=_score)

    def result(factor: float, shift: int, reason: Reason) -> SweepResult:
        return SweepResult(keep_margin(edge, factor), shift, (reason,), edge, reference)

    if best is lowest:
        return result(lowest.factor, -1, Reason.LOWEST_IS_BEST)
    if _score(lowest) <= _nearly_best_score(sound, reference):
        return result(lowest.factor, -1, Reason.LOWEST_IS_AS_GOOD)
    if best is points[-1]:
        return result(best.factor, +1, Reason.HIGHEST_IS_BEST)
    return result(_lowest_nearly_best(sound, reference), 0, Reason.NEARLY_BEST)


def refine_choice(points: Sequence[Observation], first_choice: SweepResult) -> SweepResult:
    """Choose among the learning rates of a refinement, which lie close together."""
    points = sorted(points)
    sound, broken = _below_first_broken(points)
    lost = _lowest_lost(points, first_choice.reference) if sound else None
    edge = min(filter(None, [first_choice.lowest_lost, broken, lost]), default=None)
    sound = [point for point in sound if lost is None or point.factor < lost]
    smooth = _fit_parabola(sound)
    if not _curve_gains(smooth, first_choice.reference):
        # These rounds prefer no learning rate, but they may show one that is lost.
        kept = None if first_choice.factor is None else keep_margin(edge, first_choice.factor)
        return first_choice._replace(factor=kept, lowest_lost=edge)
    return first_choice._replace(
        factor=keep_margin(
            edge, _lowest_nearly_best(smooth, first_choice.reference, FLAT_WITHIN_ERRORS)
        ),
        lowest_lost=edge,
        reasons=(Reason.NEARLY_BEST, Reason.REFINED),
    )


def divergence_threshold(
    points: Sequence[Observation], reference: float, gain: float
) -> float | None:
    """The learning rate where scores explode, interpolated; None if that is not known.

    A learning rate with a worse score may pay in a longer run; one that explodes does not. An
    explosion counts if it is significant, or if all learning rates above it explode as well.

    Args:
        points: The observations of all sweeps.
        reference: The score of the weights before the search.
        gain: The gain of the best learning rate. With an infinite gain, scores explode where they
            are twice as high as the reference.
    """
    sound, _ = _below_first_broken(sorted(points))
    level = reference + _explosion_rise(reference, gain)
    exploded = [_score(point) >= level for point in sound]
    # Learning rates that only overflow may lie thousands of times too high: an error rate is
    # never twice as high. If the lowest learning rate explodes, the loss grows by design.
    if not any(exploded) or exploded[0]:
        return None
    excuse = _excused_noise(sound, reference)
    for place, point in enumerate(sound):
        is_sure = _score(point) - reference > MIN_SIGNIFICANCE * min(point.error, excuse)
        if exploded[place] and (is_sure or all(exploded[place:])):
            return _crossing_point(sound[place - 1], point, level, min(map(_score, sound)))
        # If a loss starts near zero, hard batches alone may double it.
        if exploded[place] and _gain_beyond_doubt(sound[place:], reference):
            return None
    return None


def _explosion_rise(reference: float, gain: float) -> float:
    """The rise above the reference that is an explosion; infinite if that is not known."""
    above = EXPLOSION_IN_GAINS * gain if gain > 0 else math.inf
    return min(above, reference) if reference > 0 else above


def _crossing_point(below: Observation, point: Observation, level: float, lowest: float) -> float:
    """Where scores cross a level: a line through the logarithms of their rise above `lowest`."""
    # The lowest score itself has no logarithm, so it counts as a share of the level.
    high, low = (
        _score(point) - lowest,
        max(_score(below) - lowest, (level - lowest) / LEVEL_OVER_LOWEST),
    )
    if not 0 < low < min(high, level - lowest):
        return below.factor
    rise = math.log(high) - math.log(low)
    if not rise:  # they are equal but for rounding
        return below.factor
    share = (math.log(level - lowest) - math.log(low)) / rise
    return float(below.factor ** (1 - share) * point.factor**share)


def _below_first_broken(points: Sequence[Observation]) -> tuple[list[Observation], float | None]:
    """The points below the first broken one, and the factor of that one.

    A point that a bad batch may have broken does not count if the two above it are sound.
    """
    points = [
        point for place, point in enumerate(points) if not _is_single_bad_batch(points, place)
    ]
    broken = next((point.factor for point in points if point.score is None), None)
    return [point for point in points if broken is None or point.factor < broken], broken


def _is_single_bad_batch(points: Sequence[Observation], place: int) -> bool:
    above = points[place + 1 : place + 3]
    return points[place].bad_batch and bool(above) and all(p.score is not None for p in above)


def _fit_parabola(points: Sequence[Observation]) -> list[Observation]:
    """A parabola through the scores, by least squares, with the error of each of its points.

    The parabola averages the chance of single replicas; it is most certain in its middle.
    """
    if len(points) < MIN_PARABOLA_POINTS:
        return list(points)
    noise = median(point.error for point in points)
    places = [math.log(point.factor) for point in points]
    basis = [[1.0] * len(points)]
    for power in (1, 2):
        basis.append(orthogonal_residual([place**power for place in places], basis))
    scores = [_score(point) for point in points]
    misses = orthogonal_residual(scores, basis)
    lengths = [sum(entry**2 for entry in vector) for vector in basis]
    shares = [
        sum(entry**2 / length for entry, length in zip(entries, lengths, strict=True))
        for entries in zip(*basis, strict=True)
    ]
    return [
        Observation(point.factor, score - miss, noise * math.sqrt(share))
        for point, score, miss, share in zip(points, scores, misses, shares, strict=True)
    ]


def _score(point: Observation) -> float:
    assert point.score is not None
    return point.score


def _differ(points: Sequence[Observation], reference: float = -math.inf) -> bool:
    """Whether the range of the scores, and of a reference, is larger than chance explains.

    The largest of n normal deviates is about sqrt(2 ln n); their range is twice that.
    """
    scores = [_score(point) for point in points]
    noise = median(point.error for point in points)
    most = RANGE_MARGIN + 2 * math.sqrt(2 * math.log(len(points)))
    return max(*scores, reference) - min(scores) > most * noise


def _gains(points: Sequence[Observation], reference: float) -> bool:
    """Whether the best score lies further below a reference than chance explains."""
    noise = median(point.error for point in points)
    most = MAXIMUM_MARGIN + math.sqrt(2 * math.log(max(len(points), 2)))
    return reference - min(map(_score, points)) > most * noise


def _curve_gains(curve: Sequence[Observation], reference: float) -> bool:
    """Whether a fitted curve lies significantly below a reference at any of its points."""
    return any(reference - _score(point) > PARABOLA_SIGNIFICANCE * point.error for point in curve)


def _worsens(points: Sequence[Observation], reference: float) -> bool:
    """Whether even the best score is significantly worse than a reference."""
    noise = median(point.error for point in points)
    return min(map(_score, points)) - reference >= MIN_SIGNIFICANCE * noise


def _lowest_lost(points: Sequence[Observation], reference: float) -> float | None:
    """The lowest learning rate that is significantly worse than the start, without broken ones.

    One of the next two above it must be lost as well: a single one may have seen hard batches.
    """
    sound, broken = _below_first_broken(points)
    limit = reference + LOST_SHARE * max(reference - min(map(_score, sound)), 0.0)
    excuse = _excused_noise(sound, reference)
    lost = [_score(point) > limit + MIN_SIGNIFICANCE * min(point.error, excuse) for point in sound]
    lost += [True] * (broken is not None)
    for place, point in enumerate(sound):
        above = lost[place + 1 : place + 3]
        if lost[place] and (any(above) or not above):
            return point.factor
    return None


def _excused_noise(sound: Sequence[Observation], reference: float) -> float:
    """The largest error that excuses a bad score: replicas that diverge are noisy."""
    calm = [point.error for point in sound if _score(point) <= reference]
    return MAX_EXCUSED_NOISE * median(calm or [sound[0].error])


def _gain_beyond_doubt(points: Sequence[Observation], reference: float) -> bool:
    return any(reference - _score(point) > MIN_SIGNIFICANCE * point.error for point in points)


def keep_margin(edge: float | None, factor: float) -> float:
    """A factor that keeps its margin to the lowest learning rate that is lost."""
    return factor if edge is None else min(factor, edge / MARGIN_TO_LOST)


def _lowest_nearly_best(
    sound: Sequence[Observation], reference: float, within: float = 0.0
) -> float:
    """The lowest learning rate that gains nearly as much as the best, interpolated.

    Scores are flat around the best, so which of them is lowest is chance. Below it they are steep,
    and where they cross a line is certain. A learning rate that is a little too low costs less than
    one that is a little too high.
    """
    line = _nearly_best_score(sound, reference, within)
    if _score(sound[0]) <= line:
        return sound[0].factor
    for below, point in pairwise(sound):
        if _score(point) <= line:
            share = (_score(below) - line) / (_score(below) - _score(point))
            return float(below.factor ** (1 - share) * point.factor**share)
    raise AssertionError("the lowest score is below the line")


def _nearly_best_score(
    sound: Sequence[Observation], reference: float, within: float = 0.0
) -> float:
    """The score that counts as nearly as good as the best, or lies within its error."""
    best = min(sound, key=_score)
    lowest = _score(best)
    gain = reference - lowest
    # A learning rate that gains next to nothing is not as good, however noisy the best is.
    return lowest + max(
        NEARLY_BEST_SHARE * gain, min(within * best.error, MAX_FLAT_GAIN_SHARE * gain)
    )
