"""How the replicas of a run differ just before they are averaged, beside runs of their own."""

import copy
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks.replication.ranker import NUM_REPLICAS, SPREAD, Ranking
from benchmarks.replication.tail_tasks import calibration
from benchmarks.replication.tail_training import DIRECTIONS, SHARPNESS
from benchmarks.zoo.runs import silence
from hdet.replicas.stacked.vmap_compat import safe_attention

PLACE = 0.6
"""The part of the run after which members are measured: the learning rate is still high."""
OWN_RUNS = "runs of their own"
GRADIENTS = {"shared gradients": "shared", "local gradients": "local"}


def measure(ranking: Ranking, way: str, lr: float, seed: int) -> dict[str, float]:
    """Loss of members, of their mean answer and of their mean weights; how they differ.

    Args:
        ranking: The task.
        way: A key of `GRADIENTS` with the paper's spread, or `OWN_RUNS`.
        lr: The peak of the schedule.
        seed: Of weights and data; runs of their own have eight seeds from it on.
    """
    num = ranking.sync_every * round(PLACE * ranking.steps / ranking.sync_every)
    if way == OWN_RUNS:
        first = NUM_REPLICAS * (1 + seed)
        models = [plain(ranking, lr, first + place, num) for place in range(NUM_REPLICAS)]
    else:
        models = replicas(ranking, GRADIENTS[way], lr, seed, num)
    answers = torch.stack([answers_of(ranking, model) for model in models])
    assert ranking.task.truth is not None
    found = calibration(answers, ranking.task.truth)
    found["sharpness"] = sharpness(ranking, models[0])
    if way != OWN_RUNS:
        centre = mean_of(models)
        found["loss_of_mean_weights"] = loss_of(ranking, centre)
        found["sharpness_of_mean_weights"] = sharpness(ranking, centre)
    return found


def plain(ranking: Ranking, lr: float, seed: int, num: int) -> nn.Module:
    """A plain run, stopped after some steps."""
    model = ranking.start(seed, None)
    optimizer = ranking.groups(model, lr)
    schedule = OneCycleLR(optimizer, max_lr=lr, total_steps=ranking.steps)
    for batch in ranking.batches(seed, ranking.num_earlier, num):
        optimizer.zero_grad()
        ranking.task.loss(model, *batch).backward()
        optimizer.step()
        schedule.step()
    return model


def replicas(ranking: Ranking, gradients: Any, lr: float, seed: int, num: int) -> list[nn.Module]:
    """Stacked replicas with the paper's spread, stopped just before an average."""
    model = ranking.start(seed, None)
    with silence(), safe_attention("cpu"):
        ensemble = hdet.StackedReplicas(model, NUM_REPLICAS)
        optimizer = ensemble.optimizer(ranking.groups(model, lr))
        scheduler = hdet.HDET(
            OneCycleLR(optimizer, max_lr=lr, total_steps=ranking.steps),
            model=model,
            replicas=ensemble,
            spread=SPREAD,
            sync_every=ranking.sync_every,
            gradients=gradients,
            controller=None,
            scout=None,
            guard=None,
            seed=seed,
        )
        for step, batch in enumerate(ranking.batches(seed, ranking.num_earlier, num), start=1):
            optimizer.zero_grad()
            losses = ensemble.losses(ranking.task.loss, *batch)
            losses.sum().backward()
            optimizer.step()
            if step < num:
                scheduler.step(losses)
        return [copy.deepcopy(module) for module in ensemble.modules(model)]


def answers_of(ranking: Ranking, model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        return ranking.task.judge(model)


def loss_of(ranking: Ranking, model: nn.Module) -> float:
    assert ranking.task.truth is not None
    return calibration(answers_of(ranking, model)[None], ranking.task.truth)["member_loss"]


@torch.no_grad()
def mean_of(models: Sequence[nn.Module]) -> nn.Module:
    """A model with the mean of the weights."""
    centre = copy.deepcopy(models[0])
    rows = [list(model.parameters()) for model in models]
    for target, parts in zip(centre.parameters(), zip(*rows, strict=True), strict=True):
        target.copy_(torch.stack(parts).mean(0))
    return centre


@torch.no_grad()
def sharpness(ranking: Ranking, model: nn.Module) -> float:
    """By how much a random step of a fixed relative length raises the loss."""
    calm, draw = loss_of(ranking, model), torch.Generator().manual_seed(0)
    weights = nn.utils.parameters_to_vector(model.parameters())
    risen = []
    for _ in range(DIRECTIONS):
        way = torch.randn(weights.shape, generator=draw)
        moved = copy.deepcopy(model)
        step = way * float(SHARPNESS * weights.norm() / way.norm())
        nn.utils.vector_to_parameters(weights + step, moved.parameters())
        risen.append(loss_of(ranking, moved) - calm)
    return fmean(risen) if risen else math.nan
