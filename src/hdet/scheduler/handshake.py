"""The handshake: replicas compare their settings and weights before the first step."""

from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from hdet.replicas.protocol import Replicas
from hdet.scheduler.settings import Settings, as_plain_data
from hdet.weights.replica_weights import ReplicaWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaDescription:
    """What one process sends to all others in the handshake.

    Attributes:
        settings: The options, the schedule and the parameter groups as plain data.
        parameters: Shape, type, strides and hash of each parameter and buffer, by name.
        perturbed: Whether `hdet.perturb_` changed the weights.
        records: Whether this process writes a record.
    """

    settings: dict[str, Any]
    parameters: dict[str, tuple[tuple[int, ...], str, tuple[int, ...], int | None]]
    perturbed: bool
    records: bool


class Agreement(NamedTuple):
    """What all processes know after the handshake.

    Attributes:
        weights_differ: Whether the weights of the replicas differ on purpose.
        has_record: Whether any process writes a record.
    """

    weights_differ: bool
    has_record: bool


def describe_replica(
    settings: Settings, schedule: dict[str, Any], parameters: ReplicaWeights, *, records: bool
) -> ReplicaDescription:
    """Return the description of this process."""
    return ReplicaDescription(
        settings={**as_plain_data(settings), **schedule},
        parameters=parameters.checks.describe(),
        perturbed=parameters.checks.are_perturbed(),
        records=records,
    )


def report_failure(replicas: Replicas, problem: Exception) -> NoReturn:
    """Send the reason why this replica cannot start, so that the others do not wait for it.

    Raises:
        Exception: The problem itself.
    """
    replicas.gather_objects(f"{type(problem).__name__}: {problem}")
    raise problem


def check_replicas_agree(replicas: Replicas, mine: ReplicaDescription) -> Agreement:
    """Compare the descriptions of all processes.

    Raises:
        ValueError: On every replica, if one cannot start or differs from the first.
    """
    everyone = replicas.gather_objects(mine)
    for process, theirs in enumerate(everyone):
        if isinstance(theirs, str):
            raise ValueError(f"replica {process // replicas.parts} could not start: {theirs}")
    on_purpose = all(theirs.perturbed for theirs in everyone)
    weights_differ = False
    for process, theirs in enumerate(everyone):
        replica, part = divmod(process, replicas.parts)
        first = everyone[part]  # the processes of one replica may hold different shards
        difference = (
            _different_settings(first.settings, theirs.settings, replica)
            or _different_settings(_common_settings(everyone[0]), _common_settings(theirs), replica)
            or _different_parameters(first.parameters, theirs.parameters, replica)
        )
        weights = _different_weights(first.parameters, theirs.parameters, replica)
        if difference or (weights and not on_purpose):
            raise ValueError(f"replicas must be alike: {difference or weights}")
        weights_differ |= weights is not None
    return Agreement(
        weights_differ=weights_differ or (on_purpose and replicas.size > 1),
        has_record=any(theirs.records for theirs in everyone),
    )


def _common_settings(description: ReplicaDescription) -> dict[str, Any]:
    """Return the settings in which also the processes of one replica must agree."""
    return {name: value for name, value in description.settings.items() if name != "groups"}


def _different_settings(first: Any, other: Any, replica: int, name: str = "") -> str | None:
    """Return a sentence about the first entry in which two nested settings differ."""
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
    """Return a sentence about the first parameter whose name, shape or type differs."""
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
    """Return a sentence about the first parameter whose values differ."""
    for name, entry in first.items():
        if name in other and entry[3] != other[name][3]:
            return (
                f"parameter {name!r} does not start from the same values on replicas 0 and "
                f"{replica}. Seed, load or broadcast the weights first (DDP broadcasts them), "
                "or perturb them on purpose with hdet.perturb_."
            )
    return None
