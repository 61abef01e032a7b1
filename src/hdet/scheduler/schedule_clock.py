"""ScheduleClock: keeps the base schedule in time with the run. It needs no torch.

A scout uses steps that the schedule was made for. After it, the rest of the schedule is compressed
into the rest of the run: some steps of the run advance the schedule by two.
"""

from collections.abc import Mapping
from typing import Any


class ScheduleClock:
    """Counts how far the base schedule is, and how far each step of the run advances it.

    >>> clock = ScheduleClock(0, total_steps=100)
    >>> clock.scouted(20)
    >>> [clock.due(step) for step in (21, 22, 23, 24)]
    [1, 1, 2, 1]
    """

    def __init__(self, base_step: int, total_steps: int | None) -> None:
        self.base_step = base_step
        self._total = total_steps
        self._scout_end: tuple[int, int] | None = None
        """The step of the run and of the schedule at which the scout ended."""

    @property
    def has_scouted(self) -> bool:
        """Whether a scout has used steps of the run."""
        return self._scout_end is not None

    def scouted(self, step: int) -> None:
        """Note that a scout has ended at a step of the run."""
        self._scout_end = (step, self.base_step)

    def due(self, step: int) -> int:
        """Return how many steps the schedule advances to reach this step of the run."""
        before = self.base_step
        self.base_step += 1
        if (
            self._scout_end is not None
            and self._total is not None
            and self._scout_end[0] < self._total
        ):
            since, base_since = self._scout_end
            self.base_step = base_since + round(
                (step - since) * (self._total - base_since) / (self._total - since)
            )
        return self.base_step - before

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        scout_end = None if self._scout_end is None else list(self._scout_end)
        return {"base_step": self.base_step, "scouted": scout_end}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Without a scout, schedule and run are at the same step."""
        self.base_step = state.get("base_step", state["step"])
        scout_end = state.get("scouted")
        if scout_end is not None and state["total_steps"] != self._total:
            scout_end = [state["step"], self.base_step]  # compress the rest anew
        self._scout_end = None if scout_end is None else (scout_end[0], scout_end[1])
