"""The plan of a learning-rate search: what to try next, within a budget of steps."""

from collections.abc import Mapping, Sequence
from typing import Any

from hdet.lr_search.budget import StepBudget
from hdet.lr_search.constants import MAX_SWEEPS
from hdet.lr_search.estimator import Estimate, SearchContext, estimate
from hdet.lr_search.evidence import divergence_of, gain_peak
from hdet.lr_search.grids import SweepGrid
from hdet.lr_search.observations import Observation, Observations, RoundLog
from hdet.lr_search.prior import Prior
from hdet.lr_search.reasons import Reason
from hdet.lr_search.scout import AllRatesDiverged, Scout


class Search:
    """A learning-rate search: one sweep over decades, and more beside it where that is needed.

    The caller asks for `factors` and `num_steps`, trains, and calls `record_round`, until
    `is_over`. Then `estimate` tells what the run starts with.
    """

    def __init__(
        self,
        scout: Scout,
        *,
        num_replicas: int,
        total_steps: int | None,
        prior: Prior | None = None,
    ) -> None:
        """Set up from plain values.

        Args:
            scout: What the user has set.
            num_replicas: Replicas, which try one learning rate each in a round.
            total_steps: Steps of the run, or those that are left; None if not known.
            prior: The usual learning rate, in units of the given one; None if not known.

        Raises:
            ValueError: One sweep takes more steps than the scout may take.
        """
        self.is_over = False
        self.reasons: tuple[Reason, ...] = ()
        self.last_factors: tuple[float, ...] = ()
        """The learning rates of the last complete round."""
        self.budget = StepBudget(scout, num_replicas=num_replicas, total_steps=total_steps)
        self._prior = prior
        centre = 0.0 if prior is None else prior.mean
        self._grid = SweepGrid(scout.decades, num_replicas, centre)
        self._log = RoundLog()
        self._first = 0
        """The lowest place of the current sweep."""
        self._round = 0
        self._ways: list[int] = []
        """The direction of each further sweep, -1 or 1."""

    @property
    def used(self) -> int:
        """The steps that the search has taken."""
        return self.budget.used

    @property
    def num_steps(self) -> int:
        """Steps of the current round."""
        return self.budget.round_steps

    @property
    def factors(self) -> tuple[float, ...]:
        """The learning rate of each replica in this round, in units of the given one."""
        return tuple(map(self._grid.factor, self._grid.places(self._first, self._round)))

    @property
    def observations(self) -> Observations:
        """All that was observed so far."""
        return self._log.observations

    @property
    def start_score(self) -> float | None:
        """The score of the weights before the search; None if not known."""
        return self.observations.start_score

    @property
    def divergence(self) -> float | None:
        """The learning rate from which on scores explode; None if none does."""
        seen = self.observations
        return divergence_of(seen.points, seen.reference)

    def can_spare(self, num_steps: int) -> bool:
        """Whether `num_steps` more fit in beside the rounds that are left of this sweep."""
        return not self.is_over and self.budget.fits(self._steps_ahead + num_steps)

    @property
    def _steps_ahead(self) -> int:
        """Steps of the rounds that are left of this sweep."""
        return (self._grid.num_rounds - self._round) * self.num_steps

    def record_round(self, points: Sequence[Observation], start_score: float | None = None) -> None:
        """Record a complete round and plan the next one.

        Args:
            points: One observation per replica, in the order of the replicas.
            start_score: The score of the weights before the search.

        Raises:
            AllRatesDiverged: All learning rates blow up, also in a lower range.
        """
        self.budget.used += self.num_steps
        self.last_factors = self.factors
        self._log.add(self._grid.places(self._first, self._round), points, start_score)
        self._round += 1
        if self._round == self._grid.num_rounds:
            self._plan_sweep()

    def interrupt(self, num_steps: int) -> None:
        """Count steps of a round that failed. The round starts again if there is time."""
        self.budget.used += num_steps
        if not self.budget.fits(self._steps_ahead):
            self._end(Reason.INTERRUPTED)

    def _plan_sweep(self) -> None:
        """Sweep the range beside, if the best learning rate may lie there; or end."""
        way, must = self._way()
        if not way or -way in self._ways:
            self._end(Reason.SWEPT)
            return
        num_steps = self._grid.num_rounds * self.num_steps
        fits = self.budget.fits_in_run if must else self.budget.fits
        if len(self._ways) == MAX_SWEEPS - 1 or not fits(num_steps):
            if must:
                self._give_up()
            self._end(Reason.NO_TIME)
            return
        self._ways.append(way)
        self._first, self._round = self._grid.next_to(self._log.places, way), 0

    def _way(self) -> tuple[int, bool]:
        """Where the best learning rate may lie, and whether the search must look there.

        Where all learning rates explode there is nothing to start with.
        """
        seen = self.observations
        if all(point.score is None for point in seen.points):
            return -1, True
        divergence = divergence_of(seen.points, seen.reference)
        lowest = next((point.factor for point in seen.points if not point.bad_batch), 0.0)
        if divergence is not None and divergence <= lowest:
            return -1, True
        peak = gain_peak(seen.points, seen.reference)
        if peak is None:
            return (1 if divergence is None else 0), False
        scores = [(p.score, place) for place, p in enumerate(seen.points) if p.score is not None]
        best = min(scores)[1]
        if best == 0:
            return -1, False
        return (1 if best == len(seen.points) - 1 else 0), False

    def _give_up(self) -> None:
        points = self.observations.points
        low, high = points[0].factor, points[-1].factor
        raise AllRatesDiverged(
            f"training diverges at every learning rate that the scout tried, from {low:.3g} to "
            f"{high:.3g} times the given one. Give a lower learning rate, or check the data and "
            "the initial weights."
        )

    def _end(self, *reasons: Reason) -> None:
        self.is_over, self.reasons = True, reasons

    def estimate(
        self,
        *,
        peak: float = 1.0,
        highest: float = 1.0,
        bounds: tuple[float, float] = (0.0, float("inf")),
    ) -> Estimate:
        """The learning rate that the run starts with.

        Args:
            peak: The peak of the schedule over its mean.
            highest: The highest learning rate of the schedule over the given one.
            bounds: The lowest and the highest peak, in units of the given learning rate.
        """
        return estimate(self.observations, SearchContext(self._prior, peak, highest, bounds))

    def state_dict(self) -> dict[str, Any]:
        return {
            "grid": list(self._grid),
            "used": self.used,
            "first": self._first,
            "round": self._round,
            "ways": list(self._ways),
            **self._log.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the rounds of a state; with another grid from the first round on."""
        self.budget.used = state["used"]
        if state["grid"] == list(self._grid):
            self._first, self._round = state["first"], state["round"]
            self._ways = list(state["ways"])
            self._log.load_state_dict(state)
            if self._round == self._grid.num_rounds:
                self._plan_sweep()
        if not self.is_over and not self.budget.fits_in_run(self._steps_ahead):
            self._end(Reason.INTERRUPTED)  # the run resumes with fewer steps
