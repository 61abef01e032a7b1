"""The Replicas protocol, and replicas as processes: the only file that knows torch.distributed."""

import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet.buckets import SLOTS, Bucket, Buckets, Plan
from hdet.validation import check_integer

Rows = Sequence[Sequence[Tensor]]
"""One row of tensors for each replica of this process."""


class Replicas(Protocol):
    """An ensemble of replicas, of which some live in this process."""

    @property
    def size(self) -> int:
        """Replicas in the ensemble."""

    @property
    def local(self) -> range:
        """Those that live in this process."""

    def modules(self, model: nn.Module | None) -> Sequence[nn.Module | None]:
        """The module of each local replica, given what the user calls the model."""

    def optimizers(
        self, optimizer: Optimizer, steers: Collection[str] | None = None
    ) -> Sequence[Optimizer]:
        """The optimizer of each local replica, given what the user calls the optimizer.

        Whoever asks will write their learning rates, and the entries `steers` of their groups.
        """

    def gather(self, rows: Tensor) -> Tensor:
        """One row for each local replica -> one row for each replica, in their order."""

    def gather_objects(self, description: Any) -> list[Any]:
        """One picklable description from each process, in their order; for set-up only."""

    def are_finite(self, rows: Rows) -> Tensor:
        """For each local replica whether all its elements are finite, on the device."""

    def average_(self, rows: Rows, fit: Sequence[int], *, once: bool = False) -> int:
        """All replicas take the mean over those that are fit; the bytes that were reduced.

        Rows that are averaged `once` are not kept in mind for the next time.
        """

    def maximum_(self, rows: Rows) -> int:
        """All replicas take the maximum over all of them; the bytes that were reduced."""

    def copy_(self, rows: Rows, source: int, targets: Sequence[int]) -> int:
        """The targets take the source's values; the bytes that were sent."""

    def share_gradients(self, model: nn.Module, shared: bool) -> None:
        """Switch the averaging of gradients over the replicas on or off."""


class OneReplica:
    """A run without other processes: nothing to average with, and nobody to ask."""

    size = 1
    local = range(1)

    def modules(self, model: nn.Module | None) -> Sequence[nn.Module | None]:
        return [model]

    def optimizers(
        self, optimizer: Optimizer, steers: Collection[str] | None = None
    ) -> Sequence[Optimizer]:
        return [optimizer]

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def gather_objects(self, description: Any) -> list[Any]:
        return [description]

    def are_finite(self, rows: Rows) -> Tensor:
        return torch.ones(1, dtype=torch.bool)

    def average_(self, rows: Rows, fit: Sequence[int], *, once: bool = False) -> int:
        return 0

    def maximum_(self, rows: Rows) -> int:
        return 0

    def copy_(self, rows: Rows, source: int, targets: Sequence[int]) -> int:
        return 0

    def share_gradients(self, model: nn.Module, shared: bool) -> None:
        pass


