"""ProcessReplicas: one replica for each process, or for several that hold its shards."""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from hdet._validation import check_integer, check_names
from hdet.replicas.collective_calls import CollectiveCalls
from hdet.replicas.collectives import CollectiveReplicas
from hdet.replicas.device_mesh import (
    GradientSwitch,
    ddp_modules,
    groups_of,
    ranks_along,
    reaches,
    same_replica,
)
from hdet.replicas.process_groups import (
    device_types,
    equalise_group_counts,
    gather_through,
    new_group,
    timeout_of,
)
from hdet.replicas.protocol import Capabilities, Rows
from hdet.replicas.rendezvous import meet
from hdet.tensors.dtensor import WRAPPER_NAMES, layout


class ProcessReplicas(CollectiveReplicas):
    """One replica in each process of a group, or in several processes that hold its shards.

    With `mesh["replicate"]`, one dimension of a device mesh, a replica consists of all processes
    that differ in the other dimensions. FSDP2, tensor parallelism and others work inside a replica.
    Every process averages its shards with those at the same place of the other replicas. A
    parameter that is sharded over the replicas themselves exists once and is not averaged.

    Every process must construct it, with equal arguments.

    Args:
        process_group: The processes: a group, a device mesh of one dimension, or None for the
            default group.
        keep_out: Patterns of parameter names, such as "*.experts.*". These parameters exist once
            in each process and are not averaged.
        bucket_bytes: The memory that an average may use beside the model, in bytes.
        share_gradients: Switches the averaging of gradients over the replicas on or off. hdet calls
            it with True or False between two steps. None is for DDP and FSDP2, which hdet switches
            by itself.

    Raises:
        RuntimeError: No process group is initialized.
        ValueError: The mesh has several dimensions, this process is outside the group, or the
            arguments differ between processes.
        TypeError: An argument has the wrong type.

    Example:
        >>> import hdet, torch
        >>> def main(model, schedule_of):  # in every process that torchrun starts
        ...     mesh = torch.distributed.init_device_mesh(
        ...         "cuda", (2, 4), mesh_dim_names=("replicate", "shard")
        ...     )
        ...     torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        ...     optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ...     replicas = hdet.ProcessReplicas(mesh["replicate"])
        ...     return hdet.HDET(schedule_of(optimizer), model=model, replicas=replicas)
    """

    capabilities = Capabilities(can_compress=True, needs_wrapped_model=True)

    def __init__(
        self,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        keep_out: Sequence[str] = (),
        bucket_bytes: int = 64 << 20,
        share_gradients: Callable[[bool], object] | None = None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "`ProcessReplicas` needs a process group: call "
                "torch.distributed.init_process_group first, or start the script with torchrun."
            )
        own_ranks: list[int] = [dist.get_rank()]
        groups: list[Any] = [process_group]
        self._by_mesh = isinstance(process_group, DeviceMesh)
        if isinstance(process_group, DeviceMesh):
            _check_mesh(process_group)
            own_ranks, groups = same_replica(process_group), groups_of(process_group)
            process_group = process_group.get_group()
        if dist.get_rank(process_group) < 0:
            raise ValueError("`process_group` must contain this process, got a group without it.")
        # A group of our own: an average never races the collectives of the user's group.
        # torch 2.6 does not read None as the default group here.
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        timeout = timeout_of(None if self._by_mesh else process_group)
        meet(ranks, timeout)
        if len(ranks) < dist.get_world_size() or len(own_ranks) > 1:
            equalise_group_counts(groups)
        self._group = new_group(ranks, timeout)
        here = dist.get_rank(self._group)
        self.size: int = dist.get_world_size(self._group)
        self.local = range(here, here + 1)
        self.parts, self.part = len(own_ranks), own_ranks.index(dist.get_rank())
        self._replica_group = new_group(own_ranks, timeout) if self.parts > 1 else None
        self._groups = [group for group in (self._replica_group, self._group) if group is not None]
        self._ranks, self._replica_ranks = frozenset(ranks), frozenset(own_ranks)
        self._keep_out = keep_out
        self._matched_patterns: set[str] = set()
        self._switch, self._own_switch = GradientSwitch(self._ranks), share_gradients
        needs_wrapper = share_gradients is None
        self.capabilities = replace(self.capabilities, needs_wrapped_model=needs_wrapper)
        every_rank = self._check_equal_arguments(bucket_bytes)
        super().__init__(bucket_bytes, device_types(self._group))
        places = {rank: self._place_of(index) for index, rank in enumerate(every_rank)}
        device = torch.device(self._device_types[0])
        self._calls = CollectiveCalls(self._groups, device, places)

    def _place_of(self, index: int) -> str:
        """What messages call a process, given its place in the order of all processes."""
        replica, part = divmod(index, self.parts)
        return f"replica {replica}" if self.parts == 1 else f"replica {replica} (part {part})"

    def collective_call(self, name: str, step: int) -> AbstractContextManager[None]:
        return self._calls.call(name, step)

    def begin_reduce(self, wire: Tensor, op: Any) -> Any:
        return self._calls.start(
            lambda: dist.all_reduce(wire, op=op, group=self._group, async_op=True)
        )

    # Which parameters are replicated ---------------------------------------------------------

    def unreplicated(self, named: Mapping[str, Tensor]) -> Collection[str]:
        found = set()
        for pattern in self._keep_out:
            matches = [name for name in named if fnmatchcase(_unwrapped(name), pattern)]
            if not matches and pattern not in self._matched_patterns:
                raise ValueError(
                    f"`keep_out` must match parameters of `model`, got the pattern {pattern!r}, "
                    f"which matches none of {sorted(named)}."
                )
            self._matched_patterns.add(pattern)  # DDP hides parameters after a forward
            found.update(matches)
        others = [(name, p) for name, p in named.items() if name not in found]
        return found.union(name for name, p in others if self._is_sharded_over_replicas(name, p))

    def _is_sharded_over_replicas(self, name: str, parameter: Tensor) -> bool:
        """Whether the replicas hold shards of one parameter. Other shards must lie inside one."""
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
                f"`{name}` is sharded over the replicas, so there is only one of it. Pass "
                "`replicas=ProcessReplicas(mesh['replicate'])` of the mesh that the model is "
                "sharded on, or name it in `keep_out`."
            )
        for ranks in sharded:
            if not ranks <= self._replica_ranks:
                raise ValueError(
                    f"`{name}` must be sharded inside one replica or over all replicas, got "
                    f"processes {sorted(ranks)}; this replica has {sorted(self._replica_ranks)}, "
                    f"and the replicas lie on {sorted(self._ranks)}. Pass "
                    "`replicas=ProcessReplicas(mesh['replicate'])` of the mesh that the model is "
                    "sharded on."
                )
        return False

    # Communication ---------------------------------------------------------------------------

    def gather(self, rows: Tensor) -> Tensor:
        return torch.cat(self._all_gather(rows, self._group, self.size))

    def gather_parts(self, rows: Tensor) -> Tensor:
        if self._replica_group is None:
            return super().gather_parts(rows)
        gathered = self._all_gather(rows, self._replica_group, self.parts)
        return torch.stack(gathered, dim=1).to(rows.device)

    def _all_gather(self, rows: Tensor, group: dist.ProcessGroup, size: int) -> list[Tensor]:
        sent = rows.to(self._wire_device(rows.device)).contiguous()
        received = [torch.empty_like(sent) for _ in range(size)]
        self._calls.run(lambda: dist.all_gather(received, sent, group=group))
        return received

    def gather_objects(self, description: Any) -> list[Any]:
        return self._calls.run(lambda: gather_through(self._groups, description))

    def all_to_all(self, rows: Tensor) -> Callable[[], Tensor]:
        """Send row r to replica r. The result waits, and returns one row from each replica."""
        sent = rows.to(self._wire_device(rows.device))
        received = torch.empty_like(sent)
        work = self._calls.start(
            lambda: dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        )

        def wait() -> Tensor:
            work.wait()
            return received.to(rows.device)

        return wait

    def copy_(self, rows: Rows, source: int, targets: Sequence[int]) -> int:
        here = self.local[0]
        num_bytes = 0
        for bucket in self._buckets.of(rows[0]).buckets:
            wire = bucket.load()
            if here != source and here not in targets:
                wire = torch.empty_like(wire)  # every process takes part, only the targets write
            self._calls.run(partial(dist.broadcast, wire, group_src=source, group=self._group))
            if here in targets:
                bucket.store()
            num_bytes += wire.nbytes
        return num_bytes

    # Gradients -------------------------------------------------------------------------------

    def share_gradients(self, model: nn.Module, shared: bool) -> bool:
        if self._own_switch is not None:
            self._own_switch(shared)
            return True
        wrapped = [
            module
            for module in ddp_modules(model)
            if reaches(dist.get_process_group_ranks(module.process_group), self._ranks, shared)
        ]
        if not shared and any(module.static_graph for module in wrapped):
            raise ValueError("gradients cannot be local under DDP(static_graph=True).")
        for module in wrapped:
            self._switch_ddp(module, shared)
        is_fsdp2 = self._switch.turn(model, shared)
        return not shared or self.size == 1 or bool(wrapped) or is_fsdp2

    def _switch_ddp(self, module: DistributedDataParallel, shared: bool) -> None:
        # DDP's own no_sync() sets this attribute. It also stops the broadcast of buffers.
        module.require_backward_grad_sync = shared
        hook = _FORWARD_HOOKS.pop(module, None)
        if hook is not None:  # it may belong to an earlier scheduler
            hook.remove()
        if not shared:
            _FORWARD_HOOKS[module] = module.register_forward_pre_hook(_keep_gradients_local(self))
        elif hook is not None and module.find_unused_parameters:
            _FORWARD_HOOKS[module] = module.register_forward_pre_hook(_fill_gradients)

    def _check_equal_arguments(self, bucket_bytes: Any) -> list[int]:
        """All processes must cut equal buckets. One that cannot start tells the others first.

        Returns:
            The ranks of all processes, ordered by replica, then by part.
        """
        problem = None
        try:
            check_integer("bucket_bytes", bucket_bytes, at_least=1024)
            check_names("keep_out", self._keep_out)
            if self._own_switch is not None and not callable(self._own_switch):
                raise TypeError(
                    f"`share_gradients` must be a function of one bool, got {self._own_switch!r}."
                )
        except (TypeError, ValueError) as error:
            problem = error
        mine = {"bucket_bytes": bucket_bytes, "keep_out": self._keep_out, "rank": dist.get_rank()}
        gathered = gather_through(self._groups, mine)
        if problem is not None:
            raise problem
        for name in ("bucket_bytes", "keep_out"):
            values = [arguments[name] for arguments in gathered]
            if any(value != values[0] for value in values):
                raise ValueError(
                    f"`{name}` must be the same on all replicas, got {values} in their order."
                )
        return [arguments["rank"] for arguments in gathered]


