"""The parts of a run that a checkpoint holds: model, optimizers, scheduler, and the guard's best.

A part with tensors of its own is one more class here and one more line in `parts_of`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adagrad, Optimizer

from hdet._messages import launched_first, warn
from hdet._validation import check_integer, check_positive
from hdet.checkpoint.arguments import (
    check_belong_together,
    optimizer_of_one,
    optimizers_of,
    parameters_of,
)
from hdet.checkpoint.optimizer_state import (
    check_same_kind,
    empty_states,
    fill,
    settings_of,
    tensors_of,
)
from hdet.scheduler.hdet import HDET
from hdet.tensors.dtensor import WRAPPER_NAMES

T = TypeVar("T")
Saved = Mapping[str, TensorStorageMetadata]
"""Shape and type of each saved tensor of a part, by name."""


class Part:
    """A part of a run: its tensors, which may be sharded, and the rest as plain data.

    `plain` and `tensors` are what is saved. `targets` checks that a saved part fits, changes
    nothing, and makes the tensors to read into. `load` then takes them over.
    """

    name: str

    def check(self) -> None:
        """Raise what cannot be saved, before the replicas converge."""

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def plain(self) -> Any:
        """Everything else. None is not loaded."""

    def targets(self, plain: Any, saved: Saved) -> dict[str, Tensor]:
        return {}

    def load(self, plain: Any, tensors: Mapping[str, Tensor]) -> None:
        pass


class ModelPart(Part):
    """The weights and buffers of the model."""

    name = "model"

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def tensors(self) -> dict[str, Tensor]:
        state = get_model_state_dict(self._model)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    def plain(self) -> dict[str, Any]:
        state = get_model_state_dict(self._model)
        return {name: value for name, value in state.items() if not isinstance(value, Tensor)}

    def targets(self, plain: Any, saved: Saved) -> dict[str, Tensor]:
        own, others = self.tensors(), self.plain()
        if unknown := (saved.keys() | (plain or {}).keys()) - own.keys() - others.keys():
            raise ValueError(
                f"`model` must be the one that was saved, but it lacks {sorted(unknown)}."
            )
        if unsaved := (own.keys() - saved.keys()) | (others.keys() - (plain or {}).keys()):
            raise ValueError(
                f"`model` must be the one that was saved, but that one lacks {sorted(unsaved)}."
            )
        for name, tensor in own.items():
            if tensor.shape != saved[name].size:
                raise ValueError(
                    f"`model` must be the one that was saved, but {name!r} has the shape "
                    f"{list(tensor.shape)}, and the saved one {list(saved[name].size)}."
                )
        return {name: torch.zeros_like(tensor.detach()) for name, tensor in own.items()}

    def load(self, plain: Any, tensors: Mapping[str, Tensor]) -> None:
        set_model_state_dict(self._model, {**tensors, **(plain or {})})


class BesidePart(Part):
    """The parameters that optimizers have and the model lacks, such as those of a loss."""

    name = "beside"

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def targets(self, plain: Any, saved: Saved) -> dict[str, Tensor]:
        own = self.tensors()
        for name, tensor in own.items():
            size = saved[name].size if name in saved else None
            if tensor.shape != size:
                raise ValueError(
                    f"`optimizer` must hold the parameters that were saved, but {name!r} has the "
                    f"shape {tuple(tensor.shape)}, and the saved one {size and tuple(size)}."
                )
        return {name: torch.zeros_like(tensor) for name, tensor in own.items()}

    def load(self, plain: Any, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self.tensors().items():
            parameter.copy_(tensors[name])


class OptimizerPart(Part):
    """The settings and the state of an optimizer, under the names of its parameters."""

    def __init__(self, name: str, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        self.name = name
        self._optimizer, self._one = optimizer, optimizer_of_one(optimizer)
        self._parameters = parameters

    def check(self) -> None:
        settings_of(self._one, self._parameters)

    def tensors(self) -> dict[str, Tensor]:
        own = tensors_of(self._one, self._parameters)
        return {f"tensors.{name}": tensor for name, tensor in own.items()}

    def plain(self) -> str:
        if self._one is not self._optimizer:
            self._optimizer.state_dict()  # every replica gets what the loop has set
        return settings_of(self._one, self._parameters)

    def targets(self, plain: Any, saved: Saved) -> dict[str, Tensor]:
        if plain is None:
            return {}
        check_same_kind(self.name, self._one, self._parameters, json.loads(plain))
        return empty_states(self.name, self._parameters, saved)

    def load(self, plain: Any, tensors: Mapping[str, Tensor]) -> None:
        if not isinstance(self._one, Adagrad):  # which makes its state in its constructor
            self._one.state.clear()
        if plain is not None:
            fill(self._one, self._parameters, tensors, json.loads(plain))
        if self._one is not self._optimizer:
            self._optimizer.load_state_dict(self._one.state_dict())  # into all replicas


class SchedulerPart(Part):
    """The scheduler, which has plain data alone."""

    name = "scheduler"

    def __init__(self, scheduler: HDET) -> None:
        self._scheduler = scheduler

    def plain(self) -> dict[str, Any]:
        return self._scheduler.state_dict()

    def targets(self, plain: Any, saved: Saved) -> dict[str, Tensor]:
        self._scheduler.check_state_dict(plain)
        return {}

    def load(self, plain: Any, tensors: Mapping[str, Tensor]) -> None:
        self._scheduler.load_state_dict(plain)


class ScalerPart(Part):
    """The loss scale of automatic mixed precision; nothing without one."""

    name = "scaler"

    def __init__(self, scaler: GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(f"`scaler` must be a torch.amp.GradScaler, got {scaler!r}.")
        self._scaler = scaler

    def plain(self) -> dict[str, Any] | None:
        return None if self._scaler is None else self._scaler.state_dict()

    def targets(self, plain: Any, saved: Saved) -> dict[str, Tensor]:
        if self._scaler is None:
            if plain and launched_first():
                warn(
                    "the checkpoint has a loss scale, which is not loaded. Pass scaler= to "
                    "load_checkpoint."
                )
            return {}
        if self._scaler.is_enabled() and not plain:
            raise ValueError(
                "`scaler` must be None, for the checkpoint has no loss scale. Pass scaler= to "
                "save_checkpoint."
            )
        if plain:
            check_positive("scale of the saved scaler", plain.get("scale"))
            for key in ("growth_factor", "backoff_factor"):
                check_positive(f"{key} of the saved scaler", plain.get(key))
            check_integer(
                "growth_interval of the saved scaler", plain.get("growth_interval"), at_least=1
            )
            check_integer(
                "_growth_tracker of the saved scaler", plain.get("_growth_tracker"), at_least=0
            )
        return {}

    def load(self, plain: Any, tensors: Mapping[str, Tensor]) -> None:
        if self._scaler is not None and plain:
            self._scaler.load_state_dict(plain)


class BestPart(Part):
    """What the guard would restore: weights and states, where they are not the present ones."""

    name = "best"

    def __init__(self, scheduler: HDET, parts: Sequence[Part]) -> None:
        self._scheduler, self._parts = scheduler, parts
        self._tensors: dict[str, Tensor] = {}

    def plain(self) -> dict[str, Any] | None:
        with self._scheduler.best_weights_shown() as step:
            if step is None:
                return None
            named = ((part.name, part.tensors()) for part in self._parts)
            # Copies: afterwards the same memory holds the present weights.
            self._tensors = {
                f"{part}.{name}": tensor.detach().clone()
                for part, tensors in named
                for name, tensor in tensors.items()
            }
            return {"step": step, "parts": {part.name: part.plain() for part in self._parts}}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that `plain` has found."""
        return self._tensors

    def targets(self, plain: Any, saved: Saved) -> dict[str, Tensor]:
        if plain is None or self._scheduler.best_step is None:
            return {}
        check_integer("step of the best weights", plain.get("step"), at_least=0)
        found: dict[str, Tensor] = {}
        for part in self._parts:
            own = part.targets(plain["parts"].get(part.name), _of_part(part, saved))
            found |= {f"{part.name}.{name}": tensor for name, tensor in own.items()}
        return found

    def load(self, plain: Any, tensors: Mapping[str, Tensor]) -> None:
        if plain is None or self._scheduler.best_step is None:
            return
        with self._scheduler.best_weights_loaded(plain["step"]):
            for part in self._parts:
                part.load(plain["parts"].get(part.name), _of_part(part, tensors))


