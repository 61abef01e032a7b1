"""The state of an optimizer by the names of its parameters, so that it fits any mesh.

Torch's own function for this makes a step with an optimizer without state.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.tensors.dtensor import layout

NO_SETTINGS = ("params", "param_names")
"""Entries of a parameter group that are no settings."""


def tensors_of(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an optimizer's state."""
    return {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def settings_of(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> str:
    """All of an optimizer but tensors, as JSON: its kind, groups and other state entries."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    states = {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if not isinstance(value, Tensor)
    }
    settings = {
        "kind": type(optimizer).__name__,
        "members": [sorted(names[id(p)] for p in g["params"]) for g in optimizer.param_groups],
        "groups": [
            {key: _plain(value) for key, value in group.items() if key not in NO_SETTINGS}
            for group in optimizer.param_groups
        ],
        "states": states,
    }
    keys = {key for parameter in parameters.values() for key in optimizer.state.get(parameter, {})}
    try:
        if odd := [key for key in keys if not isinstance(key, str)]:
            raise TypeError(f"its state has the key {odd[0]!r}, which is not a string")
        return json.dumps(settings)
    except TypeError as error:
        raise TypeError(
            f"save_checkpoint cannot save a {type(optimizer).__name__}: {error}. Save such a run "
            "yourself, after scheduler.converge()."
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value.tolist() if isinstance(value, Tensor) else value


def check_same_kind(
    part: str, optimizer: Optimizer, parameters: Mapping[str, Tensor], saved: Mapping[str, Any]
) -> None:
    """Refuse an optimizer of another kind or with other groups than the saved one."""
    mine = json.loads(settings_of(optimizer, parameters))
    for key, what in (("kind", "type"), ("members", "parameter groups")):
        if saved.get(key) != mine[key]:
            raise ValueError(
                f"`{part}` must have the same {what} as the saved one, {saved.get(key)}, got "
                f"{mine[key]}."
            )


def empty_states(
    part: str, parameters: Mapping[str, Tensor], saved: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Tensors to load saved states into: like their parameters, or of their own shape."""
    states = {}
    for saved_name, about in saved.items():
        name, _, key = saved_name.removeprefix("tensors.").rpartition("/")
        parameter, dtype = parameters[name].detach(), about.properties.dtype
        if about.size == parameter.shape and key != "step":
            states[saved_name] = torch.zeros_like(parameter, dtype=dtype)
            continue
        if layout(parameter) is not None and len(about.size):
            raise ValueError(
                f"`{part}` has a state {key!r} whose shape differs from that of its sharded "
                f"parameter {name!r}. Load it into a model that is not sharded."
            )
        states[saved_name] = torch.zeros(about.size, dtype=dtype, device=parameter.device)
    return states


def fill(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    saved: Mapping[str, Any],
) -> None:
    """Give an optimizer the saved settings and states."""
    for group, settings in zip(optimizer.param_groups, saved["groups"], strict=False):
        for key, value in settings.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)  # compiled and captured steps use this memory
            elif isinstance(value, list):
                group[key] = _filled(group.get(key), value)
            else:
                group[key] = value
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    states = {name.removeprefix("tensors."): tensor for name, tensor in tensors.items()}
    for entry, value in {**states, **saved["states"]}.items():
        name, _, key = entry.rpartition("/")
        parameter = parameters[name]
        if key == "step" and isinstance(value, Tensor):
            # Step counts lie on the host, unless the step runs on the device.
            on_device = any(group_of[parameter].get(way) for way in ("fused", "capturable"))
            value = value.to(parameter.device if on_device else "cpu")
        optimizer.state[parameter][key] = value


def _filled(old: Any, new: list[Any]) -> tuple[Any, ...]:
    """The new values, in the tensors that exist already."""
    if isinstance(old, tuple) and len(old) == len(new):
        return tuple(
            a.fill_(b) if isinstance(a, Tensor) else b for a, b in zip(old, new, strict=True)
        )
    return tuple(new)
