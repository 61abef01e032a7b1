"""Winner takes all: population-based training inside one data-parallel run.

Members have their own learning rates and step with one mean gradient, each on its part of the
batch. At the end of an interval the member with the lowest training loss becomes the parent of all:
its weights, its optimizer state, and its learning rate times a mutation for each member.
"""

import copy
import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from benchmarks.zoo.runs import Outcome
from benchmarks.zoo.small.task import SmallTask, make_schedule
from benchmarks.zoo.small.train import one_thread

NUM_MEMBERS, INTERVAL, MUTATION = 8, 25, 1.25
"""A mutation multiplies by 1.25 or divides by it, as in population-based training. The parent's own
learning rate stays in the population."""


@dataclass
class Member:
    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    factor: float
    """What the learning rate of the schedule is multiplied by."""

    def step(self) -> None:
        """Step with the gradients that the model has, at this member's learning rate."""
        scheduled = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor
        self.optimizer.step()
        for group, lr in zip(self.optimizer.param_groups, scheduled, strict=True):
            group["lr"] = lr
        self.schedule.step()


def winner_takes_all(task: SmallTask, lr: float, seed: int) -> Outcome:
    """Train a population from a learning rate, and judge the last winner."""
    outset = task.validate(task.make_model(seed))["loss"]
    with one_thread():
        members = [_member(task, lr, seed, place) for place in range(NUM_MEMBERS)]
        winner = _train(task, members, seed)
        scores = task.validate(winner.model)
    loss = scores["loss"] if math.isfinite(scores["loss"]) else math.nan
    return Outcome(loss, outset, scores.get("accuracy"), lr, winner.factor, 0, 0, "")


def _member(task: SmallTask, lr: float, seed: int, place: int) -> Member:
    model = task.make_model(seed)
    model.train()
    optimizer = task.make_optimizer(model, lr)
    return Member(model, optimizer, make_schedule(task, optimizer, lr), mutation(place))


def mutation(place: int) -> float:
    """What a member multiplies its parent's learning rate by: the first one keeps it."""
    if place == 0:
        return 1.0
    return MUTATION if place % 2 else 1 / MUTATION


def _train(task: SmallTask, members: list[Member], seed: int) -> Member:
    batches = task.batches(seed)
    winner, losses = members[0], [[math.inf]] * len(members)
    for step in range(task.steps):
        if step % INTERVAL == 0:
            winner = _select(members, losses) if step else winner
            losses = [[] for _ in members]
        for member, part, seen in zip(members, _parts(batches(step)), losses, strict=True):
            member.optimizer.zero_grad()
            loss = task.loss(member.model, *part)
            loss.backward()
            seen.append(float(loss.detach()))
        _share_gradients(members, task.clip)
        for member in members:
            member.step()
        if not any(math.isfinite(seen[-1]) for seen in losses):
            break
    return min(zip(members, losses, strict=True), key=lambda pair: _mean(pair[1]))[0]


def _parts(batch: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """The batch, cut for the members. A batch with fewer samples is seen by all of them."""
    if len(batch[0]) < NUM_MEMBERS:
        return [batch] * NUM_MEMBERS
    cut = [tensor.tensor_split(NUM_MEMBERS) for tensor in batch]
    return list(zip(*cut, strict=True))


@torch.no_grad()
def _share_gradients(members: list[Member], clip: float | None) -> None:
    """Give all members the mean gradient, clipped as the task has it."""
    parameters = [list(member.model.parameters()) for member in members]
    for same in zip(*parameters, strict=True):
        found = [p.grad for p in same if p.grad is not None]
        if found:
            mean = torch.stack(found).mean(0)
            for p in same:
                p.grad = mean.clone()
    if clip is not None:
        for own in parameters:
            nn.utils.clip_grad_norm_(own, clip)


def _select(members: list[Member], losses: list[list[float]]) -> Member:
    """Make the best member the parent of all; return it."""
    best = min(range(len(members)), key=lambda place: _mean(losses[place]))
    parent = members[best]
    weights: Any = copy.deepcopy(parent.model.state_dict())
    state, factor = copy.deepcopy(parent.optimizer.state_dict()), parent.factor
    for place, member in enumerate(members):
        if member is not parent:
            member.model.load_state_dict(weights)
            member.optimizer.load_state_dict(state)
        member.factor = factor * mutation((place - best) % len(members))
    return parent


def _mean(losses: list[float]) -> float:
    """The mean loss; infinite if one is not finite."""
    return fmean(losses) if all(map(math.isfinite, losses)) else math.inf
