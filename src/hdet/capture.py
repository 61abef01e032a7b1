"""Forward and backward of all replicas as two CUDA graphs: no launch waits for the host.

N small replicas make N times as many launches as one model. Recorded once and replayed, they cost
the host nothing, and replicas on streams of their own fill the device together.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

NUM_REHEARSALS = 3  # cuDNN, cuBLAS and the compiler choose their kernels in the first runs


class Captured:
    """The losses of one kind of batch, replayed.

    `run(batch)` gives the losses; `leaves` are what gradients are computed for. Everything else
    that `run` reads or writes must stay where it is in memory.
    """

    def __init__(self, run: Callable[[Any], Tensor], leaves: Sequence[Tensor], batch: Any) -> None:
        self._batch = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, batch)
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._generation = 0
        pool = torch.cuda.graph_pool_handle()
        self._rehearse(run)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forward, pool=pool):
            self.losses = run(self._batch)
        self._seed = torch.ones_like(self.losses)
        with torch.cuda.graph(self._backward, pool=pool):
            self._gradients = self._differentiate(self.losses)
        self.losses = self.losses.detach()

    def __call__(self, batch: Any) -> Tensor:
        """The losses of a batch like the one that was captured."""
        pairs = zip(tree_flatten(self._batch)[0], tree_flatten(batch)[0], strict=True)
        for ours, theirs in pairs:
            if isinstance(ours, Tensor):
                ours.copy_(theirs, non_blocking=True)
        losses: Tensor = _Replay.apply(self, *self._leaves)
        return losses

    def replay_forward(self) -> int:
        self._generation += 1
        self._forward.replay()
        return self._generation

    def replay_backward(self, generation: int, seed: Tensor) -> list[Tensor | None]:
        if generation != self._generation:
            raise RuntimeError(
                "`backward()` must come before the next `losses()`: a captured run keeps the "
                "activations of one batch. Accumulate with one backward for each batch."
            )
        self._seed.copy_(seed)
        for leaf, gradient in zip(self._leaves, self._gradients, strict=True):
            # Gradients that are being accumulated still lie where the replay writes.
            if gradient is not None and _lies_at(leaf.grad, gradient):
                leaf.grad = leaf.grad.clone()  # type: ignore[union-attr]
        self._backward.replay()
        return [None if g is None else g.detach() for g in self._gradients]

    def _rehearse(self, run: Callable[[Any], Tensor]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(NUM_REHEARSALS):
                losses = run(self._batch)
                self._seed = torch.ones_like(losses)
                self._differentiate(losses)
        torch.cuda.current_stream().wait_stream(side)

    def _differentiate(self, losses: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(losses, self._leaves, self._seed, allow_unused=True)


def _lies_at(tensor: Tensor | None, other: Tensor) -> bool:
    return tensor is not None and tensor.data_ptr() == other.data_ptr()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: Captured, *leaves: Tensor) -> Tensor:
        ctx.captured, ctx.generation = captured, captured.replay_forward()
        return captured.losses.clone()

    @staticmethod
    def backward(ctx: Any, *seeds: Tensor) -> Any:
        return None, *ctx.captured.replay_backward(ctx.generation, seeds[0])
