"""Rows of tensors, one row for each replica on a device: stacked, averaged, copied."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hdet.tensors.buckets import wire_dtype

Row = Sequence[Tensor]


def stack_rows(replicas: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Name -> [N, ...]. The replicas' own tensors become slices of it.

    A slice has the strides of its tensor, so that channels-last weights stay channels-last. A
    tensor that is not dense in memory becomes dense.
    """
    stacks: dict[str, Tensor] = {}
    for name, tensor in replicas[0].items():
        one = torch.empty_like(tensor.detach())  # keeps the strides of a dense tensor
        stacks[name] = stacked = torch.empty_strided(
            (len(replicas), *one.shape),
            (one.numel(), *one.stride()),
            dtype=one.dtype,
            device=one.device,
        )
        for row, replica in zip(stacked, replicas, strict=True):
            row.copy_(replica[name].detach())
            replica[name].data = row
    return stacks


def mean_of_rows(rows: Sequence[Row], fit: Sequence[int]) -> list[Tensor]:
    """The mean over the replicas in `fit`. Where they agree it is exactly their value.

    Differences from the first replica are summed, in float32 at least. So the mean of equal numbers
    is that number for every N, and half precision loses nothing. Integers are not averaged: they
    are those of the first replica in `fit`.
    """
    first = [tensor.detach() for tensor in rows[fit[0]]]
    places = [i for i, t in enumerate(first) if t.is_floating_point() or t.is_complex()]
    means = list(first)
    if not places:
        return means
    anchors = [_exact(first[i]) for i in places]
    totals = [torch.zeros_like(anchor) for anchor in anchors]
    for replica in fit[1:]:
        others = [_exact(rows[replica][i].detach()) for i in places]
        torch._foreach_add_(totals, torch._foreach_sub(others, anchors))
    torch._foreach_div_(totals, len(fit))
    torch._foreach_add_(totals, anchors)
    for place, total in zip(places, totals, strict=True):
        means[place] = total
    return means


def maximum_of_rows(rows: Sequence[Row]) -> list[Tensor]:
    """The elementwise maximum over all replicas."""
    return [torch.stack([t.detach() for t in column]).amax(0) for column in zip(*rows, strict=True)]


def copy_rows_(targets: Sequence[Row], source: Row) -> None:
    """Copy one row to each of the targets."""
    for row in targets:
        if row:
            torch._foreach_copy_([tensor.detach() for tensor in row], list(source))


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to(wire_dtype(tensor.dtype))
