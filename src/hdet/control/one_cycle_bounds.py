"""Where OneCycleLR peaks and ends, for a controller that takes over its decay."""

from typing import NamedTuple


class OneCycleBounds(NamedTuple):
    """Where OneCycleLR peaks and where it ends, for each knob."""

    peaks: list[float]
    floors: list[float]
