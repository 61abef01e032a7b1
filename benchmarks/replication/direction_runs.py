"""How the runs of `directions` are trained: other groups, optimizers, lengths and controllers."""

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import hdet
from benchmarks.replication.ranker import (
    NUM_REPLICAS,
    SMOKE_STEPS,
    SPREAD,
    Ranking,
    Replicas,
    Trained,
    train_replicas,
)
from benchmarks.zoo import data
from benchmarks.zoo.entries import ENTRIES
from benchmarks.zoo.models import Ranker
from benchmarks.zoo.runs import silence
from benchmarks.zoo.tasks import GROUPS, seeded
from hdet.control.controller import Evidence, Move, ScaleState
from hdet.replicas.stacked.vmap_compat import safe_attention

DEPTHS = ("embedding", "attention", "perceptron", "hidden", "towers", "heads")
"""Of the ranker, from its input to its output."""
STARTS_OF_NAMES = {
    "embedding": "embedding",
    "blocks.0.norm1": "attention",
    "blocks.0.qkv": "attention",
    "blocks.0.out": "attention",
    "blocks": "perceptron",
    "norm": "hidden",
    "hidden": "hidden",
    "towers": "towers",
    "heads": "heads",
}
"""The first of these that a parameter's name begins with says how deep it is."""
MOST = 4.0
"""How far the spread of a group may be from the usual one, as a factor."""
SENSITIVITY_SEED = 100
JUDGED = 2 / 3
"""The last part of a stream, whose losses count."""


def depth_of(name: str) -> str:
    """How deep a parameter of the ranker lies.

    >>> depth_of("blocks.0.qkv.bias"), depth_of("blocks.0.norm2.weight")
    ('attention', 'perceptron')
    """
    return next(depth for start, depth in STARTS_OF_NAMES.items() if name.startswith(start))