class ProcessReplicas:
    """One replica in each process of a group (the default group, a given one, or a 1-D mesh).

    `bucket_bytes` is all the memory a converge may use beside the model.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        bucket_bytes: int = 64 << 20,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "`ProcessReplicas` needs a process group: call "
                "torch.distributed.init_process_group first, or start the script with torchrun."
            )
        if isinstance(process_group, DeviceMesh):
            if process_group.ndim != 1:
                raise ValueError(
                    "`process_group` must be a mesh of one dimension, such as "
                    f"mesh['replicate'], got {process_group!r}."
                )
            process_group = process_group.get_group()
        if dist.get_rank(process_group) < 0:
            raise ValueError("`process_group` must contain this process, got a group without it.")
        # A group of our own: the converge never races the collectives of the user's.
        ranks = dist.get_process_group_ranks(process_group)
        # For a part of the world only its members take part. Torch then names the new group by
        # the number of groups a process is in, which must be the same for all members.
        self._group = dist.new_group(
            ranks, use_local_synchronization=len(ranks) < dist.get_world_size()
        )
        here = dist.get_rank(self._group)
        self.size: int = dist.get_world_size(self._group)
        self.local = range(here, here + 1)
        self._devices = _device_types(self._group)
        self._check_alike(bucket_bytes)
        self._buckets = Buckets(bucket_bytes, self._devices)

    def modules(self, model: nn.Module | None) -> Sequence[nn.Module | None]:
        return [model]

    def optimizers(
        self, optimizer: Optimizer, steers: Collection[str] | None = None
    ) -> Sequence[Optimizer]:
        return [optimizer]

    def gather(self, rows: Tensor) -> Tensor:
        if rows.device.type not in self._devices:
            rows = rows.to(self._devices[0])
        everyone = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(everyone, rows, group=self._group)
        return torch.cat(everyone)

    def gather_objects(self, description: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, description, group=self._group)
        return everyone

    def are_finite(self, rows: Rows) -> Tensor:
        # No sum with a nan or an infinity is finite, and it is the cheapest pass over memory there
        # is. Weights so large that their sum overflows count as not finite: they are lost anyway.
        plan = self._buckets.of(rows[0])
        sums = [bucket.load().sum() for bucket in plan.buckets]
        plan.is_loaded = plan.fits  # the average that follows need not pack again
        if not sums:
            return torch.ones(1, dtype=torch.bool)
        totals = [total.to(device=sums[0].device, dtype=torch.float64) for total in sums]
        return torch.stack(totals).isfinite().all()[None]

    def average_(self, rows: Rows, fit: Sequence[int], *, once: bool = False) -> int:
        included = self.local[0] in fit
        plan = self._buckets.of(rows[0])
        loads, plan.is_loaded = not plan.is_loaded, False

        def fill(bucket: Bucket) -> None:
            if loads:
                bucket.load()
            if not included:
                bucket.wire.zero_()  # not times zero: nan * 0 is nan

        def empty(bucket: Bucket) -> None:
            bucket.wire.div_(len(fit))
            bucket.store()

        sent = self._reduce(plan, dist.ReduceOp.SUM, fill, empty)
        if once:
            self._buckets.forget(rows[0])
        return sent

    def maximum_(self, rows: Rows) -> int:
        plan = self._buckets.of(rows[0])
        return self._reduce(plan, dist.ReduceOp.MAX, Bucket.load, Bucket.store)

    def copy_(self, rows: Rows, source: int, targets: Sequence[int]) -> int:
        here = self.local[0]
        sent = 0
        for bucket in self._buckets.of(rows[0]).buckets:
            wire = bucket.load()
            if here != source and here not in targets:
                wire = torch.empty_like(wire)  # everyone takes part, only the targets write
            dist.broadcast(wire, group_src=source, group=self._group)
            if here in targets:
                bucket.store()
            sent += wire.nbytes
        return sent

    def share_gradients(self, model: nn.Module, shared: bool) -> None:
        wrapped = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        if not shared and any(module.static_graph for module in wrapped):
            raise ValueError("gradients cannot be local under DDP(static_graph=True).")
        for module in wrapped:
            # What DDP's own no_sync() sets. It also stops the broadcast of buffers.
            module.require_backward_grad_sync = shared
        # By name: importing FSDP only to ask would change the program's warning filters.
        kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
        if shared and self.size > 1 and not wrapped and "FSDPModule" not in kinds:
            warnings.warn(
                "gradients='shared' but `model` is not wrapped in DistributedDataParallel: every "
                "replica steps with its own gradients, unless your loop averages them.",
                stacklevel=5,
            )

    def _check_alike(self, bucket_bytes: Any) -> None:
        """Replicas must cut their buckets alike; one that cannot start tells the others."""
        problem = None
        try:
            check_integer("bucket_bytes", bucket_bytes, at_least=1024)
        except (TypeError, ValueError) as error:
            problem = error
        everyone = self.gather_objects(bucket_bytes)
        if problem is not None:
            raise problem
        if len(set(everyone)) > 1:
            raise ValueError(
                f"`bucket_bytes` must be the same on all replicas, got {everyone} in their order."
            )

    def _reduce(self, plan: Plan, op: Any, fill: Any, empty: Any) -> int:
        """All-reduce bucket by bucket: while one is on the wire, others are filled and emptied."""
        on_the_wire: deque[tuple[Any, Bucket]] = deque()

        def land() -> None:
            work, bucket = on_the_wire.popleft()
            work.wait()
            empty(bucket)

        sent = 0
        for bucket in plan.buckets:
            if len(on_the_wire) == SLOTS:
                land()
            fill(bucket)
            work = dist.all_reduce(bucket.wire, op=op, group=self._group, async_op=True)
            on_the_wire.append((work, bucket))
            sent += bucket.wire.nbytes
        while on_the_wire:
            land()
        return sent


@contextmanager
def gloo_group(meeting: str, rank: int, size: int) -> Iterator[Callable[[bool], bool]]:
    """A default process group on the CPU; inside, a way to ask whether anybody says yes."""
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)

    def anybody(says: bool) -> bool:
        votes = torch.tensor(float(says))
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes)

    try:
        yield anybody
    finally:
        dist.destroy_process_group()


def default_replicas() -> Replicas:
    """The processes of the default group; without one, a single replica."""
    return ProcessReplicas() if local_replicas() is not OneReplica.local else OneReplica()


def local_replicas() -> range:
    """The replicas of this process in `default_replicas()`, without asking anyone."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return range(dist.get_rank(), dist.get_rank() + 1)
    return OneReplica.local


def _device_types(group: dist.ProcessGroup) -> list[str]:
    """Device types whose tensors the group can send, such as ["cuda"] for NCCL."""
    return [entry.split(":")[0] for entry in str(dist.get_backend_config(group)).split(",")]
