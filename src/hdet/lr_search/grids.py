"""Grids of learning rates: a sweep over decades, and a refinement around a choice."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hdet.lr_search.constants import (
    NUM_REPEATED_POINTS,
    POINTS_PER_DECADE,
    REFINE_ABOVE,
    REFINE_BELOW,
    REFINE_POINTS,
)


class SweepGrid(NamedTuple):
    """Learning rates on a log scale, known by their place; 0 is the lowest of the first sweep."""

    decades: float
    num_replicas: int

    @property
    def num_rounds(self) -> int:
        """Rounds of a sweep over the range, with one learning rate per replica and round."""
        return max(math.ceil(POINTS_PER_DECADE * self.decades / self.num_replicas), 1)

    @property
    def num(self) -> int:
        """Learning rates of a sweep."""
        return self.num_rounds * self.num_replicas

    @property
    def num_repeated(self) -> int:
        """Learning rates that a shifted sweep tries again, with other batches."""
        return min(self.num - 1, NUM_REPEATED_POINTS)

    def factor(self, place: int) -> float:
        """The learning rate at a place, in units of the given one.

        >>> grid = SweepGrid(4.0, 5)
        >>> [round(grid.factor(place), 3) for place in (0, 1, 9)]
        [0.01, 0.028, 100.0]
        """
        return float(10 ** (self.decades * (place / (self.num - 1) - 0.5)))

    def places(self, first: int, number: int, rounds: int) -> tuple[int, ...]:
        """The places of round `number` of `rounds`, as far from each other as possible.

        >>> grid = SweepGrid(4.0, 3)
        >>> grid.places(0, number=1, rounds=3), grid.places(7, 1, rounds=2)
        ((1, 4, 7), (8, 10, 12))
        """
        return tuple(range(first + number, first + rounds * self.num_replicas, rounds))


class RefinementGrid(NamedTuple):
    """The learning rates around a first choice, known by their place from below."""

    centre: float
    num_replicas: int

    @property
    def num_rounds(self) -> int:
        """Rounds of the refinement."""
        return math.ceil(REFINE_POINTS / self.num_replicas)

    def factors(self, number: int) -> tuple[float, ...]:
        """The learning rates of one round.

        >>> [round(factor, 3) for factor in RefinementGrid(1.0, 5).factors(0)]
        [0.125, 0.231, 0.429, 0.794, 1.47]
        """
        last = self.num_rounds * self.num_replicas - 1
        low, span = self.centre / REFINE_BELOW, REFINE_BELOW * REFINE_ABOVE
        places = range(number, last + 1, self.num_rounds)
        return tuple(low * float(span ** (place / last)) for place in places)


@dataclass
class SweepPosition:
    """Where a search stands: its sweep, its round, and the shifts so far.

    Attributes:
        grid: The learning rates of the sweeps.
        first: The lowest place of the current sweep.
        round: The number of the current round, also in a refinement.
        rounds: Rounds of the current sweep. A shifted sweep has fewer if the budget is short.
        shifts: The direction of each shift, -1 or 1.
        has_extended_up: Whether one sweep went up only to find where scores explode.
    """

    grid: SweepGrid
    first: int = 0
    round: int = 0
    rounds: int = 0
    shifts: list[int] = field(default_factory=list)
    has_extended_up: bool = False

    def __post_init__(self) -> None:
        self.rounds = self.rounds or self.grid.num_rounds

    @property
    def places(self) -> tuple[int, ...]:
        """The places that this round of a sweep tries."""
        return self.grid.places(self.first, self.round, self.rounds)

    def move(self, way: int, rounds: int, tried: Collection[int]) -> None:
        """Start a sweep of `rounds` rounds beyond the places that were tried."""
        low, high, repeated = min(tried), max(tried), self.grid.num_repeated
        further = low + repeated - rounds * self.grid.num_replicas
        self.first = high - repeated + 1 if way > 0 else further
        self.round, self.rounds = 0, rounds

    def state_dict(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "round": self.round,
            "rounds": self.rounds,
            "shifts": list(self.shifts),
            "looked_up": self.has_extended_up,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first, self.round = state["first"], state["round"]
        self.rounds = state.get("rounds", self.grid.num_rounds)
        self.shifts = list(state["shifts"])
        self.has_extended_up = state.get("looked_up", False)
