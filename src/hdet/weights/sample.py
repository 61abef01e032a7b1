"""A sample of weights: a few thousand evenly spaced elements of many tensors."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from hdet.tensors.buckets import JOINED_BYTES, SMALL_BYTES, fill, flatten

SAMPLE_SIZE = 4096
"""The distance between replicas is estimated from at least this many trainable elements."""


def rows_to_join(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """All tensors in order, flat: small ones in rows of limited size, each of the others alone.

    Elements of one joined tensor are reached in less time than those of many small ones.
    """
    rows: list[list[Tensor]] = []
    for kind, row in groupby(tensors, lambda t: (t.nbytes < SMALL_BYTES, t.dtype, t.device)):
        flats = [*map(flatten, row)]
        rows += fill(flats, JOINED_BYTES // kind[1].itemsize) if kind[0] else [[f] for f in flats]
    return rows


def evenly_spaced(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """Evenly spaced elements of all tensors together, at least `SAMPLE_SIZE` if there are."""
    stride = max(sum(flat.numel() for row in rows for flat in row) // SAMPLE_SIZE, 1)
    parts, start = [], stride // 2
    for row in rows:
        flat = torch.cat(list(row)) if len(row) > 1 else row[0]
        if start < flat.numel():
            parts.append(flat[start::stride].clone())  # a view would keep what was joined
        start = (start - flat.numel()) % stride
    if len({(part.dtype, part.device) for part in parts}) > 1:
        parts = [part.to(device=parts[0].device, dtype=torch.float64) for part in parts]
    return torch.cat(parts) if parts else torch.zeros(0)
