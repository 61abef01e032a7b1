"""The place of a process in a device mesh, and which wrappers average gradients there."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from hdet.tensors.dtensor import sharded_modules


def same_replica(mesh: DeviceMesh) -> list[int]:
    """The ranks that hold the same replica as this process, given the dimension of the replicas.

    They differ from this process only in the other dimensions of the mesh.
    """
    root = _root_of(mesh)
    ranks = root.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(
            f"the ranks of a device mesh must be in rising order, got {root.mesh.tolist()}. Create "
            "the mesh with init_device_mesh."
        )
    index_of = {rank: index for index, rank in enumerate(ranks)}
    column = dist.get_process_group_ranks(mesh.get_group())
    if dist.get_rank() not in index_of or not set(column) <= set(index_of):
        return [dist.get_rank()]  # a mesh of its own
    shape = shape_with([index_of[rank] for rank in column], tuple(root.mesh.shape))
    coordinates = {rank: _unravel(index, shape) for rank, index in index_of.items()}
    here = coordinates[dist.get_rank()]
    replicated = _differing([coordinates[rank] for rank in column])
    return [r for r, at in coordinates.items() if all(at[d] == here[d] for d in replicated)]


def groups_of(mesh: DeviceMesh) -> list[Any]:
    """The process groups of all dimensions of the root mesh.

    A message that goes through them one after another reaches every process of the mesh.
    """
    root = _root_of(mesh)
    is_member = dist.get_rank() in root.mesh.flatten().tolist()
    return [root.get_group(d) for d in range(root.ndim)] if is_member else [mesh.get_group()]


def shape_with(column: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """A shape of the mesh in which a column of processes is one dimension, or several.

    It is the given shape, or the one that splits a dimension of it into three.

    >>> shape_with([0, 2], (2, 2)), shape_with([1, 3], (4,)), shape_with([4, 6], (2, 4))
    ((2, 2), (1, 2, 2), (2, 2, 2))
    """
    dimensions = _differing([_unravel(index, shape) for index in column])
    if math.prod(shape[d] for d in dimensions) == len(column):
        return tuple(shape)
    step, num, total = column[1] - column[0], len(column), math.prod(shape)
    evenly = list(range(column[0], column[0] + num * step, step))
    if list(column) != evenly or total % (num * step):
        raise ValueError(
            f"the replicas must be a dimension of a device mesh, got processes at {list(column)} "
            f"of {total}. Create the mesh with init_device_mesh and that dimension."
        )
    return total // (num * step), num, step


def _differing(coordinates: Sequence[tuple[int, ...]]) -> list[int]:
    """The dimensions in which coordinates differ."""
    return [d for d, values in enumerate(zip(*coordinates, strict=True)) if len(set(values)) > 1]


def _unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The coordinates of a flat index."""
    at = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        at.append(rest)
    return tuple(reversed(at))


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # in older torch

    return _mesh_resources.get_root_mesh(mesh)


def ranks_along(mesh: Any, dimension: int) -> list[int]:
    """The ranks that differ from this process only in one dimension of a mesh."""
    ranks: list[int] = dist.get_process_group_ranks(mesh.get_group(dimension))
    return ranks


class GradientSwitch:
    """Switches the averaging of gradients over the replicas where FSDP2 does it (HSDP).

    FSDP2's own `set_requires_all_reduce(False)` is for accumulation: parameters get no gradient
    before the all-reduce. So while gradients are local, FSDP2 gets a mesh of the shards alone.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks = ranks

    def turn(self, model: nn.Module, on: bool) -> bool:
        """Switch all parameter groups of a model. Returns whether there was any."""
        found = [group for group in _parameter_groups(model) if self._reaches(group, on)]
        for group in found:
            # FSDP2's group keeps the original mesh, so that another switch finds it.
            group._hdet_mesh_info = info = getattr(group, "_hdet_mesh_info", group.mesh_info)
            group.mesh_info = info if on else _without_replicas(info)
        return bool(found)

    def _reaches(self, group: Any, on: bool) -> bool:
        info = getattr(group, "_hdet_mesh_info", group.mesh_info)
        replicated = getattr(info, "replicate_process_group", None)
        if replicated is None:
            return False
        return reaches(dist.get_process_group_ranks(replicated), self._ranks, on)


def ddp_modules(model: nn.Module) -> list[DistributedDataParallel]:
    """The parts of a model that are wrapped in DistributedDataParallel."""
    return [m for m in model.modules() if isinstance(m, DistributedDataParallel)]


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 averages the gradients of some part of a model."""
    return bool(_parameter_groups(model))


def _parameter_groups(model: nn.Module) -> list[Any]:
    """FSDP2's parameter groups. Each holds the parameters that are gathered at once."""
    found: list[Any] = []
    for module in sharded_modules(model):
        state = module._get_fsdp_state()
        one = getattr(state, "_fsdp_param_group", None)  # the only one, in older versions of torch
        found += getattr(state, "_fsdp_param_groups", [one] if one is not None else [])
    return found


def reaches(ranks: Sequence[int], replicas: Collection[int], on: bool) -> bool:
    """Whether processes average gradients over the replicas, and not only inside one.

    >>> reaches([0, 2], {0, 2}, on=True), reaches([0, 1], {0, 2}, on=True)
    (True, False)
    """
    if len(set(ranks).intersection(replicas)) < 2:
        return False
    if not on and set(ranks) != set(replicas):
        raise ValueError(
            f"gradients cannot be local: processes {sorted(ranks)} average them both over replicas "
            f"and inside a replica; the replicas lie on {sorted(replicas)}. Wrap the model with "
            "the same mesh dimension as ProcessReplicas."
        )
    return True


def _without_replicas(info: Any) -> Any:
    """FSDP2's description of a mesh, reduced to the dimension of the shards."""
    kinds = [k for k in type(info).__mro__ if k.__name__ == "FSDPMeshInfo"]
    if not kinds:
        raise ValueError(
            "gradients cannot be local under FSDP2's replicate(): use DistributedDataParallel, or "
            "fully_shard on a mesh with a second dimension."
        )
    kind = kinds[0]
    return kind(info.mesh, shard_mesh_dim=info.shard_mesh_dim)
