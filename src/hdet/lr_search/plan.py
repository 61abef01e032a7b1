"""The plan of a learning-rate search: what to try next, within a budget of steps."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from hdet.lr_search.constants import (
    HALF_EFFECT_NOISE,
    HELD_OUT_BUDGET_SHARE,
    HOPELESS_SHARE,
    LIKELY_OVER_FLOOR,
    MAX_HELD_OUT_PARTS,
    MAX_SWEEPS,
    MIN_ROUND_STEPS,
    MIN_TRUSTED_STEPS,
    NUM_HELD_OUT_PARTS,
    OVERFLOW,
    POINTS_PER_DECADE,
    REFINE_ABOVE,
    REFINE_BELOW,
    REFINE_POINTS,
    REFINE_STEPS,
    SGD_LIKE,
    SWEEP_STEPS,
)
from hdet.lr_search.estimator import Estimate
from hdet.lr_search.observations import Observation
from hdet.lr_search.reasons import (
    CLOSELY,
    INTERRUPTED,
    LOST_OR_NOT_TRIED,
    NO_TIME,
    NOISE,
    NOTHING,
    NOTHING_FOUND,
    SHORT,
    TOO_LOW,
    TOO_SHORT,
)
from hdet.lr_search.response import (
    SweepResult,
    divergence_threshold,
    judge_sweep,
    keep_margin,
    refine_choice,
)
from hdet.lr_search.scout import AllRatesDiverged, Scout
from hdet.lr_search.transfer import (
    GradientNorms,
    RoundChoice,
    batch_scaling,
    extrapolate_to_horizon,
    lr_ceiling,
    lr_floor,
)


class SweepGrid(NamedTuple):
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
        >>> grid = SweepGrid(4.0, 5)
        >>> [round(grid.factor(place), 3) for place in (0, 1, 9)]
        [0.01, 0.028, 100.0]
        """
        return float(10 ** (self.decades * (place / (self.num - 1) - 0.5)))

    def places(self, first: int, number: int, rounds: int) -> tuple[int, ...]:
        """Those of one of so many rounds: as far from each other as can be.

        >>> grid = SweepGrid(4.0, 3)
        >>> grid.places(0, number=1, rounds=3), grid.places(7, 1, rounds=2)
        ((1, 4, 7), (8, 10, 12))
        """
        return tuple(range(first + number, first + rounds * self.num_replicas, rounds))


