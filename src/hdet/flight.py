"""A converge under way: the replicas train on while their mean is made, and take it as a change.

What a replica has learnt since it was sent off stays: it moves by the difference between the mean
and what it had then. So replicas do not meet in one point, but nobody waits for the wire. Only
where all of them are fit: one that is lost has to wait.
"""

import torch

from hdet.buckets import flatten
from hdet.replicas import Replicas, Rows


class Flight:
    """From the end of a cycle until it lands."""

    @torch.no_grad()
    def __init__(self, replicas: Replicas, rows: Rows) -> None:
        self._rows = [[flatten(tensor) for tensor in row] for row in rows]
        self._sent = [[flat.clone() for flat in row] for row in self._rows]
        self._mean = replicas.begin_average(self._rows)
        self.num_bytes = sum(flat.nbytes for flat in self._rows[0])

    @torch.no_grad()
    def land(self) -> None:
        """Wait for the mean, and move by it."""
        means = self._mean()
        for row, sent in zip(self._rows, self._sent, strict=True):
            for flat, mean, before in zip(row, means, sent, strict=True):
                flat.add_((mean - before).to(flat.dtype))

    def abandon(self) -> None:
        """Wait, and leave everything as it is."""
        self._mean()
