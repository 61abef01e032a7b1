"""The arguments of `save_checkpoint` and `load_checkpoint`: their types, and whether they fit."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.replicas.protocol import EngineOptimizer
from hdet.scheduler.hdet import HDET
from hdet.tensors.joined_optimizer import members_of
from hdet.tensors.optimizers import unwrapped


def check_arguments(name: str, path: Any, scheduler: Any) -> None:
    """Check what must be right before processes can tell each other of errors.

    Raises:
        TypeError: The path or the scheduler has the wrong type.
    """
    if not isinstance(path, str | PathLike):
        raise TypeError(f"`{name}` must be a str or a pathlib.Path, got {path!r}.")
    if not isinstance(scheduler, HDET):
        raise TypeError(
            f"`scheduler` must be an hdet.HDET, got a {type(scheduler).__name__}. Pass the one "
            "that wraps the schedule."
        )


def optimizers_of(optimizer: Any) -> list[Optimizer]:
    """The optimizers of a run, each of which has parameters of its own, without wrappers.

    Raises:
        TypeError: The argument is something else.
    """
    given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    found = [member for one in given for member in members_of(one)]
    if not found or not all(map(_is_optimizer, found)):
        raise TypeError(f"`optimizer` must be an optimizer or a list of them, got {optimizer!r}.")
    return [unwrapped(one) for one in found]


def _is_optimizer(value: Any) -> bool:
    return hasattr(value, "param_groups") and hasattr(value, "state")


def optimizer_of_one(optimizer: Optimizer) -> Optimizer:
    """The optimizer of the first replica, where an engine steps several at once."""
    return optimizer.each[0] if isinstance(optimizer, EngineOptimizer) else optimizer


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_belong_together(
    known: Mapping[int, str], optimizers: Sequence[Optimizer], scheduler: HDET
) -> None:
    """Check that the arguments are of one run, by the ids of the known parameters.

    Raises:
        ValueError: They are not.
    """
    trained = [p for one in optimizers for p in parameters_of(optimizer_of_one(one))]
    own = [id(parameter) for parameter in trained]
    if others := [tuple(p.shape) for p in trained if id(p) not in known]:
        raise ValueError(
            f"`optimizer` must hold parameters of `model`, got {len(others)} other(s), the first "
            f"of shape {others[0]}. Pass the whole model of the run, here and as `model=` of HDET."
        )
    if len(set(own)) < len(own):
        raise ValueError("`optimizer` must be optimizers of different parameters, got one twice.")
    given = {id(p) for one in optimizers for p in parameters_of(one)}
    if not given.issuperset(map(id, parameters_of(scheduler.optimizer))):
        raise ValueError(
            "`optimizer` must have all parameters that the scheduler trains, got a part of them. "
            "Pass a list of all optimizers of the run."
        )
    if any(id(own) not in known for own, _ in scheduler.outer_parameters()):
        raise ValueError(
            "`model` must have all parameters of the outer optimizer, got a part of them."
        )