def sweep_steps(scout: Scout, total_steps: int | None, num_replicas: int) -> int:
    """Of a round over the whole range: a quarter of the budget is for one sweep.

    >>> sweep_steps(Scout(), 1500, 8), sweep_steps(Scout(), 100_000, 8)
    (11, 12)
    """
    if scout.steps is not None:
        return scout.steps
    if total_steps is None:
        return SWEEP_STEPS
    rounds = SweepGrid(scout.decades, num_replicas).num_rounds
    return max(min(SWEEP_STEPS, int(scout.share * total_steps) // (4 * rounds)), MIN_ROUND_STEPS)


def check_room(scout: Scout, *, num_replicas: int, total_steps: int | None) -> None:
    """Refuse a run that has no room for one sweep."""
    Search(scout, num_replicas=num_replicas, total_steps=total_steps)


class RefinementGrid(NamedTuple):
    """The learning rates around a first choice, known by their place from below."""

    centre: float
    num_replicas: int

    @property
    def num_rounds(self) -> int:
        return math.ceil(REFINE_POINTS / self.num_replicas)

    def factors(self, number: int) -> tuple[float, ...]:
        """Those of a round.

        >>> [round(factor, 3) for factor in RefinementGrid(1.0, 5).factors(0)]
        [0.125, 0.231, 0.429, 0.794, 1.47]
        """
        last = self.num_rounds * self.num_replicas - 1
        low, span = self.centre / REFINE_BELOW, REFINE_BELOW * REFINE_ABOVE
        places = range(number, last + 1, self.num_rounds)
        return tuple(low * float(span ** (place / last)) for place in places)


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
        self.lowest_lost: float | None = None
        self.divergence: float | None = None
        """The learning rate where scores explode; none if they did not."""
        self.last_factors: tuple[float, ...] = ()
        """Those of the round that has just ended."""
        self.used = 0
        """How many steps it has taken."""
        self._scout, self._num_replicas, self._is_brief = scout, num_replicas, brief
        self._rule, self._optimizer = scout.batch_rule if shared else "none", optimizer
        self._grid = SweepGrid(scout.decades, num_replicas)
        self._sweep_steps = sweep_steps(scout, total_steps, num_replicas)
        self._budget = self._budget_of(scout, total_steps)
        self._seen: dict[int, Observation] = {}
        self._first = self._round = 0
        self._rounds = self._grid.num_rounds
        """Of this sweep: one that goes further has fewer if there is no time for all."""
        self._shifts: list[int] = []
        self._has_extended_up = False
        """Whether it went up for nothing but to see where scores explode."""
        self._first_choice: SweepResult | None = None
        """A first choice, while what is around it is tried."""
        self._centre: float | None = None
        """Of what is tried then; none if there is nothing to go by."""
        self._sweep_steps_used = 0
        """The steps that were used before it was made."""
        self._refined: list[Observation] = []
        self._gradient_norms: list[GradientNorms] = []
        self._start_scores: list[float] = []
        """What the weights score that everyone set out from: by losses, in every round anew."""

    def _budget_of(self, scout: Scout, total_steps: int | None) -> float:
        """So many steps at most; a run that has no room for one sweep is refused."""
        sweep = self._grid.num_rounds * self._sweep_steps
        if total_steps is None:
            return (MAX_SWEEPS + 1) * sweep + REFINE_STEPS
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
        return self._sweep_steps if self._first_choice is None else self._refine_steps()

    def _refine_steps(self) -> int:
        """What is left, for all rounds around the first choice together."""
        if self._scout.steps is not None:
            return self._scout.steps
        return min(
            REFINE_STEPS, int(self._budget - self._sweep_steps_used) // self._window.num_rounds
        )

    @property
    def _left(self) -> float:
        """Steps, when it has done what it is about."""
        rounds = self._rounds if self._first_choice is None else self._window.num_rounds
        return self._budget - self.used - (rounds - self._round) * self.num_steps

    def can_spare(self, num_steps: int) -> bool:
        """Whether that is a small part of what is left."""
        return not self.is_over and HELD_OUT_BUDGET_SHARE * self._left >= num_steps

    @property
    def num_parts(self) -> int:
        """Of batches that are held out, to score this round by: closely twice as many, or more if
        there is time for it. A forward takes a third of a step."""
        if self._first_choice is None:
            return NUM_HELD_OUT_PARTS
        time_for = int(3 * self._left) // self._window.num_rounds
        return min(max(time_for, 2 * NUM_HELD_OUT_PARTS), MAX_HELD_OUT_PARTS)

    @property
    def factors(self) -> tuple[float, ...]:
        """What every replica tries in this round."""
        if self._first_choice is not None:
            return self._window.factors(self._round)
        return tuple(map(self._grid.factor, self._places()))

    def _places(self) -> tuple[int, ...]:
        return self._grid.places(self._first, self._round, self._rounds)

    @property
    def _window(self) -> RefinementGrid:
        assert self._centre is not None
        return RefinementGrid(self._centre, self._num_replicas)

    @property
    def start_score(self) -> float | None:
        """What the weights score that everyone set out from."""
        return fmean(self._start_scores) if self._start_scores else None

    @property
    def points(self) -> list[Observation]:
        """What was seen over the whole range."""
        return sorted(self._seen.values())

    @property
    def refined_observations(self) -> list[Observation]:
        """What was seen around the first choice, in longer rounds."""
        return sorted(self._refined)

    def record_round(
        self,
        points: Sequence[Observation],
        gradient_norms: GradientNorms | None = None,
        start_score: float | None = None,
    ) -> None:
        """What a round has shown, in the order of the replicas."""
        if start_score is not None and abs(start_score) < OVERFLOW:
            self._start_scores.append(start_score)
        self.used += self.num_steps
        self.last_factors = self.factors
        if gradient_norms is not None:
            self._gradient_norms.append(gradient_norms)
        if self._first_choice is not None:
            self._refined += points
        else:
            self._seen.update(zip(self._places(), points, strict=True))
        self._round += 1
        if self._first_choice is not None and self._round == self._window.num_rounds:
            self._end(self._extrapolated(refine_choice(self._refined, self._first_choice)))
        elif self._first_choice is None and self._round == self._rounds:
            self._decide(judge_sweep(self.points, self.start_score))

    def interrupt(self, num_steps: int) -> None:
        """So many steps of a round were for nothing: it starts again, if there is time."""
        self.used += num_steps
        if self._first_choice is not None:
            self._refine_again(self._first_choice)
        elif self.used + (self._rounds - self._round) * self.num_steps > self._budget:
            seen = judge_sweep(self.points, self.start_score) if self._seen else None
            self._end(seen or SweepResult(None, 0, "nothing was tried"), INTERRUPTED)

    def _refine_again(self, first_choice: SweepResult) -> None:
        """This round, if there is time; or all of them, as long as what is left allows; or it ends
        with what those that were made have shown."""
        rounds = self._window.num_rounds - self._round
        if self.used + rounds * self.num_steps <= self._budget:
            return
        self._sweep_steps_used = self.used
        if self._has_room_to_refine():
            self._round, self._refined = 0, []
        else:
            enough = len(self._refined) >= REFINE_POINTS // 2
            self._end(
                refine_choice(self._refined, first_choice) if enough else first_choice, INTERRUPTED
            )

    def _decide(self, verdict: SweepResult) -> None:
        if self._is_brief and not self._is_hopeless(verdict):
            self._end(verdict, "no reason to leave what was given")
            return
        self._is_brief = False
        if verdict.shift == 0:
            if self._should_extend_up(verdict):
                self._has_extended_up = True
                self._move(+1, self._grid.num_rounds)
            else:
                self._start_refinement(verdict)
            return
        if verdict.factor is None and verdict.shift < 0 and -1 in self._shifts:
            if self.points[0].score is not None:
                # So little harms nobody: the outset was lucky, or losses grow by design.
                self._end(verdict._replace(lowest_lost=None))
                return
            low, high = self.points[0].factor, self.points[-1].factor
            raise AllRatesDiverged(
                f"every learning rate from {low:.3g} to {high:.3g} times the given one blows up: "
                "give a lower one, or look at the data and the initial weights."
            )
        # There is nothing to begin with: one sweep more, whatever the budget says.
        must = (
            verdict.lowest_lost is not None and verdict.factor is None and verdict.reason != NOTHING
        )
        # What led the other way may have been chance, if what is there is nothing but chance.
        turns = -verdict.shift in self._shifts and verdict.reason != NOISE
        rounds = self._grid.num_rounds if must else self._room()
        if rounds * self._num_replicas <= self._num_repeated or (turns and not must):
            self._end(verdict, NO_TIME)
            return
        self._shifts.append(verdict.shift)
        self._move(verdict.shift, rounds)

    def _is_hopeless(self, verdict: SweepResult) -> bool:
        """Whether the given learning rate is far too high, whatever the schedule's peak may be."""
        if verdict.shift:
            return verdict.shift < 0
        best = verdict.factor or verdict.lowest_lost
        seen = math.inf if best is None else self._for_full_batch(best)
        return min(seen, lr_ceiling(self._optimizer, self._divergence(verdict))) < HOPELESS_SHARE

    @property
    def _num_repeated(self) -> int:
        """So many neighbours are tried again, with other batches: the curve goes on from there."""
        return min(self._grid.num - 1, 2)

    def _move(self, way: int, rounds: int) -> None:
        low, high = min(self._seen), max(self._seen)
        further = low + self._num_repeated - rounds * self._num_replicas
        self._first = high - self._num_repeated + 1 if way > 0 else further
        self._round, self._rounds = 0, rounds

    def _divergence(self, verdict: SweepResult) -> float | None:
        """Where scores explode; nobody knows where there is nothing to measure them by."""
        if math.isnan(verdict.reference):
            return None
        gain = math.inf  # if what was gained is chance, it says nothing
        if verdict.factor is not None:
            below = verdict.lowest_lost or math.inf  # beyond it a good score is luck
            scores = [p.score for p in self.points if p.score is not None and p.factor < below]
            gain = verdict.reference - min(scores, default=math.inf)
        return divergence_threshold(self.points, verdict.reference, gain)

    def _should_extend_up(self, verdict: SweepResult) -> bool:
        """Whether to spend a sweep on where scores explode, once: some never do."""
        if self._has_extended_up or self._divergence(verdict) is not None:
            return False
        sweep = self._grid.num_rounds * self._sweep_steps
        rounds = RefinementGrid(1.0, self._num_replicas).num_rounds
        return self.used + sweep + rounds * self._sweep_steps <= self._budget

    def _start_refinement(self, verdict: SweepResult) -> None:
        """Around the first choice, or below an explosion where that is lower or all there is.

        If what is left of the budget allows rounds that are no shorter than those before.
        """
        exploded = self._divergence(verdict)
        likely = self._likely_lr(exploded)
        centres = [centre for centre in (verdict.factor, likely) if centre and centre < math.inf]
        self._centre = min(centres, default=None)
        self._sweep_steps_used = self.used
        # Where scores explode may tell more than what is gained.
        is_needless = verdict.factor and self._floor(exploded) > self._for_full_batch(
            verdict.factor
        )
        if self._centre is None or is_needless or not self._has_room_to_refine():
            self._end(verdict)
        else:
            self._first_choice, self._round = verdict, 0

    def _has_room_to_refine(self) -> bool:
        rounds, steps = self._window.num_rounds, self._refine_steps()
        return steps >= self._sweep_steps and self.used + rounds * steps <= self._budget

    def _extrapolated(self, verdict: SweepResult) -> SweepResult:
        """What full rounds would have chosen."""
        assert self._first_choice is not None
        if (
            verdict.factor is None
            or self._first_choice.factor is None
            or CLOSELY not in verdict.reason
        ):
            return verdict  # a margin to what is lost is no choice
        coarse = RoundChoice(self._first_choice.factor, self._sweep_steps)
        close = RoundChoice(verdict.factor, self._refine_steps())
        factor = extrapolate_to_horizon(coarse, close, REFINE_STEPS, self.noise)
        if factor == verdict.factor:
            return verdict
        return verdict._replace(factor=factor, reason=f"{verdict.reason}, {SHORT}")

    def _end(self, verdict: SweepResult, but: str = "") -> None:
        self.is_over, self.found, self.lowest_lost = True, verdict.factor, verdict.lowest_lost
        self.divergence = self._divergence(self._first_choice or verdict)
        self.reason = ", ".join(filter(None, [verdict.reason, but]))

    def _room(self) -> int:
        """For so many rounds of one sweep more."""
        if len(self._shifts) >= MAX_SWEEPS - 1:
            return 0
        return min(int(self._budget - self.used) // self._sweep_steps, self._grid.num_rounds)

    @property
    def noise(self) -> float | None:
        """That of one replica's gradient at the outset; none if it is not known."""
        if not self._gradient_norms:
            return None
        alone, together = (fmean(column) for column in zip(*self._gradient_norms, strict=True))
        return GradientNorms(alone, together).noise(self._num_replicas)

    def _for_full_batch(self, factor: float | None) -> float:
        """For the batch of all replicas."""
        growth = batch_scaling(self._rule, self._optimizer, self._num_replicas, self.noise)
        return 0.0 if factor is None else factor * growth

    def _likely_lr(self, divergence: float | None) -> float:
        """What may be right for the batch of all replicas, by where scores explode; infinite if
        nobody knows."""
        return LIKELY_OVER_FLOOR * lr_floor("auto", self._optimizer, divergence) or math.inf

    def _are_rounds_too_short(self) -> bool:
        """Whether all rounds were so short that they choose far too high, or close ones have not
        confirmed what a sweep chose. Of SGD nobody knows."""
        if self._optimizer in SGD_LIKE:
            return False
        if self._refined:
            return self._refine_steps() < MIN_TRUSTED_STEPS or CLOSELY not in self.reason
        return self._sweep_steps < MIN_TRUSTED_STEPS

    def _floor(self, divergence: float | None) -> float:
        return lr_floor(self._rule, self._optimizer, divergence)

    def estimate(self, *, peak: float = 1.0, highest: float = 1.0) -> Estimate:
        """What was found, for the batch of all replicas, and for a schedule that peaks so many
        times above its mean, and whose highest learning rate is so many times the given one.

        It stays below what was lost already with the batch of one, and within what was tried; but
        not far below where scores explode, whatever is merely worse than none in a few steps.
        """
        rise = max(highest, 1.0)
        lowest = self._floor(self.divergence) * peak
        if self.divergence is not None:
            lowest = min(lowest, self.divergence / 2 / rise)
        lost = min(filter(None, [self.lowest_lost, self.divergence]), default=None)
        if self.found is None:
            kept = Estimate(keep_margin(lost, rise) / rise, NOTHING_FOUND)
            return Estimate(lowest, TOO_LOW) if lowest else kept
        chosen = Estimate(
            self._for_full_batch(self.found) * peak,
            "what was found, for the batch of all replicas and the schedule",
        )
        # Where gradients are noise, short rounds are timid already.
        likely = (
            self._likely_lr(self.divergence) * (1 + (self.noise or 0.0) / HALF_EFFECT_NOISE) * peak
        )
        if self._are_rounds_too_short() and chosen.factor > likely:
            chosen = Estimate(likely, TOO_SHORT)
        limit = self.points[-1].factor if lost is None else lost / 2
        if chosen.factor > max(limit, self.found) / rise:
            chosen = Estimate(max(limit, self.found) / rise, LOST_OR_NOT_TRIED)
        return max(chosen, Estimate(lowest, TOO_LOW), key=lambda begin: begin.factor)

    def state_dict(self) -> dict[str, Any]:
        return {
            "grid": list(self._grid),
            "seen": [[place, *point] for place, point in self._seen.items()],
            "first": self._first,
            "round": self._round,
            "rounds": self._rounds,
            "used": self.used,
            "shifts": list(self._shifts),
            "looked_up": self._has_extended_up,
            "rough": None if self._first_choice is None else list(self._first_choice),
            "centre": self._centre,
            "coarse": self._sweep_steps_used,
            "close": [list(point) for point in self._refined],
            "agreements": [list(gradient_norms) for gradient_norms in self._gradient_norms],
            "outsets": list(self._start_scores),
            "brief": self._is_brief,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the rounds that were made; with other replicas from the first one on."""
        self.used, self._is_brief = state["used"], state.get("brief", False)
        if state["grid"] == list(self._grid):
            self._seen = {place: Observation(*point) for place, *point in state["seen"]}
            self._first, self._round = state["first"], state["round"]
            self._rounds = state.get("rounds", self._grid.num_rounds)
            self._shifts = list(state["shifts"])
            self._has_extended_up = state.get("looked_up", False)
            first_choice = state.get("rough")
            self._first_choice = None if first_choice is None else SweepResult(*first_choice)
            self._centre = state.get("centre", first_choice[0] if first_choice else None)
            self._sweep_steps_used = state.get("coarse", 0)
            self._refined = [Observation(*point) for point in state.get("close", [])]
            self._gradient_norms = [GradientNorms(*pair) for pair in state.get("agreements", [])]
            self._start_scores = list(state.get("outsets", []))
        if self._first_choice is not None and self._refine_steps() < MIN_ROUND_STEPS:
            self._end(self._first_choice, "the run has become too short to look closely")
