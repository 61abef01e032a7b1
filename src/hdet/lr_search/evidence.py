"""What rounds of a search say about the best learning rate: where they gain most, and explode.

Logarithms are to base 10, of learning rates in units of the given one.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from hdet.lr_search.constants import (
    BEST_UNDER_PEAK,
    DIVERGED_SHARE,
    DIVERGENCE_ERROR,
    DIVERGENCE_OVER_BEST,
    FULL_GAIN_SHARE,
    GAIN_ERROR,
    GAIN_NOISE_ERRORS,
    LOW_GAIN_ERROR,
    NEARLY_BEST_SHARE,
    SIZE_ERROR,
    SIZE_POWER,
)
from hdet.lr_search.observations import Observation


class Belief(NamedTuple):
    """What one piece of evidence says: the logarithm of the best mean learning rate, its error."""

    mean: float
    error: float


class Peak(NamedTuple):
    """Where rounds gain most.

    Attributes:
        log_lr: The logarithm of that learning rate.
        share: The highest gain beyond its noise, as a share of the score of the start.
    """

    log_lr: float
    share: float


def gain_peak(points: Sequence[Observation], start: float) -> Peak | None:
    """Where the rounds gain most: the mean of the learning rates that may be the best.

    A learning rate counts the less, the further its gain lies below the highest one, in units of
    their errors and of a share of that gain.

    Args:
        points: The observations, by learning rate.
        start: The score of the weights before the search.

    Returns:
        None if no learning rate gains anything.

    >>> points = [Observation(10.0**x, 1.0 - gain, 0.01) for x, gain in [(-1, 0.1), (0, 0.5)]]
    >>> peak = gain_peak([*points, Observation(10.0, 1.8)], 1.0)
    >>> round(peak.log_lr, 2), round(peak.share, 2)
    (-0.03, 0.48)
    """
    known = [
        (math.log10(point.factor), start - point.score, point.error)
        for point in points
        if point.score is not None
    ]
    best = max(known, key=lambda row: row[1], default=None)
    if best is None or best[1] <= 0:
        return None
    _, highest, error = best
    weights = []
    for _, gain, own in known:
        scale = math.hypot(NEARLY_BEST_SHARE * highest, error / math.sqrt(2), own / math.sqrt(2))
        weights.append(math.exp(-0.5 * ((highest - gain) / scale) ** 2) if gain > 0 else 0.0)
    total = sum(weights)
    mean = sum(weight * row[0] for weight, row in zip(weights, known, strict=True)) / total
    sure = max(highest - GAIN_NOISE_ERRORS * error, 0.0)
    return Peak(mean, sure / max(abs(start), 1e-300))


def belief_of_gains(
    points: Sequence[Observation], start: float, decades: float = 0.0
) -> Belief | None:
    """What the gains say. Small ones say little: short rounds see the noise, not the run.

    A model that stands on a plateau, or has been trained before, gains little in short rounds. The
    first steps of a model that is larger by some `decades` favour learning rates that are too low.
    """
    peak = gain_peak(points, start)
    if peak is None:
        return None
    low = LOW_GAIN_ERROR * (FULL_GAIN_SHARE / max(peak.share, 1e-9)) ** 2
    best = peak.log_lr - BEST_UNDER_PEAK + SIZE_POWER * decades
    return Belief(best, math.hypot(GAIN_ERROR, low, SIZE_ERROR * decades))


def divergence_of(points: Sequence[Observation], start: float) -> float | None:
    """The learning rate from which on scores explode; None if none does.

    A score explodes if it is not finite, or worse than the start by the start's own size. A bad
    batch is no explosion.

    >>> scores = [(0.1, 0.9), (1.0, 0.5), (10.0, 7.0), (100.0, None)]
    >>> round(divergence_of([Observation(*row) for row in scores], 1.0), 2)
    3.16
    """
    limit = start + DIVERGED_SHARE * abs(start)
    rows = [
        (point.factor, point.score is None or point.score > limit)
        for point in points
        if not point.bad_batch
    ]
    survived = [factor for factor, has_diverged in rows if not has_diverged]
    above = [factor for factor, _ in rows if not survived or factor > max(survived)]
    if not above:
        return None
    return math.sqrt(min(above) * max(survived)) if survived else min(above)


def belief_of_divergence(divergence: float | None) -> Belief | None:
    """What the explosion says: the best learning rate lies some way below it."""
    if divergence is None:
        return None
    return Belief(math.log10(divergence) - DIVERGENCE_OVER_BEST, DIVERGENCE_ERROR)
