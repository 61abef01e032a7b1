"""The calls by which a training loop asks for losses, recorded to repeat them later."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hdet.replicas.stacked.batch_dims import Batch

LossFunction = Callable[..., Tensor]
"""(model, *batch, **named) -> the loss of one replica on its part of the batch."""


class RecordedCall(NamedTuple):
    """One call for the losses of all replicas."""

    function: LossFunction
    parts: Batch
    """A copy of the batch, split into the parts of the replicas."""
    losses: Tensor
    autocast_dtype: torch.dtype | None
    """The dtype of autocast, or None if it was off."""
    training_flags: tuple[bool, ...]
    """The flag `training` of each submodule of the model."""


class CallRecorder(Protocol):
    """An object that gets every call of the training loop."""

    def record(self, call: RecordedCall) -> None: ...


def copied(value: Any) -> Any:
    """A copy of a tensor that is a leaf; other values are returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)
