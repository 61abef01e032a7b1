"""Autograd functions that bring the gradients of stacked replicas to their parameters.

With shared gradients the parameters of replica 0 (the user's model) get the mean. With local
gradients every replica gets its own.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor


class SharedGradient(torch.autograd.Function):
    """The stacked weights, unchanged. The mean of their gradients goes to one leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, stack: Tensor) -> Tensor:
        return stack.view_as(stack)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].mean(0), None


class SharedGradients(torch.autograd.Function):
    """The weights of all replicas, row by row. The leaves get the mean gradients."""

    @staticmethod
    def forward(ctx: Any, num: int, *tensors: Tensor) -> Any:
        ctx.num = num
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors[num:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        rows = [gradients[start : start + ctx.num] for start in range(0, len(gradients), ctx.num)]
        return None, *mean_gradients(rows), *([None] * len(gradients))


class OwnGradients(torch.autograd.Function):
    """The stacked weights, unchanged. Every replica's leaves get their slice of the gradient."""

    @staticmethod
    def forward(ctx: Any, num: int, *tensors: Tensor) -> Any:
        ctx.num, ctx.strides = num, [stack.stride() for stack in tensors[:num]]
        ctx.set_materialize_grads(False)
        return tuple(stack.view_as(stack) for stack in tensors[:num])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        num_replicas = (len(ctx.needs_input_grad) - 1) // ctx.num - 1
        missing = (None,) * num_replicas
        own = _own_memory([_laid_out(*pair) for pair in zip(gradients, ctx.strides, strict=True)])
        # `data`: each slice has a version of its own, so that a change of one of them is seen.
        columns = [missing if g is None else [row.data for row in g.unbind()] for g in own]
        return None, *([None] * ctx.num), *chain.from_iterable(zip(*columns, strict=True))


def _laid_out(gradient: Tensor | None, strides: tuple[int, ...]) -> Tensor | None:
    """A gradient with the strides of the weights, so that torch copies no slice of it.

    An expanded gradient gets memory of its own too: its slices would share one element.
    """
    if gradient is None or gradient.stride() == strides:
        return gradient
    return torch.empty_strided(
        gradient.shape, strides, dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)


def _own_memory(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients without shared memory: two weights that are added up have the same gradient."""
    taken: set[int] = set()
    own: list[Tensor | None] = []
    for gradient in gradients:
        if gradient is not None and gradient.data_ptr() in taken:
            gradient = gradient.clone()
        if gradient is not None and gradient.numel():
            taken.add(gradient.data_ptr())
        own.append(gradient)
    return own


def mean_gradients(rows: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """For each leaf, the sum over the replicas that have a gradient, divided by N.

    All leaves are summed at once: N launches for each small leaf would take longer.
    """
    columns = [[g for g in column if g is not None] for column in zip(*rows, strict=True)]
    used = {leaf: column[0] for leaf, column in enumerate(columns) if column}
    if not used:
        return [None] * len(columns)
    filled = [
        [torch.zeros_like(like) if (g := row[leaf]) is None else g for leaf, like in used.items()]
        for row in rows
    ]
    totals = filled[0]
    for gradients in filled[1:]:
        totals = list(torch._foreach_add(totals, gradients))
    means = dict(zip(used, torch._foreach_div(totals, len(rows)), strict=True))
    return [means.get(leaf) for leaf in range(len(columns))]
