"""Find the learning rate before the run: scores over a log-grid -> the next grid, or a choice.

Plain Python floats, no torch: every process computes the same answer. Factors are in units of the
learning rate that the user gave.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, median_low, stdev
from typing import Any, Literal, NamedTuple

from hdet.fit import without
from hdet.validation import check_choice, check_flag, check_integer, check_range

POINTS_PER_DECADE = 2
"""At least so many learning rates are tried in a decade, in several rounds if need be."""
COARSE_STEPS, FINE_STEPS = 12, 30
"""Of a round, if the budget allows: longer ones prefer learning rates that are too low."""
FINE_POINTS = 6
"""At least so many learning rates are tried around a first choice ..."""
BELOW, ABOVE = 8.0, 2.0
"""... from this factor below it to that above: what a longer round chooses is lower."""
FEWEST_STEPS = 4
"""Below so many a round tells nothing."""
LOST = 0.25
"""A learning rate is lost if its score is worse than before the first step, by this share of what
the best has gained."""
NEARLY = 0.08
"""The choice may gain less than the best by this share."""
MARGIN = 4.0
"""The choice keeps this factor away from learning rates that are lost."""
FAINT = 2.5
"""Differences of fewer standard errors than this say nothing."""
HUGE = 1e300
"""Scores beyond it count as not finite."""
NOISIEST = 1e6
"""Beyond it gradients are nothing but noise."""
STEEPEST = 2.5
"""A schedule that peaks further above its mean is taken for one that peaks so far."""
NOISE = "the scores do not differ by more than their noise"
NOTHING = "no learning rate gains anything"
MOST_SWEEPS = 4
"""Twelve decades further there is nothing to be found."""


class Lost(RuntimeError):
    """Every learning rate that was tried blows up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scout:
    """Tries learning rates over some decades in the first steps of a run, then starts anew.

    Each replica trains alone with its own learning rate. The range is shifted while the best sits
    at its end, then a narrow one is tried around the choice, in at most `share` of the run's
    steps. Then the run begins from the weights it had, with what was found; the batches are spent.
    """

    decades: float = 4.0
    share: float = 0.03
    """Of the steps of the run, at most."""
    steps: int | None = None
    """Of every round; by default up to 12 over the whole range, and up to 30 around the choice."""
    batch_rule: Literal["auto", "sqrt", "linear", "none"] = "auto"
    """How a learning rate grows with the batch when gradients are shared again: with the number of
    replicas or its root; or ("auto") the more, the less the gradients of the replicas agree."""
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
    finite = sorted((row for row in scores if _all_finite(row)), key=fmean)
    if not finite or len(finite[0]) < 2:
        return [0.0] * len(scores)
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


