"""What rounds of a search observed: scores, their errors, bad batches, and the log of them all."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median_low, stdev
from typing import Any, NamedTuple

from hdet.lr_search.constants import (
    BAD_BATCH_ALLOWANCE,
    DIVERGED_NOISE_RATIO,
    MIN_START_SCORES,
    OVERFLOW,
    SINGLE_SCORE_NOISE,
)


class Observation(NamedTuple):
    """The result of one learning rate in one round.

    Attributes:
        factor: The learning rate, in units of the given one.
        score: The score, lower is better; None if it is not finite.
        error: The standard error of the score against the others of the round.
        bad_batch: Whether a bad batch may be the cause of the score, and not the learning rate.
    """

    factor: float
    score: float | None
    error: float = 0.0
    bad_batch: bool = False

    def shifted_by(self, by: float) -> "Observation":
        """The observation on other batches, whose scores are all higher by `by`."""
        return self if self.score is None else self._replace(score=self.score + by)


class Observations(NamedTuple):
    """All that a search has observed, as `estimate` reads it.

    Attributes:
        points: The observations of all sweeps, by learning rate.
        start_score: The score of the weights before the search; None if not known.
    """

    points: Sequence[Observation]
    start_score: float | None = None

    @property
    def reference(self) -> float:
        """The score that gains are measured from; NaN if no score is finite.

        Without a score of the start it is that of the lowest learning rate, which hardly moves.
        """
        if self.start_score is not None:
            return self.start_score
        scores = (point.score for point in self.points if point.score is not None)
        return next(scores, math.nan)


class RoundLog:
    """The rounds of a search, in the order they were made."""

    def __init__(self) -> None:
        self.start_scores: list[float] = []
        """Scores of the weights before the search. Training losses give one in each round."""
        self._by_place: dict[int, Observation] = {}

    def add(
        self, places: Iterable[int], points: Sequence[Observation], start_score: float | None
    ) -> None:
        """Add a round. A place that is tried again keeps its last observation."""
        if start_score is not None and abs(start_score) < OVERFLOW:
            self.start_scores.append(start_score)
        self._by_place.update(zip(places, points, strict=True))

    @property
    def places(self) -> list[int]:
        """The places of the grid that were tried."""
        return list(self._by_place)

    @property
    def observations(self) -> Observations:
        """All that was observed, as plain data."""
        start = fmean(self.start_scores) if self.start_scores else None
        noise = self._noise_of_starts()
        points = [p._replace(error=max(p.error, noise)) for p in self._by_place.values()]
        return Observations(sorted(points), start)

    def _noise_of_starts(self) -> float:
        """How much losses vary from batch to batch, by the first losses of several rounds.

        The few losses of a short round do not show it.
        """
        return stdev(self.start_scores) if len(self.start_scores) >= MIN_START_SCORES else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "points": [[place, *point] for place, point in self._by_place.items()],
            "start_scores": list(self.start_scores),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._by_place = {place: Observation(*point) for place, *point in state["points"]}
        self.start_scores = list(state["start_scores"])


def observations_of_round(
    factors: Sequence[float],
    losses: Sequence[float | None],
    errors: Sequence[float | None],
    scores: Sequence[Sequence[float]] | None,
    finite: Sequence[bool],
    had_bad_batch: Sequence[bool] = (),
) -> list[Observation]:
    """The observations of one round, by scores or else by training losses.

    Args:
        factors: The learning rate of each replica.
        losses: The mean training loss of each replica; None if it has none.
        errors: The standard error of each loss.
        scores: The scores of each replica, one per batch; None to compare losses.
        finite: Whether the weights of each replica are finite.
        had_bad_batch: Whether each replica had good losses until one was not finite.
    """
    rows = scores or [[math.nan if loss is None else loss] for loss in losses]
    chances = _errors_of_scores(rows) if scores else _errors_of_losses(rows, errors)
    points = []
    hits = had_bad_batch or [False] * len(rows)
    for factor, row, chance, sound, is_hit in zip(
        factors, rows, chances, finite, hits, strict=True
    ):
        if sound and _are_finite(row):
            points.append(Observation(factor, fmean(row), chance))
        else:
            # A loss that is not finite says nothing about weights that are finite.
            bad_batch = is_hit or (sound and scores is None)
            points.append(Observation(factor, None, chance, bad_batch=bad_batch))
    return points


class LossSummary(NamedTuple):
    """The training losses of one replica in one round.

    Attributes:
        num: The number of finite losses before the first that is not finite.
        first: The first of these losses.
        last: The last of these losses.
    """

    num: float
    first: float
    last: float


def hit_by_bad_batch(
    summaries: Sequence[LossSummary], num_steps: int, factors: Sequence[float]
) -> list[bool]:
    """Which replicas a bad batch may have broken. A learning rate makes losses rise first.

    A learning rate that is far too high breaks a replica in one step. A replica that broke after
    one step counts only if a replica with a higher learning rate went on.

    >>> low, middle = LossSummary(5, 2.0, 1.8), LossSummary(12, 2.1, 1.5)
    >>> hit_by_bad_batch([low, middle, LossSummary(5, 2.0, 90.0)], 12, [0.1, 1.0, 10.0])
    [True, False, False]
    """
    firsts = [losses.first for losses in summaries if math.isfinite(losses.first)]
    # All replicas have the same weights at first, so batches alone make these losses differ.
    limit = -math.inf
    if firsts:
        limit = (1 + BAD_BATCH_ALLOWANCE) * max(firsts) - BAD_BATCH_ALLOWANCE * min(firsts)
    pairs = list(zip(factors, summaries, strict=True))
    survived = max((factor for factor, losses in pairs if losses.num > 1), default=0.0)
    return [
        losses.num < num_steps
        and (losses.num != 1 or factor < survived)
        and (losses.num == 0 or losses.last <= limit)
        for factor, losses in pairs
    ]


def _errors_of_scores(scores: Sequence[Sequence[float]]) -> list[float]:
    """The standard error of each mean score, from how its batches vary against the others."""
    finite = sorted((row for row in scores if _are_finite(row)), key=fmean)
    if not finite:
        return [0.0] * len(scores)
    if len(finite[0]) < 2 or len(scores) == 1:  # nothing that shows the noise
        return [SINGLE_SCORE_NOISE * abs(fmean(finite[0]))] * len(scores)
    if len(finite) == 2:  # the middle between the two moves along with each
        between = [a - b for a, b in zip(*finite, strict=True)]
        return [stdev(between) / math.sqrt(2 * len(between))] * len(scores)
    # The lower median of the better half: replicas that diverged would blur the others.
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
    """The errors of a few losses each, at least that of the better half together."""
    own = [error or 0.0 for error in errors]
    finite = sorted(
        (*row, error) for row, error in zip(losses, own, strict=True) if _are_finite(row)
    )
    better = [error for _, error in finite[: (len(finite) + 1) // 2]]
    # The better half may hold replicas that diverged, too.
    calm = [error for error in better if error <= DIVERGED_NOISE_RATIO * median_low(better)]
    common = math.hypot(*calm) / math.sqrt(len(calm)) if calm else 0.0
    return [max(error, common) for error in own]


def _are_finite(row: Sequence[float]) -> bool:
    """Whether all scores, and so their sum, are finite."""
    return bool(row) and all(abs(score) < OVERFLOW for score in row)
