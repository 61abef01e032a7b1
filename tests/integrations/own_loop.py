"""What a loop of the user's own does under every adapter that leaves it the loop."""

from collections.abc import Callable
from typing import Any, Protocol

import hdet
from tests.integrations import digits

SCOUT = hdet.Scout(share=0.25)
"""Room for a usual search in a run of a few hundred steps."""
EXPLORING: dict[str, Any] = {"scout": SCOUT, "spread": 0.2, "sync_every": 40}
"""Replicas differ inside of a cycle."""
IN_SCOUT, IN_CYCLE, END = 13, 210, 300


class Training(Protocol):
    """A run with an adapter, or a plain one."""

    scheduler: Any

    def run(self, until: int | None = None) -> None:
        """Train up to a number of optimizer steps."""

    def save(self, folder: str) -> None:
        """Save as the framework does."""

    def load(self, folder: str, step: int) -> None:
        """Load what was saved after this step."""

    def loss(self) -> float: ...

    def digest(self) -> str: ...

    def end(self) -> None:
        """Free the run, so that another one can begin in this process."""


def three_ways(make: Callable[..., Training], num_steps: int) -> dict[str, float]:
    """The loss of a plain run at a bad learning rate, of hdet there, and of a good plain run."""
    found = {}
    ways: list[tuple[str, float, dict[str, Any]]] = [
        ("bad", digits.BAD_LR, {}),
        ("hdet", digits.BAD_LR, {"scout": SCOUT}),
        ("good", digits.GOOD_LR, {}),
    ]
    for name, lr, options in ways:
        training = make(lr, num_steps, **options)
        training.run()
        found[name] = training.loss()
        training.end()
    return found


def resumes(make: Callable[..., Training], folder: str) -> dict[str, Any]:
    """Save in mid-scout and in mid-cycle, and go on from there; evaluate in mid-cycle."""
    first = make(digits.BAD_LR, END, **EXPLORING)
    first.run(IN_SCOUT)
    found: dict[str, Any] = {"scouting": first.scheduler.is_scouting}
    first.save(f"{folder}/scout")
    first.run(IN_CYCLE)
    found["mid-cycle"] = first.digest()
    with first.scheduler.consensus():
        found["consensus"] = first.digest()
    found["after consensus"] = first.digest()
    first.save(f"{folder}/cycle")
    found["saved"] = first.digest()
    first.run()
    first.scheduler.converge()
    found["end"] = first.digest()

    second = make(digits.BAD_LR, END, **EXPLORING)
    second.load(f"{folder}/scout", IN_SCOUT)
    found["still scouting"] = second.scheduler.is_scouting
    second.run(IN_CYCLE)
    second.save(f"{folder}/cycle again")
    second.run()
    second.scheduler.converge()
    found["end from scout"] = second.digest()

    third = make(digits.BAD_LR, END, **EXPLORING)
    third.load(f"{folder}/cycle", IN_CYCLE)
    found["clock"] = third.scheduler.last_epoch
    third.run()
    third.scheduler.converge()
    found["end from cycle"] = third.digest()
    return found
