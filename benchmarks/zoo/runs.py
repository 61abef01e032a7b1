"""One run of a small task with hdet, as a new user would write it."""

import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import hdet
from benchmarks.zoo.small.task import SmallTask, make_schedule
from benchmarks.zoo.small.train import one_thread
from hdet.replicas.stacked.vmap_compat import safe_attention


class Events:
    """A sink that keeps the events of a run."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, event: Mapping[str, Any]) -> None:
        self.lines.append(dict(event))

    def close(self) -> None:
        """Nothing is open."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == kind]


@dataclass
class Outcome:
    """How a run ended."""

    loss: float
    outset: float
    accuracy: float | None
    peak: float
    """The learning rate that the schedule was given, or that the scout chose."""
    scale: float
    """What the schedule was multiplied by in the end."""
    scout_steps: int
    rollbacks: int
    text: str
    """What the scout decided by, or why the run stopped."""


def run_stacked(
    task: SmallTask, lr: float, seed: int, num_replicas: int, **options: Any
) -> Outcome:
    """A run with N replicas on one device; nothing but model and replicas is set."""
    model = task.make_model(seed)
    ensemble = hdet.StackedReplicas(model, num_replicas)
    optimizer: Any = ensemble.optimizer(task.make_optimizer(model, lr))

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        losses = ensemble.losses(task.loss, *batch)
        losses.sum().backward()
        if task.clip is not None:
            optimizer.clip_grad_norm_(task.clip)
        return losses.detach()

    return _run(task, lr, seed, model, optimizer, step, replicas=ensemble, **options)


def run_alone(task: SmallTask, lr: float, seed: int, **options: Any) -> Outcome:
    """A run with one replica; nothing but the model is set."""
    model = task.make_model(seed)

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        loss = task.loss(model, *batch)
        loss.backward()
        if task.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        return loss.detach()

    return _run(task, lr, seed, model, task.make_optimizer(model, lr), step, **options)


@contextmanager
def silence() -> Iterator[None]:
    """Inside, hdet says nothing: a benchmark has thousands of runs."""
    logger = logging.getLogger("hdet")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _run(
    task: SmallTask,
    lr: float,
    seed: int,
    model: nn.Module,
    optimizer: Optimizer,
    forward_and_back: Any,
    **options: Any,
) -> Outcome:
    events, batches, stopped = Events(), task.batches(seed), ""
    outset = task.validate(model)["loss"]
    model.train()
    with one_thread(), silence(), safe_attention("cpu"):
        schedule: LRScheduler = make_schedule(task, optimizer, lr)
        scheduler = hdet.HDET(
            schedule, model=model, total_steps=task.steps, record=events, **options
        )
        try:
            for step in range(task.steps):
                optimizer.zero_grad()
                loss = forward_and_back(batches(step))
                optimizer.step()
                scheduler.step(loss)
        except (hdet.ReplicasLost, RuntimeError) as problem:
            stopped = str(problem)[:120]
        with scheduler.consensus():
            scores = task.validate(model)
    scouts = [line for line in events.of("scout") if line.get("factor") is not None]
    return Outcome(
        loss=scores["loss"] if math.isfinite(scores["loss"]) else math.nan,
        outset=outset,
        accuracy=scores.get("accuracy"),
        peak=scheduler.found_lr or lr,
        scale=next(iter(scheduler.get_knobs().values()), 1.0),
        scout_steps=max((line["step"] for line in events.of("scout")), default=0),
        rollbacks=sum(line.get("back_to") != line["step"] for line in events.of("guard")),
        text=stopped or "; ".join(str(line.get("factor_reason", "")) for line in scouts),
    )
