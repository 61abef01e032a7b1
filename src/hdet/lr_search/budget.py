"""The steps that a learning-rate search may take, and how long its rounds are."""

import math

from hdet.lr_search.constants import (
    MAX_SWEEPS,
    MIN_ROUND_STEPS,
    NUM_SWEEPS_ASKED_FOR,
    SWEEP_STEPS,
    SWEEPS_PER_BUDGET,
)
from hdet.lr_search.grids import SweepGrid
from hdet.lr_search.scout import Scout


def sweep_steps(scout: Scout, total_steps: int | None, num_replicas: int) -> int:
    """Steps of a round. A sweep takes at most half of the budget, or all of it in a short run.

    >>> sweep_steps(Scout(), 1500, 8), sweep_steps(Scout(), 300, 8), sweep_steps(Scout(), 600, 2)
    (8, 4, 3)
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
        self.round_steps = sweep_steps(scout, total_steps, num_replicas)
        self.limit = _limit(
            scout, SweepGrid(scout.decades, num_replicas), self.round_steps, total_steps
        )
        self._most = math.inf if total_steps is None else total_steps - 1
        """The steps that the search may take in need: the run must keep one."""
        self.limit = min(self.limit, self._most)
        self.used = 0

    def fits(self, num_steps: int) -> bool:
        """Whether `num_steps` more stay within the limit."""
        return self.used + num_steps <= self.limit

    def fits_in_run(self, num_steps: int) -> bool:
        """Whether `num_steps` more leave a step to the run, within the limit or not."""
        return self.used + num_steps <= self._most


def _limit(scout: Scout, grid: SweepGrid, round_steps: int, total_steps: int | None) -> float:
    sweep = grid.num_rounds * round_steps
    if total_steps is None:
        return MAX_SWEEPS * sweep
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
