"""How the base schedule keeps time with the run. Plain Python, the same on every process.

A scout takes some of the steps that the schedule was made for. What is left of the schedule is
played over what is left of the run, a little faster: at times it makes two steps in one.
"""

from collections.abc import Mapping
from typing import Any


class ScheduleClock:
    """Where the base schedule is, and when it is to move.

    >>> clock = ScheduleClock(0, total_steps=100)
    >>> clock.scouted(20)
    >>> [clock.due(step) for step in (21, 22, 23, 24)]
    [1, 1, 2, 1]
    """

    def __init__(self, base_step: int, total_steps: int | None) -> None:
        self.base_step = base_step
        self._total = total_steps
        self._begun: tuple[int, int] | None = None
        """The step at which a scout was over, and where the base schedule was then."""

    @property
    def has_scouted(self) -> bool:
        return self._begun is not None

    def scouted(self, step: int) -> None:
        self._begun = (step, self.base_step)

    def due(self, step: int) -> int:
        """How many steps of the schedule bring it to where it is at this step of the run."""
        before = self.base_step
        self.base_step += 1
        if self._begun is not None and self._total is not None and self._begun[0] < self._total:
            since, begun = self._begun
            self.base_step = begun + round(
                (step - since) * (self._total - begun) / (self._total - since)
            )
        return self.base_step - before

    def state_dict(self) -> dict[str, Any]:
        begun = None if self._begun is None else list(self._begun)
        return {"base_step": self.base_step, "scouted": begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of a run that knew no scout, too: there both clocks agree."""
        self.base_step = state.get("base_step", state["step"])
        begun = state.get("scouted")
        if begun is not None and state["total_steps"] != self._total:
            begun = [state["step"], self.base_step]  # from here on over what is left now
        self._begun = None if begun is None else (begun[0], begun[1])
