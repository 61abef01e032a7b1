"""Checkpoints of runs on any device mesh, by torch's distributed checkpoint.

Torch saves every tensor once, from any replica. Between two averages replicas differ, so it would
save a mixture of several models. Here the replicas converge first. Optimizer states are saved under
the names of their parameters. Torch's own function makes a step with an optimizer without state.
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

from hdet.replicas.protocol import EngineOptimizer
from hdet.scheduler.hdet import HDET
from hdet.tensors.dtensor import WRAPPER_NAMES, layout

NO_SETTINGS = ("params", "param_names")
"""Entries of a parameter group that are no settings."""

# torch.distributed.checkpoint is imported where it is used: the import takes a second.


def save_checkpoint(
    folder: str | Path, *, model: nn.Module, optimizer: Optimizer, scheduler: HDET
) -> None:
    """Save model, optimizer, scheduler and outer optimizer of a run, sharded or not.

    All processes must call it together. The replicas converge, as by `scheduler.converge()`.

    Args:
        folder: Where to save. Each process writes its shards to files in this folder.
        model: The model of the run, wrapped as it is trained.
        optimizer: The optimizer of the run.
        scheduler: The scheduler of the run.

    Raises:
        TypeError: The optimizer steps stacked replicas, or its state cannot be written as JSON.
        ValueError: The optimizer has parameters that are not the model's, or plain tensors exist
            once in each process.

    Example:
        >>> import tempfile, hdet, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> base = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        >>> scheduler = hdet.HDET(base, model=model, preset="paper")
        >>> run = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     hdet.save_checkpoint(folder, **run)
        ...     hdet.load_checkpoint(folder, **run)
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    parts = _optimizers(model, optimizer, scheduler)
    for one, parameters in parts.values():
        _settings(one, parameters)  # raises what cannot be saved before the replicas converge
    with scheduler._collective_call("`save_checkpoint()`"):
        scheduler.converge()
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    # One text: torch loads a dictionary entry by entry, and only entries that exist already.
    state["hdet"] = json.dumps(scheduler.state_dict())
    for name, (one, parameters) in parts.items():
        state[name] = {"tensors": _tensors(one, parameters), "others": _settings(one, parameters)}
    with _ignore_torch_warnings():
        save(state, checkpoint_id=str(folder))


