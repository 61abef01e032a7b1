"""The space of a knob: the scale on which its steps are even, and its bounds.

Plain Python, no torch: every process computes the same answer, bit for bit.
"""

import math
from dataclasses import dataclass

from hdet._validation import check_choice, check_number

KINDS = ("log", "linear", "logit")


@dataclass(frozen=True, slots=True)
class Space:
    """Values between two bounds, and their positions: log(v), v, or log(v / (1 - v)).

    >>> space = Space("log", 1e-4, 1.0)
    >>> round(space.shifted(0.01, math.log(10)), 12)
    0.1
    >>> space.shifted(0.5, math.log(10))
    1.0
    """

    kind: str
    low: float
    high: float

    def __post_init__(self) -> None:
        check_choice("space", self.kind, KINDS)
        check_number("bounds", self.low)
        check_number("bounds", self.high)
        least, most = {"log": (0.0, math.inf), "logit": (0.0, 1.0)}.get(
            self.kind, (-math.inf, math.inf)
        )
        if self.kind == "log" and not self.low > 0:
            raise ValueError(f"`bounds` of a log space must be above 0, got {self.low!r}.")
        if not least <= self.low < self.high <= most:
            raise ValueError(
                f"`bounds` must be two rising numbers in [{least:g}, {most:g}] for a {self.kind} "
                f"space, got ({self.low!r}, {self.high!r})."
            )

    def position(self, value: float) -> float:
        """The position of a value; 0 and 1 of a logit space lie at infinity."""
        if self.kind == "log":
            return math.log(value)
        if self.kind == "linear":
            return value
        if value <= 0:
            return -math.inf
        return math.inf if value >= 1 else math.log(value) - math.log1p(-value)

    def value(self, position: float) -> float:
        """The value at a position, within the bounds."""
        if self.kind == "log":
            value = math.exp(min(position, 700.0))
        elif self.kind == "linear":
            value = position
        else:
            value = 1 / (1 + math.exp(-position)) if position > -700 else 0.0
        return min(max(value, self.low), self.high)

    def clamped(self, value: float) -> float:
        """The value within the bounds. A zero stays, except in a linear space."""
        if value == 0 and self.kind != "linear":
            return value
        return min(max(value, self.low), self.high)

    def shifted(self, value: float, by: float) -> float:
        """The value at a distance `by` from another."""
        return self.value(self.position(value) + by) if by else value

    def width(self, spread: float) -> float:
        """The distance that a spread covers.

        A factor 1 + spread of the value in a log space, and of the odds in a logit space. The
        spread itself in a linear space.
        """
        return spread if self.kind == "linear" else math.log1p(spread)

    def carried(self, value: float, start: float, base: float) -> float:
        """Move `base` by the distance from `start` to `value`.

        A base at the rim of the space stays: no factor changes a weight decay of zero.

        >>> Space("log", 1e-4, 1.0).carried(0.2, start=0.1, base=0.01)
        0.02
        """
        if base == start:
            return value
        if self.kind == "linear":
            return min(max(base + value - start, self.low), self.high)
        if self.kind == "log":
            return base * value / start
        if not 0 < base < 1:
            return base
        return self.value(self.position(base) + self.position(value) - self.position(start))
