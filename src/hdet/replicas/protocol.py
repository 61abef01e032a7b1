"""What an engine of replicas offers to the rest of the library.

`Replicas` is the contract of every engine. `Capabilities` say what an engine can do beyond it. The
functions `is_elastic`, `can_compress` and `records_calls` turn a capability into a type, so that
callers name no engine.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Rows = Sequence[Sequence[Tensor]]
"""One row of tensors for each replica of this process."""
Means = Callable[[], list[Tensor]]
"""Waits for a mean and returns it."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do beyond the `Replicas` protocol.

    Attributes:
        is_elastic: Replicas join and leave during a run. The engine is an `ElasticReplicas`.
        can_compress: Replicas can exchange compressed parts. The engine is an `AllToAllReplicas`.
        records_calls: The engine sees the batches and the loss function of the training loop, so
            it can hold out batches. The engine is a `RecordingReplicas`.
        has_own_optimizer: The engine makes the optimizer that the training loop steps, an
            `EngineOptimizer`.
        needs_wrapped_model: A wrapper of the model (DDP or FSDP2) averages the gradients, so the
            run must be given the wrapped model.
    """

    is_elastic: bool = False
    can_compress: bool = False
    records_calls: bool = False
    has_own_optimizer: bool = False
    needs_wrapped_model: bool = False


class Replicas(Protocol):
    """The replicas of a run.

    A process holds one replica, several replicas, or a part of one replica.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do beyond the protocol."""

    @property
    def size(self) -> int:
        """The number of replicas."""

    @property
    def local(self) -> range:
        """The replicas that lie in this process, completely or in part."""

    @property
    def parts(self) -> int:
        """The number of processes that hold one replica. Each of them has shards of it."""

    @property
    def part(self) -> int:
        """The place of this process among those that hold the same replica."""

    def unreplicated(self, named: Mapping[str, Tensor]) -> Collection[str]:
        """The names of parameters that exist once for all replicas."""

    def modules(self, model: nn.Module | None) -> Sequence[nn.Module | None]:
        """The module of each local replica, given the user's model."""

    def optimizers(
        self, optimizer: Optimizer, steered: Collection[str] | None = None
    ) -> Sequence[Optimizer]:
        """The optimizer of each local replica, given the user's optimizer.

        Args:
            optimizer: The user's optimizer.
            steered: The entries of parameter groups that the caller writes for each replica. The
                others follow the user's optimizer. None changes nothing.
        """

    def collective_call(self, name: str, step: int) -> AbstractContextManager[None]:
        """Inside, what processes exchange belongs to one call, which all of them must make.

        Args:
            name: What messages call it.
            step: The step of the run, which must be equal on all processes.
        """

    def gather(self, rows: Tensor) -> Tensor:
        """One row for each local replica -> one row for each replica, in order.

        Where a replica has several parts, the rows come from the same part of each replica.
        """

    def gather_parts(self, rows: Tensor) -> Tensor:
        """The rows of all parts: [local replicas, columns] -> [local replicas, parts, columns]."""

    def gather_objects(self, description: Any) -> list[Any]:
        """One picklable object from each process, ordered by replica, then by part.

        It is slow, and meant for the set-up of a run.
        """

    def are_finite(self, rows: Rows) -> Tensor:
        """Whether all elements of a row are finite, for each local replica, on the device."""

    def average_(self, rows: Rows, fit: Sequence[int], *, once: bool = False) -> int:
        """Give all replicas the mean over the replicas in `fit`.

        Args:
            rows: The tensors of each local replica.
            fit: The replicas that the mean is taken over.
            once: Drop what is cached for these rows. The caller does not use them again.

        Returns:
            The number of bytes that were reduced.
        """

    def begin_average(self, rows: Rows) -> Means:
        """Start the mean over all replicas of flat tensors, without waiting for it.

        The tensors themselves do not change.
        """

    def maximum_(self, rows: Rows) -> int:
        """Give all replicas the elementwise maximum. Returns the bytes that were reduced."""

    def copy_(self, rows: Rows, source: int, targets: Sequence[int]) -> int:
        """Copy the source's values to the targets. Returns the bytes that were sent."""

    def share_gradients(self, model: nn.Module, shared: bool) -> bool:
        """Switch the averaging of gradients on or off; return whether something averages them."""


# What engines with a capability offer ------------------------------------------------------------


class Members(NamedTuple):
    """The replicas that take part in a run from now on."""

    have_changed: bool
    """Whether they are others than at the last synchronization."""
    newcomers: tuple[int, ...]
    """Replicas that got the state of another replica and have not trained with it yet."""


class Interrupted(RuntimeError):
    """A replica left, so what the others do together at the moment does not count."""


