"""The modules of stacked replicas, and the tensors that they are slices of."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hdet.replicas.stacked.rows import stack_rows
from hdet.tensors.dtensor import check_initialised
from hdet.tensors.ops import copies, copy_all

Tensors = dict[str, Tensor]


class ModuleStack:
    """One module for each replica. Its tensors are slices of `weights` and `buffers`, [N, ...].

    The first module is the user's model. What the user does to it counts for all replicas.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.weights = stack_rows([dict(module.named_parameters()) for module in modules])
        self.buffers = stack_rows([dict(module.named_buffers()) for module in modules])
        # Listed once: at every step a walk through all modules takes longer than the launches of a
        # small model. The user has no access to the copies, so their parameters do not change.
        self.copied_parameters = [list(module.parameters()) for module in modules[1:]]
        self.device = next(iter(self.weights.values())).device
        # As tensors, not as numbers: compiled code is the same for all replicas.
        self.replica_ids = torch.arange(len(modules), device=self.device)
        self._copied_flags: tuple[list[bool], list[bool]] | None = None

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.modules[0]

    def __len__(self) -> int:
        return len(self.modules)

    def check_tensors(self, *, with_buffers: bool) -> None:
        """Raise a RuntimeError if a tensor of the user's model is no slice of its stack."""
        expected: list[tuple[Tensors, Any]] = [(self.weights, self.model.named_parameters())]
        if with_buffers:
            expected.append((self.buffers, self.model.named_buffers()))
        for stacks, named in expected:
            for name, tensor in named:
                if name not in stacks or tensor.data_ptr() != stacks[name].data_ptr():
                    raise RuntimeError(
                        f"`{name}` no longer belongs to the replicas. Move, convert or extend the "
                        "model before StackedReplicas, and load weights with load_state_dict."
                    )

    def flags(self) -> tuple[list[bool], list[bool]]:
        """Which submodules of the model train, and which parameters."""
        return (
            [module.training for module in self.model.modules()],
            [parameter.requires_grad for parameter in self.model.parameters()],
        )

    def copy_flags(self) -> None:
        """Give all replicas the training flags and frozen parameters of the user's model."""
        flags = self.flags()
        if flags == self._copied_flags:
            return
        self._copied_flags = flags
        for module in self.modules[1:]:
            for part, flag in zip(module.modules(), flags[0], strict=True):
                part.training = flag
        for parameters in self.copied_parameters:
            for parameter, flag in zip(parameters, flags[1], strict=True):
                parameter.requires_grad_(flag)

    def clear_gradients(self) -> None:
        """Clear the gradients of all replicas where the user's model has none."""
        is_cleared = [own.grad is None for own in self.model.parameters()]
        for parameters in self.copied_parameters if any(is_cleared) else ():
            for clear, other in zip(is_cleared, parameters, strict=True):
                if clear:
                    other.grad = None

    def restored_random_state(self) -> AbstractContextManager[None]:
        """Restore the random state at the end: what is drawn inside is drawn again after it."""
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])

    @contextmanager
    def restored_buffers(self, *, of_modules: bool) -> Iterator[None]:
        """Restore all buffers at the end.

        Args:
            of_modules: Also put the modules' own buffers back. A forward in a loop may replace
                them by new tensors.
        """
        owners = self._buffer_owners() if of_modules else []
        buffers = [*self.buffers.values(), *(owner[name] for owner, name in owners)]
        kept = copies(buffers)
        try:
            yield
        finally:
            copy_all(buffers, kept)
            for (owner, name), buffer in zip(owners, buffers[len(self.buffers) :], strict=True):
                owner[name] = buffer

    def _buffer_owners(self) -> list[tuple[dict[str, Any], str]]:
        """The dictionary and the name of each buffer of each module."""
        parts = [part for module in self.modules for part in module.modules()]
        return [
            (p._buffers, name) for p in parts for name, b in p._buffers.items() if b is not None
        ]


def tensors_of(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]


def check_model(model: nn.Module) -> None:
    """Raise a TypeError or a ValueError if a model cannot be stacked."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {model!r}.")
    if not any(True for _ in model.parameters()):
        raise ValueError("`model` must have parameters, got none.")
    kind = type(model).__name__
    if kind == "OptimizedModule":
        raise ValueError(
            "`model` must be the module itself, got a compiled one: call `compile()` on the "
            "replicas instead."
        )
    if kind in ("DistributedDataParallel", "DataParallel"):
        raise ValueError(f"`model` must be the module itself, got it wrapped in {kind}.")
    check_initialised(dict(model.named_parameters()))
    devices = {tensor.device for tensor in tensors_of(model)}
    if len(devices) > 1:
        raise ValueError(
            f"`model` must lie on one device, got {sorted(str(device) for device in devices)}."
        )
