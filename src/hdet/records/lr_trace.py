"""The learning rates of a cycle, at the few steps that are needed to draw them.

Plain Python, no torch. A step is kept where a straight line between its neighbours would miss it.
A smooth schedule keeps few steps of a cycle; one with jumps keeps each jump.
"""

from collections.abc import Sequence

from hdet.records.events import LRTracePoints

TOLERANCE = 1e-6
"""How far a line may miss a value, in units of the largest value of the cycle."""


class LRTrace:
    """The learning rates and momenta of the consensus, step by step, since the last cycle ended."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all steps: a new cycle begins."""
        self._steps: list[int] = []
        self._lrs: list[list[float]] = []
        self._momenta: list[Sequence[float] | None] = []

    def add(self, step: int, lrs: Sequence[float], momenta: Sequence[float] | None) -> None:
        """Add a step.

        Args:
            step: Its number, counted from 0.
            lrs: The learning rate of each parameter group.
            momenta: The momentum of each group; none if the schedule does not cycle it.
        """
        self._steps.append(step)
        self._lrs.append(list(lrs))
        self._momenta.append(momenta)

    def points(self) -> LRTracePoints:
        """The steps that are kept, with the values of each parameter group."""
        places = self._places()
        momenta = [row for i in places if (row := self._momenta[i]) is not None]
        return LRTracePoints(
            steps=tuple(self._steps[i] for i in places),
            lrs=tuple(zip(*(self._lrs[i] for i in places), strict=True)),
            momenta=tuple(zip(*momenta, strict=True)) if len(momenta) == len(places) else None,
        )

    def _places(self) -> list[int]:
        """The first and the last step, and each step that the lines between kept steps miss."""
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
    """The place between two others that the line between them misses most, if by too much."""
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
