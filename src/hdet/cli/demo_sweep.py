"""The sweep that the demo is compared with: made beforehand, and stored beside this file.

`python -m tools.demo_sweep` makes it again: plain runs of each task over a grid of learning rates.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hdet.records.reference import Reference

FILE = Path(__file__).with_name("demo_sweep.json")


class Sweep(NamedTuple):
    """The best of a sweep.

    Attributes:
        lr: The learning rate with the lowest mean loss.
        runs: The number of learning rates that were tried, one run each.
        seeds: The number of seeds, over which losses and accuracies have a range.
        loss: The lowest and the highest held-out loss at the best learning rate.
        accuracy: The lowest and the highest accuracy; None where the task has none.
    """

    lr: float
    runs: int
    seeds: int
    loss: tuple[float, float]
    accuracy: tuple[float, float] | None

    @property
    def price(self) -> str:
        """What a user would pay for it."""
        return f"{self.runs} runs"

    def reference(self, task: str) -> Reference:
        """The band that a report draws."""
        text = f"best of a sweep that takes {self.runs} runs (range of {self.seeds} seeds)"
        bands = {"loss": self.loss}
        if self.accuracy is not None:
            bands["accuracy"] = self.accuracy
        return Reference(name=task, text=text, runs=self.runs, lr=self.lr, bands=bands)


@cache
def _stored() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return stored


def sweep_of(task: str) -> Sweep:
    """The best of the sweep over a task.

    >>> sweep_of("conv-net").price
    '9 runs'
    """
    best = _stored()["best"][task]
    ranges = {name: (best[name][0], best[name][1]) for name in ("loss", "accuracy") if name in best}
    return Sweep(best["lr"], best["runs"], best["seeds"], ranges["loss"], ranges.get("accuracy"))
