"""How replicas on one device are run: all at once under vmap, or one after another."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_map

from hdet.knobs.dial import running
from hdet.replicas.stacked.cuda_graphs import CapturedGraphs
from hdet.replicas.stacked.gradients import OwnGradients, SharedGradient, SharedGradients
from hdet.replicas.stacked.vmap_compat import VmapCompat, safe_attention
from hdet.tensors.ops import copies, copy_all

LossFunction = Callable[..., Tensor]
"""(model, *batch) -> the loss of one replica on its part of the batch."""

Tensors = dict[str, Tensor]

# A captured batch keeps its activations: a few shapes (the last batch of an epoch) and no more.
MAX_CAPTURED = 4


class RecordedCall(NamedTuple):
    """A loop has asked for the losses of all replicas."""

    function: LossFunction
    parts: Any
    losses: Tensor
    dtype: torch.dtype | None
    """That of autocast, if it was on."""
    flags: tuple[bool, ...]
    """Which modules were training."""


class CallRecorder(Protocol):
    """Somebody who wants to know of them."""

    def hear(self, call: RecordedCall) -> None: ...


class Replica:
    """What a loss function gets as its model: something to call."""

    def __init__(self, module: nn.Module, tensors: tuple[Tensors, ...]) -> None:
        self._module, self._tensors = module, tensors

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return functional_call(self._module, self._tensors, inputs, options)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`model.{name}` cannot be used in a loss function of stacked replicas, where `model` "
            "can only be called: the weights are handed to its forward."
        )


class Forward:
    """Runs the replicas of `modules`, whose tensors are slices of `weights` and `buffers`."""

    def __init__(
        self, modules: Sequence[nn.Module], weights: Tensors, buffers: Tensors, mode: str
    ) -> None:
        self.mode = mode
        self.shares_gradients = True
        self.call_recorder: ref[CallRecorder] | None = None
        """Who is told of the calls of training, as long as there is somebody."""
        self._modules, self._weights, self._buffers = modules, weights, buffers
        # Copies are nobody else's: to walk through all of them at every step would take longer
        # than to launch a small model.
        self._copies = [list(module.parameters()) for module in modules[1:]]
        self._device = next(iter(weights.values())).device
        # As tensors, not as numbers: compiled code is the same for all replicas.
        self._replicas = torch.arange(len(modules), device=self._device)
        self._options: dict[str, Any] | None = None  # of torch.compile, if it is wanted
        self._functions: dict[Any, Any] = {}
        self._captured: dict[Any, CapturedGraphs | None] = {}
        self._streams: list[Any] = []
        self._said: set[str] = set()
        self._followed: tuple[list[bool], list[bool]] | None = None

    def compile(self, **options: Any) -> None:
        """Compile what is run; on CUDA also capture it, so that the host does not hold it up."""
        self._options = options
        self._functions.clear()
        self._captured.clear()

    @property
    def num_replicas(self) -> int:
        return len(self._modules)

    def losses(self, function: LossFunction, parts: Any) -> Tensor:
        """The loss of every replica, [N], each on its part of the batch."""
        call_recorder = None if self.call_recorder is None else self.call_recorder()
        if call_recorder is None or not (torch.is_grad_enabled() and self._modules[0].training):
            return self._losses(function, parts)
        # Copies: a loop may write every batch to the same place, and a loss into its batch.
        own, flags = tree_map(copied, parts), tuple(self._switches()[0])
        losses = self._losses(function, parts)
        call = RecordedCall(function, own, losses.detach().clone(), self._autocast_dtype(), flags)
        call_recorder.hear(call)
        return losses

    def repeat(self, call: RecordedCall, parts: Any) -> Tensor:
        """The losses of a call with other parts, the way it was made: what was compiled or captured
        is used again, and a loss that needs gradients itself has them. No buffer, flag or gradient
        is changed by it; random numbers are drawn."""
        modules = list(self._modules[0].modules())
        flags = [module.training for module in modules]
        kind, is_on = self._device.type, call.dtype is not None
        # Casts that autocast remembers from before would be those of other weights.
        cast = torch.autocast(kind, call.dtype, is_on, cache_enabled=False)
        try:
            for module, flag in zip(modules, call.flags, strict=False):
                module.training = flag
            with self._same_buffers(), torch.enable_grad(), cast:
                return self._losses(call.function, parts).detach()
        finally:
            for module, flag in zip(modules, flags, strict=True):
                module.training = flag
            self.follow_the_model()

    def _losses(self, function: LossFunction, parts: Any) -> Tensor:
        self._check_home()
        self.follow_the_model()
        if self.mode == "auto":
            if not (torch.is_grad_enabled() and self._modules[0].training):
                # Training decides, not an evaluation before it.
                return self._loop(function, parts, self._leaves())
            self.mode = self._choose(function, parts)
        if self._options is None or self._device.type != "cuda" or not torch.is_grad_enabled():
            return self._run(function, parts, self._leaves())
        captured = self._capture(function, parts)
        if captured is None:
            return self._run(function, parts, self._leaves())
        return captured(parts)

    # Which way ---------------------------------------------------------------------------------

    def _choose(self, function: LossFunction, parts: Any) -> str:
        """vmap where torch can, and where it is fast: on CUDA a convolution of N groups is not."""
        modules = self._modules[0].modules()
        convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in modules)
        if (convolves and self._device.type == "cuda") or self._rebinds_buffers(function, parts):
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
        warnings.warn(
            f"replicas run one after another: vmap cannot run this model ({reason})", stacklevel=4
        )
        return "loop"

    def _rebinds_buffers(self, function: LossFunction, parts: Any) -> bool:
        """Whether the forward makes new buffers instead of changing them: vmap would lose them."""
        module = copy.deepcopy(self._modules[0])
        before = {name: id(buffer) for name, buffer in module.named_buffers()}
        part = tree_map(lambda value: value[0] if is_split(value) else value, parts)
        with self._undone(), torch.no_grad():
            function(Replica(module, ()), *part)
        return before != {name: id(buffer) for name, buffer in module.named_buffers()}

    def _rehearse(self, function: LossFunction, parts: Any) -> None:
        leaves = self._leaves()
        losses = self._run(function, parts, leaves)
        if losses.requires_grad:
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            torch.autograd.grad(losses.sum(), trained, allow_unused=True)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """What is done inside changes no buffer and no random state."""
        with self.same_draws(), self._same_buffers():
            yield

    def same_draws(self) -> AbstractContextManager[None]:
        """What is drawn inside is drawn again after it."""
        devices = [self._device] if self._device.type == "cuda" else []
        return torch.random.fork_rng(devices)

    @contextmanager
    def _same_buffers(self) -> Iterator[None]:
        homes = self._homes_of_buffers()
        buffers = [*self._buffers.values(), *(home[name] for home, name in homes)]
        kept = copies(buffers)
        try:
            yield
        finally:
            copy_all(buffers, kept)
            for (home, name), buffer in zip(homes, buffers[len(self._buffers) :], strict=True):
                home[name] = buffer

    def _homes_of_buffers(self) -> list[tuple[dict[str, Any], str]]:
        """Where modules keep theirs: in a loop they may have made new ones."""
        modules = self._modules if self.mode == "loop" else ()
        parts = [part for module in modules for part in module.modules()]
        return [
            (p._buffers, name) for p in parts for name, b in p._buffers.items() if b is not None
        ]

    # How -----------------------------------------------------------------------------------------

    def _run(self, function: LossFunction, parts: Any, leaves: Sequence[Tensor]) -> Tensor:
        run = self._vmap if self.mode == "vmap" else self._loop
        if self._options is None:
            return run(function, parts, leaves)
        with warnings.catch_warnings():
            # torch's compiler warns of what it does itself to the tensors it is given.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
            warnings.filterwarnings("ignore", message=".*should not be instantiated")
            return run(function, parts, leaves)

    def _leaves(self) -> list[Tensor]:
        """What gradients are computed for: replica after replica, or the first one's for all."""
        copies = () if self.shares_gradients else self._copies
        return [*self._modules[0].parameters(), *chain.from_iterable(copies)]

    def _vmap(self, function: LossFunction, parts: Any, leaves: Sequence[Tensor]) -> Tensor:
        shared: Tensors = {}
        weights, names = self._weights, list(self._weights)
        if self.shares_gradients:
            shared = dict(zip(names, leaves, strict=True))
        else:
            joined = OwnGradients.apply(len(names), *weights.values(), *leaves)
            weights = dict(zip(names, joined, strict=True))
        run = self._compiled(_vmapped)
        with safe_attention(self._device.type):
            losses: Tensor = run(
                function,
                self._modules[0],
                shared,
                (weights, self._buffers, self._replicas),
                parts,
                self._device.type,
            )
        return losses

    def _loop(self, function: LossFunction, parts: Any, leaves: Sequence[Tensor]) -> Tensor:
        run = self._compiled(_alone)
        weights = self._weights_of_each(leaves)
        streams = self._branches()
        losses = []
        for r, module in enumerate(self._modules):
            part = tree_map(lambda v, r=r: v[r] if is_split(v) else v, parts)
            # A compiled function is made for one module; what the others have is handed to it.
            ours = module if self._options is None else self._modules[0]
            buffers = {} if ours is module else {n: b[r] for n, b in self._buffers.items()}
            with streams(r):
                losses.append(run(function, ours, (weights[r], buffers), self._replicas[r], part))
        streams(None)
        return torch.stack(losses)

    def _weights_of_each(self, leaves: Sequence[Tensor]) -> list[Tensors]:
        names, rows = list(self._weights), leaves
        if self.shares_gradients:
            own = [stack[r] for r in range(len(self._modules)) for stack in self._weights.values()]
            rows = SharedGradients.apply(len(names), *leaves, *own)
        return [
            dict(zip(names, rows[r * len(names) : (r + 1) * len(names)], strict=True))
            for r in range(len(self._modules))
        ]

    def _compiled(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if self._options is None:
            return run
        if run not in self._functions:
            # vmap draws random numbers of known shapes only: a new shape is compiled anew.
            options: dict[str, Any] = {"dynamic": False} if run is _vmapped else {}
            self._functions[run] = torch.compile(run, **(options | self._options))
        compiled: Callable[..., Tensor] = self._functions[run]
        return compiled

    def _branches(self) -> "CompiledBranches":
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing and not self._streams:
            self._streams = [torch.cuda.Stream() for _ in self._modules]
        return CompiledBranches(self._streams if capturing else [])

    # On CUDA: recorded once ----------------------------------------------------------------------

    def _capture(self, function: LossFunction, parts: Any) -> CapturedGraphs | None:
        key = (function, self.mode, self.shares_gradients, self._circumstances(), _kind(parts))
        if key not in self._captured:
            if len(self._captured) >= MAX_CAPTURED:
                self._say_once(
                    f"replicas run uncaptured, which is slower: more than {MAX_CAPTURED} kinds of "
                    "batches or loss functions. Define the loss function once, outside the loop."
                )
                return None
            self._captured[key] = self._try_capture(function, parts)
        return self._captured[key]

    def _circumstances(self) -> Any:
        """What a captured run has taken for granted."""
        return self._autocast_dtype(), *map(tuple, self._switches())

    def _autocast_dtype(self) -> torch.dtype | None:
        kind = self._device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _try_capture(self, function: LossFunction, parts: Any) -> CapturedGraphs | None:
        if torch.is_autocast_enabled(self._device.type):
            # A cast that autocast remembers from before would be missing in the replay.
            torch.clear_autocast_cache()
        with self._undone(), _without_autocast_cache():
            try:
                run = partial(self._run, function)
                return CapturedGraphs(run, self._leaves(), parts)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0]
        self._captured.clear()  # the others would draw from a random state that nobody seeds
        warnings.warn(f"replicas run uncaptured, which is slower: {reason}", stacklevel=5)
        return None

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, stacklevel=5)

    # The model is the user's ---------------------------------------------------------------------

    def _check_home(self) -> None:
        first = self._modules[0]
        homes: list[tuple[Tensors, Any]] = [(self._weights, first.named_parameters())]
        if self.mode == "vmap":  # in a loop every module keeps its own buffers
            homes.append((self._buffers, first.named_buffers()))
        for stacks, named in homes:
            for name, tensor in named:
                if name not in stacks or tensor.data_ptr() != stacks[name].data_ptr():
                    raise RuntimeError(
                        f"`{name}` has left the replicas: move, convert or extend the model "
                        "before StackedReplicas, and load weights with load_state_dict."
                    )

    def follow_the_model(self) -> None:
        """Training flags, frozen parameters and cleared gradients are those of the user's model."""
        if self._switches() != self._followed:
            self._followed = self._switches()
            for module in self._modules[1:]:
                for part, flag in zip(module.modules(), self._followed[0], strict=True):
                    part.training = flag
            for parameters in self._copies:
                for parameter, flag in zip(parameters, self._followed[1], strict=True):
                    parameter.requires_grad_(flag)
        if not self.shares_gradients:
            first = [own.grad is None for own in self._modules[0].parameters()]
            for parameters in self._copies if any(first) else ():
                for is_cleared, other in zip(first, parameters, strict=True):
                    if is_cleared:
                        other.grad = None

    def _switches(self) -> tuple[list[bool], list[bool]]:
        """Which modules train, and which parameters."""
        first = self._modules[0]
        return (
            [module.training for module in first.modules()],
            [parameter.requires_grad for parameter in first.parameters()],
        )


