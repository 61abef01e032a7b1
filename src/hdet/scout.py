"""Find the learning rate before the run: scores over a log-grid -> the next grid, or a choice.

Plain Python floats, no torch: every process computes the same answer. Factors are in units of the
learning rate that the user gave.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Any, Literal, NamedTuple

from hdet.validation import check_choice, check_flag, check_integer, check_range

POINTS_PER_DECADE = 2
"""At least so many learning rates are tried in a decade, in several rounds if need be."""
STEPS = 25
"""Of one round, if the budget allows: longer ones prefer learning rates that are too low."""
FEWEST_STEPS = 4
"""Below so many a round tells nothing."""
LOST = 0.25
"""A learning rate is lost if its score is worse than that of the lowest one, which has hardly
moved, by this share of what the best has gained."""
NEARLY = 0.05
"""The choice may gain less than the best by this share."""
MARGIN = 4.0
"""The choice keeps this factor away from learning rates that are lost."""
FAINT = 2.5
"""Differences of fewer standard errors than this say nothing."""
MOST_SWEEPS = 4
"""Twelve decades further there is nothing to be found."""


class Lost(RuntimeError):
    """Every learning rate that was tried blows up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scout:
    """Tries learning rates over some decades in the first steps of a run, then starts anew.

    Each replica trains alone with its own learning rate. The range is shifted while the best sits
    at its end, in at most `share` of the run's steps. Then the run begins from the weights it had,
    with what was found; the batches are spent.
    """

    decades: float = 4.0
    share: float = 0.03
    """Of the steps of the run, at most."""
    steps: int | None = None
    """Of one round; by default 25, or as many as the budget has for two."""
    batch_rule: Literal["auto", "sqrt", "linear", "none"] = "auto"
    """How a learning rate grows with the batch when gradients are shared again: with the square
    root of the number of replicas for optimizers like Adam, linearly for SGD."""
    rewind: bool = True
    """Whether the run begins with the weights of before, or with those of the best replica."""

    def __post_init__(self) -> None:
        check_range("decades", self.decades, least=0.5, below=12.0001)
        check_range("share", self.share, least=1e-6, below=1.0)
        if self.steps is not None:
            check_integer("steps", self.steps, at_least=FEWEST_STEPS)
        check_choice("batch_rule", self.batch_rule, ("auto", "sqrt", "linear", "none"))
        check_flag("rewind", self.rewind)


class Point(NamedTuple):
    """What one learning rate came to."""

    factor: float
    score: float | None
    """Lower is better; none if it is not finite."""
    error: float = 0.0
    """Its standard error against the others."""


def points_of(
    factors: Sequence[float],
    losses: Sequence[float | None],
    errors: Sequence[float | None],
    scores: Sequence[Sequence[float]] | None,
    finite: Sequence[bool],
) -> list[Point]:
    """What the replicas of a round have come to, by their scores or else by their losses."""
    rows = scores or [[math.nan if loss is None else loss] for loss in losses]
    chances = _errors(rows) if scores else [error or 0.0 for error in errors]
    return [
        Point(factor, fmean(row) if sound and _all_finite(row) else None, chance)
        for factor, row, chance, sound in zip(factors, rows, chances, finite, strict=True)
    ]


def _errors(scores: Sequence[Sequence[float]]) -> list[float]:
    """How much of each mean score is chance: its variation over batches, beside the others."""
    finite = [row for row in scores if _all_finite(row)]
    if not finite or len(finite[0]) < 2:
        return [0.0] * len(scores)
    # The median: what diverged would blur the others.
    common = [median(column) for column in zip(*finite, strict=True)]
    return [
        stdev([a - b for a, b in zip(row, common, strict=True)]) / math.sqrt(len(row))
        if _all_finite(row)
        else 0.0
        for row in scores
    ]


def _all_finite(row: Sequence[float]) -> bool:
    return bool(row) and all(map(math.isfinite, row))


class Verdict(NamedTuple):
    """What a sweep has shown."""

    factor: float | None
    """The choice; none if the range has to be shifted, or if there is nothing to choose by."""
    shift: int
    """Down (-1), up (+1), or not at all."""
    reason: str
    edge: float | None = None
    """The lowest learning rate that is lost."""


