"""Forward and backward of all replicas as two CUDA graphs, so that no launch waits for the host.

N small replicas make N times as many launches as one model. A replay of recorded launches costs the
host almost nothing, and replicas on separate streams fill the device together.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

RunFunction = Callable[[Any, Sequence[Tensor]], Tensor]
Gradients = tuple[Tensor | None, ...]

NUM_WARMUPS = 3  # cuDNN, cuBLAS and the compiler choose their kernels in the first runs


class CapturedGraphs:
    """Captured forward and backward for batches of one shape.

    Everything that `run` reads or writes must stay at its place in memory.

    Args:
        run: `run(batch, leaves)` returns the losses.
        leaves: The tensors that gradients are computed for.
        batch: A batch like those that are replayed later.

    Raises:
        RuntimeError: `run` cannot be captured.
    """

    def __init__(self, run: RunFunction, leaves: Sequence[Tensor], batch: Any) -> None:
        self._batch = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, batch)
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._generation = 0
        self._warm_up(run, leaves)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with _restored_generator():
            self.losses, self._gradients = self._record(run, leaves)

    def __call__(self, batch: Any) -> Tensor:
        """The losses of a batch with the shapes of the captured one."""
        pairs = zip(tree_flatten(self._batch)[0], tree_flatten(batch)[0], strict=True)
        for ours, theirs in pairs:
            if isinstance(ours, Tensor):
                ours.copy_(theirs, non_blocking=True)
        losses: Tensor = _Replay.apply(self, *self._leaves)
        return losses

    def replay_forward(self) -> int:
        self._generation += 1
        self._keep_gradients()
        self._forward.replay()
        return self._generation

    def replay_backward(self, generation: int, seed: Tensor) -> list[Tensor | None]:
        if generation != self._generation:
            raise RuntimeError(
                "`backward()` must come before the next `losses()`: CUDA graphs keep the "
                "activations of one batch. Call backward once for each batch."
            )
        self._seed.copy_(seed)
        self._keep_gradients()
        self._backward.replay()
        return [None if g is None else g.detach() for g in self._gradients]

    def _keep_gradients(self) -> None:
        """Copy gradients that lie in memory that a replay writes, so that they accumulate."""
        for leaf, gradient in zip(self._leaves, self._gradients, strict=True):
            if gradient is not None and _share_memory(leaf.grad, gradient):
                leaf.grad = leaf.grad.clone()  # type: ignore[union-attr]

    def _warm_up(self, run: RunFunction, leaves: Sequence[Tensor]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for number in range(NUM_WARMUPS):
                # A synchronization cannot be captured. Here it raises a clearer error.
                with _no_synchronization() if number == NUM_WARMUPS - 1 else nullcontext():
                    stand_ins = _as_new_leaves(leaves)
                    losses = run(self._batch, stand_ins)
                    self._seed = torch.ones_like(losses)
                    self._differentiate(losses, stand_ins)
        torch.cuda.current_stream().wait_stream(side)

    def _record(self, run: RunFunction, leaves: Sequence[Tensor]) -> tuple[Tensor, Gradients]:
        pool = torch.cuda.graph_pool_handle()
        stand_ins = _as_new_leaves(leaves)
        with torch.cuda.graph(self._forward, pool=pool):
            losses = run(self._batch, stand_ins)
        self._seed = torch.ones_like(losses)
        with torch.cuda.graph(self._backward, pool=pool):
            gradients = self._differentiate(losses, stand_ins)
        return losses.detach(), gradients

    def _differentiate(self, losses: Tensor, leaves: Sequence[Tensor]) -> Gradients:
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        return torch.autograd.grad(losses, trained, self._seed, allow_unused=True)


def _as_new_leaves(leaves: Sequence[Tensor]) -> list[Tensor]:
    """New leaves with the same memory.

    A leaf that belongs to an earlier graph ties the backward to the stream of that graph. That
    breaks a capture.
    """
    return [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]


@contextmanager
def _no_synchronization() -> Iterator[None]:
    """Inside, waiting for the device is an error."""
    previous = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(previous)


@contextmanager
def _restored_generator() -> Iterator[None]:
    """Restore the generator after a failed capture, which leaves it in the state of capturing."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    kept = generator.clone_state()
    try:
        yield
    except BaseException:
        generator.graphsafe_set_state(kept)
        raise


def _share_memory(tensor: Tensor | None, other: Tensor) -> bool:
    return tensor is not None and tensor.data_ptr() == other.data_ptr()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: CapturedGraphs, *leaves: Tensor) -> Tensor:
        ctx.captured, ctx.generation = captured, captured.replay_forward()
        return captured.losses.clone()

    @staticmethod
    def backward(ctx: Any, *seeds: Tensor) -> Any:
        return None, *ctx.captured.replay_backward(ctx.generation, seeds[0])