def coarse_steps(scout: Scout, total_steps: int | None, num_replicas: int) -> int:
    """Of a round over the whole range: a quarter of the budget is for one sweep.

    >>> coarse_steps(Scout(), 1500, 8), coarse_steps(Scout(), 100_000, 8)
    (11, 12)
    """
    if scout.steps is not None:
        return scout.steps
    if total_steps is None:
        return COARSE_STEPS
    rounds = Grid(scout.decades, num_replicas).num_rounds
    return max(min(COARSE_STEPS, int(scout.share * total_steps) // (4 * rounds)), FEWEST_STEPS)


class Window(NamedTuple):
    """The learning rates around a first choice, known by their place from below."""

    centre: float
    num_replicas: int

    @property
    def num_rounds(self) -> int:
        return math.ceil(FINE_POINTS / self.num_replicas)

    def factors(self, number: int) -> tuple[float, ...]:
        """Those of a round.

        >>> [round(factor, 3) for factor in Window(1.0, 5).factors(0)]
        [0.125, 0.231, 0.429, 0.794, 1.47]
        """
        last = self.num_rounds * self.num_replicas - 1
        low, span = self.centre / BELOW, BELOW * ABOVE
        places = range(number, last + 1, self.num_rounds)
        return tuple(low * float(span ** (place / last)) for place in places)


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
    edge = _edge(sound, reference) or broken
    # What lies beyond an edge is luck: there a model may do no more than guess.
    sound = [point for point in sound if edge is None or point.factor < edge]
    if not sound:
        return Verdict(None, -1, "every learning rate is worse than none", edge)
    is_flat = len(sound) > 1 and not _differ(sound, reference)
    if is_flat and edge is None:
        return Verdict(None, +1, NOISE)
    if outset is not None and min(map(_score, sound)) >= reference:
        return Verdict(None, -1, NOTHING, edge)
    if is_flat:
        return Verdict(None, 0, NOISE, edge)
    best = min(sound, key=_score)

    def verdict(factor: float, shift: int, reason: str) -> Verdict:
        return Verdict(_away_from(edge, factor), shift, reason, edge, reference)

    if best is lowest:
        return verdict(lowest.factor, -1, "the lowest learning rate is the best")
    if _score(lowest) <= _line(sound, reference):
        return verdict(lowest.factor, -1, "the lowest learning rate is as good as the best")
    if best is points[-1]:
        return verdict(best.factor, +1, "the highest learning rate is the best")
    reason = "the lowest that gains nearly as much as the best"
    return verdict(_nearly(sound, reference), 0, reason)


def refine(points: Sequence[Point], rough: Verdict) -> Verdict:
    """The same choice among learning rates that are close together."""
    sound, broken = _sound(sorted(points))
    if not sound:
        return rough
    lost = _edge(sound, rough.reference)
    sound = [point for point in sound if lost is None or point.factor < lost]
    smooth = _smoothed(sound)
    if not smooth or min(map(_score, smooth)) >= rough.reference:
        return rough  # these rounds have shown nothing
    edge = min(filter(None, [rough.edge, broken, lost]), default=None)
    return rough._replace(
        factor=_away_from(edge, _nearly(smooth, rough.reference)),
        edge=edge,
        reason=f"{rough.reason}, tried closely",
    )


def _sound(points: Sequence[Point]) -> tuple[list[Point], float | None]:
    """Those below the first that is broken, and that one's factor."""
    broken = next((point.factor for point in points if point.score is None), None)
    return [point for point in points if broken is None or point.factor < broken], broken


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """A parabola through the scores, by least squares: every replica has its own luck."""
    if len(points) < 4:
        return list(points)
    places = [math.log(point.factor) for point in points]
    basis = [[1.0] * len(points)]
    for power in (1, 2):
        basis.append(without([place**power for place in places], basis))
    scores = [_score(point) for point in points]
    misses = without(scores, basis)
    return [
        point._replace(score=score - miss)
        for point, score, miss in zip(points, scores, misses, strict=True)
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


def _edge(sound: Sequence[Point], reference: float) -> float | None:
    """The lowest learning rate that is worse than none, beyond doubt."""
    limit = reference + LOST * max(reference - min(map(_score, sound)), 0.0)
    for point in sound:
        if _score(point) > limit + FAINT * point.error:
            return point.factor
    return None


def _away_from(edge: float | None, factor: float) -> float:
    return factor if edge is None else min(factor, edge / MARGIN)


def _nearly(sound: Sequence[Point], reference: float) -> float:
    """The lowest learning rate that gains nearly as much as the best, between the points.

    Around the best the scores are flat, and which is lowest is chance; below it they are steep,
    and where they cross a line is not. And what is a little too low costs less than what is a
    little too high.
    """
    line = _line(sound, reference)
    if _score(sound[0]) <= line:
        return sound[0].factor
    for below, point in pairwise(sound):
        if _score(point) <= line:
            share = (_score(below) - line) / (_score(below) - _score(point))
            return float(below.factor ** (1 - share) * point.factor**share)
    raise AssertionError("the lowest score is below the line")


def _line(sound: Sequence[Point], reference: float) -> float:
    """What counts as nearly as good as the best."""
    lowest = min(map(_score, sound))
    return lowest + NEARLY * (reference - lowest)


class Agreement(NamedTuple):
    """How far the gradients of replicas agree that stand at the same place."""

    alone: float
    """The mean squared norm of a replica's gradient."""
    together: float
    """The squared norm of their mean."""

    def noise(self, num_replicas: int) -> float:
        """The variance of one replica's gradient, in units of the squared true gradient.

        >>> Agreement(alone=2.0, together=1.125).noise(8)
        1.0
        """
        variance = (self.alone - self.together) * num_replicas / (num_replicas - 1)
        signal = self.together - variance / num_replicas
        return min(variance / signal, NOISIEST) if signal > 0 else NOISIEST


def grown(rule: str, optimizer: str, num_replicas: int, noise: float | None = None) -> float:
    """By how much a learning rate grows with the batch of all replicas.

    A larger batch lets it grow as far as gradients are noise: the best one for a batch of size b
    goes with 1 / (1 + noise / b) (McCandlish et al., 1812.06162). For optimizers like Adam the
    batch itself accounts for the root of that alone; but short rounds are too timid where
    gradients are noise, since nothing in them averages it out, and the other root makes up for it
    (docs/scout.md). If the noise is not known, a root for Adam and all of it for SGD.

    >>> grown("auto", "AdamW", 16), grown("auto", "SGD", 16), grown("none", "SGD", 16)
    (4.0, 16.0, 1.0)
    >>> round(grown("auto", "AdamW", 16, noise=1.0), 3)
    1.882
    """
    if rule == "auto" and noise is not None:
        return num_replicas * (1 + noise) / (num_replicas + noise)
    if rule == "auto":
        rule = "linear" if optimizer in ("SGD", "ASGD") else "sqrt"
    return {"sqrt": math.sqrt(num_replicas), "linear": float(num_replicas), "none": 1.0}[rule]


def peak_of(mean_share: float | None) -> float:
    """How far a schedule peaks above its mean: rounds are made at a constant learning rate.

    What a run gains depends on the mean of its learning rates much more than on their peak, as
    long as it comes down in the end.

    >>> peak_of(0.5), peak_of(1.0), peak_of(None), peak_of(0.01)
    (2.0, 1.0, 1.0, 2.5)
    """
    return 1.0 if not mean_share else min(max(1 / mean_share, 1.0), STEEPEST)


class Search:
    """A scout on its way: what it tries now, what it has seen, and what it found."""

    def __init__(self, scout: Scout, *, num_replicas: int, total_steps: int | None) -> None:
        self.is_over = False
        self.found: float | None = None
        """The choice, for the batch of one replica; none if there was nothing to choose by."""
        self.reason = ""
        self.edge: float | None = None
        self.last_factors: tuple[float, ...] = ()
        """Those of the round that has just ended."""
        self.used = 0
        """How many steps it has taken."""
        self._scout, self._num_replicas = scout, num_replicas
        self._grid = Grid(scout.decades, num_replicas)
        self._coarse_steps = coarse_steps(scout, total_steps, num_replicas)
        self._budget = self._budget_of(scout, total_steps)
        self._seen: dict[int, Point] = {}
        self._first = self._round = 0
        self._shifts: list[int] = []
        self._rough: Verdict | None = None
        """A first choice, while what is around it is tried."""
        self._coarse = 0
        """The steps that were used before it was made."""
        self._close: list[Point] = []
        self._agreements: list[Agreement] = []
        self.outset: float | None = None
        """What the weights score that everyone set out from."""

    def _budget_of(self, scout: Scout, total_steps: int | None) -> float:
        """So many steps at most; a run that has no room for one sweep is refused."""
        sweep = self._grid.num_rounds * self._coarse_steps
        if total_steps is None:
            return (MOST_SWEEPS + 1) * sweep + FINE_STEPS
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
    def num_steps(self) -> int:
        """Of a round."""
        return self._coarse_steps if self._rough is None else self._fine_steps()

    def _fine_steps(self) -> int:
        """What is left, for all rounds around the first choice together."""
        if self._scout.steps is not None:
            return self._scout.steps
        return min(FINE_STEPS, int(self._budget - self._coarse) // self._window.num_rounds)

    @property
    def factors(self) -> tuple[float, ...]:
        """What every replica tries in this round."""
        if self._rough is not None:
            return self._window.factors(self._round)
        return tuple(map(self._grid.factor, self._places()))

    def _places(self) -> tuple[int, ...]:
        return self._grid.places(self._first, self._round)

    @property
    def _window(self) -> Window:
        assert self._rough is not None
        assert self._rough.factor is not None
        return Window(self._rough.factor, self._num_replicas)

    @property
    def points(self) -> list[Point]:
        """What was seen over the whole range."""
        return sorted(self._seen.values())

    @property
    def close_points(self) -> list[Point]:
        """What was seen around the first choice, in longer rounds."""
        return sorted(self._close)

    def tell(
        self,
        points: Sequence[Point],
        agreement: Agreement | None = None,
        outset: float | None = None,
    ) -> None:
        """What a round has shown, in the order of the replicas."""
        if self.outset is None and outset is not None and abs(outset) < HUGE:
            self.outset = outset
        self.used += self.num_steps
        self.last_factors = self.factors
        if agreement is not None:
            self._agreements.append(agreement)
        if self._rough is not None:
            self._close += points
        else:
            self._seen.update(zip(self._places(), points, strict=True))
        self._round += 1
        if self._rough is not None and self._round == self._window.num_rounds:
            self._end(refine(self._close, self._rough))
        elif self._rough is None and self._round == self._grid.num_rounds:
            self._decide(judge(self.points, self.outset))

    def interrupt(self, num_steps: int) -> None:
        """So many steps of a round were for nothing: it starts again, if there is time."""
        self.used += num_steps
        rounds = self._grid.num_rounds if self._rough is None else self._window.num_rounds
        if self.used + (rounds - self._round) * self.num_steps > self._budget:
            verdict = Verdict(None, 0, "nothing was tried")
            if self._seen:
                verdict = self._rough or judge(self.points, self.outset)
            self._end(verdict, "interrupted")

    def _decide(self, verdict: Verdict) -> None:
        if verdict.shift == 0:
            if verdict.factor is None:
                self._end(verdict)
            else:
                self._look_closely(verdict)
            return
        if verdict.factor is None and verdict.shift < 0 and -1 in self._shifts:
            if self.points[0].score is not None:  # nothing helps, but not all is broken
                self._end(verdict)
                return
            low, high = self.points[0].factor, self.points[-1].factor
            raise Lost(
                f"every learning rate from {low:.3g} to {high:.3g} times the given one blows up: "
                "give a lower one, or look at the data and the initial weights."
            )
        # There is nothing to begin with: one sweep more, whatever the budget says.
        must = verdict.edge is not None and verdict.factor is None and verdict.reason != NOTHING
        if not must and (not self._has_room() or -verdict.shift in self._shifts):
            self._end(verdict, "there was no time to look further")
            return
        self._shifts.append(verdict.shift)
        # Two neighbours are tried again, with other batches: the curve goes on from there.
        self._first += verdict.shift * max(self._grid.num - 2, 1)
        self._round = 0

    def _look_closely(self, verdict: Verdict) -> None:
        """If what is left of the budget allows rounds that are no shorter than those before."""
        self._rough, self._round, self._coarse = verdict, 0, self.used
        rounds = self._window.num_rounds
        steps = self._fine_steps()
        if steps < self._coarse_steps or self.used + rounds * steps > self._budget:
            self._end(verdict)

    def _end(self, verdict: Verdict, but: str = "") -> None:
        self.is_over, self.found, self.edge = True, verdict.factor, verdict.edge
        self.reason = ", ".join(filter(None, [verdict.reason, but]))

    def _has_room(self) -> bool:
        sweep = self._grid.num_rounds * self._coarse_steps
        return len(self._shifts) < MOST_SWEEPS - 1 and self.used + sweep <= self._budget

    @property
    def noise(self) -> float | None:
        """That of one replica's gradient at the outset; none if it is not known."""
        if not self._agreements:
            return None
        alone, together = (fmean(column) for column in zip(*self._agreements, strict=True))
        return Agreement(alone, together).noise(self._num_replicas)

    def factor_for(self, rule: str, optimizer: str, *, peak: float = 1.0) -> float:
        """What the run begins with: what was found, for the batch of all replicas, and for a
        schedule that peaks so many times above its mean.

        It stays below what was lost already with the batch of one, and within what was tried.
        """
        if self.found is None:
            return _away_from(self.edge, 1.0)
        wanted = self.found * grown(rule, optimizer, self._num_replicas, self.noise) * peak
        highest = self.points[-1].factor if self.edge is None else self.edge / 2
        return max(min(wanted, highest), self.found)

    def state_dict(self) -> dict[str, Any]:
        return {
            "grid": list(self._grid),
            "seen": [[place, *point] for place, point in self._seen.items()],
            "first": self._first,
            "round": self._round,
            "used": self.used,
            "shifts": list(self._shifts),
            "rough": None if self._rough is None else list(self._rough),
            "coarse": self._coarse,
            "close": [list(point) for point in self._close],
            "agreements": [list(agreement) for agreement in self._agreements],
            "outset": self.outset,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the rounds that were made; with other replicas from the first one on."""
        self.used = state["used"]
        if state["grid"] == list(self._grid):
            self._seen = {place: Point(*point) for place, *point in state["seen"]}
            self._first, self._round = state["first"], state["round"]
            self._shifts = list(state["shifts"])
            rough = state.get("rough")
            self._rough = None if rough is None else Verdict(*rough)
            self._coarse = state.get("coarse", 0)
            self._close = [Point(*point) for point in state.get("close", [])]
            self._agreements = [Agreement(*pair) for pair in state.get("agreements", [])]
            self.outset = state.get("outset")
        if self._rough is not None and self._fine_steps() < FEWEST_STEPS:
            self._end(self._rough, "the run has become too short to look closely")
