"""An average that overlaps with training: replicas train on while their mean is computed.

When the mean arrives, each replica moves by the difference between the mean and the weights it had
sent. It keeps the progress that it made in between. So replicas do not become equal, but no replica
waits for the network. All replicas must be healthy: an excluded one cannot train on.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hdet.replicas.protocol import Means, Rows
from hdet.tensors.buckets import flatten

StartMean = Callable[[Rows], tuple[Means, int]]
"""Starts to compute the mean of flat tensors; returns how to wait for it, and the bytes sent."""

OuterStep = Callable[[list[Tensor], list[Tensor]], list[Tensor]]
"""(flat tensors of the first replica, their means) -> the weights after an outer step."""


class PendingAverage:
    """A mean of the replicas' weights that was started and has not been applied yet."""

    @torch.no_grad()
    def __init__(self, rows: Rows, start_mean: StartMean) -> None:
        self._rows = [[flatten(tensor) for tensor in row] for row in rows]
        self._sent = [[flat.clone() for flat in row] for row in self._rows]
        self._wait, self.num_bytes = start_mean(self._rows)

    def rebind(self, rows: Rows) -> None:
        """Use the current memory of the same tensors, which may have moved."""
        self._rows = [[flatten(tensor) for tensor in row] for row in rows]

    @torch.no_grad()
    def apply_(self, outer_step: OuterStep | None = None) -> list[Tensor]:
        """Wait for the mean, and move every replica by its difference to what was sent.

        With an `outer_step`, its result takes the place of the mean.

        Returns:
            The weights that replicas were moved towards.
        """
        targets = self._wait()
        if outer_step is not None:
            targets = outer_step(self._rows[0], targets)
        for row, sent in zip(self._rows, self._sent, strict=True):
            for flat, target, before in zip(row, targets, sent, strict=True):
                flat.add_((target - before).to(flat.dtype))
        return targets

    def cancel(self) -> None:
        """Wait for the mean, and discard it."""
        self._wait()
