"""What the losses say about a knob: the paper's update of the scale (eqs. 4 to 8).

Plain Python floats, no torch. State in, evidence in, new state out: every process computes the
same move, bit for bit, and a move carries the reason a person reads in the record.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hdet.control.regression import Slope
from hdet.control.space import Space


class ScaleState(NamedTuple):
    """What a controller knows of one knob."""

    scale: float = 1.0
    """Centre of the spread: in units of the base schedule for a learning rate, else a value."""
    velocity: float = 0.0
    """Running mean of the hypergradient (paper, eq. 7), in the units of the scale; for Tracker the
    direction of the last move, 1 or -1."""
    decay: float = 0.0
    """Share of the scale that is lost at every sync (paper, gamma of eq. 8)."""
    floor: float = 1e-9
    """The least the scale may become."""
    pull: float = 0.0
    """The evidence so far, in standard errors (Tracker): a sum in which old cycles fade."""
    mass: float = 0.0
    """The variance that sum would have if there were no effect."""
    reach: float = 0.0
    """How far the next move may go, in units of the spread; 0 before the first."""
    narrow: float = 1.0
    """The share of its spread that is used: wide to search, narrow to track."""


class Evidence(NamedTuple):
    """What one cycle showed: for each replica that is fit, its loss and the factor it ran with."""

    losses: Sequence[float]
    factors: Sequence[float]
    errors: Sequence[float | None] = ()
    """The standard error of each loss, where it is known."""
    space: Space = Space("log", 1e-9, 1e9)
    """Where the knob lives."""
    width: float = 0.0
    """How far the spread reaches, in that space."""
    slope: Slope | None = None
    """d loss / d position from the joint fit; none if the knob cannot be told apart."""


class Move(NamedTuple):
    """A controller's answer to the evidence of one cycle."""

    state: ScaleState
    hypergradient: float
    decision: str
    reason: str
    error: float | None = None
    """The standard error of the hypergradient; none where the losses' are not known."""


class Controller(Protocol):
    """Moves a scale by the evidence of a cycle. Pure: the same answer on every process.

    One with a `cooldown` has nothing explored in that last share of the run.
    """

    @property
    def warmup_steps(self) -> int:
        """Steps before the first sync that may move the scale."""

    def weigh(self, losses: Sequence[float]) -> list[float] | None:
        """How much each replica's experience counts, for the record; none if it asks otherwise."""

    def update(self, state: ScaleState, evidence: Evidence) -> Move:
        """The new state of one knob, and why."""


def decay_only(state: ScaleState, reason: str, decision: str = "stay") -> Move:
    """A cycle without evidence: the decay goes on, and nothing else."""
    scale = max(state.scale * (1 - state.decay), min(state.floor, state.scale))
    return Move(state._replace(scale=scale), 0.0, decision, reason)


def direction(scale: float, decayed: float) -> str:
    """Which way a move went, beside the decay."""
    if scale > decayed:
        return "up"
    return "down" if scale < decayed else "stay"
