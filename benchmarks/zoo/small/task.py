"""What a small task is: a model, its batches, its optimizer, and what it is judged by."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from benchmarks.zoo.small.optimizers import Rule
from benchmarks.zoo.tasks import in_epochs, seeded

Family = Literal["conv", "dense", "text", "tables", "generative", "finetuning"]
Schedule = Literal["onecycle", "cosine", "wsd", "constant"]
Batch = tuple[Tensor, ...]
Batches = Callable[[int], Batch]
"""A step -> its batch; the first dimension of every tensor is that of the samples."""

WARM_UP, DECAY = 0.05, 0.2
"""Parts of a run."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class SmallTask:
    """A training run that lacks nothing but a learning rate and a seed."""

    name: str
    family: Family
    optimizer: str
    steps: int
    batch: int
    schedule: Schedule
    middle: float
    """The geometric middle of the grid of learning rates."""
    clip: float | None
    """The largest norm of the gradient."""
    make_model: Callable[[int], nn.Module]
    """A seed -> a new model, the same for a seed."""
    loss: Callable[..., Tensor]
    """(model, *batch) -> the mean loss of the batch. The model is only called: vmap can run it."""
    batches: Callable[[int], Batches]
    """A seed -> what a run sees. Batches are made when they are asked for."""
    validate: Callable[[nn.Module], dict[str, float]]
    """A model -> "loss", and "accuracy" if there is one, on data that no run trains on."""
    make_optimizer: Callable[[nn.Module, float], Optimizer]


def make_task(
    name: str,
    family: Family,
    rule: Rule,
    *,
    steps: int,
    batch: int,
    schedule: Schedule,
    model: Callable[[], nn.Module],
    loss: Callable[..., Tensor],
    batches: Callable[[int, int, int], Batches],
    score: Callable[[nn.Module], Mapping[str, Tensor]],
    clip: float | None = None,
    lr_factor: float = 1.0,
) -> SmallTask:
    """A task.

    Args:
        name: Of the task.
        family: Of the task.
        rule: The optimizer and its typical learning rate.
        steps: Of a run.
        batch: The number of samples of a step.
        schedule: Of the learning rate.
        model: Makes a model with torch's global generator.
        loss: (model, *batch) -> the mean loss.
        batches: (seed, steps, batch) -> the batches of a run.
        score: A model -> measures on held-out data.
        clip: The largest norm of the gradient.
        lr_factor: What the typical learning rate is multiplied by.
    """

    def validate(trained: nn.Module) -> dict[str, float]:
        with evaluating(trained):
            return {key: float(value) for key, value in score(trained).items()}

    return SmallTask(
        name=name,
        family=family,
        optimizer=rule.name,
        steps=steps,
        batch=batch,
        schedule=schedule,
        middle=rule.middle * lr_factor,
        clip=clip,
        make_model=lambda seed: seeded(model, CPU, seed),
        loss=loss,
        batches=lambda seed: batches(seed, steps, batch),
        validate=validate,
        make_optimizer=rule.make,
    )


def with_steps(task: SmallTask, steps: int) -> SmallTask:
    """The same task with a longer or shorter run; a longer one goes through the data anew."""

    def batches(seed: int) -> Batches:
        parts: dict[int, Batches] = {}

        def at(step: int) -> Batch:
            part, place = divmod(step, task.steps)
            if part not in parts:
                parts[part] = task.batches(seed + 1000 * part)
            return parts[part](place)

        return at

    return replace(task, steps=steps, batches=batches)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode and no gradients are computed."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def make_schedule(task: SmallTask, optimizer: Optimizer, lr: float) -> LRScheduler:
    """The schedule of a task.

    Args:
        task: The task.
        optimizer: An optimizer whose groups have the learning rates of the task.
        lr: The highest learning rate of the first group. The others keep their ratio to it.
    """
    scale = lr / optimizer.param_groups[0]["lr"]
    if task.schedule == "onecycle":
        peaks = [scale * group["lr"] for group in optimizer.param_groups]
        return OneCycleLR(optimizer, max_lr=peaks, total_steps=task.steps)
    return LambdaLR(
        optimizer, lambda step: scale * factor_at(task.schedule, (step + 1) / task.steps)
    )


def factor_at(schedule: Schedule, part: float) -> float:
    """The factor of the learning rate when this part of the run is over, with the present step.

    >>> [factor_at("wsd", part) for part in (0.025, 0.05, 0.5, 0.9)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if schedule == "constant":
        return 1.0
    rise = min(part / WARM_UP, 1.0)
    if schedule == "cosine":
        fall = min(max(part - WARM_UP, 0.0) / (1 - WARM_UP), 1.0)
        return rise * (0.5 + 0.5 * math.cos(math.pi * fall))
    return round(rise * min(max(1 - part, 0.0) / DECAY, 1.0), 12)


def from_table(
    train: Callable[[], Batch], prepare: Callable[[int, Batch], Batch] | None = None
) -> Callable[[int, int, int], Batches]:
    """Batches of the rows of some tensors, epoch by epoch.

    Args:
        train: Returns the tensors, loaded when the first batch is asked for.
        prepare: (seed of the step, rows) -> what the loss gets.
    """

    def batches(seed: int, steps: int, batch: int) -> Batches:
        tensors = train()
        order = in_epochs(len(tensors[0]), steps, batch, generator(seed))

        def at(step: int) -> Batch:
            rows = tuple(tensor[order[step]] for tensor in tensors)
            return rows if prepare is None else prepare(seed * 1_000_003 + step, rows)

        return at

    return batches


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).float().mean()


def call(model: Any, *inputs: Tensor) -> Tensor:
    """A model's answer, typed."""
    answer: Tensor = model(*inputs)
    return answer
