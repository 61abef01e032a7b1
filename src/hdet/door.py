"""Everything that is checked before the first step, on every replica alike.

A bad argument on one replica, or two replicas that disagree, is an error on all of them: nobody
is left waiting for a replica that has already gone.
"""

from dataclasses import asdict, dataclass
from typing import Any

from hdet.controller import Controller
from hdet.replicas import Replicas
from hdet.validation import check_choice, check_integer, check_range

GRADIENTS = ("shared", "local")
OPTIMIZER_STATES = ("keep", "average", "reset")
OVERRUNS = ("hold", "extend", "raise")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a run is set to; equal on all replicas."""

    spread: float
    sync_every: int
    controller: Controller | None
    gradients: str
    optimizer_state: str
    total_steps: int | None
    on_overrun: str
    seed: int

    def __post_init__(self) -> None:
        number = isinstance(self.spread, (int, float)) and not isinstance(self.spread, bool)
        check_range("spread", self.spread, "[0, 1)", number and 0 <= self.spread < 1)
        check_integer("sync_every", self.sync_every, at_least=1)
        check_integer("seed", self.seed, at_least=0)
        check_choice("gradients", self.gradients, GRADIENTS)
        check_choice("optimizer_state", self.optimizer_state, OPTIMIZER_STATES)
        check_choice("on_overrun", self.on_overrun, OVERRUNS)
        if self.controller is not None and not hasattr(self.controller, "update"):
            raise TypeError(
                "`controller` must be a controller such as hdet.PaperController() or None, "
                f"got {self.controller!r}."
            )
        if self.total_steps is not None:
            check_integer("total_steps", self.total_steps, at_least=1)
            if self.controller is not None and self.controller.warmup_steps >= self.total_steps:
                raise ValueError(
                    f"`warmup_steps` must be less than `total_steps` ({self.total_steps}), "
                    f"got {self.controller.warmup_steps}."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What one replica says of itself at the door."""

    settings: dict[str, Any]
    parameters: dict[str, tuple[tuple[int, ...], str, tuple[int, ...], int]]
    perturbed: bool


def describe(settings: Settings, schedule: dict[str, Any], parameters: Any) -> Description:
    return Description(
        settings={**asdict(settings), **schedule},
        parameters=parameters.describe(),
        perturbed=parameters.is_perturbed(),
    )


def agree(replicas: Replicas, mine: Description | Exception) -> bool:
    """Raise on all replicas if one of them has a problem or differs; whether weights differ."""
    if isinstance(mine, Exception):
        replicas.gather_objects(f"{type(mine).__name__}: {mine}")
        raise mine
    everyone = replicas.gather_objects(mine)
    for replica, theirs in enumerate(everyone):
        if isinstance(theirs, str):
            raise ValueError(f"replica {replica} could not start: {theirs}")
    first = everyone[0]
    on_purpose = all(theirs.perturbed for theirs in everyone)
    weights_differ = False
    for replica, theirs in enumerate(everyone):
        difference = _different_settings(
            first.settings, theirs.settings, replica
        ) or _different_parameters(first.parameters, theirs.parameters, replica)
        weights = _different_weights(first.parameters, theirs.parameters, replica)
        if difference or (weights and not on_purpose):
            raise ValueError(f"replicas must be alike: {difference or weights}")
        weights_differ |= weights is not None
    return weights_differ


def _different_settings(first: dict[str, Any], other: dict[str, Any], replica: int) -> str | None:
    for key in [*first, *other]:
        if first.get(key) != other.get(key):
            return (
                f"`{key}` is {first.get(key)!r} on replica 0 "
                f"and {other.get(key)!r} on replica {replica}."
            )
    return None


def _different_parameters(first: dict[str, Any], other: dict[str, Any], replica: int) -> str | None:
    for name in [*first, *other]:
        if name not in first or name not in other:
            there, missing = (0, replica) if name in first else (replica, 0)
            return f"parameter {name!r} exists on replica {there} but not on replica {missing}."
        if first[name][:3] != other[name][:3]:
            return (
                f"parameter {name!r} is {_shape(first[name])} on replica 0 "
                f"and {_shape(other[name])} on replica {replica}."
            )
    return None


def _shape(entry: tuple[tuple[int, ...], str, tuple[int, ...], int]) -> str:
    return f"{entry[0]} {entry[1]} with strides {entry[2]}"


def _different_weights(first: dict[str, Any], other: dict[str, Any], replica: int) -> str | None:
    for name, entry in first.items():
        if name in other and entry[3] != other[name][3]:
            return (
                f"parameter {name!r} does not start from the same values on replicas 0 and "
                f"{replica}. Seed, load or broadcast the weights first (DDP broadcasts them), "
                "or perturb them on purpose with hdet.perturb_."
            )
    return None
