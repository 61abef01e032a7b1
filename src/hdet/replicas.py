"""The Replicas protocol, and replicas as processes: the only file that talks to other processes."""

import warnings
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hdet.body import WRAPPED
from hdet.buckets import SLOTS, Bucket, Buckets, Plan, wire_dtype
from hdet.held_out import HeldOut
from hdet.mesh import Switch, ranks_along, reaches, same_replica, wires_of
from hdet.shards import layout
from hdet.validation import check_integer, check_names

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

    def alone(self, named: Mapping[str, Tensor]) -> Collection[str]:
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

    def pool(self, rows: Tensor) -> Tensor:
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

    def hold_out(self) -> HeldOut | None:
        """Keep the next batches, to score replicas by them; none where nobody knows batches."""


class OneHere:
    """What all engines with one replica in a process have in common, if it is there as a whole."""

    parts, part = 1, 0

    def hold_out(self) -> HeldOut | None:
        return None  # the loop computes losses itself

    def modules(self, model: nn.Module | None) -> Sequence[nn.Module | None]:
        return [model]

    def optimizers(
        self, optimizer: Optimizer, steers: Collection[str] | None = None
    ) -> Sequence[Optimizer]:
        return [optimizer]

    def alone(self, named: Mapping[str, Tensor]) -> Collection[str]:
        return ()

    def pool(self, rows: Tensor) -> Tensor:
        return rows[:, None]


class OneReplica(OneHere):
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


class Wired(OneHere, ABC):
    """One replica in each process, and a wire between them, on which tensors travel in buckets."""

    size: int
    local: range

    def __init__(self, bucket_bytes: int, device_types: Sequence[str]) -> None:
        self._devices = device_types
        self._buckets = Buckets(bucket_bytes, device_types)

    @abstractmethod
    def begin_reduce(self, wire: Tensor, op: Any) -> Any:
        """Start to reduce a tensor over all replicas, in place; what to `wait()` for."""

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

    def begin_average(self, rows: Rows) -> Means:
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, flat in enumerate(rows[0]):
            kinds.setdefault((flat.device, wire_dtype(flat.dtype)), []).append(place)
        under_way = []
        for (device, dtype), places in kinds.items():
            home = self._home(device)
            wire = torch.cat([rows[0][place].to(home, dtype) for place in places])
            work = self.begin_reduce(wire, dist.ReduceOp.SUM)
            under_way.append((work, wire, places))

        def wait() -> list[Tensor]:
            means: dict[int, Tensor] = {}
            for work, wire, places in under_way:
                work.wait()
                parts = wire.div_(self.size).split([rows[0][place].numel() for place in places])
                means.update(zip(places, parts, strict=True))
            return [means[place].to(flat.device) for place, flat in enumerate(rows[0])]

        return wait

    def maximum_(self, rows: Rows) -> int:
        plan = self._buckets.of(rows[0])
        return self._reduce(plan, dist.ReduceOp.MAX, Bucket.load, Bucket.store)

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
            work = self.begin_reduce(bucket.wire, op)
            on_the_wire.append((work, bucket))
            sent += bucket.wire.nbytes
        while on_the_wire:
            land()
        return sent

    def _home(self, device: torch.device) -> torch.device:
        """Where the wire takes what lies on a device."""
        return device if device.type in self._devices else torch.device(self._devices[0])


