"""Controllers: what moves a knob, from its state and the evidence of a cycle.

Plain Python floats, no torch. State in, evidence in, new state out: every process computes the
same move, bit for bit. A move carries the reason for the record.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hdet.control.regression import Slope
from hdet.control.space import Space


class ScaleState(NamedTuple):
    """What a controller knows about one knob.

    Attributes:
        scale: The centre of the spread: in units of the base schedule for a learning rate, else a
            value.
        velocity: The running mean of the hypergradient (paper, eq. 7), in the units of the scale.
            Tracker keeps the direction of the last move here, 1 or -1.
        decay: The share of the scale that is lost at every sync (paper, gamma of eq. 8).
        floor: The lowest value of the scale.
        pull: The evidence so far, in standard errors: a sum in which old cycles fade (Tracker).
        mass: The variance of that sum if the knob had no effect (Tracker).
        reach: The longest next move, in units of the spread; 0 before the first (Tracker).
        narrow: The share of the spread that is used: wide to search, narrow to track (Tracker).
    """

    scale: float = 1.0
    velocity: float = 0.0
    decay: float = 0.0
    floor: float = 1e-9
    pull: float = 0.0
    mass: float = 0.0
    reach: float = 0.0
    narrow: float = 1.0


class Evidence(NamedTuple):
    """What one cycle shows about one knob.

    Attributes:
        losses: The loss or mean score of each healthy replica.
        factors: The value of the knob that each of them used.
        errors: The standard error of each loss; None where it is not known.
        space: The space of the knob.
        width: How far the spread reaches, in that space.
        slope: d loss / d position from the joint fit; None if other knobs hide the effect.
    """

    losses: Sequence[float]
    factors: Sequence[float]
    errors: Sequence[float | None] = ()
    space: Space = Space("log", 1e-9, 1e9)
    width: float = 0.0
    slope: Slope | None = None


class Move(NamedTuple):
    """The answer of a controller to the evidence of one cycle.

    Attributes:
        state: The new state of the knob.
        hypergradient: Where the evidence pulls the scale.
        decision: "up", "down", "stay" or "abstain".
        reason: Why, for the record.
        error: The standard error of the hypergradient; None where it is not known.
    """

    state: ScaleState
    hypergradient: float
    decision: str
    reason: str
    error: float | None = None


class Controller(Protocol):
    """Moves the scale of a knob by the evidence of a cycle.

    A controller is pure: it gives the same answer on every process. These three members are all
    that a user's controller needs. The other members of `BaseController` are optional.
    """

    @property
    def warmup_steps(self) -> int:
        """Steps before the first sync that may move the scale."""

    def weigh(self, losses: Sequence[float]) -> list[float] | None:
        """The weight of each replica, for the record; None if the controller uses none."""

    def update(self, state: ScaleState, evidence: Evidence) -> Move:
        """The new state of one knob, and why."""


class BaseController(ABC):
    """A controller with all members, and the defaults of those that are optional.

    Attributes:
        warmup_steps: Steps before the first sync that may move the scale.
        cooldown: The last share of a run, of known length, in which nothing is explored.
        relative: Whether the learning rates of groups move only against each other.
        default_design: The design of `assignment.DESIGNS` that the run uses if the user sets none.
            A controller that judges each knob alone can use "permutation".
    """

    __slots__ = ()

    warmup_steps: int = 0
    cooldown: float = 0.0
    relative: bool = False
    default_design: str = "orthogonal"

    def weigh(self, losses: Sequence[float]) -> list[float] | None:
        """The weight of each replica, for the record; None if the controller uses none."""
        return None

    @abstractmethod
    def update(self, state: ScaleState, evidence: Evidence) -> Move:
        """The new state of one knob, and why."""


class _Completed(BaseController):
    """A controller of a class without the base: members that it lacks have their defaults."""

    def __init__(self, given: Controller) -> None:
        self._given = given
        self.warmup_steps = getattr(given, "warmup_steps", BaseController.warmup_steps)
        self.cooldown = getattr(given, "cooldown", BaseController.cooldown)
        self.relative = getattr(given, "relative", BaseController.relative)
        self.default_design = getattr(given, "default_design", BaseController.default_design)

    def weigh(self, losses: Sequence[float]) -> list[float] | None:
        return self._given.weigh(losses)

    def update(self, state: ScaleState, evidence: Evidence) -> Move:
        return self._given.update(state, evidence)


def complete_controller(given: Controller) -> BaseController:
    """The controller with all members; those that its class lacks have their defaults."""
    return given if isinstance(given, BaseController) else _Completed(given)


def decay_only(state: ScaleState, reason: str, decision: str = "stay") -> Move:
    """The move of a cycle without evidence: the decay goes on, and nothing else."""
    scale = max(state.scale * (1 - state.decay), min(state.floor, state.scale))
    return Move(state._replace(scale=scale), 0.0, decision, reason)


def direction(scale: float, decayed: float) -> str:
    """The direction of a move, without the decay."""
    if scale > decayed:
        return "up"
    return "down" if scale < decayed else "stay"
