"""Checkpoints of runs on any mesh, by torch's distributed checkpoint: one model, no patchwork.

Torch saves every tensor once, from whichever replica is at hand. Between two converges replicas
differ, so what would be saved is a model that nobody has trained: its first tensor from one, its
second from another. Here they converge first. Optimizer states are saved as they are, under the
names of their parameters: torch's own way makes a step with an optimizer that has none yet.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adagrad, Optimizer

from hdet.replicas.stacked.optimizer import StackedOptimizer
from hdet.scheduler.hdet import HDET
from hdet.tensors.dtensor import WRAPPER_NAMES, layout

OWN = ("params", "param_names")
"""Entries of a group that belong to a run, and are not settings."""

# Torch's own is imported where it is used: it takes a second, which most programs need not spend.


def save_checkpoint(
    folder: str | Path, *, model: nn.Module, optimizer: Optimizer, scheduler: HDET
) -> None:
    """Model, optimizer, schedule and outer optimizer of a run, sharded or not, in one folder.

    All processes must call it. The replicas converge, as by `scheduler.converge()`.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    parts = _optimizers(model, optimizer, scheduler)
    for one, parameters in parts.values():
        _others(one, parameters)  # what cannot be saved is told before anybody converges
    scheduler.converge()
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    # One text: torch would load it entry by entry, and only those that are there already.
    state["hdet"] = json.dumps(scheduler.state_dict())
    for name, (one, parameters) in parts.items():
        state[name] = {"tensors": _tensors(one, parameters), "others": _others(one, parameters)}
    with _without_a_word():
        save(state, checkpoint_id=str(folder))


def load_checkpoint(
    folder: str | Path, *, model: nn.Module, optimizer: Optimizer, scheduler: HDET
) -> None:
    """Go on from a saved run: on the same mesh, on another one, or with another number of replicas.

    All processes must call it, with a run that was made like the one that was saved.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    saved = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    parts = _optimizers(model, optimizer, scheduler)
    known = [name for name in parts if name != "outer" or "outer.others" in saved]  # it may be new
    texts: dict[str, Any] = {"hdet": "", **{name: {"others": ""} for name in known}}
    with _without_a_word():
        load(texts, checkpoint_id=str(folder))
    weights, schedule = get_model_state_dict(model), json.loads(texts["hdet"])
    state: dict[str, Any] = {"model": weights}
    # Torch loads into the model itself: whatever does not fit is refused before.
    scheduler.check_state_dict(schedule)
    _check_model(weights, saved)
    for name in known:
        _check_alike(name, *parts[name], json.loads(texts[name]["others"]))
        state[name] = {"tensors": _room(name, parts[name][1], saved)}
    with _without_a_word():
        load(state, checkpoint_id=str(folder))
    set_model_state_dict(model, weights)
    for name, (one, parameters) in parts.items():
        if not isinstance(one, Adagrad):  # which makes its state in its constructor
            one.state.clear()
        if name in known:
            _fill(one, parameters, state[name]["tensors"], json.loads(texts[name]["others"]))
    scheduler.load_state_dict(schedule)


@contextmanager
def _without_a_word() -> Iterator[None]:
    """Torch warns that a run of one process is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or")
        yield


def _optimizers(
    model: nn.Module, optimizer: Optimizer, scheduler: HDET
) -> dict[str, tuple[Optimizer, dict[str, Tensor]]]:
    """What is saved of optimizers, each with its parameters by name."""
    if isinstance(optimizer, StackedOptimizer):
        raise TypeError(
            "`optimizer` must be that of one replica in each process, got stacked replicas: call "
            "scheduler.converge(), then save the states of model, optimizer and scheduler by "
            "torch.save."
        )
    if names := scheduler.unsaved_parameters():
        raise ValueError(
            f"parameters {names} exist once in each process but are plain tensors, of which torch "
            "would save a single one: make them DTensors."
        )
    known = {id(p): _bare(model, name) for name, p in model.named_parameters()}
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(parameter) not in known for parameter in own):
        raise ValueError(
            "`optimizer` must move parameters of `model`, got others. (DDP over tensor "
            "parallelism hides them: save such a run yourself, after scheduler.converge().)"
        )
    found = {"optimizer": (optimizer, {known[id(parameter)]: parameter for parameter in own})}
    pairs = scheduler.outer_parameters()
    if any(id(own) not in known for own, _ in pairs):
        raise ValueError("`model` must have all that the outer optimizer moves, got a part of it.")
    if scheduler.outer is not None:
        found["outer"] = scheduler.outer, {known[id(own)]: outer for own, outer in pairs}
    return found


