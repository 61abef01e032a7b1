"""What learning rates came to in short rounds: their scores -> a choice, or where to look further.

Plain Python floats, no torch: every process computes the same answer. Factors are in units of the
learning rate that the user gave.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median, median_low, stdev
from typing import NamedTuple

from hdet.fit import without

LOST = 0.25
"""A learning rate is lost if its score is worse than before the first step, by this share of what
the best has gained."""
NEARLY = 0.07
"""The choice may gain less than the best by this share."""
WITHIN = 0.5
"""What lies so many standard errors above the lowest of a curve is no worse: that is chance."""
MARGIN = 4.0
"""The choice keeps this factor away from learning rates that are lost."""
BLAST = 20.0
"""A score explodes if it is worse than before the first step by so many times what the best has
gained, or twice as high: what comes first."""
FAINT = 2.5
"""Differences of fewer standard errors than this say nothing."""
WILD = 3.0
"""What gains nothing may be so many times as noisy as what does: beyond, that is no excuse."""
DIVERGED = 30.0
"""What is so many times as noisy as others has diverged: two or three losses may seem ten times as
noisy as others by chance."""
CLEAR = 2.2
"""A parabola that is nothing but chance is hardly ever anywhere so many standard errors below a
reference."""
UNKNOWN = 1e-3
"""So much of a score is taken for chance where a probe gives a single one."""
HUGE = 1e300
"""Scores beyond it count as not finite."""
CLOSELY = "tried closely"
NEARLY_BEST = "the lowest that gains nearly as much as the best"
NOISE = "the scores do not differ by more than their noise"
NOTHING = "no learning rate gains anything"


class Point(NamedTuple):
    """What one learning rate came to."""

    factor: float
    score: float | None
    """Lower is better; none if it is not finite."""
    error: float = 0.0
    """Its standard error against the others."""
    glitch: bool = False
    """Whether a bad batch may have done it, and not the learning rate."""

    def moved(self, by: float) -> "Point":
        """The same on other batches, where all scores are higher by so much."""
        return self if self.score is None else self._replace(score=self.score + by)


def points_of(
    factors: Sequence[float],
    losses: Sequence[float | None],
    errors: Sequence[float | None],
    scores: Sequence[Sequence[float]] | None,
    finite: Sequence[bool],
    struck: Sequence[bool] = (),
) -> list[Point]:
    """What the replicas of a round have come to, by their scores or else by their losses.

    Those who were `struck` had good losses until one was not finite.
    """
    rows = scores or [[math.nan if loss is None else loss] for loss in losses]
    chances = _errors(rows) if scores else _pooled(rows, errors)
    points = []
    hit = struck or [False] * len(rows)
    for factor, row, chance, sound, is_hit in zip(factors, rows, chances, finite, hit, strict=True):
        if sound and _all_finite(row):
            points.append(Point(factor, fmean(row), chance))
        else:
            # If its weights are finite, a loss that is not says nothing of them.
            glitch = is_hit or (sound and scores is None)
            points.append(Point(factor, None, chance, glitch=glitch))
    return points


class Fate(NamedTuple):
    """How the losses of a replica went in a round."""

    num: float
    """Those that were finite, before the first that was not."""
    first: float
    last: float
    """Of these."""


def struck(fates: Sequence[Fate], num_steps: int, factors: Sequence[float]) -> list[bool]:
    """Whom a bad batch may have killed, and not a learning rate: that makes losses rise first.

    One step is enough for what is far too high: after that it counts only if somebody with a
    higher learning rate has outlived it.

    >>> struck([Fate(5, 2.0, 1.8), Fate(12, 2.1, 1.5), Fate(5, 2.0, 90.0)], 12, [0.1, 1.0, 10.0])
    [True, False, False]
    """
    firsts = [fate.first for fate in fates if math.isfinite(fate.first)]
    # All stand at the same place there: how far their losses differ is what batches do.
    limit = 2 * max(firsts) - min(firsts) if firsts else -math.inf
    pairs = list(zip(factors, fates, strict=True))
    survived = max((factor for factor, fate in pairs if fate.num > 1), default=0.0)
    return [
        fate.num < num_steps
        and (fate.num != 1 or factor < survived)
        and (fate.num == 0 or fate.last <= limit)
        for factor, fate in pairs
    ]


def _errors(scores: Sequence[Sequence[float]]) -> list[float]:
    """How much of each mean score is chance: its variation over batches, beside the others."""
    finite = sorted((row for row in scores if _all_finite(row)), key=fmean)
    if not finite:
        return [0.0] * len(scores)
    if len(finite[0]) < 2:  # one number knows nothing of its own noise
        return [UNKNOWN * abs(finite[0][0])] * len(scores)
    if len(finite) == 2:  # the middle between them moves along with each
        between = [a - b for a, b in zip(*finite, strict=True)]
        return [stdev(between) / math.sqrt(2 * len(between))] * len(scores)
    # The better half, and the lower middle of it: what diverged would blur the others.
    better = finite[: (len(finite) + 1) // 2]
    common = [median_low(column) for column in zip(*better, strict=True)]
    return [
        stdev([a - b for a, b in zip(row, common, strict=True)]) / math.sqrt(len(row))
        if _all_finite(row)
        else 0.0
        for row in scores
    ]


def _pooled(losses: Sequence[Sequence[float]], errors: Sequence[float | None]) -> list[float]:
    """Errors of a few losses each: together they know the noise better than each its own."""
    own = [error or 0.0 for error in errors]
    finite = sorted(
        (*row, error) for row, error in zip(losses, own, strict=True) if _all_finite(row)
    )
    better = [error for _, error in finite[: (len(finite) + 1) // 2]]
    # From far too high even they diverge, but for a few.
    calm = [error for error in better if error <= DIVERGED * median_low(better)]
    common = math.sqrt(fmean(error**2 for error in calm)) if calm else 0.0
    return [max(error, common) for error in own]


def _all_finite(row: Sequence[float]) -> bool:
    """Whether their sum is finite, too."""
    return bool(row) and all(abs(score) < HUGE for score in row)


class Verdict(NamedTuple):
    """What a sweep has shown."""

    factor: float | None
    """The choice, or what to take if there is no time to look further; none if there is nothing
    to choose by."""
    shift: int
    """Where to look further: down (-1), up (+1), or nowhere."""
    reason: str
    edge: float | None = None
    """The lowest learning rate that is lost."""
    reference: float = math.nan
    """What it scores not to have moved."""


def judge(points: Sequence[Point], outset: float | None = None) -> Verdict:
    """The lowest learning rate that gains nearly as much as the best; or where to look further.

    `outset` is the score of the weights that everyone set out from; by default that of the lowest
    learning rate, which has hardly moved.
    """
    points = sorted(points)
    sound, broken = _sound(points)
    if not sound:
        return Verdict(None, -1, "the lowest learning rate is lost", broken)
    lowest = sound[0]
    reference = _score(lowest) if outset is None else outset
    if outset is not None and min(map(_score, sound)) >= reference + _blast(reference, math.inf):
        return Verdict(None, -1, "every learning rate explodes", lowest.factor, reference)
    edge = _edge(points, reference) or broken
    # What lies beyond an edge is luck: there a model may do no more than guess.
    sound = [point for point in sound if edge is None or point.factor < edge]
    if not sound:
        return Verdict(None, -1, "every learning rate is worse than none", edge, reference)
    is_flat = len(sound) > 1 and not _differ(sound, reference)
    # Scores may differ by what is lost alone: then whatever is gained is luck.
    is_flat = is_flat or (outset is not None and not _gains(sound, reference))
    if is_flat and edge is None:
        return Verdict(None, +1, NOISE)
    if outset is not None and _worsens(sound, reference):
        return Verdict(None, -1, NOTHING, edge, reference)
    if is_flat:
        return Verdict(None, 0, NOISE, edge, reference)
    best = min(sound, key=_score)

    def verdict(factor: float, shift: int, reason: str) -> Verdict:
        return Verdict(away_from(edge, factor), shift, reason, edge, reference)

    if best is lowest:
        return verdict(lowest.factor, -1, "the lowest learning rate is the best")
    if _score(lowest) <= _line(sound, reference):
        return verdict(lowest.factor, -1, "the lowest learning rate is as good as the best")
    if best is points[-1]:
        return verdict(best.factor, +1, "the highest learning rate is the best")
    return verdict(_nearly(sound, reference), 0, NEARLY_BEST)


def refine(points: Sequence[Point], rough: Verdict) -> Verdict:
    """The same choice among learning rates that are close together."""
    points = sorted(points)
    sound, broken = _sound(points)
    lost = _edge(points, rough.reference) if sound else None
    edge = min(filter(None, [rough.edge, broken, lost]), default=None)
    sound = [point for point in sound if lost is None or point.factor < lost]
    smooth = _smoothed(sound)
    if not _sinks(smooth, rough.reference):
        # These rounds have shown nothing, but perhaps what is lost in longer ones.
        kept = None if rough.factor is None else away_from(edge, rough.factor)
        return rough._replace(factor=kept, edge=edge)
    return rough._replace(
        factor=away_from(edge, _nearly(smooth, rough.reference, WITHIN)),
        edge=edge,
        reason=f"{NEARLY_BEST}, {CLOSELY}",
    )


def explosion(points: Sequence[Point], reference: float, gain: float) -> float | None:
    """The learning rate where scores explode, between those that were tried; none if they do not.

    `gain` is what the best has gained, or infinite if that is not known: then it is where they are
    twice as high. What is merely worse than before may pay in a longer run; this does not. It is
    beyond doubt, or everything above it explodes as well; else nobody knows.
    """
    sound, _ = _sound(sorted(points))
    level = reference + _blast(reference, gain)
    exploded = [_score(point) >= level for point in sound]
    # What is lost by overflow alone may lie thousands of times too high: an error rate is never
    # twice as high. And where the lowest explodes, the loss grows by design.
    if not any(exploded) or exploded[0]:
        return None
    excuse = _excuse(sound, reference)
    for place, point in enumerate(sound):
        is_sure = _score(point) - reference > FAINT * min(point.error, excuse)
        if exploded[place] and (is_sure or all(exploded[place:])):
            return _crossing(sound[place - 1], point, level, min(map(_score, sound)))
        # Where a loss begins near zero, twice of it may be nothing but hard batches.
        if exploded[place] and _gain_beyond_doubt(sound[place:], reference):
            return None
    return None


def _blast(reference: float, gain: float) -> float:
    """How much worse than before the first step an explosion is; infinite if nobody can say."""
    above = BLAST * gain if gain > 0 else math.inf
    return min(above, reference) if reference > 0 else above


def _crossing(below: Point, point: Point, level: float, lowest: float) -> float:
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


def _sound(points: Sequence[Point]) -> tuple[list[Point], float | None]:
    """Those below the first that is broken, and that one's factor.

    One that a bad batch may have broken, below two that are sound, does not count.
    """
    points = [point for place, point in enumerate(points) if not _is_alone(points, place)]
    broken = next((point.factor for point in points if point.score is None), None)
    return [point for point in points if broken is None or point.factor < broken], broken


def _is_alone(points: Sequence[Point], place: int) -> bool:
    above = points[place + 1 : place + 3]
    return points[place].glitch and bool(above) and all(p.score is not None for p in above)


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """A parabola through the scores, by least squares: every replica has its own luck, and a curve
    through all of them has less, the least in its middle."""
    if len(points) < 4:
        return list(points)
    noise = median(point.error for point in points)
    places = [math.log(point.factor) for point in points]
    basis = [[1.0] * len(points)]
    for power in (1, 2):
        basis.append(without([place**power for place in places], basis))
    scores = [_score(point) for point in points]
    misses = without(scores, basis)
    lengths = [sum(entry**2 for entry in vector) for vector in basis]
    shares = [
        sum(entry**2 / length for entry, length in zip(entries, lengths, strict=True))
        for entries in zip(*basis, strict=True)
    ]
    return [
        Point(point.factor, score - miss, noise * math.sqrt(share))
        for point, score, miss, share in zip(points, scores, misses, shares, strict=True)
    ]


def _score(point: Point) -> float:
    assert point.score is not None
    return point.score


def _differ(points: Sequence[Point], reference: float = -math.inf) -> bool:
    """Whether chance alone would hardly spread so many scores so far, or below a reference.

    The largest of n normal deviates is about sqrt(2 ln n), the range of them twice that.
    """
    scores = [_score(point) for point in points]
    noise = median(point.error for point in points)
    most = 0.4 + 2 * math.sqrt(2 * math.log(len(points)))
    return max(*scores, reference) - min(scores) > most * noise


def _gains(points: Sequence[Point], reference: float) -> bool:
    """Whether chance alone would hardly bring the best of so many so far below a reference."""
    noise = median(point.error for point in points)
    most = 0.2 + math.sqrt(2 * math.log(max(len(points), 2)))
    return reference - min(map(_score, points)) > most * noise


def _sinks(curve: Sequence[Point], reference: float) -> bool:
    """The same for a curve: its points are not so many chances, and differ in how sure they are."""
    return any(reference - _score(point) > CLEAR * point.error for point in curve)


def _worsens(points: Sequence[Point], reference: float) -> bool:
    """Whether even the best is worse than a reference, beyond doubt."""
    noise = median(point.error for point in points)
    return min(map(_score, points)) - reference >= FAINT * noise


def _edge(points: Sequence[Point], reference: float) -> float | None:
    """The lowest learning rate that is worse than none, beyond doubt; what is broken aside.

    One of the next two above it is lost as well: one alone may have seen hard batches.
    """
    sound, broken = _sound(points)
    limit = reference + LOST * max(reference - min(map(_score, sound)), 0.0)
    excuse = _excuse(sound, reference)
    lost = [_score(point) > limit + FAINT * min(point.error, excuse) for point in sound]
    lost += [True] * (broken is not None)
    for place, point in enumerate(sound):
        above = lost[place + 1 : place + 3]
        if lost[place] and (any(above) or not above):
            return point.factor
    return None


def _excuse(sound: Sequence[Point], reference: float) -> float:
    """The most noise that counts for a bad score: what diverges is noisy, the lowest the least."""
    calm = [point.error for point in sound if _score(point) <= reference]
    return WILD * median(calm or [sound[0].error])


def _gain_beyond_doubt(points: Sequence[Point], reference: float) -> bool:
    return any(reference - _score(point) > FAINT * point.error for point in points)


def away_from(edge: float | None, factor: float) -> float:
    return factor if edge is None else min(factor, edge / MARGIN)


def _nearly(sound: Sequence[Point], reference: float, within: float = 0.0) -> float:
    """The lowest learning rate that gains nearly as much as the best, between the points.

    Around the best the scores are flat, and which is lowest is chance; below it they are steep,
    and where they cross a line is not. And what is a little too low costs less than what is a
    little too high.
    """
    line = _line(sound, reference, within)
    if _score(sound[0]) <= line:
        return sound[0].factor
    for below, point in pairwise(sound):
        if _score(point) <= line:
            share = (_score(below) - line) / (_score(below) - _score(point))
            return float(below.factor ** (1 - share) * point.factor**share)
    raise AssertionError("the lowest score is below the line")


def _line(sound: Sequence[Point], reference: float, within: float = 0.0) -> float:
    """What counts as nearly as good as the best, or is within its error."""
    best = min(sound, key=_score)
    lowest = _score(best)
    gain = reference - lowest
    # However noisy the best is: what has gained next to nothing is not as good.
    return lowest + max(NEARLY * gain, min(within * best.error, gain / 4))
