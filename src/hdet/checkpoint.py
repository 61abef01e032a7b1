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
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from hdet.scheduler import HDET
from hdet.stacked_optimizer import StackedOptimizer

# Torch's own is imported where it is used: it takes a second, which most programs need not spend.

WITH_MODULE = (DataParallel, DistributedDataParallel)
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""What torch.compile, activation checkpointing and FSDP1 put into names; DDP puts "module"."""


def save_checkpoint(
    folder: str | Path, *, model: nn.Module, optimizer: Optimizer, scheduler: HDET
) -> None:
    """Model, optimizer, schedule and outer optimizer of a run, sharded or not, in one folder.

    All processes must call it. The replicas converge, as by `scheduler.converge()`.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    parts = _optimizers(model, optimizer, scheduler)
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
    parts = {
        name: part
        for name, part in _optimizers(model, optimizer, scheduler).items()
        if name != "outer" or "outer.others" in saved  # it may be new
    }
    told = {"hdet": ""}
    with _without_a_word():
        load(told, checkpoint_id=str(folder))
    schedule = json.loads(told["hdet"])
    scheduler.check_state_dict(schedule)  # torch loads into the model itself: not before
    weights = get_model_state_dict(model)
    state: dict[str, Any] = {"model": weights}
    for name, (_, parameters) in parts.items():
        state[name] = {"tensors": _room(name, parameters, saved), "others": ""}
    with _without_a_word():
        load(state, checkpoint_id=str(folder))
    set_model_state_dict(model, weights)
    for name, (one, parameters) in parts.items():
        _fill(one, parameters, state[name]["tensors"], state[name]["others"])
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
    if scheduler.outer is not None:
        pairs = scheduler.outer_parameters()
        found["outer"] = scheduler.outer, {known[id(own)]: outer for own, outer in pairs}
    return found


def _bare(model: nn.Module, name: str) -> str:
    """The name that a parameter has without wrappers, as in torch's own checkpoints."""
    holder: Any = model
    kept = []
    for part in name.split("."):
        if part not in WRAPPED and not (part == "module" and isinstance(holder, WITH_MODULE)):
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
    """Settings of groups, and whatever a state holds beside tensors."""
    states = {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if not isinstance(value, Tensor)
    }
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return json.dumps({"groups": groups, "states": states})


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _room(
    part: str, parameters: Mapping[str, Tensor], saved: Mapping[str, Any]
) -> dict[str, Tensor]:
    """For what was saved: tensors like their parameters, or numbers on their own."""
    prefix = f"{part}.tensors."
    entries = {e.removeprefix(prefix): about for e, about in saved.items() if e.startswith(prefix)}
    if unknown := {e.rpartition("/")[0] for e in entries}.difference(parameters):
        raise ValueError(
            f"`{part}` must have the parameters that it was saved with, got none named "
            f"{sorted(unknown)}; it has {sorted(parameters)}."
        )
    room = {}
    for entry, about in entries.items():
        parameter, dtype = parameters[entry.rpartition("/")[0]].detach(), about.properties.dtype
        like = about.size == parameter.shape
        empty = torch.zeros(about.size, dtype=dtype, device=parameter.device)
        room[entry] = torch.zeros_like(parameter, dtype=dtype) if like else empty
    return room


def _fill(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    others: str,
) -> None:
    told = json.loads(others)
    for group, settings in zip(optimizer.param_groups, told["groups"], strict=False):
        for key, value in settings.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)  # compiled and captured steps know it by its place
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    optimizer.state.clear()
    for entry, value in [*tensors.items(), *told["states"].items()]:
        name, _, key = entry.rpartition("/")
        parameter = parameters[name]
        if key == "step" and isinstance(value, Tensor):
            # Steps are counted on the host, unless the device counts them itself.
            on_device = any(group_of[parameter].get(way) for way in ("fused", "capturable"))
            value = value.to(parameter.device if on_device else "cpu")
        optimizer.state[parameter][key] = value
