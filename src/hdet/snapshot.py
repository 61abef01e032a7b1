"""What a run can be taken back to: weights, buffers, optimizer state and random numbers."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.body import Body
from hdet.shards import Layout, layout, local

Tensors = dict[str, Tensor]


class Seen(NamedTuple):
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
    def seen(self) -> Seen:
        return Seen(self.weights, self.buffers)

    def has_the_weights_of(self, other: "Snapshot") -> bool:
        if [list(mine) for mine in self.weights] != [list(theirs) for theirs in other.weights]:
            return False
        same = [
            (tensor == theirs[name]).all()
            for mine, theirs in zip(self.weights, other.weights, strict=True)
            for name, tensor in mine.items()
        ]
        return bool(torch.stack([one.to(same[0].device) for one in same]).all()) if same else True


class Away(NamedTuple):
    """A tensor in the memory of the host, and where it belongs."""

    tensor: Tensor
    home: torch.device
    layout: Layout | None
    """Of a shard."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Away":
        return cls(local(tensor).to("cpu", copy=True), tensor.device, layout(tensor))

    def come_home(self) -> Tensor:
        tensor = self.tensor.to(self.home, copy=True)
        return tensor if self.layout is None else self.layout.wrap(tensor)


def take(
    bodies: Sequence[Body], outer: Optimizer | None = None, *, offload: bool = False
) -> Snapshot:
    """A copy of everything; with `offload` in the memory of the host."""

    # Stacked replicas may share one state: then its copy is shared, too.
    copies: dict[int, Any] = {}

    def state(value: Any) -> Any:
        if id(value) not in copies:
            copies[id(value)] = _away(value) if offload else copy.deepcopy(value)
        return copies[id(value)]

    return Snapshot(
        *seen(bodies, offload=offload),
        [{key: state(value) for key, value in body.optimizer.state.items()} for body in bodies],
        [[_settings(group) for group in body.optimizer.param_groups] for body in bodies],
        _draws(next(iter(bodies[0].parameters().values())).device),
        None if outer is None else {key: state(value) for key, value in outer.state.items()},
    )


@torch.no_grad()
def restore(
    snapshot: Snapshot,
    bodies: Sequence[Body],
    outer: Optimizer | None = None,
    *,
    draws: bool = True,
) -> None:
    """Everything as it was, with `draws` also the random numbers that come next.

    Learning rates are written by whoever steers. What was not there yet is left alone.
    """
    show(snapshot.seen, bodies)
    copies: dict[int, Any] = {}
    for place, body in enumerate(bodies):
        body.optimizer.state.clear()
        for key, value in snapshot.states[place].items():
            if id(value) not in copies:
                copies[id(value)] = _at_home(value)
            body.optimizer.state[key] = copies[id(value)]
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
        outer.state.update({key: _at_home(value) for key, value in snapshot.outer.items()})
    if draws:
        for device, state in snapshot.draws.items():
            if device == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)


def seen(bodies: Sequence[Body], *, offload: bool = False) -> Seen:
    """A copy of weights and buffers; with `offload` in the memory of the host."""

    def kept(named: Tensors) -> Tensors:
        once = {name: tensor.detach() for name, tensor in _once(named).items()}
        return {n: t.to("cpu", copy=True) if offload else t.clone() for n, t in once.items()}

    return Seen([kept(body.shards()) for body in bodies], [kept(b.buffers()) for b in bodies])


@torch.no_grad()
def show(what: Seen, bodies: Sequence[Body]) -> None:
    """The weights and buffers that were kept; optimizers know nothing of it."""
    for weights, buffers, body in zip(what.weights, what.buffers, bodies, strict=True):
        for kept, named in ((weights, body.shards()), (buffers, body.buffers())):
            pairs = [(named[n].detach(), t) for n, t in kept.items() if n in named]
            if pairs:
                torch._foreach_copy_([own for own, _ in pairs], [t for _, t in pairs])


def _away(value: Any) -> Any:
    """A state in the memory of the host."""
    if not isinstance(value, dict):
        return copy.deepcopy(value)
    return {k: Away.of(v) if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in value.items()}


def _at_home(value: Any) -> Any:
    """A state as an optimizer keeps it."""
    if not isinstance(value, dict) or not any(isinstance(v, Away) for v in value.values()):
        return copy.deepcopy(value)
    return {k: v.come_home() if isinstance(v, Away) else copy.deepcopy(v) for k, v in value.items()}


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
