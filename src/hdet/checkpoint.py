"""Checkpoints of runs on any mesh, by torch's distributed checkpoint: one model, no patchwork.

Torch saves every tensor once, from whichever replica is at hand. Between two converges replicas
differ, so what would be saved is a model that nobody has trained: its first tensor from one, its
second from another. Here they converge first.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.scheduler import HDET
from hdet.stacked_optimizer import StackedOptimizer

# Torch's own is imported where it is used: it takes a second, which most programs need not spend.

OUTER, HDET_STATE = "outer", "hdet"


def save_checkpoint(
    folder: str | Path, *, model: nn.Module, optimizer: Optimizer, scheduler: HDET
) -> None:
    """Model, optimizer, schedule and outer optimizer of a run, sharded or not, in one folder.

    All processes must call it. The replicas converge, as by `scheduler.converge()`.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    _check(optimizer, scheduler)
    scheduler.converge()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, **_own_state(scheduler)}
    save(state, checkpoint_id=str(folder))


def load_checkpoint(
    folder: str | Path, *, model: nn.Module, optimizer: Optimizer, scheduler: HDET
) -> None:
    """Go on from a saved run: on the same mesh, on another one, or with another number of replicas.

    All processes must call it, with a run that was made like the one that was saved.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    _check(optimizer, scheduler)
    weights, moments = get_state_dict(model, optimizer)
    saved = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    state: dict[str, Any] = {"model": weights, "optimizer": moments, HDET_STATE: ""}
    if scheduler.outer is not None:
        state[OUTER] = _empty(scheduler.outer, saved)
    load(state, checkpoint_id=str(folder))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    if scheduler.outer is not None:
        _fill(scheduler.outer, state[OUTER])
    scheduler.load_state_dict(json.loads(state[HDET_STATE]))


def _check(optimizer: Optimizer, scheduler: HDET) -> None:
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


def _own_state(scheduler: HDET) -> dict[str, Any]:
    # One text: torch would load it entry by entry, and only those that are there already.
    own: dict[str, Any] = {HDET_STATE: json.dumps(scheduler.state_dict())}
    if scheduler.outer is not None:
        own[OUTER] = _flat(scheduler.outer)
    return own


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _flat(optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{place}/{key}": value
        for place, parameter in enumerate(_parameters(optimizer))
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _empty(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Room for what was saved: a tensor like its parameter, or a number on its own."""
    parameters, room = _parameters(optimizer), {}
    for name, entry in saved.items():
        if name.startswith(f"{OUTER}."):
            key = name.removeprefix(f"{OUTER}.")
            like = parameters[int(key.split("/")[0])].detach()
            alone = torch.zeros(entry.size, dtype=entry.properties.dtype)
            room[key] = torch.zeros_like(like) if entry.size == like.shape else alone
    return room


def _fill(optimizer: Optimizer, state: Mapping[str, Tensor]) -> None:
    optimizer.state.clear()
    for name, value in state.items():
        place, key = name.split("/", 1)
        optimizer.state[_parameters(optimizer)[int(place)]][key] = value
