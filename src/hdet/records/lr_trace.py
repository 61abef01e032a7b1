"""The learning rates of a cycle at some of its steps: enough to draw its course again.

Plain Python, no torch. A step is kept where a straight line between its neighbours would miss it:
few in a cycle of a smooth schedule, every turn of one that has turns.
"""

from collections.abc import Sequence
from typing import Any

TOLERANCE = 1e-6
"""How far a line may miss a value, in units of the largest of the cycle."""


class LRTrace:
    """What the consensus was trained with, step by step, since the last cycle ended."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._steps: list[int] = []
        self._lrs: list[list[float]] = []
        self._momenta: list[Sequence[float] | None] = []

    def add(self, step: int, lrs: Sequence[float], momenta: Sequence[float] | None) -> None:
        """The learning rate and momentum of each knob in a step, counted from 0."""
        self._steps.append(step)
        self._lrs.append(list(lrs))
        self._momenta.append(momenta)

    def points(self) -> dict[str, Any]:
        """The steps that were kept, and for each knob its values there."""
        places = self._places()
        cycled = [self._momenta[i] for i in places]
        return {
            "steps": [self._steps[i] for i in places],
            "lrs": [list(column) for column in zip(*(self._lrs[i] for i in places), strict=True)],
            "momenta": None
            if any(momenta is None for momenta in cycled)
            else [list(column) for column in zip(*cycled, strict=True)],
        }

    def _places(self) -> list[int]:
        """The ends, and by halves whatever a line between two that are kept would miss."""
        rows = [
            [*lrs, *(momenta or ())] for lrs, momenta in zip(self._lrs, self._momenta, strict=True)
        ]
        if len(rows) < 2:
            return list(range(len(rows)))
        limits = [TOLERANCE * max(map(abs, column)) for column in zip(*rows, strict=True)]
        kept, open_ends = {0, len(rows) - 1}, [(0, len(rows) - 1)]
        while open_ends:
            left, right = open_ends.pop()
            worst = _most_missed(rows, limits, left, right)
            if worst is not None:
                kept.add(worst)
                open_ends += [(left, worst), (worst, right)]
        return sorted(kept)


def _most_missed(
    rows: Sequence[Sequence[float]], limits: Sequence[float], left: int, right: int
) -> int | None:
    """The place between two that a line between them misses by most, if by too much."""
    most, place = 1.0, None
    for between in range(left + 1, right):
        share = (between - left) / (right - left)
        for value, first, last, limit in zip(
            rows[between], rows[left], rows[right], limits, strict=True
        ):
            missed = abs(value - first - share * (last - first))
            if missed > most * limit:
                most, place = missed / limit if limit else float("inf"), between
    return place
