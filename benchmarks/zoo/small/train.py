"""Plain training of a small task."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean

import torch
from torch import nn

from benchmarks.zoo.small.task import SmallTask, make_schedule

LAST_PART = 0.05
"""Of a run, whose training losses are averaged."""


def train(task: SmallTask, lr: float, seed: int) -> dict[str, float]:
    """Train a new model on one thread.

    Returns:
        "loss" and, if there is one, "accuracy" on held-out data; "outset", the held-out loss
        before the first step; "train_loss", the mean training loss of the last steps. All but
        "outset" are nan if a loss was not finite.
    """
    with one_thread():
        model = task.make_model(seed)
        scores = task.validate(model)
        outset = scores["loss"]
        losses = fit(task, model, lr, seed)
        if losses is not None:
            scores = task.validate(model)
        if losses is None or not math.isfinite(scores["loss"]):
            return dict.fromkeys([*scores, "train_loss"], math.nan) | {"outset": outset}
    num_last = max(int(LAST_PART * task.steps), 1)
    return scores | {"outset": outset, "train_loss": fmean(losses[-num_last:])}


def fit(task: SmallTask, model: nn.Module, lr: float, seed: int) -> list[float] | None:
    """The training loss of every step, or nothing if one was not finite."""
    optimizer = task.make_optimizer(model, lr)
    schedule = make_schedule(task, optimizer, lr)
    batches = task.batches(seed)
    losses = []
    model.train()
    for step in range(task.steps):
        optimizer.zero_grad()
        loss = task.loss(model, *batches(step))
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            return None
        loss.backward()
        if task.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        schedule.step()
    return losses


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
