"""SweepGrid: the learning rates of a search, on a log scale."""

import math
from collections.abc import Collection
from typing import NamedTuple

from hdet.lr_search.constants import SWEEP_POINTS


class SweepGrid(NamedTuple):
    """Learning rates known by their place; 0 is the lowest of the first sweep.

    Attributes:
        decades: The range of a sweep.
        num_replicas: Replicas, which try one learning rate each in a round.
        centre: The logarithm of the middle of the first sweep, in units of the given one.
    """

    decades: float
    num_replicas: int
    centre: float = 0.0

    @property
    def num_rounds(self) -> int:
        """Rounds of a sweep over the range."""
        return math.ceil(SWEEP_POINTS / self.num_replicas)

    @property
    def num(self) -> int:
        """Learning rates of a sweep."""
        return self.num_rounds * self.num_replicas

    def factor(self, place: int) -> float:
        """The learning rate at a place, in units of the given one.

        >>> grid = SweepGrid(4.0, 3)
        >>> [round(grid.factor(place), 3) for place in (0, 1, 5)]
        [0.01, 0.063, 100.0]
        """
        return float(10 ** (self.centre + self.decades * (place / (self.num - 1) - 0.5)))

    def places(self, first: int, number: int) -> tuple[int, ...]:
        """The places of round `number` of the sweep from `first` on, far from each other.

        >>> SweepGrid(4.0, 3).places(6, number=1)
        (7, 9, 11)
        """
        return tuple(range(first + number, first + self.num, self.num_rounds))

    def next_to(self, tried: Collection[int], way: int) -> int:
        """The lowest place of a sweep above (`way` 1) or below (-1) the places that were tried."""
        return max(tried) + 1 if way > 0 else min(tried) - self.num