def load_checkpoint(
    folder: str | Path, *, model: nn.Module, optimizer: Optimizer, scheduler: HDET
) -> None:
    """Load a run that `save_checkpoint` has saved.

    The mesh and the number of replicas may be others than those of the saved run. All processes
    must call it together. A checkpoint that does not fit changes nothing.

    Args:
        folder: The folder of the checkpoint.
        model: A model like the saved one. The weights are loaded into it.
        optimizer: An optimizer of the same kind and parameter groups. Its state is replaced.
        scheduler: A scheduler like the saved one. Its state is replaced.

    Raises:
        TypeError: The optimizer steps stacked replicas.
        ValueError: Model, optimizer or scheduler do not fit the checkpoint.

    Example:
        See `save_checkpoint`.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    saved = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    parts = _optimizers(model, optimizer, scheduler)
    known = [
        name for name in parts if name != "outer" or "outer.others" in saved
    ]  # the saved run may have none
    texts: dict[str, Any] = {"hdet": "", **{name: {"others": ""} for name in known}}
    with _ignore_torch_warnings():
        load(texts, checkpoint_id=str(folder))
    weights, schedule = get_model_state_dict(model), json.loads(texts["hdet"])
    state: dict[str, Any] = {"model": weights}
    # Torch loads into the model itself, so everything is checked before.
    scheduler.check_state_dict(schedule)
    _check_model(weights, saved)
    for name in known:
        _check_same_kind(name, *parts[name], json.loads(texts[name]["others"]))
        state[name] = {"tensors": _empty_states(name, parts[name][1], saved)}
    with _ignore_torch_warnings():
        load(state, checkpoint_id=str(folder))
    set_model_state_dict(model, weights)
    for name, (one, parameters) in parts.items():
        if not isinstance(one, Adagrad):  # which makes its state in its constructor
            one.state.clear()
        if name in known:
            _fill(one, parameters, state[name]["tensors"], json.loads(texts[name]["others"]))
    scheduler.load_state_dict(schedule)


@contextmanager
def _ignore_torch_warnings() -> Iterator[None]:
    """Ignore that a run has one process, which is fine here, and what torch says of itself."""
    with warnings.catch_warnings():
        # torch 2.6 does not say "disabled".
        one_process = "torch.distributed is (disabled, )?unavailable or"
        warnings.filterwarnings("ignore", message=one_process)
        # The writer of torch 2.6 uses what torch deprecates.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        yield


def _optimizers(
    model: nn.Module, optimizer: Optimizer, scheduler: HDET
) -> dict[str, tuple[Optimizer, dict[str, Tensor]]]:
    """The optimizers to save, each with its parameters by name."""
    if isinstance(optimizer, EngineOptimizer):
        raise TypeError(
            "`optimizer` must belong to one replica per process, got stacked replicas. Call "
            "scheduler.converge(), then save the states of model, optimizer and scheduler with "
            "torch.save."
        )
    if names := scheduler.unsaved_parameters():
        raise ValueError(
            f"parameters {names} exist once in each process as plain tensors, and a distributed "
            "checkpoint would save only one of them. Make them DTensors."
        )
    known = {id(p): _unwrapped_name(model, name) for name, p in model.named_parameters()}
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(parameter) not in known for parameter in own):
        raise ValueError(
            "`optimizer` must hold parameters of `model`, got others. DDP over tensor parallelism "
            "hides them: save such a run yourself, after scheduler.converge()."
        )
    found = {"optimizer": (optimizer, {known[id(parameter)]: parameter for parameter in own})}
    pairs = scheduler.outer_parameters()
    if any(id(own) not in known for own, _ in pairs):
        raise ValueError(
            "`model` must have all parameters of the outer optimizer, got a part of them."
        )
    if scheduler.outer is not None:
        found["outer"] = scheduler.outer, {known[id(own)]: outer for own, outer in pairs}
    return found


def _unwrapped_name(model: nn.Module, name: str) -> str:
    """A parameter's name without wrappers, as in torch's own checkpoints."""
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
    """The tensors of an optimizer's state."""
    return {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _settings(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> str:
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


def _check_model(weights: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse a checkpoint with more weights than the model: torch checks only for fewer."""
    names = {entry.removeprefix("model.") for entry in saved if entry.startswith("model.")}
    if unknown := names.difference(weights):
        raise ValueError(f"`model` must be the one that was saved, but it lacks {sorted(unknown)}.")


def _check_same_kind(
    part: str, optimizer: Optimizer, parameters: Mapping[str, Tensor], saved: Mapping[str, Any]
) -> None:
    """Refuse an optimizer of another kind or with other groups than the saved one."""
    mine = json.loads(_settings(optimizer, parameters))
    for key, what in (("kind", "type"), ("members", "parameter groups")):
        if saved.get(key) != mine[key]:
            raise ValueError(
                f"`{part}` must have the same {what} as the saved one, {saved.get(key)}, got "
                f"{mine[key]}."
            )


def _empty_states(
    part: str, parameters: Mapping[str, Tensor], saved: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Tensors to load saved states into: like their parameters, or of their own shape."""
    prefix = f"{part}.tensors."
    entries = {e.removeprefix(prefix): about for e, about in saved.items() if e.startswith(prefix)}
    states = {}
    for entry, about in entries.items():
        name, _, key = entry.rpartition("/")
        parameter, dtype = parameters[name].detach(), about.properties.dtype
        if about.size == parameter.shape and key != "step":
            states[entry] = torch.zeros_like(parameter, dtype=dtype)
            continue
        if layout(parameter) is not None and len(about.size):
            raise ValueError(
                f"`{part}` has a state {key!r} whose shape differs from that of its sharded "
                f"parameter {name!r}. Load it into a model that is not sharded."
            )
        states[entry] = torch.zeros(about.size, dtype=dtype, device=parameter.device)
    return states


def _fill(
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
    for entry, value in [*tensors.items(), *saved["states"].items()]:
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