def _bare(model: nn.Module, name: str) -> str:
    """The name that a parameter has without wrappers, as in torch's own checkpoints."""
    holder: Any = model
    kept = []
    for part in name.split("."):
        if part not in WRAPPER_NAMES and not (
            part == "module" and isinstance(holder, DistributedDataParallel)
        ):
            kept.append(part)
        holder = getattr(holder, part)
    return ".".join(kept)


def _tensors(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _others(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> str:
    """Kind and groups, and whatever a state holds beside tensors, as a text."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    states = {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if not isinstance(value, Tensor)
    }
    told = {
        "kind": type(optimizer).__name__,
        "members": [sorted(names[id(p)] for p in g["params"]) for g in optimizer.param_groups],
        "groups": [
            {key: _plain(value) for key, value in group.items() if key not in OWN}
            for group in optimizer.param_groups
        ],
        "states": states,
    }
    keys = {key for parameter in parameters.values() for key in optimizer.state.get(parameter, {})}
    try:
        if odd := [key for key in keys if not isinstance(key, str)]:
            raise TypeError(f"its state has a key {odd[0]!r} that is no name")
        return json.dumps(told)
    except TypeError as error:
        raise TypeError(
            f"a {type(optimizer).__name__} cannot be saved here, {error}: save such a run "
            "yourself, after scheduler.converge()."
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value.tolist() if isinstance(value, Tensor) else value


def _check_model(weights: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Torch tells what is missing in a checkpoint, and not what is left of it."""
    names = {entry.removeprefix("model.") for entry in saved if entry.startswith("model.")}
    if unknown := names.difference(weights):
        raise ValueError(f"`model` must be the one that was saved, got none of {sorted(unknown)}.")


def _check_alike(
    part: str, optimizer: Optimizer, parameters: Mapping[str, Tensor], told: Mapping[str, Any]
) -> None:
    mine = json.loads(_others(optimizer, parameters))
    for key, what in (("kind", "of the kind"), ("members", "with the groups")):
        if told.get(key) != mine[key]:
            raise ValueError(
                f"`{part}` must be {what} that it was saved with, {told.get(key)}, got {mine[key]}."
            )


def _room(
    part: str, parameters: Mapping[str, Tensor], saved: Mapping[str, Any]
) -> dict[str, Tensor]:
    """For what was saved: tensors like their parameters, or numbers on their own."""
    prefix = f"{part}.tensors."
    entries = {e.removeprefix(prefix): about for e, about in saved.items() if e.startswith(prefix)}
    room = {}
    for entry, about in entries.items():
        name, _, key = entry.rpartition("/")
        parameter, dtype = parameters[name].detach(), about.properties.dtype
        if about.size == parameter.shape and key != "step":
            room[entry] = torch.zeros_like(parameter, dtype=dtype)
            continue
        if layout(parameter) is not None and len(about.size):
            raise ValueError(
                f"`{part}` has a state {key!r} of another shape than the parameter {name!r}, which "
                "is sharded: nobody knows how that was."
            )
        room[entry] = torch.zeros(about.size, dtype=dtype, device=parameter.device)
    return room


def _fill(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    told: Mapping[str, Any],
) -> None:
    for group, settings in zip(optimizer.param_groups, told["groups"], strict=False):
        for key, value in settings.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)  # compiled and captured steps know it by its place
            elif isinstance(value, list):
                group[key] = _filled(group.get(key), value)
            else:
                group[key] = value
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    for entry, value in [*tensors.items(), *told["states"].items()]:
        name, _, key = entry.rpartition("/")
        parameter = parameters[name]
        if key == "step" and isinstance(value, Tensor):
            # Steps are counted on the host, unless the device counts them itself.
            on_device = any(group_of[parameter].get(way) for way in ("fused", "capturable"))
            value = value.to(parameter.device if on_device else "cpu")
        optimizer.state[parameter][key] = value


def _filled(old: Any, new: list[Any]) -> tuple[Any, ...]:
    """Numbers, in the tensors that were there."""
    if isinstance(old, tuple) and len(old) == len(new):
        return tuple(
            a.fill_(b) if isinstance(a, Tensor) else b for a, b in zip(old, new, strict=True)
        )
    return tuple(new)
