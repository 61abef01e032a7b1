"""Where a process stands in a device mesh, and who averages gradients with whom there."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hdet.tensors.dtensor import sharded_modules


def same_replica(mesh: DeviceMesh) -> list[int]:
    """The processes that differ from this one in other dimensions of a mesh than the given one."""
    root = _root_of(mesh)
    ranks = root.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(
            f"the processes of a mesh must be in rising order, got {root.mesh.tolist()}: torch "
            "orders those of a group, and a replica would not know its place."
        )
    places = {rank: place for place, rank in enumerate(ranks)}
    column = dist.get_process_group_ranks(mesh.get_group())
    if dist.get_rank() not in places or not set(column) <= set(places):
        return [dist.get_rank()]  # a mesh of its own
    shape = shape_with([places[rank] for rank in column], tuple(root.mesh.shape))
    coordinates = {rank: _unravel(place, shape) for rank, place in places.items()}
    here, along = coordinates[dist.get_rank()], _along([coordinates[rank] for rank in column])
    return [r for r, at in coordinates.items() if all(at[d] == here[d] for d in along)]


def wires_of(mesh: DeviceMesh) -> list[Any]:
    """The groups along all dimensions of the mesh that a dimension was taken from: everybody is
    reached by one after another."""
    root = _root_of(mesh)
    here = dist.get_rank() in root.mesh.flatten().tolist()
    return [root.get_group(d) for d in range(root.ndim)] if here else [mesh.get_group()]


def shape_with(column: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a mesh of which a column is a dimension, or several.

    That of the root, or where a dimension of the root was unflattened one that has it.

    >>> shape_with([0, 2], (2, 2)), shape_with([1, 3], (4,)), shape_with([4, 6], (2, 4))
    ((2, 2), (1, 2, 2), (2, 2, 2))
    """
    along = _along([_unravel(place, shape) for place in column])
    if math.prod(shape[d] for d in along) == len(column):
        return tuple(shape)
    step, num, total = column[1] - column[0], len(column), math.prod(shape)
    evenly = list(range(column[0], column[0] + num * step, step))
    if list(column) != evenly or total % (num * step):
        raise ValueError(
            f"the replicas must be a dimension of a mesh, got processes at {list(column)} of "
            f"{total}: make the mesh by init_device_mesh with that dimension."
        )
    return total // (num * step), num, step


def _along(coordinates: Sequence[tuple[int, ...]]) -> list[int]:
    """The dimensions in which they differ."""
    return [d for d, values in enumerate(zip(*coordinates, strict=True)) if len(set(values)) > 1]


def _unravel(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    at = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        at.append(rest)
    return tuple(reversed(at))


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # in older torch

    return _mesh_resources.get_root_mesh(mesh)


def ranks_along(mesh: Any, dimension: int) -> list[int]:
    ranks: list[int] = dist.get_process_group_ranks(mesh.get_group(dimension))
    return ranks


class GradientSwitch:
    """Turns the averaging of gradients over the replicas on and off where FSDP2 does it (HSDP).

    Its own `set_requires_all_reduce(False)` is for accumulation: no parameter gets a gradient until
    the all-reduce is made after all. So for the time being it is told of the shards alone.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks = ranks

    def turn(self, model: nn.Module, on: bool) -> bool:
        """Whether there was anything to turn."""
        found = [group for group in _parameter_groups(model) if self._reaches(group, on)]
        for group in found:
            # What FSDP2 was told at first stays with it, for whoever turns it again.
            group._hdet_mesh_info = info = getattr(group, "_hdet_mesh_info", group.mesh_info)
            group.mesh_info = info if on else _without_replicas(info)
        return bool(found)

    def _reaches(self, group: Any, on: bool) -> bool:
        info = getattr(group, "_hdet_mesh_info", group.mesh_info)
        wire = getattr(info, "replicate_process_group", None)
        return wire is not None and reaches(dist.get_process_group_ranks(wire), self._ranks, on)


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shares gradients in some part of a model."""
    return bool(_parameter_groups(model))


def _parameter_groups(model: nn.Module) -> list[Any]:
    """FSDP2's, each with the parameters that are gathered and reduced at once."""
    found: list[Any] = []
    for module in sharded_modules(model):
        state = module._get_fsdp_state()
        one = getattr(state, "_fsdp_param_group", None)  # the only one, in older versions of torch
        found += getattr(state, "_fsdp_param_groups", [one] if one is not None else [])
    return found


def reaches(wire: Sequence[int], replicas: Collection[int], on: bool) -> bool:
    """Whether these processes average gradients over the replicas, or only inside of one.

    >>> reaches([0, 2], {0, 2}, on=True), reaches([0, 1], {0, 2}, on=True)
    (True, False)
    """
    if len(set(wire).intersection(replicas)) < 2:
        return False
    if not on and set(wire) != set(replicas):
        raise ValueError(
            "local gradients must be averaged over the replicas alone, or inside of each, got "
            f"processes {sorted(wire)} that do both; the replicas lie on {sorted(replicas)}. Wrap "
            "the model with the same dimension of the mesh as ProcessReplicas."
        )
    return True


def _without_replicas(info: Any) -> Any:
    kinds = [k for k in type(info).__mro__ if k.__name__ == "FSDPMeshInfo"]
    if not kinds:
        raise ValueError(
            "gradients cannot be local under FSDP2's replicate(): use DistributedDataParallel, or "
            "fully_shard on a mesh with a second dimension."
        )
    kind = kinds[0]
    return kind(info.mesh, shard_mesh_dim=info.shard_mesh_dim)
