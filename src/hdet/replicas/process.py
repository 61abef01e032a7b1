"""ProcessReplicas: one replica for each process, or for several that hold its shards."""

import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from hdet._validation import check_integer, check_names
from hdet.replicas.collectives import CollectiveReplicas
from hdet.replicas.device_mesh import GradientSwitch, ranks_along, reaches, same_replica, wires_of
from hdet.replicas.protocol import Rows
from hdet.tensors.dtensor import WRAPPER_NAMES, layout


class ProcessReplicas(CollectiveReplicas):
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
            _equalise_group_counts(wires)
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
        self._switch = GradientSwitch(self._ranks)
        self._check_alike(bucket_bytes)
        super().__init__(bucket_bytes, _device_types(self._group))

    def begin_reduce(self, wire: Tensor, op: Any) -> Any:
        return dist.all_reduce(wire, op=op, group=self._group, async_op=True)

    def unreplicated(self, named: Mapping[str, Tensor]) -> Collection[str]:
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

    def gather_parts(self, rows: Tensor) -> Tensor:
        if self._inside is None:
            return super().gather_parts(rows)
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

    def all_to_all(self, rows: Tensor) -> Callable[[], Tensor]:
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
            hook = _FORWARD_HOOKS.pop(module, None)
            if hook is not None:  # also one of a scheduler before
                hook.remove()
            if not shared:
                _FORWARD_HOOKS[module] = module.register_forward_pre_hook(
                    _keep_gradients_local(self)
                )
            elif hook is not None and module.find_unused_parameters:
                _FORWARD_HOOKS[module] = module.register_forward_pre_hook(_fill_gradients)
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


_FORWARD_HOOKS: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
"""What looks at a DDP module before its forwards: one hook, whoever has put it there."""


def _keep_gradients_local(replicas: ProcessReplicas) -> Callable[..., None]:
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
        _FORWARD_HOOKS.pop(module).remove()


def _own_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    # For a part of the world only its members take part.
    made: dist.ProcessGroup = dist.new_group(
        list(ranks), use_local_synchronization=len(ranks) < dist.get_world_size()
    )
    return made


def _equalise_group_counts(wires: Sequence[dist.ProcessGroup | None]) -> None:
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
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES).removeprefix(
        "module."
    )


def _device_types(group: dist.ProcessGroup) -> list[str]:
    """Device types whose tensors the group can send, such as ["cuda"] for NCCL."""
    return [entry.split(":")[0] for entry in str(dist.get_backend_config(group)).split(",")]