class ElasticReplicas(Replicas, Protocol):
    """Replicas that join and leave during a run."""

    first_step: int
    """The step at which this replica and those that started with it began."""

    @property
    def shared(self) -> bool:
        """Whether the training loop averages gradients over the replicas at every step."""

    @property
    def have_synced(self) -> bool:
        """Whether this replica has synchronized with the others at least once."""

    @property
    def has_healed(self) -> bool:
        """Whether this replica got the state of another one and has not synchronized since."""

    @property
    def are_members_unchanged(self) -> bool:
        """Whether the replicas of the last synchronization are still those that take part."""

    def wraps(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer is a wrapper that belongs to the manager of the replicas."""

    def shares_gradients_of(self, model: nn.Module | None) -> bool:
        """Whether a wrapper of the model averages its gradients at every step."""

    def must_sync(self, step: int) -> bool:
        """Whether the replicas must synchronize at this step to learn who takes part."""

    def register(self, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        """Register the state that a new replica gets from another one."""

    def start_quorum(self, *, anew: bool = False) -> None:
        """Wait for the replicas that take part. A new replica has another one's state after it.

        Args:
            anew: Ask for a new quorum even where that of the last training step would do.
        """

    def check_members(self) -> Members:
        """Exchange who takes part. All replicas get the same answer."""

    def commit(self) -> bool:
        """End a synchronization. Returns whether it counts for this replica."""


class AllToAllReplicas(Replicas, Protocol):
    """Replicas that can send each other different data at the same time."""

    def all_to_all(self, rows: Tensor) -> Callable[[], Tensor]:
        """Send row r to replica r. The result waits, and returns one row from each replica."""


class HeldOutBatches(Protocol):
    """Batches that no replica trains on. An engine records them, or the loop gives them."""

    steps_left: int
    """Steps whose batches are held out before the first round can start."""
    is_fixed: bool
    """Whether all rounds of a search are scored on the same batches."""

    @property
    def is_empty(self) -> bool:
        """Whether no batch was kept."""

    def end_step(self) -> None:
        """A held-out step is over. Keep its batches if their losses are finite."""

    def begin_round(self) -> None:
        """The first training step of a round is over."""

    def end_round(self) -> None:
        """All replicas were restored, so the first batch of the round is held out from now on."""

    def close(self) -> None:
        """Stop recording; the batches are not needed any more."""

    def state_dict(self) -> dict[str, Any]:
        """The batches as plain data, equal on all replicas; empty where they cannot be saved."""

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Use saved batches with the loop's functions; return whether it can."""

    def rows(self, num: int, *, alike: bool = False) -> Tensor:
        """The scores of each replica, at most `num`, laid out like those of a probe.

        With `alike` all replicas have the same weights, so not each of them must score all parts.
        """


class RecordingReplicas(Replicas, Protocol):
    """Replicas whose engine computes the losses, and therefore sees every batch."""

    def hold_out(self, num_parts: int, max_parts: int) -> HeldOutBatches:
        """Keep the next batches, so that replicas can be scored on them.

        Args:
            num_parts: The parts to hold out before the first round. A part is the batch of one
                replica in one step.
            max_parts: The largest number of parts to keep.
        """

    def num_samples(self, loss_of: Callable[..., Tensor], batch: Any) -> int:
        """The samples of a batch, (arguments, named arguments); 1 if its tensors disagree."""

    def pieces(self, loss_of: Callable[..., Tensor], batch: Any, num: int) -> list[Any]:
        """Split a batch, (arguments, named arguments), into pieces of nearly equal size."""


def is_elastic(replicas: Replicas) -> TypeGuard[ElasticReplicas]:
    """Whether replicas join and leave during the run."""
    return replicas.capabilities.is_elastic


def can_compress(replicas: Replicas) -> TypeGuard[AllToAllReplicas]:
    """Whether the replicas can exchange compressed parts."""
    return replicas.capabilities.can_compress


def records_calls(replicas: Replicas) -> TypeGuard[RecordingReplicas]:
    """Whether the engine can hold out batches of the training loop."""
    return replicas.capabilities.records_calls


# Replicas in one process -------------------------------------------------------------------------


class EngineOptimizer(Optimizer):
    """An optimizer that an engine made to step all replicas of a process at once.

    Attributes:
        each: The optimizer of each replica.
    """

    each: list[Optimizer]


class SingleLocalReplica:
    """The common part of engines with one complete replica in each process."""

    capabilities = Capabilities()
    parts, part = 1, 0

    def collective_call(self, name: str, step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def modules(self, model: nn.Module | None) -> Sequence[nn.Module | None]:
        return [model]

    def optimizers(
        self, optimizer: Optimizer, steered: Collection[str] | None = None
    ) -> Sequence[Optimizer]:
        return [optimizer]

    def unreplicated(self, named: Mapping[str, Tensor]) -> Collection[str]:
        return ()

    def gather_parts(self, rows: Tensor) -> Tensor:
        return rows[:, None]


class SingleReplica(SingleLocalReplica):
    """A run of one replica: there is nothing to average."""

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

    def share_gradients(self, model: nn.Module, shared: bool) -> bool:
        return True
