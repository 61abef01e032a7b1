"""How replicas on one device compute their losses: all at once under vmap, or one by one."""

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map

from hdet._messages import warn
from hdet.knobs.dial import running
from hdet.replicas.stacked.batch_dims import Batch, is_split
from hdet.replicas.stacked.clipping import GradientCheck
from hdet.replicas.stacked.cuda_graphs import CapturedGraphs
from hdet.replicas.stacked.gradients import OwnGradients, SharedGradient, SharedGradients
from hdet.replicas.stacked.graph_cache import GraphCache, batch_key, without_autocast_cache
from hdet.replicas.stacked.module_stack import ModuleStack, Tensors
from hdet.replicas.stacked.recorded_calls import (
    CallRecorder,
    LossFunction,
    RecordedCall,
    copied,
)
from hdet.replicas.stacked.vmap_compat import VmapCompat, safe_attention


class Replica:
    """The model that a loss function gets. It can only be called."""

    def __init__(self, module: nn.Module, tensors: tuple[Tensors, ...]) -> None:
        self._module, self._tensors = module, tensors

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return functional_call(self._module, self._tensors, inputs, options)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`model.{name}` cannot be used in a loss function of stacked replicas, where `model` "
            "can only be called. Move the code into the model's forward."
        )


class Forward:
    """Computes the losses of all replicas, so that a backward gives them their gradients.

    Args:
        stack: The modules of the replicas.
        mode: "vmap", "loop", or "auto": the first batch of training decides.
    """

    def __init__(self, stack: ModuleStack, mode: str) -> None:
        self.mode = mode
        self.shares_gradients = True
        self.call_recorder: ref[CallRecorder] | None = None
        """Gets every call of training as long as it lives."""
        self.stack = stack
        self.graphs = GraphCache(stack.device.type)
        self.gradient_check = GradientCheck(stack.modules)

    @property
    def num_replicas(self) -> int:
        return len(self.stack)

    def losses(self, function: LossFunction, parts: Batch) -> Tensor:
        """The loss of every replica, [N], each on its part of the batch."""
        recorder = None if self.call_recorder is None else self.call_recorder()
        if recorder is None or not self._is_training():
            return self._watched_losses(function, parts)
        # Copies: a loop may reuse the memory of its batch, and a loss may write into it.
        kept, flags = tree_map(copied, parts), tuple(self.stack.flags()[0])
        losses = self._watched_losses(function, parts)
        dtype = self._autocast_dtype()
        recorder.record(RecordedCall(function, kept, losses.detach().clone(), dtype, flags))
        return losses

    def repeat(self, call: RecordedCall, parts: Batch) -> Tensor:
        """The losses of a recorded call on other parts, computed the same way.

        Compiled and captured code is used again, and gradients are enabled for losses that need
        them. Buffers, flags and gradients stay as they are. Random numbers are drawn.
        """
        modules = list(self.stack.model.modules())
        flags = [module.training for module in modules]
        # Casts that autocast has cached would be those of other weights.
        cast = torch.autocast(
            self.stack.device.type,
            call.autocast_dtype,
            call.autocast_dtype is not None,
            cache_enabled=False,
        )
        try:
            for module, flag in zip(modules, call.training_flags, strict=False):
                module.training = flag
            with self._restored_buffers(), torch.enable_grad(), cast:
                return self._losses(call.function, parts).detach()
        finally:
            for module, flag in zip(modules, flags, strict=True):
                module.training = flag
            self.follow_model()

    def follow_model(self) -> None:
        """Give all replicas the flags and the cleared gradients of the user's model."""
        self.stack.copy_flags()
        if not self.shares_gradients:
            self.stack.clear_gradients()

    def restored_random_state(self) -> AbstractContextManager[None]:
        """Restore the random state at the end: what is drawn inside is drawn again after it."""
        return self.stack.restored_random_state()

    def _watched_losses(self, function: LossFunction, parts: Batch) -> Tensor:
        losses = self._losses(function, parts)
        if not self.shares_gradients:
            self.gradient_check.watch(losses)
        return losses

    def _losses(self, function: LossFunction, parts: Batch) -> Tensor:
        # In a loop every module keeps its own buffers.
        self.stack.check_tensors(with_buffers=self.mode == "vmap")
        self.follow_model()
        if self.mode == "auto":
            if not self._is_training():
                # Training decides, not an evaluation before it.
                return self._loop(function, parts, self._leaves())
            self.mode = self._choose_mode(function, parts)
        if not (self.graphs.captures and torch.is_grad_enabled()):
            return self._run(function, parts, self._leaves())
        circumstances = self._autocast_dtype(), *map(tuple, self.stack.flags())
        key = (function, self.mode, self.shares_gradients, circumstances, batch_key(parts))
        captured = self.graphs.captured(key, partial(self._capture, function, parts))
        if captured is None:
            return self._run(function, parts, self._leaves())
        return captured(parts)

    def _is_training(self) -> bool:
        return torch.is_grad_enabled() and self.stack.model.training

    def _autocast_dtype(self) -> torch.dtype | None:
        kind = self.stack.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    # Mode ------------------------------------------------------------------------------------

    def _choose_mode(self, function: LossFunction, parts: Batch) -> str:
        """Choose vmap where torch can and it is fast: grouped convolutions on CUDA are slow."""
        modules = self.stack.model.modules()
        has_convolutions = any(isinstance(module, nn.modules.conv._ConvNd) for module in modules)
        is_slow = has_convolutions and self.stack.device.type == "cuda"
        if is_slow or self._rebinds_buffers(function, parts):
            return "loop"
        self.mode = "vmap"
        with self._undone():
            try:
                self._rehearse(function, parts)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                reason = str(error).strip().splitlines()[0]
            else:
                return "vmap"
        self.mode = "loop"
        with self._undone():
            self._rehearse(function, parts)  # if this fails too, the error is the user's
        warn(
            "replicas run one after another, which is slower: vmap cannot run this model "
            f"({reason})"
        )
        return "loop"

    def _rebinds_buffers(self, function: LossFunction, parts: Batch) -> bool:
        """Whether the forward replaces buffers instead of changing them: vmap would lose them."""
        module = copy.deepcopy(self.stack.model)
        before = {name: id(buffer) for name, buffer in module.named_buffers()}
        part = tree_map(lambda value: value[0] if is_split(value) else value, parts)
        with self._undone(), torch.no_grad():
            function(Replica(module, ()), *part.arguments, **part.named)
        return before != {name: id(buffer) for name, buffer in module.named_buffers()}

    def _rehearse(self, function: LossFunction, parts: Batch) -> None:
        """Run forward and backward once, without keeping the gradients."""
        leaves = self._leaves()
        losses = self._run(function, parts, leaves)
        if losses.requires_grad:
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            torch.autograd.grad(losses.sum(), trained, allow_unused=True)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Restore buffers and random state at the end."""
        with self.restored_random_state(), self._restored_buffers():
            yield

    def _restored_buffers(self) -> AbstractContextManager[None]:
        return self.stack.restored_buffers(of_modules=self.mode == "loop")

    # Running ---------------------------------------------------------------------------------

    def _capture(self, function: LossFunction, parts: Batch) -> CapturedGraphs:
        if torch.is_autocast_enabled(self.stack.device.type):
            # A cast that autocast has cached before would be missing in the replay.
            torch.clear_autocast_cache()
        with self._undone(), without_autocast_cache():
            return CapturedGraphs(partial(self._run, function), self._leaves(), parts)

    def _run(self, function: LossFunction, parts: Batch, leaves: Sequence[Tensor]) -> Tensor:
        run = self._vmap if self.mode == "vmap" else self._loop
        if not self.graphs.compiles:
            return run(function, parts, leaves)
        with warnings.catch_warnings():
            # torch's compiler warns of what it does itself to the tensors it is given.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
            warnings.filterwarnings("ignore", message=".*should not be instantiated")
            return run(function, parts, leaves)

    def _leaves(self) -> list[Tensor]:
        """The tensors that get gradients: those of the model, or those of every replica."""
        others = () if self.shares_gradients else self.stack.copied_parameters
        return [*self.stack.model.parameters(), *chain.from_iterable(others)]

    def _vmap(self, function: LossFunction, parts: Batch, leaves: Sequence[Tensor]) -> Tensor:
        stack, shared = self.stack, {}
        weights, names = stack.weights, list(stack.weights)
        if self.shares_gradients:
            shared = dict(zip(names, leaves, strict=True))
        else:
            joined = OwnGradients.apply(len(names), *weights.values(), *leaves)
            weights = dict(zip(names, joined, strict=True))
        # vmap draws random numbers of known shapes only: a new shape is compiled again.
        run = self.graphs.compiled(_vmapped_losses, dynamic=False)
        with safe_attention(stack.device.type):
            losses: Tensor = run(
                function,
                stack.model,
                shared,
                (weights, stack.buffers, stack.replica_ids),
                parts,
                stack.device.type,
            )
        return losses

    def _loop(self, function: LossFunction, parts: Batch, leaves: Sequence[Tensor]) -> Tensor:
        stack, run = self.stack, self.graphs.compiled(_single_loss)
        weights = self._weights_of_each(leaves)
        branches = self.graphs.branches(len(stack))
        losses = []
        for r, module in enumerate(stack.modules):
            part = tree_map(lambda v, r=r: v[r] if is_split(v) else v, parts)
            # A compiled function is made for one module, and gets the tensors of the others.
            used = stack.model if self.graphs.compiles else module
            buffers = {} if used is module else {n: b[r] for n, b in stack.buffers.items()}
            with branches.branch(r):
                losses.append(
                    run(function, used, (weights[r], buffers), stack.replica_ids[r], part)
                )
        branches.join()
        return torch.stack(losses)

    def _weights_of_each(self, leaves: Sequence[Tensor]) -> list[Tensors]:
        stacks, num = self.stack.weights, len(self.stack)
        names, rows = list(stacks), leaves
        if self.shares_gradients:
            slices = [stack[r] for r in range(num) for stack in stacks.values()]
            rows = SharedGradients.apply(len(names), *leaves, *slices)
        return [
            dict(zip(names, rows[r * len(names) : (r + 1) * len(names)], strict=True))
            for r in range(num)
        ]


def _single_loss(
    function: LossFunction,
    module: nn.Module,
    tensors: tuple[Tensors, Tensors],
    replica: Tensor,
    part: Batch,
) -> Tensor:
    """The loss of one replica on its part of the batch."""
    with running(replica):
        return _checked_loss(function(Replica(module, tensors), *part.arguments, **part.named))


def _checked_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"`function` must return one loss, got a {type(loss).__name__}.")
    if loss.dim():
        raise ValueError(f"`function` must return one loss, got shape {tuple(loss.shape)}.")
    return loss


def _vmapped_losses(
    function: LossFunction,
    module: nn.Module,
    leaves: Tensors,
    stacks: tuple[Tensors, Tensors, Tensor],
    parts: Batch,
    device_type: str,
) -> Tensor:
    """The losses of all replicas at once. With `leaves`, these get the mean gradients."""
    weights, buffers, replicas = stacks
    if leaves:
        weights = {name: SharedGradient.apply(leaves[name], weights[name]) for name in weights}

    def one(weights: Tensors, buffers: Tensors, replica: Tensor, part: Batch) -> Tensor:
        with VmapCompat(device_type), running(replica):
            model = Replica(module, (weights, buffers))
            return _checked_loss(function(model, *part.arguments, **part.named))

    dims = tree_map(lambda value: 0 if is_split(value) else None, parts)
    run = vmap(one, in_dims=(0, 0, 0, dims), randomness="different")
    losses: Tensor = run(weights, buffers, replicas, parts)
    return losses
