"""The plan of a learning-rate search: what to try next, within a budget of steps."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hdet.lr_search.budget import StepBudget
from hdet.lr_search.constants import (
    FORWARDS_PER_STEP,
    HELD_OUT_BUDGET_SHARE,
    MAX_HELD_OUT_PARTS,
    MAX_SWEEPS,
    MIN_REFINED_POINTS,
    MIN_ROUND_STEPS,
    NUM_HELD_OUT_PARTS,
    NUM_REFINE_PARTS,
)
from hdet.lr_search.estimator import (
    Conclusion,
    Estimate,
    SearchContext,
    conclusion_of,
    divergence_of,
    estimate,
    floor_lr,
    is_hopeless,
    likely_lr,
    refined_choice,
    scale_to_full_batch,
)
from hdet.lr_search.grids import RefinementGrid, SweepGrid, SweepPosition
from hdet.lr_search.observations import Observation, RoundLog
from hdet.lr_search.reasons import Reason
from hdet.lr_search.response import (
    SweepResult,
    judge_sweep,
    refine_choice,
    sweep_result_of_state,
)
from hdet.lr_search.scout import AllRatesDiverged, Scout
from hdet.lr_search.transfer import GradientNorms


class Search:
    """A learning-rate search: sweeps over decades, then a refinement around the choice.

    The caller asks for `factors` and `num_steps`, trains, and calls `record_round`, until
    `is_over`. Then `estimate` tells what the run starts with.
    """

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
        """Set up from plain values.

        Args:
            scout: What the user has set.
            num_replicas: Replicas, which try one learning rate each in a round.
            total_steps: Steps of the run, or those that are left; None if not known.
            optimizer: The name of the optimizer's class.
            shared: Whether the run shares gradients after the search.
            brief: Whether one sweep is enough unless the given learning rate is hopeless.

        Raises:
            ValueError: One sweep takes more steps than the scout may take.
        """
        self.is_over = False
        self.found: float | None = None
        """The choice, for the batch of one replica; None if the scores prefer none."""
        self.reasons: tuple[Reason, ...] = ()
        self.lowest_lost: float | None = None
        self.divergence: float | None = None
        """The learning rate where scores explode; None if they do not."""
        self.last_factors: tuple[float, ...] = ()
        """The learning rates of the last complete round."""
        self.log = RoundLog()
        self.budget = StepBudget(scout, num_replicas=num_replicas, total_steps=total_steps)
        self._is_brief = brief
        self._context = SearchContext(
            num_replicas,
            optimizer,
            scout.batch_rule if shared else "none",
            self.budget.sweep_steps,
        )
        self._position = SweepPosition(SweepGrid(scout.decades, num_replicas))
        self._first_choice: SweepResult | None = None
        """The choice of the sweeps, while the refinement tries what lies around it."""
        self._centre: float | None = None
        """The centre of the refinement; None if there is nothing to go by."""

    @property
    def used(self) -> int:
        """The steps that the search has taken."""
        return self.budget.used

    @property
    def num_steps(self) -> int:
        """Steps of the current round."""
        if self._first_choice is None:
            return self.budget.sweep_steps
        return self.budget.refine_steps(self._window.num_rounds)

    @property
    def _window(self) -> RefinementGrid:
        assert self._centre is not None
        return RefinementGrid(self._centre, self._context.num_replicas)

    @property
    def _steps_ahead(self) -> int:
        """Steps of the rounds that are left of this sweep or refinement."""
        is_sweep = self._first_choice is None
        rounds = self._position.rounds if is_sweep else self._window.num_rounds
        return (rounds - self._position.round) * self.num_steps

    def can_spare(self, num_steps: int) -> bool:
        """Whether `num_steps` are a small part of what the planned rounds leave."""
        left = self.budget.left_after(self._steps_ahead)
        return not self.is_over and HELD_OUT_BUDGET_SHARE * left >= num_steps

    @property
    def num_parts(self) -> int:
        """Held-out parts that score this round: more in a refinement if there is time."""
        if self._first_choice is None:
            return NUM_HELD_OUT_PARTS
        left = self.budget.left_after(self._steps_ahead)
        affordable = int(FORWARDS_PER_STEP * left) // self._window.num_rounds
        return min(max(affordable, NUM_REFINE_PARTS), MAX_HELD_OUT_PARTS)

    @property
    def factors(self) -> tuple[float, ...]:
        """The learning rate of each replica in this round, in units of the given one."""
        if self._first_choice is not None:
            return self._window.factors(self._position.round)
        return tuple(map(self._position.grid.factor, self._position.places))

    @property
    def start_score(self) -> float | None:
        """The score of the weights before the search; None if not known."""
        return self.log.start_score

    @property
    def points(self) -> list[Observation]:
        """The observations of all sweeps, by learning rate."""
        return self.log.points

    @property
    def refined_observations(self) -> list[Observation]:
        """The observations of the refinement, by learning rate."""
        return self.log.refined

    @property
    def noise(self) -> float | None:
        """The gradient noise of one replica before the search; None if not known."""
        return self.log.noise(self._context.num_replicas)

    def record_round(
        self,
        points: Sequence[Observation],
        gradient_norms: GradientNorms | None = None,
        start_score: float | None = None,
    ) -> None:
        """Record a complete round and plan the next one.

        Args:
            points: One observation per replica, in the order of the replicas.
            gradient_norms: Gradient norms of the first step of the round.
            start_score: The score of the weights before the search.

        Raises:
            AllRatesDiverged: All learning rates blow up, also in a lower range.
        """
        self.log.add_context(gradient_norms, start_score)
        self.budget.used += self.num_steps
        self.last_factors = self.factors
        position, first_choice = self._position, self._first_choice
        if first_choice is not None:
            self.log.add_refined(points)
            position.round += 1
            if position.round == self._window.num_rounds:
                observed = self.log.observations(self._context.num_replicas)
                self._end(refined_choice(first_choice, observed, self._full_context()))
            return
        self.log.add_sweep(position.places, points)
        position.round += 1
        if position.round == position.rounds:
            self._decide(judge_sweep(self.points, self.start_score))

    def interrupt(self, num_steps: int) -> None:
        """Count steps of a round that failed. The round starts again if there is time."""
        self.budget.used += num_steps
        if self._first_choice is not None:
            self._refine_again(self._first_choice)
        elif not self.budget.fits(self._steps_ahead):
            seen = judge_sweep(self.points, self.start_score) if self.points else None
            nothing = SweepResult(None, 0, (Reason.NOTHING_TRIED,))
            self._end(seen or nothing, Reason.INTERRUPTED)

    def _refine_again(self, first_choice: SweepResult) -> None:
        """Repeat this round; or all rounds, shorter; or end with the complete ones."""
        if self.budget.fits(self._steps_ahead):
            return
        self.budget.used_by_sweeps = self.used
        if self.budget.has_room_to_refine(self._window.num_rounds):
            self._position.round = 0
            self.log.restart_refinement()
            return
        refined = self.refined_observations
        enough = len(refined) >= MIN_REFINED_POINTS
        result = refine_choice(refined, first_choice) if enough else first_choice
        self._end(result, Reason.INTERRUPTED)

    def _decide(self, result: SweepResult) -> None:
        """Plan what follows a complete sweep."""
        observed = self.log.observations(self._context.num_replicas)
        if self._is_brief and not is_hopeless(result, observed, self._context):
            self._end(result, Reason.GIVEN_IS_NOT_HOPELESS)
            return
        self._is_brief = False
        if result.shift:
            self._shift(result)
        elif self._should_extend_up(result):
            self._position.has_extended_up = True
            self._position.move(+1, self._position.grid.num_rounds, self.log.places)
        else:
            self._start_refinement(result)

    def _shift(self, result: SweepResult) -> None:
        """Move the range to where the sweep says that the best lies, if there is time."""
        position, grid = self._position, self._position.grid
        if result.factor is None and result.shift < 0 and -1 in position.shifts:
            self._end_without_gain(result)
            return
        # There is nothing to start with, so one more sweep follows, whatever the budget says.
        must = (
            result.lowest_lost is not None
            and result.factor is None
            and Reason.NO_GAIN not in result.reasons
        )
        # What led the other way may have been chance, if these scores are nothing but noise.
        turns = -result.shift in position.shifts and Reason.ONLY_NOISE not in result.reasons
        can_shift = len(position.shifts) < MAX_SWEEPS - 1
        affordable = min(self.budget.sweep_rounds(), grid.num_rounds) if can_shift else 0
        rounds = grid.num_rounds if must else affordable
        if rounds * grid.num_replicas <= grid.num_repeated or (turns and not must):
            self._end(result, Reason.NO_TIME)
            return
        position.shifts.append(result.shift)
        position.move(result.shift, rounds, self.log.places)

    def _end_without_gain(self, result: SweepResult) -> None:
        """End after a lower range that gained nothing, or refuse to go on."""
        if self.points[0].score is not None:
            # So low a learning rate does no harm: the start was lucky, or losses grow by design.
            self._end(result._replace(lowest_lost=None))
            return
        low, high = self.points[0].factor, self.points[-1].factor
        raise AllRatesDiverged(
            f"training diverges at every learning rate that the scout tried, from {low:.3g} to "
            f"{high:.3g} times the given one. Give a lower learning rate, or check the data and "
            "the initial weights."
        )

    def _should_extend_up(self, result: SweepResult) -> bool:
        """Whether to spend one sweep on where scores explode. Some scores never do."""
        position = self._position
        if position.has_extended_up or divergence_of(result, self.points) is not None:
            return False
        refinement = RefinementGrid(1.0, self._context.num_replicas).num_rounds
        return self.budget.fits((position.grid.num_rounds + refinement) * self.budget.sweep_steps)

    def _start_refinement(self, result: SweepResult) -> None:
        """Refine around the choice, or below an explosion where that is lower or all there is.

        The search ends instead if rounds that are no shorter than before do not fit.
        """
        observed = self.log.observations(self._context.num_replicas)
        exploded = divergence_of(result, observed.points)
        likely = likely_lr(exploded, self._context)
        centres = [centre for centre in (result.factor, likely) if centre and centre < math.inf]
        self._centre = min(centres, default=None)
        self.budget.used_by_sweeps = self.used
        # The floor decides in any case where it lies above the choice.
        is_needless = bool(result.factor) and floor_lr(
            exploded, self._context
        ) > scale_to_full_batch(result.factor or 0.0, observed, self._context)
        has_room = self._centre is not None and self.budget.has_room_to_refine(
            self._window.num_rounds
        )
        if is_needless or not has_room:
            self._end(result)
        else:
            self._first_choice, self._position.round = result, 0

    def _end(self, result: SweepResult, *more: Reason) -> None:
        done = conclusion_of(result, self.points, self._first_choice, *more)
        self.is_over = True
        self.found, self.lowest_lost, self.divergence, self.reasons = done

    def _full_context(self) -> SearchContext:
        """The context with the length of the refinement's rounds."""
        if self._centre is None:
            return self._context
        return self._context._replace(
            refine_steps=self.budget.refine_steps(self._window.num_rounds)
        )

    def estimate(self, *, peak: float = 1.0, highest: float = 1.0) -> Estimate:
        """The learning rate that the run starts with.

        Args:
            peak: The peak of the schedule over its mean.
            highest: The highest learning rate of the schedule over the given one.
        """
        done = Conclusion(self.found, self.lowest_lost, self.divergence, self.reasons)
        context = self._full_context()._replace(peak=peak, highest=highest, conclusion=done)
        return estimate(self.log.observations(self._context.num_replicas), context)

    def state_dict(self) -> dict[str, Any]:
        choice = self._first_choice
        return {
            "grid": list(self._position.grid),
            "used": self.used,
            "rough": None if choice is None else choice.state(),
            "centre": self._centre,
            "coarse": self.budget.used_by_sweeps,
            "brief": self._is_brief,
            **self._position.state_dict(),
            **self.log.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the rounds of a state; with another grid from the first round on."""
        self.budget.used, self._is_brief = state["used"], state.get("brief", False)
        if state["grid"] == list(self._position.grid):
            self._position.load_state_dict(state)
            self.log.load_state_dict(state)
            saved = state.get("rough")
            self._first_choice = None if saved is None else sweep_result_of_state(saved)
            self._centre = state.get("centre", saved[0] if saved else None)
            self.budget.used_by_sweeps = state.get("coarse", 0)
        if self._first_choice is not None and self.num_steps < MIN_ROUND_STEPS:
            self._end(self._first_choice, Reason.RUN_TOO_SHORT_TO_REFINE)
