"""All replicas describe themselves before the first step and must agree."""

from dataclasses import dataclass
from typing import Any, NoReturn

from hdet.replicas.protocol import Replicas
from hdet.scheduler.settings import Settings, as_plain_data
from hdet.weights.replica_weights import ReplicaWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaDescription:
    """What one replica says of itself at the door."""

    settings: dict[str, Any]
    parameters: dict[str, tuple[tuple[int, ...], str, tuple[int, ...], int | None]]
    perturbed: bool


def describe_replica(
    settings: Settings, schedule: dict[str, Any], parameters: ReplicaWeights
) -> ReplicaDescription:
    return ReplicaDescription(
        settings={**as_plain_data(settings), **schedule},
        parameters=parameters.checks.describe(),
        perturbed=parameters.checks.are_perturbed(),
    )


def report_failure(replicas: Replicas, problem: Exception) -> NoReturn:
    """This replica cannot start: tell the others, so that nobody waits for it."""
    replicas.gather_objects(f"{type(problem).__name__}: {problem}")
    raise problem


def check_replicas_agree(replicas: Replicas, mine: ReplicaDescription) -> bool:
    """Raise on all replicas if one of them has a problem or differs; whether weights differ."""
    everyone = replicas.gather_objects(mine)
    for process, theirs in enumerate(everyone):
        if isinstance(theirs, str):
            raise ValueError(f"replica {process // replicas.parts} could not start: {theirs}")
    on_purpose = all(theirs.perturbed for theirs in everyone)
    weights_differ = False
    for process, theirs in enumerate(everyone):
        replica, part = divmod(process, replicas.parts)
        first = everyone[part]  # parts of one replica may hold other tensors
        difference = (
            _different_settings(first.settings, theirs.settings, replica)
            or _different_settings(_common(everyone[0]), _common(theirs), replica)
            or _different_parameters(first.parameters, theirs.parameters, replica)
        )
        weights = _different_weights(first.parameters, theirs.parameters, replica)
        if difference or (weights and not on_purpose):
            raise ValueError(f"replicas must be alike: {difference or weights}")
        weights_differ |= weights is not None
    return weights_differ or (on_purpose and replicas.size > 1)


def _common(told: ReplicaDescription) -> dict[str, Any]:
    """What also the parts of one replica must agree in."""
    return {name: value for name, value in told.settings.items() if name != "groups"}


def _different_settings(first: Any, other: Any, replica: int, name: str = "") -> str | None:
    """The first entry in which two settings differ, however deep it lies."""
    if isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        first, other = dict(enumerate(first)), dict(enumerate(other))
    if isinstance(first, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*first, *other]):
            inner = f"{name}.{key}" if name else f"{key}"
            found = _different_settings(first.get(key), other.get(key), replica, inner)
            if found:
                return found
        return None
    if first == other:
        return None
    return f"`{name}` is {first!r} on replica 0 and {other!r} on replica {replica}."


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


def _shape(entry: tuple[tuple[int, ...], str, tuple[int, ...], int | None]) -> str:
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
