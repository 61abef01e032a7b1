"""The state of one knob: its scale, its multipliers and what was measured of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hdet.control.controller import ScaleState
from hdet.control.regression import DecayedSlope, Slope
from hdet.control.space import Space

MIN_DEGREES_OF_FREEDOM = 2.0
"""With fewer, an error may be tiny by chance, and its cycle would outweigh all others."""
INTERVAL_IN_ERRORS = 1.96
"""Half the width of a 95 % interval of a normal distribution, in standard errors."""


class KnobInfo(NamedTuple):
    """What the controller knows about a knob from the settings.

    Attributes:
        name: The name of the knob.
        space: The space of its values.
        spread: How far replicas explore: a factor 1 + spread, or a distance in a linear space.
        start: Its first value, or factor on the base schedule.
        groups: The parameter groups whose learning rate it scales; empty for any other knob.
    """

    name: str
    space: Space
    spread: float
    start: float = 1.0
    groups: tuple[int, ...] = ()


class Sensitivity(NamedTuple):
    """How the score answers to a knob: d score / d position, over the last cycles.

    Attributes:
        slope: The mean slope of the last cycles.
        error: Its standard error.
        cycles: The number of cycles that count; old ones fade.
    """

    slope: float
    error: float
    cycles: float

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the slope."""
        reach = INTERVAL_IN_ERRORS * self.error
        return self.slope - reach, self.slope + reach


@dataclass
class KnobState:
    """One knob: its state, and the value that every replica uses.

    Attributes:
        info: What the settings say about it.
        state: The state of its controller.
        multipliers: The multiplier of every replica (paper, eq. 1), for a permuted learning rate.
        levels: Otherwise the level of every replica, in units of the spread.
        slope: The slope of the last cycle in which the knob was explored.
        recent_slope: The mean slope of the cycles so far.
    """

    info: KnobInfo
    state: ScaleState
    multipliers: tuple[float, ...] = ()
    levels: tuple[float, ...] = ()
    slope: float | None = None
    recent_slope: DecayedSlope = DecayedSlope()  # noqa: RUF009 (it is a tuple)

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def width(self) -> float:
        return self.info.space.width(self.info.spread)

    def factor(self, replica: int) -> float:
        """What a replica uses: a factor on the base schedule, or a value."""
        if self.multipliers:
            return self.info.space.clamped(self.state.scale * self.multipliers[replica])
        return self._at(self.levels[replica])

    def factors(self) -> list[float]:
        """What every replica uses."""
        if self.multipliers:
            return [self.factor(replica) for replica in range(len(self.multipliers))]
        known = {level: self._at(level) for level in set(self.levels)}  # two, in most designs
        return list(map(known.__getitem__, self.levels))

    def positions(self, factors: Sequence[float]) -> list[float]:
        """The positions of values in the knob's space."""
        known = {factor: self.info.space.position(factor) for factor in set(factors)}
        return list(map(known.__getitem__, factors))

    def _at(self, level: float) -> float:
        return self.info.space.shifted(self.state.scale, self.width * self.state.narrow * level)

    def is_spread(self) -> bool:
        """Whether replicas use different values in this cycle."""
        if self.multipliers:
            return any(multiplier != 1.0 for multiplier in self.multipliers)
        return self.width != 0 and any(level != 0 for level in self.levels)

    def note_slope(self, slope: Slope | None) -> None:
        """Add the slope of a cycle to the mean, if its error is known well enough."""
        if slope is None or slope.error is None or slope.freedom < MIN_DEGREES_OF_FREEDOM:
            return
        self.recent_slope = self.recent_slope.and_then(slope.slope, slope.error)

    def sensitivity(self) -> Sensitivity | None:
        """How the score answers to the knob; None before the first slope with a known error."""
        recent_slope = self.recent_slope
        return (
            Sensitivity(recent_slope.slope, recent_slope.error, recent_slope.num)
            if recent_slope.num
            else None
        )


def first_state(about: KnobInfo) -> ScaleState:
    """The state of a knob before the first cycle."""
    if about.groups:
        return ScaleState(scale=about.start)
    return ScaleState(scale=about.start, floor=about.space.low)