_FORWARD_HOOKS: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
"""The pre-forward hook of each DDP module. A module has one, whichever scheduler registered it."""


def _keep_gradients_local(replicas: ProcessReplicas) -> Callable[..., None]:
    """A hook that switches DDP off again: loops that accumulate gradients set it at every step."""
    weak_replicas = weakref.ref(replicas)

    def keep(module: DistributedDataParallel, _: Any) -> None:
        if weak_replicas() is not None and module.require_backward_grad_sync:
            module.require_backward_grad_sync = False

    return keep


def _fill_gradients(module: DistributedDataParallel, _: Any) -> None:
    """A hook that runs once, before the first forward whose gradients DDP shares again.

    While gradients are local, DDP collects which parameters are used. It then expects a gradient of
    each parameter that was used in any of these steps.
    """
    if torch.is_grad_enabled() and module.require_backward_grad_sync:
        for parameter in module.module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        _FORWARD_HOOKS.pop(module).remove()


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ValueError(
            "`process_group` must be a mesh of one dimension, such as "
            f"mesh['replicate'], got {mesh!r}."
        )
    if mesh.get_coordinate() is None:
        raise ValueError("`process_group` must contain this process, got a mesh without it.")


def _unwrapped(name: str) -> str:
    """A parameter's name without the prefixes of DDP, torch.compile and other wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES).removeprefix(
        "module."
    )