class CompiledBranches:
    """While a graph is captured, every replica has a stream of its own; otherwise nothing."""

    def __init__(self, streams: Sequence[Any]) -> None:
        self._streams = streams
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())

    def __call__(self, replica: int | None) -> Any:
        """The branch of a replica, to be entered; with None all join again."""
        if replica is None:
            for stream in self._streams:
                torch.cuda.current_stream().wait_stream(stream)
            return None
        return torch.cuda.stream(self._streams[replica] if self._streams else None)


def _alone(
    function: LossFunction,
    module: nn.Module,
    tensors: tuple[Tensors, Tensors],
    replica: Tensor,
    part: Any,
) -> Tensor:
    with running(replica):
        return _one_loss(function(Replica(module, tensors), *part))


def _one_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"`function` must return one loss, got a {type(loss).__name__}.")
    if loss.dim():
        raise ValueError(f"`function` must return one loss, got shape {tuple(loss.shape)}.")
    return loss


def _vmapped(
    function: LossFunction,
    module: nn.Module,
    leaves: Tensors,
    stacks: tuple[Tensors, Tensors, Tensor],
    parts: Any,
    device_type: str,
) -> Tensor:
    weights, buffers, replicas = stacks
    if leaves:
        weights = {name: SharedGradient.apply(leaves[name], weights[name]) for name in weights}

    def one(weights: Tensors, buffers: Tensors, replica: Tensor, part: Any) -> Tensor:
        with VmapCompat(device_type), running(replica):
            return _one_loss(function(Replica(module, (weights, buffers)), *part))

    dims = tree_map(lambda value: 0 if is_split(value) else None, parts)
    run = vmap(one, in_dims=(0, 0, 0, dims), randomness="different")
    losses: Tensor = run(weights, buffers, replicas, parts)
    return losses


def is_split(value: Any) -> bool:
    """Whether replicas get parts of a value; scalars are for all."""
    return isinstance(value, Tensor) and value.dim() > 0


def copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _kind(parts: Any) -> Any:
    """Batches of one kind can share a captured run."""
    leaves, layout = tree_flatten(parts)
    described = [
        (tuple(leaf.shape), leaf.dtype, leaf.stride()) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    return repr((described, layout))


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)
