"""The steps that a learning-rate search may take, and how long its rounds are."""

from hdet.lr_search.constants import (
    MAX_SWEEPS,
    MIN_ROUND_STEPS,
    NUM_SWEEPS_ASKED_FOR,
    REFINE_STEPS,
    SWEEP_STEPS,
    SWEEPS_PER_BUDGET,
)
from hdet.lr_search.grids import SweepGrid
from hdet.lr_search.scout import Scout


def sweep_steps(scout: Scout, total_steps: int | None, num_replicas: int) -> int:
    """Steps of a round of a sweep. One sweep takes at most a quarter of the budget.

    >>> sweep_steps(Scout(), 1500, 8), sweep_steps(Scout(), 100_000, 8)
    (11, 12)
    """
    if scout.steps is not None:
        return scout.steps
    if total_steps is None:
        return SWEEP_STEPS
    rounds = SweepGrid(scout.decades, num_replicas).num_rounds
    affordable = int(scout.share * total_steps) // (SWEEPS_PER_BUDGET * rounds)
    return max(min(SWEEP_STEPS, affordable), MIN_ROUND_STEPS)


def check_room(scout: Scout, *, num_replicas: int, total_steps: int | None) -> None:
    """Refuse a run that has no room for one sweep.

    Raises:
        ValueError: One sweep takes more steps than the scout may take.
    """
    StepBudget(scout, num_replicas=num_replicas, total_steps=total_steps)


class StepBudget:
    """The steps of a search: how many it may take, and how many it has taken."""

    def __init__(self, scout: Scout, *, num_replicas: int, total_steps: int | None) -> None:
        """Set up from plain values.

        Args:
            scout: What the user has set.
            num_replicas: Replicas, which try one learning rate each in a round.
            total_steps: Steps of the run, or those that are left; None if not known.

        Raises:
            ValueError: One sweep takes more steps than the scout may take.
        """
        self._round_steps = scout.steps
        grid = SweepGrid(scout.decades, num_replicas)
        self.sweep_steps = sweep_steps(scout, total_steps, num_replicas)
        self.limit = _limit(scout, grid, self.sweep_steps, total_steps)
        self.used = 0
        self.used_by_sweeps = 0
        """The steps that were used when the refinement started."""

    def fits(self, num_steps: int) -> bool:
        """Whether `num_steps` more stay within the limit."""
        return self.used + num_steps <= self.limit

    def left_after(self, num_steps: int) -> float:
        """The steps that are left after `num_steps` more."""
        return self.limit - self.used - num_steps

    def refine_steps(self, num_rounds: int) -> int:
        """Steps of a round of the refinement, which shares what the sweeps have left."""
        if self._round_steps is not None:
            return self._round_steps
        return min(REFINE_STEPS, int(self.limit - self.used_by_sweeps) // num_rounds)

    def has_room_to_refine(self, num_rounds: int) -> bool:
        """Whether rounds of the refinement fit that are no shorter than those of a sweep."""
        steps = self.refine_steps(num_rounds)
        return steps >= self.sweep_steps and self.fits(num_rounds * steps)

    def sweep_rounds(self) -> int:
        """The rounds of a sweep that still fit."""
        return int(self.limit - self.used) // self.sweep_steps


def _limit(scout: Scout, grid: SweepGrid, round_steps: int, total_steps: int | None) -> float:
    sweep = grid.num_rounds * round_steps
    if total_steps is None:
        return (MAX_SWEEPS + 1) * sweep + REFINE_STEPS
    limit = scout.share * total_steps
    if scout.steps is not None:
        if sweep >= total_steps:
            raise ValueError(
                f"`scout` must be shorter than the run ({total_steps} steps), got a sweep of "
                f"{sweep} steps. Lower Scout(steps=...)."
            )
        # The user has asked for rounds of this length, so they may exceed the share.
        limit = max(limit, min(NUM_SWEEPS_ASKED_FOR * sweep, total_steps - 1))
    if sweep > limit:
        raise ValueError(
            f"`scout` must fit in its `share` ({scout.share:g}) of the run ({total_steps} steps): "
            f"trying {grid.num} learning rates takes {sweep} steps. Raise Scout(share=...) or use "
            "more replicas."
        )
    return limit
