"""Snapshots: copies of weights, buffers, optimizer state and random states, to be restored."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.tensors.dtensor import Layout, layout, local
from hdet.tensors.joined_optimizer import members_of
from hdet.tensors.ops import are_equal, copies, copy_all
from hdet.tensors.optimizers import inner_optimizers
from hdet.weights.inventory import ReplicaTensors

Tensors = dict[str, Tensor]


class ModelCopy(NamedTuple):
    """Weights and buffers by name; one entry for each replica of this process, or one for all."""

    weights: list[Tensors]
    buffers: list[Tensors]


class Snapshot(NamedTuple):
    """Everything that training changes, of the replicas of this process."""

    weights: list[Tensors]
    buffers: list[Tensors]
    states: list[dict[Any, Any]]
    """The state of each optimizer and of those that it keeps, under their own keys."""
    settings: list[list[dict[str, Any]]]
    """The entries of each optimizer's parameter groups, without parameters and learning rates."""
    random_states: dict[str, Tensor]
    """Device -> state of its random number generator; replicas share them."""
    outer: dict[Any, Any] | None = None
    """The state of the outer optimizer."""
    loss_scale: Mapping[str, Any] | None = None
    """The state of the user's GradScaler."""

    @property
    def model(self) -> ModelCopy:
        """The weights and buffers alone."""
        return ModelCopy(self.weights, self.buffers)

    def num_bytes(self) -> int:
        """The memory of the snapshot in this process."""
        owned = [t for row in (*self.weights, *self.buffers) for t in row.values()]
        entries = [
            entry
            for state in (*self.states, self.outer or {})
            for value in state.values()
            if isinstance(value, dict)
            for entry in value.values()
        ]
        owned += [e.tensor if isinstance(e, OffloadedTensor) else e for e in entries if is_held(e)]
        once = {id(tensor): local(tensor) for tensor in owned}
        return sum(tensor.numel() * tensor.element_size() for tensor in once.values())

    def has_weights_of(self, other: "Snapshot") -> bool:
        """Whether both snapshots hold the same weights, whatever else they hold."""
        if [list(mine) for mine in self.weights] != [list(theirs) for theirs in other.weights]:
            return False
        return all(
            are_equal(list(mine.values()), list(theirs.values()))
            for mine, theirs in zip(self.weights, other.weights, strict=True)
        )


class OffloadedTensor(NamedTuple):
    """A tensor in host memory, with its device and its layout if it is a shard."""

    tensor: Tensor
    device: torch.device
    layout: Layout | None

    @classmethod
    def of(cls, tensor: Tensor) -> "OffloadedTensor":
        """Copy a tensor to host memory."""
        return cls(local(tensor).to("cpu", copy=True), tensor.device, layout(tensor))

    def to_device(self) -> Tensor:
        """Copy the tensor back to its device."""
        tensor = self.tensor.to(self.device, copy=True)
        return tensor if self.layout is None else self.layout.wrap(tensor)


def is_held(entry: Any) -> bool:
    """Whether an entry of an optimizer state is a tensor, perhaps an offloaded one."""
    return isinstance(entry, (Tensor, OffloadedTensor))


def take_snapshot(
    local_tensors: Sequence[ReplicaTensors],
    outer: Optimizer | None = None,
    *,
    offload: bool = False,
    equal: bool = False,
) -> Snapshot:
    """Copy everything that training changes.

    Args:
        local_tensors: The tensors of each replica of this process.
        outer: The outer optimizer.
        offload: Whether the copy lies in host memory.
        equal: Whether replicas have the same weights and buffers: then one copy is taken.
    """
    optimizers = _optimizers(local_tensors)
    owners = _owners_of_states(optimizers)
    everyone = owners + ([] if outer is None else [outer])
    states = _copy_states([owner.state for owner in everyone], offload=offload)
    return Snapshot(
        *copy_model(local_tensors[:1] if equal else local_tensors, offload=offload),
        states[: len(owners)],
        [[_settings(group) for group in optimizer.param_groups] for optimizer in optimizers],
        _random_states(next(iter(local_tensors[0].parameters().values())).device),
        None if outer is None else states[-1],
    )


@torch.no_grad()
def restore_snapshot(
    snapshot: Snapshot,
    local_tensors: Sequence[ReplicaTensors],
    outer: Optimizer | None = None,
    *,
    random_state: bool = True,
) -> None:
    """Restore everything, with `random_state` also the random numbers that come next.

    Learning rates stay as they are. Tensors that the snapshot does not hold stay as they are.
    """
    write_model(snapshot.model, local_tensors)
    *states, outer_state = _copy_states([*snapshot.states, snapshot.outer or {}])
    optimizers = _optimizers(local_tensors)
    for owner, kept in zip(_owners_of_states(optimizers), states, strict=False):
        owner.state.clear()
        owner.state.update(kept)
    for optimizer, settings in zip(optimizers, snapshot.settings, strict=True):
        _restore_settings(optimizer, settings)
    if outer is not None and snapshot.outer is not None:
        outer.state.clear()
        outer.state.update(outer_state)
    if random_state:
        for device, state in snapshot.random_states.items():
            if device == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)


