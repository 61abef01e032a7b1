"""Find the learning rate before the run: what to try next, and what to begin with.

Plain Python floats, no torch: every process computes the same answer. Factors are in units of the
learning rate that the user gave.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple

from hdet.growth import CALM, PLAIN, Agreement, Tried, grown, least, longer, most
from hdet.validation import check_choice, check_flag, check_integer, check_range
from hdet.verdict import (
    CLOSELY,
    HUGE,
    NOISE,
    NOTHING,
    Point,
    Verdict,
    away_from,
    explosion,
    judge,
    refine,
)

POINTS_PER_DECADE = 2
"""At least so many learning rates are tried in a decade, in several rounds if need be."""
COARSE_STEPS, FINE_STEPS = 12, 24
"""Of a round, if the budget allows: longer ones prefer learning rates that are too low."""
SHORT = "lowered, since there was no time for longer rounds"
FINE_POINTS = 6
"""At least so many learning rates are tried around a first choice ..."""
BELOW, ABOVE = 8.0, 2.0
"""... from this factor below it to that above: what a longer round chooses is lower."""
FEWEST_STEPS = 4
"""Below so many a round tells nothing."""
LIKELY = 1.5
"""In units of what is needlessly low: what is tried closely lies around it at most, ..."""
HASTY = 6
"""... and so does the choice if no round had so many steps, for gradients without noise: what gains
most in five steps is many times more than a run can bear."""
NOTHING_FOUND = "nothing was found"
INTERRUPTED, NO_TIME = "interrupted", "there was no time to look further"
TOO_LOW = "less is needlessly far below where scores explode"
LOST_OR_NOT_TRIED = "more was lost, or not tried"
TOO_SHORT = "what was found in so few steps is too near to where scores explode"
NUM_PARTS, MOST_PARTS = 8, 32
"""Of batches that score replicas, each as large as what one of them trains on."""
SPARED = 1 / 4
"""Of the steps that are left over, so many at most are for keeping batches."""
HOPELESS = 1 / 8
"""Where this share of a learning rate is still too high for a mean one, the schedule is lost."""
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
    """Of every round; by default up to 12 over the whole range, and up to 24 around the choice."""
    batch_rule: Literal["auto", "sqrt", "linear", "none"] = "auto"
    """How a learning rate grows with the batch when gradients are shared again: with the number of
    replicas or its root; or ("auto") the more, the less the gradients of the replicas agree."""
    rewind: bool = True
    """Whether the run begins with the weights of before, or with those of the best replica."""
    restart: bool = False
    """Whether the given learning rate is kept unless it is hopeless: one look at the beginning
    whether far less would be better, and one after a change of the data; and if the run turns out
    to be stuck in its first cycles, it starts again from its first weights with what is far
    better."""

    def __post_init__(self) -> None:
        check_range("decades", self.decades, least=0.5, below=12.0001)
        check_range("share", self.share, least=1e-6, below=1.0)
        if self.steps is not None:
            check_integer("steps", self.steps, at_least=FEWEST_STEPS)
        check_choice("batch_rule", self.batch_rule, ("auto", "sqrt", "linear", "none"))
        check_flag("rewind", self.rewind)
        check_flag("restart", self.restart)


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

    def places(self, first: int, number: int, rounds: int) -> tuple[int, ...]:
        """Those of one of so many rounds: as far from each other as can be.

        >>> Grid(4.0, 3).places(0, number=1, rounds=3), Grid(4.0, 3).places(7, 1, rounds=2)
        ((1, 4, 7), (8, 10, 12))
        """
        return tuple(range(first + number, first + rounds * self.num_replicas, rounds))


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


def check_room(scout: Scout, *, num_replicas: int, total_steps: int | None) -> None:
    """Refuse a run that has no room for one sweep."""
    Search(scout, num_replicas=num_replicas, total_steps=total_steps)


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


class Beginning(NamedTuple):
    """What a run begins with, in units of the given learning rate."""

    factor: float
    why: str


class Search:
    """A scout on its way: what it tries now, what it has seen, and what it found."""

    def __init__(
        self,
        scout: Scout,
        *,
        num_replicas: int,
        total_steps: int | None,
        optimizer: str = "",
        shared: bool = True,
        brief: bool = False,
    ) -> None:
        """`shared` says whether gradients will be, when it is over. A `brief` one is over after a
        first sweep, unless that says that the given learning rate is hopeless."""
        self.is_over = False
        self.found: float | None = None
        """The choice, for the batch of one replica; none if there was nothing to choose by."""
        self.reason = ""
        self.edge: float | None = None
        self.explosion: float | None = None
        """The learning rate where scores explode; none if they did not."""
        self.last_factors: tuple[float, ...] = ()
        """Those of the round that has just ended."""
        self.used = 0
        """How many steps it has taken."""
        self._scout, self._num_replicas, self._brief = scout, num_replicas, brief
        self._rule, self._optimizer = scout.batch_rule if shared else "none", optimizer
        self._grid = Grid(scout.decades, num_replicas)
        self._coarse_steps = coarse_steps(scout, total_steps, num_replicas)
        self._budget = self._budget_of(scout, total_steps)
        self._seen: dict[int, Point] = {}
        self._first = self._round = 0
        self._rounds = self._grid.num_rounds
        """Of this sweep: one that goes further has fewer if there is no time for all."""
        self._shifts: list[int] = []
        self._looked_up = False
        """Whether it went up for nothing but to see where scores explode."""
        self._rough: Verdict | None = None
        """A first choice, while what is around it is tried."""
        self._centre: float | None = None
        """Of what is tried then; none if there is nothing to go by."""
        self._coarse = 0
        """The steps that were used before it was made."""
        self._close: list[Point] = []
        self._agreements: list[Agreement] = []
        self._outsets: list[float] = []
        """What the weights score that everyone set out from: by losses, in every round anew."""

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
    def _left(self) -> float:
        """Steps, when it has done what it is about."""
        rounds = self._rounds if self._rough is None else self._window.num_rounds
        return self._budget - self.used - (rounds - self._round) * self.num_steps

    def can_spare(self, num_steps: int) -> bool:
        """Whether that is a small part of what is left."""
        return not self.is_over and SPARED * self._left >= num_steps

    @property
    def num_parts(self) -> int:
        """Of batches that are held out, to score this round by: closely twice as many, or more if
        there is time for it. A forward takes a third of a step."""
        if self._rough is None:
            return NUM_PARTS
        time_for = int(3 * self._left) // self._window.num_rounds
        return min(max(time_for, 2 * NUM_PARTS), MOST_PARTS)

    @property
    def factors(self) -> tuple[float, ...]:
        """What every replica tries in this round."""
        if self._rough is not None:
            return self._window.factors(self._round)
        return tuple(map(self._grid.factor, self._places()))

    def _places(self) -> tuple[int, ...]:
        return self._grid.places(self._first, self._round, self._rounds)

    @property
    def _window(self) -> Window:
        assert self._centre is not None
        return Window(self._centre, self._num_replicas)

    @property
    def outset(self) -> float | None:
        """What the weights score that everyone set out from."""
        return fmean(self._outsets) if self._outsets else None

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
        if outset is not None and abs(outset) < HUGE:
            self._outsets.append(outset)
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
            self._end(self._lengthened(refine(self._close, self._rough)))
        elif self._rough is None and self._round == self._rounds:
            self._decide(judge(self.points, self.outset))

    def interrupt(self, num_steps: int) -> None:
        """So many steps of a round were for nothing: it starts again, if there is time."""
        self.used += num_steps
        if self._rough is not None:
            self._look_closely_again(self._rough)
        elif self.used + (self._rounds - self._round) * self.num_steps > self._budget:
            seen = judge(self.points, self.outset) if self._seen else None
            self._end(seen or Verdict(None, 0, "nothing was tried"), INTERRUPTED)

    def _look_closely_again(self, rough: Verdict) -> None:
        """This round, if there is time; or all of them, as long as what is left allows; or it ends
        with what those that were made have shown."""
        rounds = self._window.num_rounds - self._round
        if self.used + rounds * self.num_steps <= self._budget:
            return
        self._coarse = self.used
        if self._has_room_to_look_closely():
            self._round, self._close = 0, []
        else:
            enough = len(self._close) >= FINE_POINTS // 2
            self._end(refine(self._close, rough) if enough else rough, INTERRUPTED)

    def _decide(self, verdict: Verdict) -> None:
        if self._brief and not self._is_hopeless(verdict):
            self._end(verdict, "no reason to leave what was given")
            return
        self._brief = False
        if verdict.shift == 0:
            if self._should_look_up(verdict):
                self._looked_up = True
                self._move(+1, self._grid.num_rounds)
            else:
                self._look_closely(verdict)
            return
        if verdict.factor is None and verdict.shift < 0 and -1 in self._shifts:
            if self.points[0].score is not None:
                # So little harms nobody: the outset was lucky, or losses grow by design.
                self._end(verdict._replace(edge=None))
                return
            low, high = self.points[0].factor, self.points[-1].factor
            raise Lost(
                f"every learning rate from {low:.3g} to {high:.3g} times the given one blows up: "
                "give a lower one, or look at the data and the initial weights."
            )
        # There is nothing to begin with: one sweep more, whatever the budget says.
        must = verdict.edge is not None and verdict.factor is None and verdict.reason != NOTHING
        # What led the other way may have been chance, if what is there is nothing but chance.
        turns = -verdict.shift in self._shifts and verdict.reason != NOISE
        rounds = self._grid.num_rounds if must else self._room()
        if rounds * self._num_replicas <= self._again or (turns and not must):
            self._end(verdict, NO_TIME)
            return
        self._shifts.append(verdict.shift)
        self._move(verdict.shift, rounds)

    def _is_hopeless(self, verdict: Verdict) -> bool:
        """Whether the given learning rate is far too high, whatever the schedule's peak may be."""
        if verdict.shift:
            return verdict.shift < 0
        best = verdict.factor or verdict.edge
        seen = math.inf if best is None else self._grown(best)
        return min(seen, most(self._optimizer, self._explosion(verdict))) < HOPELESS

    @property
    def _again(self) -> int:
        """So many neighbours are tried again, with other batches: the curve goes on from there."""
        return min(self._grid.num - 1, 2)

    def _move(self, way: int, rounds: int) -> None:
        low, high = min(self._seen), max(self._seen)
        further = low + self._again - rounds * self._num_replicas
        self._first = high - self._again + 1 if way > 0 else further
        self._round, self._rounds = 0, rounds

    def _explosion(self, verdict: Verdict) -> float | None:
        """Where scores explode; nobody knows where there is nothing to measure them by."""
        if math.isnan(verdict.reference):
            return None
        gain = math.inf  # if what was gained is chance, it says nothing
        if verdict.factor is not None:
            below = verdict.edge or math.inf  # beyond it a good score is luck
            scores = [p.score for p in self.points if p.score is not None and p.factor < below]
            gain = verdict.reference - min(scores, default=math.inf)
        return explosion(self.points, verdict.reference, gain)

    def _should_look_up(self, verdict: Verdict) -> bool:
        """Whether to spend a sweep on where scores explode, once: some never do."""
        if self._looked_up or self._explosion(verdict) is not None:
            return False
        sweep = self._grid.num_rounds * self._coarse_steps
        rounds = Window(1.0, self._num_replicas).num_rounds
        return self.used + sweep + rounds * self._coarse_steps <= self._budget

    def _look_closely(self, verdict: Verdict) -> None:
        """Around the first choice, or below an explosion where that is lower or all there is.

        If what is left of the budget allows rounds that are no shorter than those before.
        """
        exploded = self._explosion(verdict)
        likely = self._likely(exploded)
        centres = [centre for centre in (verdict.factor, likely) if centre and centre < math.inf]
        self._centre = min(centres, default=None)
        self._coarse = self.used
        # Where scores explode may tell more than what is gained.
        is_needless = verdict.factor and self._floor(exploded) > self._grown(verdict.factor)
        if self._centre is None or is_needless or not self._has_room_to_look_closely():
            self._end(verdict)
        else:
            self._rough, self._round = verdict, 0

    def _has_room_to_look_closely(self) -> bool:
        rounds, steps = self._window.num_rounds, self._fine_steps()
        return steps >= self._coarse_steps and self.used + rounds * steps <= self._budget

    def _lengthened(self, verdict: Verdict) -> Verdict:
        """What full rounds would have chosen."""
        assert self._rough is not None
        if verdict.factor is None or self._rough.factor is None or CLOSELY not in verdict.reason:
            return verdict  # a margin to what is lost is no choice
        coarse = Tried(self._rough.factor, self._coarse_steps)
        close = Tried(verdict.factor, self._fine_steps())
        factor = longer(coarse, close, FINE_STEPS, self.noise)
        if factor == verdict.factor:
            return verdict
        return verdict._replace(factor=factor, reason=f"{verdict.reason}, {SHORT}")

    def _end(self, verdict: Verdict, but: str = "") -> None:
        self.is_over, self.found, self.edge = True, verdict.factor, verdict.edge
        self.explosion = self._explosion(self._rough or verdict)
        self.reason = ", ".join(filter(None, [verdict.reason, but]))

    def _room(self) -> int:
        """For so many rounds of one sweep more."""
        if len(self._shifts) >= MOST_SWEEPS - 1:
            return 0
        return min(int(self._budget - self.used) // self._coarse_steps, self._grid.num_rounds)

    @property
    def noise(self) -> float | None:
        """That of one replica's gradient at the outset; none if it is not known."""
        if not self._agreements:
            return None
        alone, together = (fmean(column) for column in zip(*self._agreements, strict=True))
        return Agreement(alone, together).noise(self._num_replicas)

    def _grown(self, factor: float | None) -> float:
        """For the batch of all replicas."""
        growth = grown(self._rule, self._optimizer, self._num_replicas, self.noise)
        return 0.0 if factor is None else factor * growth

    def _likely(self, explosion: float | None) -> float:
        """What may be right for the batch of all replicas, by where scores explode; infinite if
        nobody knows."""
        return LIKELY * least("auto", self._optimizer, explosion) or math.inf

    def _is_hasty(self) -> bool:
        """Whether all rounds were so short that they choose far too high, or close ones have not
        confirmed what a sweep chose. Of SGD nobody knows."""
        if self._optimizer in PLAIN:
            return False
        if self._close:
            return self._fine_steps() < HASTY or CLOSELY not in self.reason
        return self._coarse_steps < HASTY

    def _floor(self, explosion: float | None) -> float:
        return least(self._rule, self._optimizer, explosion)

    def begin_with(self, *, peak: float = 1.0, highest: float = 1.0) -> Beginning:
        """What was found, for the batch of all replicas, and for a schedule that peaks so many
        times above its mean, and whose highest learning rate is so many times the given one.

        It stays below what was lost already with the batch of one, and within what was tried; but
        not far below where scores explode, whatever is merely worse than none in a few steps.
        """
        rise = max(highest, 1.0)
        lowest = self._floor(self.explosion) * peak
        if self.explosion is not None:
            lowest = min(lowest, self.explosion / 2 / rise)
        lost = min(filter(None, [self.edge, self.explosion]), default=None)
        if self.found is None:
            kept = Beginning(away_from(lost, rise) / rise, NOTHING_FOUND)
            return Beginning(lowest, TOO_LOW) if lowest else kept
        chosen = Beginning(
            self._grown(self.found) * peak,
            "what was found, for the batch of all replicas and the schedule",
        )
        # Where gradients are noise, short rounds are timid already.
        likely = self._likely(self.explosion) * (1 + (self.noise or 0.0) / CALM) * peak
        if self._is_hasty() and chosen.factor > likely:
            chosen = Beginning(likely, TOO_SHORT)
        limit = self.points[-1].factor if lost is None else lost / 2
        if chosen.factor > max(limit, self.found) / rise:
            chosen = Beginning(max(limit, self.found) / rise, LOST_OR_NOT_TRIED)
        return max(chosen, Beginning(lowest, TOO_LOW), key=lambda begin: begin.factor)

    def state_dict(self) -> dict[str, Any]:
        return {
            "grid": list(self._grid),
            "seen": [[place, *point] for place, point in self._seen.items()],
            "first": self._first,
            "round": self._round,
            "rounds": self._rounds,
            "used": self.used,
            "shifts": list(self._shifts),
            "looked_up": self._looked_up,
            "rough": None if self._rough is None else list(self._rough),
            "centre": self._centre,
            "coarse": self._coarse,
            "close": [list(point) for point in self._close],
            "agreements": [list(agreement) for agreement in self._agreements],
            "outsets": list(self._outsets),
            "brief": self._brief,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the rounds that were made; with other replicas from the first one on."""
        self.used, self._brief = state["used"], state.get("brief", False)
        if state["grid"] == list(self._grid):
            self._seen = {place: Point(*point) for place, *point in state["seen"]}
            self._first, self._round = state["first"], state["round"]
            self._rounds = state.get("rounds", self._grid.num_rounds)
            self._shifts = list(state["shifts"])
            self._looked_up = state.get("looked_up", False)
            rough = state.get("rough")
            self._rough = None if rough is None else Verdict(*rough)
            self._centre = state.get("centre", rough[0] if rough else None)
            self._coarse = state.get("coarse", 0)
            self._close = [Point(*point) for point in state.get("close", [])]
            self._agreements = [Agreement(*pair) for pair in state.get("agreements", [])]
            self._outsets = list(state.get("outsets", []))
        if self._rough is not None and self._fine_steps() < FEWEST_STEPS:
            self._end(self._rough, "the run has become too short to look closely")
