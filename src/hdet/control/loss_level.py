"""Level: what the loss of a run usually is. Plain Python."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

LEVEL_CYCLES = 5
"""The level of the loss is the median of so many good cycles."""


class Level(NamedTuple):
    """A mean loss and its standard error."""

    loss: float
    error: float


def level_of(cycles: Sequence[Level]) -> Level:
    """The level after some good cycles; the lowest of single noisy losses would be too low.

    >>> level_of([Level(3.0, 0.1), Level(1.0, 0.1), Level(2.0, 0.2)])
    Level(loss=2.0, error=0.1)
    """
    if len(cycles) < 3:
        return cycles[-1]
    last = cycles[-LEVEL_CYCLES:]
    return Level(median(one.loss for one in last), median(one.error for one in last))


def scatter_of(losses: Sequence[float]) -> float:
    """The noise of losses by how they differ from one to the next: a trend is no noise.

    >>> scatter_of([1.0, 2.0, 3.0, 4.0])
    0.7071067811865476
    """
    squares = [(after - before) ** 2 for before, after in pairwise(losses)]
    return math.sqrt(fmean(squares) / 2) if squares else 0.0