def _of_part(part: Part, named: Mapping[str, T]) -> dict[str, T]:
    start = f"{part.name}."
    return {name.removeprefix(start): t for name, t in named.items() if name.startswith(start)}


def parts_of(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: HDET,
    scaler: GradScaler | None,
) -> list[Part]:
    """The parts of a run, in the order in which they are loaded.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The arguments do not belong together, or cannot be saved.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got a {type(model).__name__}.")
    optimizers = optimizers_of(optimizer)
    if names := scheduler.unsaved_parameters():
        raise ValueError(
            f"parameters {names} exist once in each process as plain tensors, and a distributed "
            "checkpoint would save only one of them. Make them DTensors, or put them into the "
            "model. Where DDP over tensor parallelism hides them, save the run yourself, after "
            "scheduler.converge()."
        )
    lacked = scheduler.parameters_beside_model().items()
    known = {id(p): _unwrapped_name(model, name) for name, p in model.named_parameters()}
    beside = {name: p for name, p in lacked if id(p) not in known}
    known |= {id(p): name for name, p in beside.items()}
    check_belong_together(known, optimizers, scheduler)
    parts: list[Part] = [ModelPart(model)]
    for number, one in enumerate(optimizers):
        own = parameters_of(optimizer_of_one(one))
        name = "optimizer" if len(optimizers) == 1 else f"optimizer{number}"
        parts.append(OptimizerPart(name, one, {known[id(p)]: p for p in own}))
    if beside:
        parts.append(BesidePart(beside))
    if scheduler.outer is not None:
        pairs = scheduler.outer_parameters()
        outer = {known[id(own)]: theirs for own, theirs in pairs}
        parts.append(OptimizerPart("outer", scheduler.outer, outer))
    best = BestPart(scheduler, list(parts))
    return [*parts, SchedulerPart(scheduler), ScalerPart(scaler), best]


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
