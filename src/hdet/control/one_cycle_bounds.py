"""The bounds of OneCycleLR, for a controller that takes over its decay."""

from typing import NamedTuple


class OneCycleBounds(NamedTuple):
    """The bounds of OneCycleLR.

    Attributes:
        peaks: The highest learning rate of each group.
        floors: The last learning rate of each group.
    """

    peaks: list[float]
    floors: list[float]
