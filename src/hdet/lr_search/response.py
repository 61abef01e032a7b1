"""How scores answer to the learning rate: choice, refinement and divergence threshold."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from hdet.control.regression import orthogonal_residual
from hdet.lr_search.constants import (
    EXPLOSION_IN_GAINS,
    FLAT_WITHIN_ERRORS,
    LOST_SHARE,
    MARGIN_TO_LOST,
    MAX_EXCUSED_NOISE,
    MIN_SIGNIFICANCE,
    NEARLY_BEST_SHARE,
    PARABOLA_SIGNIFICANCE,
)
from hdet.lr_search.observations import Observation
from hdet.lr_search.reasons import CLOSELY, NEARLY_BEST, NOISE, NOTHING


class SweepResult(NamedTuple):
    """What a sweep has shown."""

    factor: float | None
    """The choice, or what to take if there is no time to look further; none if there is nothing
    to choose by."""
    shift: int
    """Where to look further: down (-1), up (+1), or nowhere."""
    reason: str
    lowest_lost: float | None = None
    """The lowest learning rate that is lost."""
    reference: float = math.nan
    """What it scores not to have moved."""


def judge_sweep(points: Sequence[Observation], start_score: float | None = None) -> SweepResult:
    """The lowest learning rate that gains nearly as much as the best; or where to look further.

    `outset` is the score of the weights that everyone set out from; by default that of the lowest
    learning rate, which has hardly moved.
    """
    points = sorted(points)
    sound, broken = _below_first_broken(points)
    if not sound:
        return SweepResult(None, -1, "the lowest learning rate is lost", broken)
    lowest = sound[0]
    reference = _score(lowest) if start_score is None else start_score
    if start_score is not None and min(map(_score, sound)) >= reference + _explosion_rise(
        reference, math.inf
    ):
        return SweepResult(None, -1, "every learning rate explodes", lowest.factor, reference)
    edge = _lowest_lost(points, reference) or broken
    # What lies beyond an edge is luck: there a model may do no more than guess.
    sound = [point for point in sound if edge is None or point.factor < edge]
    if not sound:
        return SweepResult(None, -1, "every learning rate is worse than none", edge, reference)
    is_flat = len(sound) > 1 and not _differ(sound, reference)
    # Scores may differ by what is lost alone: then whatever is gained is luck.
    is_flat = is_flat or (start_score is not None and not _gains(sound, reference))
    if is_flat and edge is None:
        return SweepResult(None, +1, NOISE)
    if start_score is not None and _worsens(sound, reference):
        return SweepResult(None, -1, NOTHING, edge, reference)
    if is_flat:
        return SweepResult(None, 0, NOISE, edge, reference)
    best = min(sound, key=_score)

    def verdict(factor: float, shift: int, reason: str) -> SweepResult:
        return SweepResult(keep_margin(edge, factor), shift, reason, edge, reference)

    if best is lowest:
        return verdict(lowest.factor, -1, "the lowest learning rate is the best")
    if _score(lowest) <= _nearly_best_score(sound, reference):
        return verdict(lowest.factor, -1, "the lowest learning rate is as good as the best")
    if best is points[-1]:
        return verdict(best.factor, +1, "the highest learning rate is the best")
    return verdict(_lowest_nearly_best(sound, reference), 0, NEARLY_BEST)


def refine_choice(points: Sequence[Observation], first_choice: SweepResult) -> SweepResult:
    """The same choice among learning rates that are close together."""
    points = sorted(points)
    sound, broken = _below_first_broken(points)
    lost = _lowest_lost(points, first_choice.reference) if sound else None
    edge = min(filter(None, [first_choice.lowest_lost, broken, lost]), default=None)
    sound = [point for point in sound if lost is None or point.factor < lost]
    smooth = _fit_parabola(sound)
    if not _curve_gains(smooth, first_choice.reference):
        # These rounds have shown nothing, but perhaps what is lost in longer ones.
        kept = None if first_choice.factor is None else keep_margin(edge, first_choice.factor)
        return first_choice._replace(factor=kept, lowest_lost=edge)
    return first_choice._replace(
        factor=keep_margin(
            edge, _lowest_nearly_best(smooth, first_choice.reference, FLAT_WITHIN_ERRORS)
        ),
        lowest_lost=edge,
        reason=f"{NEARLY_BEST}, {CLOSELY}",
    )


def divergence_threshold(
    points: Sequence[Observation], reference: float, gain: float
) -> float | None:
    """The learning rate where scores explode, between those that were tried; none if they do not.

    `gain` is what the best has gained, or infinite if that is not known: then it is where they are
    twice as high. What is merely worse than before may pay in a longer run; this does not. It is
    beyond doubt, or everything above it explodes as well; else nobody knows.
    """
    sound, _ = _below_first_broken(sorted(points))
    level = reference + _explosion_rise(reference, gain)
    exploded = [_score(point) >= level for point in sound]
    # What is lost by overflow alone may lie thousands of times too high: an error rate is never
    # twice as high. And where the lowest explodes, the loss grows by design.
    if not any(exploded) or exploded[0]:
        return None
    excuse = _excused_noise(sound, reference)
    for place, point in enumerate(sound):
        is_sure = _score(point) - reference > MIN_SIGNIFICANCE * min(point.error, excuse)
        if exploded[place] and (is_sure or all(exploded[place:])):
            return _crossing_point(sound[place - 1], point, level, min(map(_score, sound)))
        # Where a loss begins near zero, twice of it may be nothing but hard batches.
        if exploded[place] and _gain_beyond_doubt(sound[place:], reference):
            return None
    return None


def _explosion_rise(reference: float, gain: float) -> float:
    """How much worse than before the first step an explosion is; infinite if nobody can say."""
    above = EXPLOSION_IN_GAINS * gain if gain > 0 else math.inf
    return min(above, reference) if reference > 0 else above


def _crossing_point(below: Observation, point: Observation, level: float, lowest: float) -> float:
    """Where scores pass a level, on a straight line of their logarithms above the lowest one."""
    # The lowest itself has none: it counts as a hundredth of the level.
    high, low = _score(point) - lowest, max(_score(below) - lowest, (level - lowest) / 100)
    if not 0 < low < min(high, level - lowest):
        return below.factor
    rise = math.log(high) - math.log(low)
    if not rise:  # they are equal but for rounding
        return below.factor
    share = (math.log(level - lowest) - math.log(low)) / rise
    return float(below.factor ** (1 - share) * point.factor**share)


def _below_first_broken(points: Sequence[Observation]) -> tuple[list[Observation], float | None]:
    """Those below the first that is broken, and that one's factor.

    One that a bad batch may have broken, below two that are sound, does not count.
    """
    points = [point for place, point in enumerate(points) if not _is_single_glitch(points, place)]
    broken = next((point.factor for point in points if point.score is None), None)
    return [point for point in points if broken is None or point.factor < broken], broken


def _is_single_glitch(points: Sequence[Observation], place: int) -> bool:
    above = points[place + 1 : place + 3]
    return points[place].glitch and bool(above) and all(p.score is not None for p in above)


def _fit_parabola(points: Sequence[Observation]) -> list[Observation]:
    """A parabola through the scores, by least squares: every replica has its own luck, and a curve
    through all of them has less, the least in its middle."""
    if len(points) < 4:
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
    """Whether chance alone would hardly spread so many scores so far, or below a reference.

    The largest of n normal deviates is about sqrt(2 ln n), the range of them twice that.
    """
    scores = [_score(point) for point in points]
    noise = median(point.error for point in points)
    most = 0.4 + 2 * math.sqrt(2 * math.log(len(points)))
    return max(*scores, reference) - min(scores) > most * noise


def _gains(points: Sequence[Observation], reference: float) -> bool:
    """Whether chance alone would hardly bring the best of so many so far below a reference."""
    noise = median(point.error for point in points)
    most = 0.2 + math.sqrt(2 * math.log(max(len(points), 2)))
    return reference - min(map(_score, points)) > most * noise


def _curve_gains(curve: Sequence[Observation], reference: float) -> bool:
    """The same for a curve: its points are not so many chances, and differ in how sure they are."""
    return any(reference - _score(point) > PARABOLA_SIGNIFICANCE * point.error for point in curve)


def _worsens(points: Sequence[Observation], reference: float) -> bool:
    """Whether even the best is worse than a reference, beyond doubt."""
    noise = median(point.error for point in points)
    return min(map(_score, points)) - reference >= MIN_SIGNIFICANCE * noise


def _lowest_lost(points: Sequence[Observation], reference: float) -> float | None:
    """The lowest learning rate that is worse than none, beyond doubt; what is broken aside.

    One of the next two above it is lost as well: one alone may have seen hard batches.
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
    """The most noise that counts for a bad score: what diverges is noisy, the lowest the least."""
    calm = [point.error for point in sound if _score(point) <= reference]
    return MAX_EXCUSED_NOISE * median(calm or [sound[0].error])


def _gain_beyond_doubt(points: Sequence[Observation], reference: float) -> bool:
    return any(reference - _score(point) > MIN_SIGNIFICANCE * point.error for point in points)


def keep_margin(edge: float | None, factor: float) -> float:
    return factor if edge is None else min(factor, edge / MARGIN_TO_LOST)


def _lowest_nearly_best(
    sound: Sequence[Observation], reference: float, within: float = 0.0
) -> float:
    """The lowest learning rate that gains nearly as much as the best, between the points.

    Around the best the scores are flat, and which is lowest is chance; below it they are steep,
    and where they cross a line is not. And what is a little too low costs less than what is a
    little too high.
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
    """What counts as nearly as good as the best, or is within its error."""
    best = min(sound, key=_score)
    lowest = _score(best)
    gain = reference - lowest
    # However noisy the best is: what has gained next to nothing is not as good.
    return lowest + max(NEARLY_BEST_SHARE * gain, min(within * best.error, gain / 4))