class Grid(NamedTuple):
    """Learning rates on a log-scale, known by their place; 0 is the lowest of the first sweep."""

    decades: float
    num_replicas: int

    @property
    def num_rounds(self) -> int:
        """Of a sweep over the range, with one learning rate for each replica in a round."""
        return max(math.ceil(POINTS_PER_DECADE * self.decades / self.num_replicas), 1)

    @property
    def num(self) -> int:
        return self.num_rounds * self.num_replicas

    def factor(self, place: int) -> float:
        """
        >>> grid = Grid(4.0, 5)
        >>> [round(grid.factor(place), 3) for place in (0, 1, 9)]
        [0.01, 0.028, 100.0]
        """
        return float(10 ** (self.decades * (place / (self.num - 1) - 0.5)))

    def places(self, first: int, number: int) -> tuple[int, ...]:
        """Those of a round: as far from each other as can be."""
        return tuple(range(first + number, first + self.num, self.num_rounds))


def steps_of_round(scout: Scout, total_steps: int | None, num_replicas: int) -> int:
    """As many as leave room for two sweeps in the budget.

    >>> steps_of_round(Scout(), 1500, 8), steps_of_round(Scout(), 100_000, 8)
    (22, 25)
    """
    if scout.steps is not None:
        return scout.steps
    if total_steps is None:
        return STEPS
    rounds = Grid(scout.decades, num_replicas).num_rounds
    return max(min(STEPS, int(scout.share * total_steps) // (2 * rounds)), FEWEST_STEPS)


def judge(points: Sequence[Point]) -> Verdict:
    """Where the scores are lowest, between the points; or in which direction to look further."""
    points = sorted(points)
    broken = next((point.factor for point in points if point.score is None), None)
    sound = [point for point in points if broken is None or point.factor < broken]
    if not sound:
        return Verdict(None, -1, "the lowest learning rate is lost", broken)
    if broken is None and not _differ(sound):
        return Verdict(None, 0, "the scores do not differ by more than their noise")
    best = min(sound, key=_score)
    edge = _edge(sound, best) or broken
    if best is points[0]:
        return Verdict(None, -1, "the lowest learning rate is the best", edge)
    if best is points[-1]:
        return Verdict(None, +1, "the highest learning rate is the best", edge)
    reason = "the lowest that gains nearly as much as the best"
    return Verdict(_away_from(edge, _nearly(sound, best)), 0, reason, edge)


def _score(point: Point) -> float:
    assert point.score is not None
    return point.score


def _differ(points: Sequence[Point]) -> bool:
    """Whether chance alone would hardly spread so many scores so far.

    The largest of n normal deviates is about sqrt(2 ln n), the range of them twice that.
    """
    scores = [_score(point) for point in points]
    noise = median(point.error for point in points)
    most = 0.4 + 2 * math.sqrt(2 * math.log(len(points)))
    return max(scores) - min(scores) > most * noise


def _edge(sound: Sequence[Point], best: Point) -> float | None:
    """The lowest learning rate above the best that is worse than the lowest, beyond doubt."""
    reference = _score(sound[0])
    limit = reference + LOST * (reference - _score(best))
    for point in sound:
        if point.factor > best.factor and _score(point) > limit + FAINT * point.error:
            return point.factor
    return None


def _away_from(edge: float | None, factor: float) -> float:
    return factor if edge is None else min(factor, edge / MARGIN)


def _nearly(sound: Sequence[Point], best: Point) -> float:
    """The lowest learning rate that gains nearly as much as the best, between the points.

    Around the best the scores are flat, and which is lowest is chance; below it they are steep,
    and where they cross a line is not. And what is a little too low costs less than what is a
    little too high.
    """
    reference, lowest = _score(sound[0]), _score(best)
    line = lowest + NEARLY * (reference - lowest)
    for below, point in pairwise(sound):
        if _score(point) <= line:
            share = (_score(below) - line) / (_score(below) - _score(point))
            return float(below.factor ** (1 - share) * point.factor**share)
    return best.factor


def grown(rule: str, optimizer: str, num_replicas: int) -> float:
    """By how much a learning rate grows with the batch of all replicas.

    >>> grown("auto", "AdamW", 16), grown("auto", "SGD", 16), grown("none", "SGD", 16)
    (4.0, 16.0, 1.0)
    """
    if rule == "auto":
        rule = "linear" if optimizer in ("SGD", "ASGD") else "sqrt"
    return {"sqrt": math.sqrt(num_replicas), "linear": float(num_replicas), "none": 1.0}[rule]


class Search:
    """A scout on its way: what it tries now, what it has seen, and what it found."""

    def __init__(self, scout: Scout, *, num_replicas: int, total_steps: int | None) -> None:
        self.num_steps = steps_of_round(scout, total_steps, num_replicas)
        self.is_over = False
        self.found: float | None = None
        """The choice, for the batch of one replica; none if there was nothing to choose by."""
        self.reason = ""
        self.edge: float | None = None
        self.last_factors: tuple[float, ...] = ()
        """Those of the round that has just ended."""
        self._grid = Grid(scout.decades, num_replicas)
        self._budget = self._budget_of(scout, total_steps)
        self._seen: dict[int, Point] = {}
        self._first = self._round = self._used = 0
        self._shifts: list[int] = []

    def _budget_of(self, scout: Scout, total_steps: int | None) -> float:
        """So many steps at most; a run that has no room for one sweep is refused."""
        sweep = self._grid.num_rounds * self.num_steps
        if total_steps is None:
            return MOST_SWEEPS * sweep
        budget = scout.share * total_steps
        if scout.steps is not None:
            if sweep >= total_steps:
                raise ValueError(f"`scout` must be shorter than the run, got {sweep} steps.")
            budget = max(budget, min(2 * sweep, total_steps - 1))  # somebody has asked for it
        if sweep > budget:
            raise ValueError(
                f"`scout` must fit in its `share` ({scout.share:g}) of the run: trying "
                f"{self._grid.num} learning rates takes {sweep} steps, got {total_steps} in all."
            )
        return budget

    @property
    def places(self) -> tuple[int, ...]:
        return self._grid.places(self._first, self._round)

    @property
    def factors(self) -> tuple[float, ...]:
        """What every replica tries in this round."""
        return tuple(map(self._grid.factor, self.places))

    @property
    def points(self) -> list[Point]:
        return sorted(self._seen.values())

    def tell(self, points: Sequence[Point]) -> None:
        """What a round has shown, in the order of the replicas."""
        self._used += self.num_steps
        self.last_factors = self.factors
        self._seen.update(zip(self.places, points, strict=True))
        self._round += 1
        if self._round == self._grid.num_rounds:
            self._decide(judge(self.points))

    def interrupt(self, num_steps: int) -> None:
        """So many steps of a round were for nothing: it starts again, if there is time."""
        self._used += num_steps
        if self._used + self.num_steps > self._budget:
            verdict = judge(self.points) if self._seen else Verdict(None, 0, "nothing was tried")
            self._end(verdict.factor, verdict, "interrupted")

    def _decide(self, verdict: Verdict) -> None:
        if verdict.factor is not None or verdict.shift == 0:
            self._end(verdict.factor, verdict)
            return
        sound = [p for p in self.points if p.score is not None and not _is_beyond(p, verdict.edge)]
        if not sound and -1 in self._shifts:
            low, high = self.points[0].factor, self.points[-1].factor
            raise Lost(
                f"every learning rate from {low:.3g} to {high:.3g} times the given one blows up: "
                "give a lower one, or look at the data and the initial weights."
            )
        if sound and (not self._has_room() or -verdict.shift in self._shifts):
            best = min(sound, key=_score).factor
            self._end(_away_from(verdict.edge, best), verdict, "there was no time to look further")
            return
        self._shifts.append(verdict.shift)
        # Two neighbours are tried again, with other batches: the curve goes on from there.
        self._first += verdict.shift * max(self._grid.num - 2, 1)
        self._round = 0

    def _end(self, found: float | None, verdict: Verdict, but: str = "") -> None:
        self.is_over, self.found, self.edge = True, found, verdict.edge
        self.reason = ", ".join(filter(None, [verdict.reason, but]))

    def _has_room(self) -> bool:
        sweep = self._grid.num_rounds * self.num_steps
        return len(self._shifts) < MOST_SWEEPS - 1 and self._used + sweep <= self._budget

    def factor_for(self, rule: str, optimizer: str, num_replicas: int) -> float:
        """What the run begins with: what was found, for the batch of all replicas.

        It stays below what was lost already with the batch of one, and within what was tried.
        """
        if self.found is None:
            return 1.0
        highest = self.points[-1].factor if self.edge is None else self.edge / 2
        return max(min(self.found * grown(rule, optimizer, num_replicas), highest), self.found)

    def state_dict(self) -> dict[str, Any]:
        return {
            "grid": list(self._grid),
            "seen": [[place, *point] for place, point in self._seen.items()],
            "first": self._first,
            "round": self._round,
            "used": self._used,
            "shifts": list(self._shifts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the rounds that were made; with other replicas from the first one on."""
        self._used = state["used"]
        if state["grid"] == list(self._grid):
            self._seen = {place: Point(*point) for place, *point in state["seen"]}
            self._first, self._round = state["first"], state["round"]
            self._shifts = list(state["shifts"])


def _is_beyond(point: Point, edge: float | None) -> bool:
    return edge is not None and point.factor >= edge
