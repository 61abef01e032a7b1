"""A converge under way: the replicas train on while their mean is made, and take it as a change.

What a replica has learnt since it was sent off stays: it moves by the difference between the mean
and what it had then. So replicas do not meet in one point, but nobody waits for the wire.
"""

from collections.abc import Sequence

import torch

from hdet.buckets import flatten
from hdet.replicas import Replicas, Rows


class Flight:
    """From the end of a cycle until it lands."""

    @torch.no_grad()
    def __init__(self, replicas: Replicas, rows: Rows, fit: Sequence[int]) -> None:
        self._rows = [[flatten(tensor) for tensor in row] for row in rows]
        self._sent = [[flat.clone() for flat in row] for row in self._rows]
        self._is_fit = [replica in fit for replica in replicas.local]
        self._mean = replicas.begin_average(self._rows, fit)
        self.num_bytes = sum(flat.nbytes for flat in self._rows[0])

    @torch.no_grad()
    def land(self) -> None:
        """Wait for the mean; one that was not fit has learnt nothing that is worth keeping."""
        means = self._mean()
        for row, sent, is_fit in zip(self._rows, self._sent, self._is_fit, strict=True):
            for flat, mean, before in zip(row, means, sent, strict=True):
                if is_fit:
                    flat.add_((mean - before).to(flat.dtype))
                else:
                    flat.copy_(mean)

    def abandon(self) -> None:
        """Wait, and leave everything as it is."""
        self._mean()
