"""The Replicas protocol: what an ensemble of replicas can do, and a single replica."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas.stacked.held_out import HeldOutBatches

Rows = Sequence[Sequence[Tensor]]
"""One row of tensors for each replica of this process."""
Means = Callable[[], list[Tensor]]
"""Waits for a mean, and gives it."""


class Replicas(Protocol):
    """An ensemble of replicas: some live in this process, or one lives in several."""

    @property
    def size(self) -> int:
        """Replicas in the ensemble."""

    @property
    def local(self) -> range:
        """Those that live in this process, wholly or in part."""

    @property
    def parts(self) -> int:
        """The processes that a replica consists of, each with shards of it."""

    @property
    def part(self) -> int:
        """Which of them this one is."""

    def unreplicated(self, named: Mapping[str, Tensor]) -> Collection[str]:
        """The names of parameters of which there is one for all replicas."""

    def modules(self, model: nn.Module | None) -> Sequence[nn.Module | None]:
        """The module of each local replica, given what the user calls the model."""

    def optimizers(
        self, optimizer: Optimizer, steers: Collection[str] | None = None
    ) -> Sequence[Optimizer]:
        """The optimizer of each local replica, given what the user calls the optimizer.

        Whoever asks will write their learning rates, and the entries `steers` of their groups.
        """

    def gather(self, rows: Tensor) -> Tensor:
        """One row for each local replica -> one row for each replica, in their order; where a
        replica has several parts, from the same part of each."""

    def gather_parts(self, rows: Tensor) -> Tensor:
        """[local replicas, columns] -> [local replicas, parts, columns]: what all parts say."""

    def gather_objects(self, description: Any) -> list[Any]:
        """One picklable description from each process, replica by replica, in the order of their
        parts; for set-up only."""

    def are_finite(self, rows: Rows) -> Tensor:
        """For each local replica whether all its elements are finite, on the device."""

    def average_(self, rows: Rows, fit: Sequence[int], *, once: bool = False) -> int:
        """All replicas take the mean over those that are fit; the bytes that were reduced.

        Rows that are averaged `once` are not kept in mind for the next time.
        """

    def begin_average(self, rows: Rows) -> Means:
        """Start to make the mean over all, of flat tensors; nobody waits, and no tensor changes."""

    def maximum_(self, rows: Rows) -> int:
        """All replicas take the maximum over all of them; the bytes that were reduced."""

    def copy_(self, rows: Rows, source: int, targets: Sequence[int]) -> int:
        """The targets take the source's values; the bytes that were sent."""

    def share_gradients(self, model: nn.Module, shared: bool) -> None:
        """Switch the averaging of gradients over the replicas on or off."""

    def hold_out(self) -> HeldOutBatches | None:
        """Keep the next batches, to score replicas by them; none where nobody knows batches."""


class SingleLocalReplica:
    """What all engines with one replica in a process have in common, if it is there as a whole."""

    parts, part = 1, 0

    def hold_out(self) -> HeldOutBatches | None:
        return None  # the loop computes losses itself

    def modules(self, model: nn.Module | None) -> Sequence[nn.Module | None]:
        return [model]

    def optimizers(
        self, optimizer: Optimizer, steers: Collection[str] | None = None
    ) -> Sequence[Optimizer]:
        return [optimizer]

    def unreplicated(self, named: Mapping[str, Tensor]) -> Collection[str]:
        return ()

    def gather_parts(self, rows: Tensor) -> Tensor:
        return rows[:, None]


class SingleReplica(SingleLocalReplica):
    """A run without other processes: nothing to average with, and nobody to ask."""

    size = 1
    local = range(1)

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def gather_objects(self, description: Any) -> list[Any]:
        return [description]

    def are_finite(self, rows: Rows) -> Tensor:
        return torch.ones(1, dtype=torch.bool)

    def average_(self, rows: Rows, fit: Sequence[int], *, once: bool = False) -> int:
        return 0

    def begin_average(self, rows: Rows) -> Means:
        return lambda: list(rows[0])

    def maximum_(self, rows: Rows) -> int:
        return 0

    def copy_(self, rows: Rows, source: int, targets: Sequence[int]) -> int:
        return 0

    def share_gradients(self, model: nn.Module, shared: bool) -> None:
        pass
