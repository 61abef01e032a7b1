"""What rounds of a search observed: scores, their errors, and bad batches."""

import math
from collections.abc import Sequence
from statistics import fmean, median_low, stdev
from typing import NamedTuple

from hdet.lr_search.constants import DIVERGED_NOISE_RATIO, OVERFLOW, SINGLE_SCORE_NOISE


class Observation(NamedTuple):
    """What one learning rate came to."""

    factor: float
    score: float | None
    """Lower is better; none if it is not finite."""
    error: float = 0.0
    """Its standard error against the others."""
    glitch: bool = False
    """Whether a bad batch may have done it, and not the learning rate."""

    def shifted_by(self, by: float) -> "Observation":
        """The same on other batches, where all scores are higher by so much."""
        return self if self.score is None else self._replace(score=self.score + by)


def observations_of_round(
    factors: Sequence[float],
    losses: Sequence[float | None],
    errors: Sequence[float | None],
    scores: Sequence[Sequence[float]] | None,
    finite: Sequence[bool],
    struck: Sequence[bool] = (),
) -> list[Observation]:
    """What the replicas of a round have come to, by their scores or else by their losses.

    Those who were `struck` had good losses until one was not finite.
    """
    rows = scores or [[math.nan if loss is None else loss] for loss in losses]
    chances = _errors_of_scores(rows) if scores else _errors_of_losses(rows, errors)
    points = []
    hit = struck or [False] * len(rows)
    for factor, row, chance, sound, is_hit in zip(factors, rows, chances, finite, hit, strict=True):
        if sound and _are_finite(row):
            points.append(Observation(factor, fmean(row), chance))
        else:
            # If its weights are finite, a loss that is not says nothing of them.
            glitch = is_hit or (sound and scores is None)
            points.append(Observation(factor, None, chance, glitch=glitch))
    return points


class LossSummary(NamedTuple):
    """How the losses of a replica went in a round."""

    num: float
    """Those that were finite, before the first that was not."""
    first: float
    last: float
    """Of these."""


def hit_by_bad_batch(
    summaries: Sequence[LossSummary], num_steps: int, factors: Sequence[float]
) -> list[bool]:
    """Whom a bad batch may have killed, and not a learning rate: that makes losses rise first.

    One step is enough for what is far too high: after that it counts only if somebody with a
    higher learning rate has outlived it.

    >>> low, middle = LossSummary(5, 2.0, 1.8), LossSummary(12, 2.1, 1.5)
    >>> hit_by_bad_batch([low, middle, LossSummary(5, 2.0, 90.0)], 12, [0.1, 1.0, 10.0])
    [True, False, False]
    """
    firsts = [fate.first for fate in summaries if math.isfinite(fate.first)]
    # All stand at the same place there: how far their losses differ is what batches do.
    limit = 2 * max(firsts) - min(firsts) if firsts else -math.inf
    pairs = list(zip(factors, summaries, strict=True))
    survived = max((factor for factor, fate in pairs if fate.num > 1), default=0.0)
    return [
        fate.num < num_steps
        and (fate.num != 1 or factor < survived)
        and (fate.num == 0 or fate.last <= limit)
        for factor, fate in pairs
    ]


def _errors_of_scores(scores: Sequence[Sequence[float]]) -> list[float]:
    """How much of each mean score is chance: its variation over batches, beside the others."""
    finite = sorted((row for row in scores if _are_finite(row)), key=fmean)
    if not finite:
        return [0.0] * len(scores)
    if len(finite[0]) < 2:  # one number knows nothing of its own noise
        return [SINGLE_SCORE_NOISE * abs(finite[0][0])] * len(scores)
    if len(finite) == 2:  # the middle between them moves along with each
        between = [a - b for a, b in zip(*finite, strict=True)]
        return [stdev(between) / math.sqrt(2 * len(between))] * len(scores)
    # The better half, and the lower middle of it: what diverged would blur the others.
    better = finite[: (len(finite) + 1) // 2]
    common = [median_low(column) for column in zip(*better, strict=True)]
    return [
        stdev([a - b for a, b in zip(row, common, strict=True)]) / math.sqrt(len(row))
        if _are_finite(row)
        else 0.0
        for row in scores
    ]


def _errors_of_losses(
    losses: Sequence[Sequence[float]], errors: Sequence[float | None]
) -> list[float]:
    """Errors of a few losses each: together they know the noise better than each its own."""
    own = [error or 0.0 for error in errors]
    finite = sorted(
        (*row, error) for row, error in zip(losses, own, strict=True) if _are_finite(row)
    )
    better = [error for _, error in finite[: (len(finite) + 1) // 2]]
    # From far too high even they diverge, but for a few.
    calm = [error for error in better if error <= DIVERGED_NOISE_RATIO * median_low(better)]
    common = math.sqrt(fmean(error**2 for error in calm)) if calm else 0.0
    return [max(error, common) for error in own]


def _are_finite(row: Sequence[float]) -> bool:
    """Whether their sum is finite, too."""
    return bool(row) and all(abs(score) < OVERFLOW for score in row)
