"""DTensors: the shard of a tensor that lies in this process.

A DTensor is recognized by its attributes, not by its type. Importing the type takes time and
changes the warning filters of the program.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

WRAPPER_NAMES = (
    "_orig_mod",  # of torch.compile
    "_checkpoint_wrapped_module",  # of activation checkpointing
    "_fsdp_wrapped_module",  # of FSDP1
    "_forward_module",  # of Lightning Fabric
)
"""The names that wrappers add to parameter names."""


def check_initialised(named: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if a parameter is lazy."""
    for name, parameter in named.items():
        if is_lazy(parameter):
            raise ValueError(
                f"`{name}` must be initialised, got a lazy parameter: run one batch first."
            )


def local(tensor: Tensor) -> Tensor:
    """The memory of a tensor in this process: the shard of a DTensor, or the tensor itself."""
    shard: Tensor | None = getattr(tensor, "_local_tensor", None)
    return tensor if shard is None else shard


def whole(tensor: Tensor) -> Tensor:
    """The complete tensor. All processes that hold a shard must call this together."""
    if type(tensor) is Tensor:  # the common case, at every step
        return tensor
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


class Layout(NamedTuple):
    """What turns a shard into a DTensor again."""

    kind: Any
    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]

    def wrap(self, shard: Tensor) -> Tensor:
        """The DTensor of a shard."""
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
    """The layout of a DTensor, or None for a plain tensor."""
    if not hasattr(tensor, "_local_tensor"):
        return None
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return Layout(type(tensor), mesh, placements, tensor.shape, tensor.stride())


def cut(full: Tensor, like: Tensor) -> Tensor:
    """The slice of a complete tensor that belongs to the shard of `like`."""
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
        index = coordinates[dimension]
        full = chunks[index] if index < len(chunks) else full.narrow(placement.dim, 0, 0)
    return full


def sharded_modules(model: nn.Module | None) -> list[Any]:
    """The modules that FSDP2 shards. They may hold complete parameters after a mere forward."""
    if model is None:
        return []
    return [
        module
        for module in model.modules()
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
    ]
