"""The rows of the paper's table on a multi-task ranker with the paper's four parameter groups.

A seed orders the training data. The first part trains the checkpoint that warm rows start from.
All rows train on the rest, once, with batches of the same size in all.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks.zoo.entries import ENTRIES
from benchmarks.zoo.runs import Events, silence
from benchmarks.zoo.tasks import GROUPS, Plan, Task
from hdet.replicas.stacked.vmap_compat import safe_attention

NUM_REPLICAS, SPREAD, NOISE, SYNC_EVERY = 8, 1 / 9, 0.01, 20
"""The paper's, but for the length of a cycle: its 1000 steps are longer than a run here."""
STEP_SIZE, TEMPERATURE, TEMPERATURE_OF_CODE = 0.5, 0.1, 0.002
"""The paper's; its published code has another temperature."""
EARLIER = 0.3
"""The share of the training data that the checkpoint sees."""
SMOKE_STEPS = {"smoke": 40, "smoke with a scout": 144}
"""Of the tests. A scout of eight replicas needs 100 steps after those of the checkpoint."""
LAST_PART, NUM_PARTS = 0.1, 20
"""Of a run, whose training losses are averaged; and the equal parts of the curve of losses."""
NOTHING = {"loss": math.nan, "auc": 0.5, "normalised_entropy": math.nan}
"""The measures of a model whose weights are not finite."""
CHANCE_NE = 0.995
"""A run with this normalised entropy or more has learnt nothing: it has crashed."""


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    is_high: bool = True
    """Whether its learning rate is above the best, by the ratio of the table."""
    is_warm: bool = False
    """Whether replicas start from the checkpoint, each with noise of its own (eq. 10)."""
    is_plain: bool = False
    """Whether it is one model with OneCycleLR."""
    spread: float = SPREAD
    averages: bool = True
    auto_lr: bool = True
    step_size: float = STEP_SIZE
    """Of the controller, lambda in the paper."""
    temperature: float = TEMPERATURE
    """Of the controller, sigma in the paper."""
    noise: float = NOISE
    """Of the replicas of a warm row."""
    share: float = 1.0
    """What the learning rate is multiplied by."""


ROWS = {
    "Baseline-Low": Row(is_high=False, is_plain=True),
    "Baseline-High": Row(is_plain=True),
    "Warm-Init": Row(is_warm=True, spread=0.0, averages=False, auto_lr=False),
    "HDET without auto-LR": Row(is_warm=True, auto_lr=False),
    "HDET without warm start": Row(),
    "HDET": Row(is_warm=True),
    "control: Low from the checkpoint": Row(is_high=False, is_warm=True, is_plain=True),
    "control: HDET at Low": Row(is_high=False, is_warm=True),
    "control: decay alone at Low": Row(is_high=False, is_warm=True, step_size=1e-12),
    "control: HDET at Low, temperature of its code": Row(
        is_high=False, is_warm=True, temperature=TEMPERATURE_OF_CODE
    ),
    "control: HDET at Low without noise": Row(is_high=False, is_warm=True, noise=0.0),
    "control: a ninth of Low": Row(is_high=False, is_plain=True, share=1 / 9),
}
LOW_ROWS = [name for name, row in ROWS.items() if not row.is_high]
HIGH_ROWS = [name for name, row in ROWS.items() if row.is_high]


