"""A converge under way: the replicas train on while their mean is made, and take it as a change.

What a replica has learnt since it was sent off stays: it moves by the difference between the mean
and what it had then. So replicas do not meet in one point, but nobody waits for the wire. Only
where all of them are fit: one that is lost has to wait.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hdet.replicas.protocol import Means, Rows
from hdet.tensors.buckets import flatten

Begin = Callable[[Rows], tuple[Means, int]]
"""Starts to make the mean of flat tensors, and says how many bytes are sent."""

Leads = Callable[[list[Tensor], list[Tensor]], list[Tensor]]
"""Tensors of a replica, flat, and their means -> where an outer optimizer goes from there."""


class PendingAverage:
    """From the end of a cycle until it lands."""

    @torch.no_grad()
    def __init__(self, rows: Rows, begin: Begin) -> None:
        self._rows = [[flatten(tensor) for tensor in row] for row in rows]
        self._sent = [[flat.clone() for flat in row] for row in self._rows]
        self._mean, self.num_bytes = begin(self._rows)

    def follow(self, rows: Rows) -> None:
        """Where the same tensors lie now, if their memory has moved."""
        self._rows = [[flatten(tensor) for tensor in row] for row in rows]

    @torch.no_grad()
    def land(self, leads_to: Leads | None = None) -> list[Tensor]:
        """Wait for the mean, and move by it, or by where it leads; what that is."""
        goals = self._mean()
        if leads_to is not None:
            goals = leads_to(self._rows[0], goals)
        for row, sent in zip(self._rows, self._sent, strict=True):
            for flat, goal, before in zip(row, goals, sent, strict=True):
                flat.add_((goal - before).to(flat.dtype))
        return goals

    def abandon(self) -> None:
        """Wait, and leave everything as it is."""
        self._mean()