class ProcessReplicas(Wired):
    """One replica in each process of a group (the default group, or a given one); or in several.

    With `mesh["replicate"]`, a dimension of a device mesh, a replica is all processes that differ
    in the other dimensions: FSDP2, tensor and other parallelism go on inside it, and every process
    averages its shards with those of the same place in other replicas. A parameter that is sharded
    over the replicas themselves exists once and is left alone; `keep_out` names others that do, by
    patterns such as "*.experts.*". `bucket_bytes` is all the memory a converge may use beside the
    model.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        keep_out: Sequence[str] = (),
        bucket_bytes: int = 64 << 20,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "`ProcessReplicas` needs a process group: call "
                "torch.distributed.init_process_group first, or start the script with torchrun."
            )
        inside: list[int] = [dist.get_rank()]
        wires: list[Any] = [process_group]
        self._by_mesh = isinstance(process_group, DeviceMesh)
        if isinstance(process_group, DeviceMesh):
            if process_group.ndim != 1:
                raise ValueError(
                    "`process_group` must be a mesh of one dimension, such as "
                    f"mesh['replicate'], got {process_group!r}."
                )
            if process_group.get_coordinate() is None:
                raise ValueError(
                    "`process_group` must contain this process, got a mesh without it."
                )
            inside, wires = same_replica(process_group), wires_of(process_group)
            process_group = process_group.get_group()
        if dist.get_rank(process_group) < 0:
            raise ValueError("`process_group` must contain this process, got a group without it.")
        # A group of our own: the converge never races the collectives of the user's.
        ranks = dist.get_process_group_ranks(process_group)
        if len(ranks) < dist.get_world_size() or len(inside) > 1:
            _be_in_as_many_groups(wires)
        self._group = _own_group(ranks)
        here = dist.get_rank(self._group)
        self.size: int = dist.get_world_size(self._group)
        self.local = range(here, here + 1)
        self.parts, self.part = len(inside), inside.index(dist.get_rank())
        self._inside = _own_group(inside) if self.parts > 1 else None
        self._ranks, self._mates = frozenset(ranks), frozenset(inside)
        self._keep_out = keep_out
        self._fitted: set[str] = set()
        """Patterns that have found a parameter."""
        self._switch = Switch(self._ranks)
        self._check_alike(bucket_bytes)
        super().__init__(bucket_bytes, _device_types(self._group))

    def begin_reduce(self, wire: Tensor, op: Any) -> Any:
        return dist.all_reduce(wire, op=op, group=self._group, async_op=True)

    def alone(self, named: Mapping[str, Tensor]) -> Collection[str]:
        found = set()
        for pattern in self._keep_out:
            fits = [name for name in named if fnmatchcase(_unwrapped(name), pattern)]
            if not fits and pattern not in self._fitted:
                raise ValueError(
                    "`keep_out` must name parameters of the model (`model=`), got "
                    f"{pattern!r}, which fits none of {sorted(named)}."
                )
            self._fitted.add(pattern)  # DDP hides parameters after a forward
            found.update(fits)
        others = [(name, p) for name, p in named.items() if name not in found]
        return found.union(name for name, p in others if self._is_across(name, p))

    def _is_across(self, name: str, parameter: Tensor) -> bool:
        """Whether it is sharded over the replicas themselves; else it must be inside of one."""
        made = layout(parameter)
        if made is None:
            return False
        sharded = [
            frozenset(ranks_along(made.mesh, dimension))
            for dimension, placement in enumerate(made.placements)
            if not placement.is_replicate()
        ]
        if any(ranks >= self._ranks for ranks in sharded) and self.size > 1:
            if self._by_mesh:
                return True
            raise ValueError(
                f"`{name}` is sharded over the processes that are to be replicas: there is one of "
                "it. Pass `replicas=ProcessReplicas(mesh['replicate'])` of the mesh that the model "
                "is sharded on; or name it in `keep_out`, if every replica has the rest of the "
                "model for itself."
            )
        for ranks in sharded:
            if not ranks <= self._mates:
                raise ValueError(
                    f"`{name}` must be sharded inside of a replica, or over all of them, got "
                    f"processes {sorted(ranks)}, where this replica consists of "
                    f"{sorted(self._mates)} and the replicas lie on {sorted(self._ranks)}. Pass "
                    "`replicas=ProcessReplicas(mesh['replicate'])` of the mesh that the model is "
                    "sharded on."
                )
        return False

    def gather(self, rows: Tensor) -> Tensor:
        return torch.cat(self._all(rows, self._group, self.size))

    def pool(self, rows: Tensor) -> Tensor:
        if self._inside is None:
            return super().pool(rows)
        return torch.stack(self._all(rows, self._inside, self.parts), dim=1).to(rows.device)

    def _all(self, rows: Tensor, group: dist.ProcessGroup, size: int) -> list[Tensor]:
        sent = rows.to(self._home(rows.device)).contiguous()
        everyone = [torch.empty_like(sent) for _ in range(size)]
        dist.all_gather(everyone, sent, group=group)
        return everyone

    def gather_objects(self, description: Any) -> list[Any]:
        replica: list[Any] = [description]
        if self._inside is not None:
            replica = [None] * self.parts
            dist.all_gather_object(replica, description, group=self._inside)
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, replica, group=self._group)
        return [told for parts in everyone for told in parts]

    def trade(self, rows: Tensor) -> Callable[[], Tensor]:
        """One row for each replica -> one row from each, for whoever waits."""
        sent = rows.to(self._home(rows.device))
        theirs = torch.empty_like(sent)
        work = dist.all_to_all_single(theirs, sent, group=self._group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return theirs.to(rows.device)

        return wait

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
        wrapped = [
            module
            for module in model.modules()
            if isinstance(module, DistributedDataParallel)
            and reaches(dist.get_process_group_ranks(module.process_group), self._ranks, shared)
        ]
        if not shared and any(module.static_graph for module in wrapped):
            raise ValueError("gradients cannot be local under DDP(static_graph=True).")
        for module in wrapped:
            # What DDP's own no_sync() sets. It also stops the broadcast of buffers.
            module.require_backward_grad_sync = shared
            hook = _WATCHES.pop(module, None)
            if hook is not None:  # also one of a scheduler before
                hook.remove()
            if not shared:
                _WATCHES[module] = module.register_forward_pre_hook(_keep_apart(self))
            elif hook is not None and module.find_unused_parameters:
                _WATCHES[module] = module.register_forward_pre_hook(_fill_gradients)
        found = self._switch.turn(model, shared)
        if shared and self.size > 1 and not wrapped and not found:
            warnings.warn(
                "gradients='shared' but `model` is neither wrapped in DistributedDataParallel nor "
                "fully_shard-ed on a mesh with the dimension of the replicas: every replica steps "
                "with its own gradients, unless your loop averages them.",
                stacklevel=5,
            )

    def _check_alike(self, bucket_bytes: Any) -> None:
        """Replicas must cut their buckets alike; one that cannot start tells the others."""
        problem = None
        try:
            check_integer("bucket_bytes", bucket_bytes, at_least=1024)
            check_names("keep_out", self._keep_out)
        except (TypeError, ValueError) as error:
            problem = error
        everyone = self.gather_objects({"bucket_bytes": bucket_bytes, "keep_out": self._keep_out})
        if problem is not None:
            raise problem
        for name in ("bucket_bytes", "keep_out"):
            told = [entry[name] for entry in everyone]
            if any(value != told[0] for value in told):
                raise ValueError(
                    f"`{name}` must be the same on all replicas, got {told} in their order."
                )


_WATCHES: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
"""What looks at a DDP module before its forwards: one hook, whoever has put it there."""


def _keep_apart(replicas: ProcessReplicas) -> Callable[..., None]:
    """Loops that accumulate gradients write DDP's switch themselves, at every step."""
    weakly = weakref.ref(replicas)

    def keep(module: DistributedDataParallel, _: Any) -> None:
        if weakly() is not None and module.require_backward_grad_sync:
            module.require_backward_grad_sync = False

    return keep


def _fill_gradients(module: DistributedDataParallel, _: Any) -> None:
    """Before the first forward that DDP shares the gradients of again, once.

    While gradients were local DDP went on noting which parameters are used: it would look for the
    gradients of all that were used in any of these steps.
    """
    if torch.is_grad_enabled() and module.require_backward_grad_sync:
        for parameter in module.module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        _WATCHES.pop(module).remove()


def _own_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    # For a part of the world only its members take part.
    made: dist.ProcessGroup = dist.new_group(
        list(ranks), use_local_synchronization=len(ranks) < dist.get_world_size()
    )
    return made


def _be_in_as_many_groups(wires: Sequence[dist.ProcessGroup | None]) -> None:
    """Torch names a group that its members make alone by the number of groups they are in: where
    that differs they would wait for each other forever. Who is in fewer joins some of its own."""
    known = dist.distributed_c10d._world.pg_names
    most = len(known)
    for wire in wires:
        told = [0] * dist.get_world_size(wire)
        dist.all_gather_object(told, most, group=wire)
        most = max(told)
    while len(known) < most:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _unwrapped(name: str) -> str:
    """Without what DDP, torch.compile and others add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED).removeprefix("module.")


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