class ByDepth(Ranking):
    """A ranker with one group for each depth."""

    def groups(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        members: dict[str, list[nn.Parameter]] = {name: [] for name in DEPTHS}
        for name, parameter in model.named_parameters():
            members[depth_of(name)].append(parameter)
        return torch.optim.AdamW([{"params": p, "name": n} for n, p in members.items()], lr=lr)


class WithSGD(Ranking):
    """A ranker that SGD with momentum trains, with the paper's four groups."""

    def groups(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        own = super().groups(model, lr).param_groups
        named = [{"params": group["params"], "name": group["name"]} for group in own]
        return torch.optim.SGD(named, lr=lr, momentum=0.9)


KINDS: dict[str, type[Ranking]] = {"AdamW": Ranking, "by depth": ByDepth, "SGD": WithSGD}


@cache
def ranking_of(
    task: str, size: str, folder: str | None, kind: str = "AdamW", epochs: int = 1
) -> Any:
    """A ranker, made once for a process."""
    return KINDS[kind](task, size, Path(folder) if folder else None, epochs)


def steered(
    ranking: Ranking,
    controller: str,
    lr: float,
    seed: int,
    *,
    low: float | None = None,
    spreads: Mapping[str, float] | None = None,
) -> Trained:
    """Train with a learning rate for each group.

    Args:
        ranking: The task.
        controller: "paper", or "tracker": groups against each other, by a probe.
        lr: The learning rate.
        seed: Of weights and data.
        low: The learning rate of the checkpoint to start from; None starts from nothing.
        spreads: The spread of each group; the paper's by default.
    """

    def schedule(replicas: Replicas, optimizer: Any) -> hdet.HDET:
        steps, knob = ranking.steps, hdet.lr(spread=spreads or SPREAD)
        common: dict[str, Any] = {
            "sync_every": ranking.sync_every,
            "seed": seed,
            "knobs": [knob],
            "spread": SPREAD,
        }
        if controller == "paper":
            return hdet.OneCycleHDET(optimizer, max_lr=lr, total_steps=steps, **common, **replicas)
        return hdet.HDET(
            OneCycleLR(optimizer, max_lr=lr, total_steps=steps),
            controller=hdet.Tracker(relative=True),
            probe=ranking.task.probe,
            scout=None,
            guard=None,
            **common,
            **replicas,
        )

    return train_replicas(ranking, schedule, lr, seed, low)


@cache
def sensitivities(task: str, size: str, folder: str | None, lr: float) -> dict[str, float]:
    """The size of the slope of the loss over each group's learning rate, in an earlier run."""
    ranking = ranking_of(task, size, folder)
    trained = steered(ranking, "tracker", lr, SENSITIVITY_SEED)
    slopes: dict[str, list[float]] = {name: [] for name in GROUPS}
    for cycle in trained.events.of("cycle"):
        for knob in cycle["knobs"]:
            if knob.get("slope") is not None:
                slopes[knob["name"].removeprefix("lr/")].append(knob["slope"])
    return {name: abs(fmean(found)) if found else 1.0 for name, found in slopes.items()}


def spreads_by(sensitivity: Mapping[str, float], power: float) -> dict[str, float]:
    """A spread for each group: the usual one times a power of its sensitivity.

    >>> spreads_by({"a": 1.0, "b": 100.0}, 0.5) == {"a": SPREAD / 10**0.5, "b": SPREAD * 10**0.5}
    True
    """
    middle = math.exp(fmean(math.log(max(value, 1e-12)) for value in sensitivity.values()))
    factors = {name: (max(v, 1e-12) / middle) ** power for name, v in sensitivity.items()}
    return {name: SPREAD * min(max(f, 1 / MOST), MOST) for name, f in factors.items()}


# Smoothed losses --------------------------------------------------------------------------------


class SmoothedPaper:
    """The paper's controller, on losses smoothed over cycles.

    Multipliers move between replicas, so each loss is smoothed with those of the replicas that had
    the same place in the spread.

    Args:
        keep: The share of the earlier losses.
        warmup_steps: Steps before the controller takes over.
    """

    default_design = "permutation"

    def __init__(self, keep: float, warmup_steps: int) -> None:
        self.keep, self.warmup_steps = keep, warmup_steps
        self._paper = hdet.PaperController()
        self._smoothed: list[float] = []
        self._total = 0.0

    def weigh(self, losses: Any) -> list[float]:
        return self._paper.weigh(losses)

    def update(self, state: ScaleState, evidence: Evidence) -> Move:
        """Replace each loss by the mean of those at its place in the spread; then as the paper."""
        order = sorted(range(len(evidence.losses)), key=evidence.factors.__getitem__)
        centre = fmean(evidence.losses)
        now = [evidence.losses[replica] - centre for replica in order]
        before = self._smoothed or [0.0] * len(now)
        self._smoothed = [
            self.keep * a + (1 - self.keep) * b for a, b in zip(before, now, strict=True)
        ]
        self._total = self.keep * self._total + 1 - self.keep
        losses = [0.0] * len(now)
        for place, replica in enumerate(order):
            losses[replica] = centre + self._smoothed[place] / self._total
        return self._paper.update(state, evidence._replace(losses=losses))


def smoothed(ranking: Ranking, keep: float, lr: float, seed: int) -> Trained:
    """Train with one learning rate for all groups, and smoothed losses."""

    def schedule(replicas: Replicas, optimizer: Any) -> hdet.HDET:
        return hdet.HDET(
            OneCycleLR(optimizer, max_lr=lr, total_steps=ranking.steps),
            controller=SmoothedPaper(keep, warmup_steps=math.ceil(0.3 * ranking.steps)),
            knobs=[hdet.lr(shared=True)],
            spread=SPREAD,
            sync_every=ranking.sync_every,
            scout=None,
            guard=None,
            seed=seed,
            **replicas,
        )

    return train_replicas(ranking, schedule, lr, seed, None)


# A stream ---------------------------------------------------------------------------------------


class Stream:
    """KuaiRand in the order of time: each sample is seen once, and the future is unknown."""

    def __init__(self, size: str, folder: str | None) -> None:
        entry, where = ENTRIES["ranking, feed"], Path(folder) if folder else None
        plan = entry.full if size == "full" else entry.quick
        rows, order = data.feed(where), data.feed_order(where)
        steps = SMOKE_STEPS.get(size, len(order) // plan.batch)
        if size == "quick":
            steps //= 3
        self.batches = order[: steps * plan.batch].view(steps, plan.batch)
        self.rows, self.steps = rows, steps
        self._shape = (
            rows.vocabulary,
            rows.categories.shape[1],
            rows.numbers.shape[1],
            rows.labels.shape[1],
            plan.size,
        )

    def model(self, seed: int) -> nn.Module:
        return seeded(lambda: Ranker(*self._shape), torch.device("cpu"), seed)

    @staticmethod
    def loss(model: Any, categories: Tensor, numbers: Tensor, labels: Tensor) -> Tensor:
        logits = model(categories, numbers)
        each = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return each.sum(1).mean()

    def batch(self, step: int) -> tuple[Tensor, ...]:
        chosen = self.batches[step]
        return tuple(part[chosen] for part in self.rows[:3])

    def judged(self, losses: list[float]) -> float:
        """The mean loss of samples that are not trained on yet, without the first ones."""
        last = losses[-max(int(JUDGED * self.steps), 1) :]
        return fmean(last) if len(losses) == self.steps else math.nan


@cache
def stream_of(size: str, folder: str | None) -> Stream:
    return Stream(size, folder)


def plain_stream(stream: Stream, lr: float, seed: int) -> float:
    """A constant learning rate."""
    model, losses = stream.model(seed), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(stream.steps):
        optimizer.zero_grad()
        loss = stream.loss(model, *stream.batch(step))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        loss.backward()
        optimizer.step()
    return stream.judged(losses)


def steered_stream(stream: Stream, controller: str, lr: float, seed: int, every: int) -> float:
    """A constant learning rate that a controller moves after every so many steps."""
    model, losses = stream.model(seed), []
    controllers = {"paper": hdet.PaperController(), "tracker": hdet.Tracker(cooldown=0.0)}
    with silence(), safe_attention("cpu"):
        ensemble = hdet.StackedReplicas(model, NUM_REPLICAS)
        optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=lr))
        scheduler = hdet.HDET(
            LambdaLR(optimizer, lambda step: 1.0),
            model=model,
            replicas=ensemble,
            controller=controllers[controller],
            knobs=[hdet.lr(shared=True)],
            spread=SPREAD,
            sync_every=min(every, stream.steps),
            scout=None,
            guard=None,
            seed=seed,
        )
        try:
            for step in range(stream.steps):
                optimizer.zero_grad()
                each = ensemble.losses(stream.loss, *stream.batch(step))
                each.sum().backward()
                optimizer.step()
                losses.append(each.mean().item())
                scheduler.step(each)
        except hdet.ReplicasLost:
            return math.nan
    return stream.judged(losses)
