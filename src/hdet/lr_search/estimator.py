"""The decision of a learning-rate search: from what was observed to a learning rate."""

from typing import NamedTuple


class Estimate(NamedTuple):
    """What a run begins with, in units of the given learning rate."""

    factor: float
    why: str
