"""The mean of the weights over the last steps of a cycle, at which probes score replicas."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hdet.tensors.ops import copies, copy_all
from hdet.weights.inventory import ReplicaTensors, TensorKind, refresh_all


class TailAverage:
    """A running mean of the trainable weights of the replicas of this process."""

    def __init__(self, local_tensors: Sequence[ReplicaTensors]) -> None:
        self._local = local_tensors
        self._mean: list[Tensor] = []
        self._num_steps = 0
        self._rows: list[list[Tensor]] = []
        self._detached: list[Tensor] = []
        """The tensors of `_rows`, detached once: there may be many."""

    @torch.no_grad()
    def add(self) -> None:
        """Add the current weights to the mean."""
        weights = self._weights()
        self._num_steps += 1
        if self._num_steps == 1 or len(weights) != len(self._mean):
            self._mean, self._num_steps = copies(weights), 1
        elif weights:
            torch._foreach_lerp_(self._mean, weights, 1 / self._num_steps)

    def clear(self) -> None:
        """Forget the mean."""
        self._mean, self._num_steps = [], 0

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, replicas have the mean as their weights, if there is one."""
        weights = self._weights() if self._mean else []
        own = copies(weights)
        copy_all(weights, self._mean if weights else [])
        try:
            yield
        finally:
            refresh_all(self._local)
            copy_all(weights, own)

    def _weights(self) -> list[Tensor]:
        """The trainable weights of all local replicas; the same list while they are the same."""
        refresh_all(self._local)
        rows = [tensors.of_kind(TensorKind.TRAINABLE) for tensors in self._local]
        if [*map(id, rows)] != [*map(id, self._rows)]:
            self._rows = rows
            self._detached = [tensor.detach() for row in rows for tensor in row]
        return self._detached