class Ranking:
    """A task, its data and its length.

    Args:
        table: "feed" (KuaiRand) or "census" (Census-Income).
        size: "full", "quick", or one of `SMOKE_STEPS`.
        folder: The data. Without it, the digits of scikit-learn as a table.
        epochs: How often all data are seen.
        every: Steps of a cycle.
    """

    def __init__(
        self,
        table: str,
        size: str,
        folder: Path | None,
        epochs: int = 1,
        every: int = SYNC_EVERY,
    ) -> None:
        entry = ENTRIES[f"ranking, {table}"]
        plan = entry.full if size == "full" else entry.quick
        plan = plan._replace(steps=epochs * plan.steps)
        self.plan: Plan = plan._replace(steps=SMOKE_STEPS[size]) if size in SMOKE_STEPS else plan
        self.task: Task = entry.make(self.plan, folder, torch.device("cpu"))
        self.num_earlier = int(EARLIER * self.plan.steps)
        self.steps = self.plan.steps - self.num_earlier
        self.sync_every = min(every, max(self.steps // 10, 1))

    def batches(self, seed: int, first: int, num: int) -> list[tuple[Tensor, ...]]:
        """The batches from a place on, in the order of this seed."""
        make = self.task.batches([seed])
        return [
            tuple(part[0] for part in make(torch.tensor([place])))
            for place in range(first, first + num)
        ]

    def groups(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Make AdamW with the paper's four groups, by name; one has no weight decay."""
        members: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
        for name, parameter in model.named_parameters():
            members[GROUPS[self.task.group_of(name)]].append(parameter)
        named = [
            {"params": p, "name": n} | ({"weight_decay": 0.0} if n == "no_decay" else {})
            for n, p in members.items()
        ]
        return torch.optim.AdamW(named, lr=lr)

    def measures(self, model: Any) -> dict[str, float]:
        """What a model is worth on data that nothing else sees; nan where it is not finite."""
        model.eval()
        with torch.no_grad():
            logits = self.task.judge(model)
        if not bool(logits.isfinite().all()):
            return dict(NOTHING)
        return self.task.measures(logits)

    def start(self, seed: int, low: float | None) -> nn.Module:
        """A new model, or with `low` what a plain run at it learns from the earlier data."""
        model = self.task.model(seed)
        if low is not None:
            self.plain(model, low, self.batches(seed, 0, self.num_earlier))
        return model

    def plain(self, model: nn.Module, lr: float, data: Sequence[tuple[Tensor, ...]]) -> list[float]:
        """Train with OneCycleLR; return the training losses, up to one that is not finite."""
        optimizer = self.groups(model, lr)
        schedule = OneCycleLR(optimizer, max_lr=lr, total_steps=len(data))
        losses = []
        model.train()
        for batch in data:
            optimizer.zero_grad()
            loss = self.task.loss(model, *batch)
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                break
            loss.backward()
            optimizer.step()
            schedule.step()
        return losses


def train(ranking: Ranking, name: str, lr: float, low: float, seed: int) -> dict[str, Any]:
    """One row of the table.

    Args:
        ranking: The task.
        name: The row.
        lr: Its learning rate.
        low: The learning rate that the checkpoint was trained with.
        seed: Of weights and data.

    Returns:
        Training loss, measures on held-out data, whether it crashed, and learning rates by group.
    """
    row = ROWS[name]
    lr = lr * row.share
    if row.is_plain:
        return train_plain(ranking, lr, seed, low if row.is_warm else None)

    def schedule(replicas: Replicas, optimizer: Any) -> hdet.HDET:
        return hdet.OneCycleHDET(
            optimizer,
            max_lr=lr,
            total_steps=ranking.steps,
            spread=row.spread,
            sync_every=ranking.sync_every if row.averages else ranking.steps,
            auto_lr=row.auto_lr,
            step_size=row.step_size,
            temperature=row.temperature,
            seed=seed,
            **replicas,
        )

    noise = row.noise if row.is_warm else 0.0
    found = train_replicas(ranking, schedule, lr, seed, low if row.is_warm else None, noise)
    course = {"group_lrs": found.group_lrs} if row.auto_lr else {}
    return found.row | course


def train_plain(ranking: Ranking, lr: float, seed: int, low: float | None) -> dict[str, Any]:
    """Train one model with OneCycleLR, from the checkpoint of `low` or from nothing."""
    data = ranking.batches(seed, ranking.num_earlier, ranking.steps)
    model = ranking.start(seed, low)
    losses = ranking.plain(model, lr, data)
    return _row(ranking, losses, ranking.measures(model))


Replicas = dict[str, Any]
"""The arguments of a scheduler that say what trains: model, replicas and record."""


class Trained(NamedTuple):
    """How a run with replicas ended."""

    row: dict[str, Any]
    events: Events

    @property
    def group_lrs(self) -> dict[str, list[float]]:
        """The learning rate of every group at the end of each cycle."""
        cycles = self.events.of("cycle")
        names = [knob["name"] for knob in cycles[0]["knobs"]] if cycles else []
        return {
            name: [float(f"{cycle['knobs'][place]['centre']:.4g}") for cycle in cycles]
            for place, name in enumerate(names)
        }


def train_replicas(
    ranking: Ranking,
    schedule: Callable[[Replicas, Any], hdet.HDET],
    lr: float,
    seed: int,
    low: float | None,
    noise: float = 0.0,
    num_replicas: int = NUM_REPLICAS,
) -> Trained:
    """Train stacked replicas.

    Args:
        ranking: The task.
        schedule: (model, replicas and record; optimizer) -> the scheduler of the run.
        lr: The learning rate of the optimizer.
        seed: Of weights and data.
        low: The learning rate of the checkpoint to start from; None starts from nothing.
        noise: Of the replicas at the start, relative to their weights.
        num_replicas: How many share each batch.
    """
    data = ranking.batches(seed, ranking.num_earlier, ranking.steps)
    model = ranking.start(seed, low)
    losses = []
    with silence(), safe_attention("cpu"):
        ensemble, events = hdet.StackedReplicas(model, num_replicas), Events()
        if noise:
            hdet.perturb_(model, noise, replicas=ensemble, seed=seed)
        optimizer = ensemble.optimizer(ranking.groups(model, lr))
        scheduler = schedule({"model": model, "replicas": ensemble, "record": events}, optimizer)
        try:
            for batch in data:
                optimizer.zero_grad()
                each = ensemble.losses(ranking.task.loss, *batch)
                each.sum().backward()
                optimizer.step()
                losses.append(each.mean().item())
                scheduler.step(each)
            with scheduler.consensus():
                measures = ranking.measures(model)
        except hdet.ReplicasLost:
            measures = dict(NOTHING)
    return Trained(_row(ranking, losses, measures), events)


def _row(
    ranking: Ranking, losses: Sequence[float], measures: Mapping[str, float]
) -> dict[str, Any]:
    num_last = max(int(LAST_PART * ranking.steps), 1)
    ended = len(losses) == ranking.steps and all(map(math.isfinite, losses[-num_last:]))
    bounds = [part * ranking.steps // NUM_PARTS for part in range(NUM_PARTS + 1)]
    parts = [losses[first:last] for first, last in pairwise(bounds)]
    return {
        "train_loss": fmean(losses[-num_last:]) if ended else math.nan,
        "curve": [float(f"{fmean(part):.4g}") if part else math.nan for part in parts],
        **{f"validation_{key}": value for key, value in measures.items()},
        "is_crashed": not measures["normalised_entropy"] < CHANCE_NE,
    }


def load(job: Mapping[str, Any], folder: str | None) -> Ranking:
    """The task of a job, made once for a process."""
    length = job.get("epochs", 1), job.get("every", SYNC_EVERY)
    return _made(job["task"], job["size"], folder, *length)


@cache
def _made(task: str, size: str, folder: str | None, epochs: int, every: int) -> Ranking:
    return Ranking(task, size, Path(folder) if folder else None, epochs, every)
