"""What a run can be taken back to: weights, buffers, optimizer state and random numbers."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.tensors.dtensor import Layout, layout, local
from hdet.tensors.ops import are_equal, copies, copy_all
from hdet.weights.inventory import ReplicaTensors

Tensors = dict[str, Tensor]


class SnapshotView(NamedTuple):
    """What a model computes with, by name; one entry for each replica of this process."""

    weights: list[Tensors]
    buffers: list[Tensors]


class Snapshot(NamedTuple):
    """The same, and all that training changes beside it, and the random states they share."""

    weights: list[Tensors]
    buffers: list[Tensors]
    states: list[dict[Any, Any]]
    """What each optimizer keeps, under its own keys: parameters, and whatever else it likes."""
    settings: list[list[dict[str, Any]]]
    """What optimizers keep in their groups, beside parameters and learning rates."""
    draws: dict[str, Tensor]
    outer: dict[Any, Any] | None = None
    """What an outer optimizer keeps."""

    @property
    def seen(self) -> SnapshotView:
        return SnapshotView(self.weights, self.buffers)

    def has_the_weights_of(self, other: "Snapshot") -> bool:
        if [list(mine) for mine in self.weights] != [list(theirs) for theirs in other.weights]:
            return False
        return all(
            are_equal(list(mine.values()), list(theirs.values()))
            for mine, theirs in zip(self.weights, other.weights, strict=True)
        )


class OffloadedTensor(NamedTuple):
    """A tensor in the memory of the host, and where it belongs."""

    tensor: Tensor
    home: torch.device
    layout: Layout | None
    """Of a shard."""

    @classmethod
    def of(cls, tensor: Tensor) -> "OffloadedTensor":
        return cls(local(tensor).to("cpu", copy=True), tensor.device, layout(tensor))

    def to_home_device(self) -> Tensor:
        tensor = self.tensor.to(self.home, copy=True)
        return tensor if self.layout is None else self.layout.wrap(tensor)


def take(
    bodies: Sequence[ReplicaTensors],
    outer: Optimizer | None = None,
    *,
    offload: bool = False,
    alike: bool = False,
) -> Snapshot:
    """A copy of everything; with `offload` in the memory of the host. Replicas that are `alike`
    have the same weights and buffers, which are kept once."""
    optimizers = [body.optimizer for body in bodies] + ([] if outer is None else [outer])
    states = _copied([one.state for one in optimizers], offload=offload)
    return Snapshot(
        *seen(bodies[:1] if alike else bodies, offload=offload),
        states[: len(bodies)],
        [[_settings(group) for group in body.optimizer.param_groups] for body in bodies],
        _draws(next(iter(bodies[0].parameters().values())).device),
        None if outer is None else states[-1],
    )


@torch.no_grad()
def restore(
    snapshot: Snapshot,
    bodies: Sequence[ReplicaTensors],
    outer: Optimizer | None = None,
    *,
    draws: bool = True,
) -> None:
    """Everything as it was, with `draws` also the random numbers that come next.

    Learning rates are written by whoever steers. What was not there yet is left alone.
    """
    show(snapshot.seen, bodies)
    states = _copied([*snapshot.states, snapshot.outer or {}])
    for place, body in enumerate(bodies):
        body.optimizer.state.clear()
        body.optimizer.state.update(states[place])
        for group, settings in zip(
            body.optimizer.param_groups, snapshot.settings[place], strict=True
        ):
            for name, value in settings.items():
                if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                    group[name].copy_(value)  # compiled and captured steps know it by its place
                else:
                    group[name] = copy.deepcopy(value)
    if outer is not None and snapshot.outer is not None:
        outer.state.clear()
        outer.state.update(states[-1])
    if draws:
        for device, state in snapshot.draws.items():
            if device == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)


def seen(bodies: Sequence[ReplicaTensors], *, offload: bool = False) -> SnapshotView:
    """A copy of weights and buffers; with `offload` in the memory of the host."""

    def kept(named: Tensors) -> Tensors:
        once = {name: tensor.detach() for name, tensor in _once(named).items()}
        if offload:
            return {name: tensor.to("cpu", copy=True) for name, tensor in once.items()}
        return dict(zip(once, copies(list(once.values())), strict=True))

    return SnapshotView(
        [kept(body.shards()) for body in bodies], [kept(b.buffers()) for b in bodies]
    )


@torch.no_grad()
def show(what: SnapshotView, bodies: Sequence[ReplicaTensors]) -> None:
    """The weights and buffers that were kept, once for all or one for each; optimizers know nothing
    of it."""
    times = len(bodies) // len(what.weights)
    rows = zip(what.weights * times, what.buffers * times, bodies, strict=True)
    for weights, buffers, body in rows:
        for kept, named in ((weights, body.shards()), (buffers, body.buffers())):
            known = [name for name in kept if name in named]
            copy_all([named[n].detach() for n in known], [kept[n] for n in known])


def _copied(states: Sequence[Mapping[Any, Any]], *, offload: bool = False) -> list[dict[Any, Any]]:
    """What optimizers keep; with `offload` in the memory of the host, else on its device, also if
    it was away. Stacked replicas may share one state: then its copy is shared, too."""
    kept = [value for state in states for value in state.values() if isinstance(value, dict)]
    entries = {id(entry): entry for value in kept for entry in value.values()}
    shifted_by: dict[int, Any] = {}
    if offload:
        shifted_by = {
            key: OffloadedTensor.of(e) for key, e in entries.items() if isinstance(e, Tensor)
        }
    else:
        plain = {key: e for key, e in entries.items() if _is_plain(e)}
        owners = Counter(entry.untyped_storage().data_ptr() for entry in plain.values())
        # The others one by one, and together if they lie in one memory.
        here = {k: e for k, e in plain.items() if owners[e.untyped_storage().data_ptr()] == 1}
        shifted_by = dict(zip(here, copies(list(here.values())), strict=True))
        shifted_by |= {
            key: e.to_home_device() for key, e in entries.items() if isinstance(e, OffloadedTensor)
        }
    return [{k: copy.deepcopy(value, shifted_by) for k, value in state.items()} for state in states]


def _is_plain(entry: Any) -> bool:
    """Whether it is a tensor and nothing else."""
    if type(entry) is not Tensor or entry.layout is not torch.strided:
        return False
    return not (entry.requires_grad or vars(entry))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "lr")}


def _draws(device: torch.device) -> dict[str, Tensor]:
    """The random states of the host and of the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[str(device)] = torch.cuda.get_rng_state(device)
    return states


def _once(named: Tensors) -> Tensors:
    """Tied tensors under one of their names."""
    names: dict[int, str] = {}
    for name, tensor in named.items():
        names.setdefault(id(tensor), name)
    return {name: named[name] for name in names.values()}