def _optimizers(local_tensors: Sequence[ReplicaTensors]) -> list[Optimizer]:
    """Each optimizer of each replica: every one has a state under keys of its own."""
    return [one for tensors in local_tensors for one in members_of(tensors.optimizer)]


def _owners_of_states(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    return [owner for one in optimizers for owner in (one, *inner_optimizers(one))]


def _restore_settings(optimizer: Optimizer, settings_of_groups: list[dict[str, Any]]) -> None:
    for group, settings in zip(optimizer.param_groups, settings_of_groups, strict=True):
        for name, value in settings.items():
            if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                group[name].copy_(value)  # compiled and captured steps hold on to the tensor
            else:
                group[name] = copy.deepcopy(value)


def copy_model(local_tensors: Sequence[ReplicaTensors], *, offload: bool = False) -> ModelCopy:
    """Copy weights and buffers; with `offload` to host memory."""

    def copied(named: Tensors) -> Tensors:
        once = {name: tensor.detach() for name, tensor in _once(named).items()}
        if offload:
            return {name: tensor.to("cpu", copy=True) for name, tensor in once.items()}
        return dict(zip(once, copies(list(once.values())), strict=True))

    return ModelCopy(
        [copied(tensors.shards()) for tensors in local_tensors],
        [copied(tensors.buffers()) for tensors in local_tensors],
    )


@torch.no_grad()
def write_model(model: ModelCopy, local_tensors: Sequence[ReplicaTensors]) -> None:
    """Write copied weights and buffers back; optimizers stay as they are.

    A copy of a single replica is written to all.
    """
    times = len(local_tensors) // len(model.weights)
    rows = zip(model.weights * times, model.buffers * times, local_tensors, strict=True)
    for weights, buffers, tensors in rows:
        for kept, named in ((weights, tensors.shards()), (buffers, tensors.buffers())):
            known = [name for name in kept if name in named]
            copy_all([named[n].detach() for n in known], [kept[n] for n in known])


def _copy_states(
    states: Sequence[Mapping[Any, Any]], *, offload: bool = False
) -> list[dict[Any, Any]]:
    """Copy optimizer states; with `offload` to host memory, else to the devices of their tensors.

    Stacked replicas may share one state: then they share its copy, too.
    """
    values = [value for state in states for value in state.values() if isinstance(value, dict)]
    entries = {id(entry): entry for value in values for entry in value.values()}
    # deepcopy takes the entries that it finds here instead of copying them itself.
    copied = _offloaded(entries) if offload else _copied_on_device(entries)
    return [{k: copy.deepcopy(value, copied) for k, value in state.items()} for state in states]


def _offloaded(entries: Mapping[int, Any]) -> dict[int, Any]:
    return {
        key: OffloadedTensor.of(entry)
        for key, entry in entries.items()
        if isinstance(entry, Tensor)
    }


def _copied_on_device(entries: Mapping[int, Any]) -> dict[int, Any]:
    """Copies of plain tensors, in few launches, and of offloaded ones.

    deepcopy handles the others, and keeps shared memory shared.
    """
    plain = {key: entry for key, entry in entries.items() if _is_plain(entry)}
    owners = Counter(entry.untyped_storage().data_ptr() for entry in plain.values())
    alone = {k: e for k, e in plain.items() if owners[e.untyped_storage().data_ptr()] == 1}
    copied = dict(zip(alone, copies(list(alone.values())), strict=True))
    returned = {k: e.to_device() for k, e in entries.items() if isinstance(e, OffloadedTensor)}
    return copied | returned


def _is_plain(entry: Any) -> bool:
    """Whether an entry is a dense tensor without gradient, attributes or a class of its own."""
    if type(entry) is not Tensor or entry.layout is not torch.strided:
        return False
    return not (entry.requires_grad or vars(entry))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "lr")}


def _random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the random number generators of the host and of the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[str(device)] = torch.cuda.get_rng_state(device)
    return states


def _once(named: Tensors) -> Tensors:
    """Each tensor under the first of its names."""
    names: dict[int, str] = {}
    for name, tensor in named.items():
        names.setdefault(id(tensor), name)
    return {name: named[name] for name in names.values()}
