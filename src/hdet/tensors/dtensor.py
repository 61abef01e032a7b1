"""Tensors that are shards of larger ones: what of them lies in this process.

A DTensor is known by what it has, not by its type: importing it only to ask takes time, and changes
the program's warning filters.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

WRAPPER_NAMES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""What torch.compile, activation checkpointing and FSDP1 put into the names of parameters."""


def check_initialised(named: Mapping[str, Tensor]) -> None:
    for name, parameter in named.items():
        if is_lazy(parameter):
            raise ValueError(
                f"`{name}` must be initialised, got a lazy parameter: run one batch first."
            )


def local(tensor: Tensor) -> Tensor:
    """The memory that this process has of it: its shard, or itself."""
    shard: Tensor | None = getattr(tensor, "_local_tensor", None)
    return tensor if shard is None else shard


def whole(tensor: Tensor) -> Tensor:
    """All of it, as after a loss over several processes; everyone who has a shard must ask."""
    if type(tensor) is Tensor:  # asked at every step
        return tensor
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


class Layout(NamedTuple):
    """How a shard is made a DTensor again."""

    kind: Any
    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]

    def wrap(self, shard: Tensor) -> Tensor:
        made: Tensor = self.kind.from_local(
            shard,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )
        return made


def layout(tensor: Tensor) -> Layout | None:
    """None for a tensor that is no shard."""
    if not hasattr(tensor, "_local_tensor"):
        return None
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return Layout(type(tensor), mesh, placements, tensor.shape, tensor.stride())


def cut(full: Tensor, like: Tensor) -> Tensor:
    """The part of a full tensor that belongs to a shard."""
    made = layout(like)
    if made is None:
        return full
    coordinates = made.mesh.get_coordinate()
    for dimension, placement in enumerate(made.placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard() or type(placement).__name__ != "Shard":
            raise ValueError(
                f"`perturb_` needs replicated or sharded parameters, got {made.placements}."
            )
        chunks = full.chunk(made.mesh.size(dimension), placement.dim)
        place = coordinates[dimension]
        full = chunks[place] if place < len(chunks) else full.narrow(placement.dim, 0, 0)
    return full


def sharded_modules(model: nn.Module | None) -> list[Any]:
    """Those of FSDP2, which may hold whole parameters after a forward without a backward."""
    if model is None:
        return []
    return [
        module
        for module in model.modules()
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
    ]
