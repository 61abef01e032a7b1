"""A problem with a known answer: its task, its values, and how far a value is off."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

Score = Callable[[Any], Tensor]
Batch = tuple[Tensor, ...]


@dataclass
class Task:
    """A model to train, with knobs to find."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    knobs: list[Any]
    loss: Callable[..., Tensor]
    """(model, *batch) -> the training loss."""
    batch: Callable[[int, int], Batch]
    """(step, number of replicas) -> the batch of all replicas."""
    score: Score
    """What replicas are compared by: one number for each of some held-out batches."""
    judge: Callable[[Any], float]
    """The validation loss of the consensus."""
    sync_every: int = 25
    starts: dict[str, float] = field(default_factory=dict)
    """The start value of each knob; learning rates are explored as factors of it."""
    judged_cycles: int = 1
    """The number of last cycles whose validation losses are averaged."""
    tail: float = 0.0
    """Of the probe; most best values are those for the weights as they stand."""
    schedule: Callable[[torch.optim.Optimizer, int], LRScheduler] = lambda optimizer, steps: (
        ConstantLR(optimizer, factor=1.0)
    )
    """(optimizer, number of steps) -> the base schedule."""
    gradients: Literal["shared", "local"] = "local"


@dataclass(frozen=True)
class Problem:
    """A family of tasks, one for each seed."""

    name: str
    make: Callable[[int, Mapping[str, float]], Task]
    """(seed, start value of each knob) -> a task."""
    best: Callable[[int], Mapping[str, float]] | None
    """The best value of each knob; none if a grid is to find it."""
    space: str
    grid: Sequence[float] = ()
    joint: bool = False
    """Whether a grid has one value for all knobs; then their geometric mean is compared with it."""
    factors: tuple[float, float] = (0.1, 10.0)
    """How far off a run starts, in units of the best value (of its odds in a logit space)."""
    cycles: int = 60


def off(space: str, value: float, factor: float) -> float:
    """A value that is too low or too high by this factor, in its space."""
    if space == "logit":
        odds = factor * value / (1 - value)
        return odds / (1 + odds)
    return value * factor


def ratio(space: str, value: float, best: float) -> float:
    """How far a value is from the best: as a factor, of the odds in a logit space."""
    if space == "logit":
        return value / (1 - value) / (best / (1 - best))
    return value / best


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chunks(losses: Tensor, num: int = 8) -> Tensor:
    return losses.unflatten(0, (num, -1)).flatten(1).mean(1)
