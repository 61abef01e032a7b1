"""Larger models than the prior was set with: what is their best learning rate, what is found?
-> zoo_sizes.json

    HDET_DATA=FOLDER python -m benchmarks.zoo.zoo_sizes [--only NAME] [--device cuda]

GPTs on web documentation (bytes) with AdamW, and ResNets on CIFAR-10 with SGD and AdamW, from 0.8
to 85 million parameters, in 600 steps. A grid of plain runs, grown until its best is not at an end;
then hdet with 8 replicas and the same batch, from 1/100 to 100 times the best. Meant for a GPU.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks.result_file import RESULTS, read_result, write_result
from benchmarks.zoo.models import GPT, ResNet18, Size, gpt_loss
from benchmarks.zoo.runs import silence
from benchmarks.zoo.small import data
from benchmarks.zoo.small.curve import finite
from benchmarks.zoo.tasks import seeded
from hdet.lr_search.prior import prior_of
from hdet.scheduler.search_result import peak_over_mean

PATH = RESULTS / "zoo_sizes.json"
STEPS, REPLICAS, CONTEXT, SEED = 600, 8, 256, 0
STARTS, FIRST_PLACES, RATIO = (0.01, 1.0, 100.0), (-2, -1, 0, 1, 2), 2.0
HELD_BATCHES, LOST_SHARE, MOST_GRID = 8, 20.0, 10
ONE_CYCLE_MEAN = 0.53
"""The mean of OneCycleLR over its peak."""


class Large(NamedTuple):
    """A task with a large model."""

    batch: int
    optimizer: str
    layers: int
    """Of a GPT; 0 for a ResNet18."""
    width: int

    def model(self) -> nn.Module:
        if self.layers == 0:
            return ResNet18(width=self.width)
        return GPT(Size(256, CONTEXT, self.layers, self.width // 64, self.width))

    def make_optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        if self.optimizer == "SGD":
            return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)


TASKS = {
    "gpt_0.8M": Large(32, "AdamW", 4, 128),
    "gpt_10M": Large(32, "AdamW", 6, 384),
    "gpt_25M": Large(32, "AdamW", 8, 512),
    "gpt_85M": Large(32, "AdamW", 12, 768),
    "resnet_0.7M_sgd": Large(128, "SGD", 0, 16),
    "resnet_11M_sgd": Large(128, "SGD", 0, 64),
    "resnet_11M_adamw": Large(128, "AdamW", 0, 64),
}


class Feed:
    """Batches of a task on a device, and its held-out ones."""

    def __init__(self, task: Large, device: torch.device) -> None:
        self.batch, self.is_text = task.batch, task.layers > 0
        if self.is_text:
            full = data.text("mdn").to(device)
            self.train, self.held = full[:-400_000], full[-400_000:]
        else:
            images = data.cifar()
            self.train, self.held = images.x.to(device), images.x_test.to(device)
            self.labels, self.held_labels = images.y.to(device), images.y_test.to(device)

    def at(self, seed: int, step: int, *, held: bool = False) -> tuple[Tensor, ...]:
        source = self.held if held else self.train
        draw = torch.Generator().manual_seed(1_000_003 * seed + step + (10**9 if held else 0))
        if not self.is_text:
            rows = torch.randint(len(source), (self.batch,), generator=draw).to(source.device)
            labels = self.held_labels if held else self.labels
            return source[rows], labels[rows]
        begin = torch.randint(len(source) - CONTEXT - 1, (self.batch, 1), generator=draw)
        places = begin + torch.arange(CONTEXT + 1)
        return (source[places.to(source.device)].long(),)


def loss_of(model: nn.Module, *batch: Tensor) -> Tensor:
    if len(batch) == 1:
        return gpt_loss(model, batch[0])
    return F.cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def validate(model: nn.Module, feed: Feed) -> float:
    model.eval()
    batches = (feed.at(7, number, held=True) for number in range(HELD_BATCHES))
    loss = float(torch.stack([loss_of(model, *batch) for batch in batches]).mean())
    model.train()
    return loss


def run_plain(task: Large, feed: Feed, lr: float, device: torch.device) -> dict[str, Any]:
    model = seeded(task.model, torch.device("cpu"), SEED).to(device)
    outset = validate(model, feed)
    optimizer = task.make_optimizer(model, lr)
    schedule = OneCycleLR(optimizer, max_lr=lr, total_steps=STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *feed.at(SEED, step)).backward()
        optimizer.step()
        schedule.step()
    return {"outset": outset, "loss": validate(model, feed)}


def run_hdet(task: Large, feed: Feed, lr: float, device: torch.device) -> dict[str, Any]:
    model = seeded(task.model, torch.device("cpu"), SEED).to(device)
    outset = validate(model, feed)
    model.train()
    ensemble = hdet.StackedReplicas(model, REPLICAS)
    optimizer: Any = ensemble.optimizer(task.make_optimizer(model, lr))
    schedule = OneCycleLR(optimizer, max_lr=lr, total_steps=STEPS)
    with silence():
        scheduler = hdet.HDET(schedule, model=model, replicas=ensemble)
        for step in range(STEPS):
            optimizer.zero_grad()
            losses = ensemble.losses(loss_of, *feed.at(SEED, step))
            losses.sum().backward()
            optimizer.step()
            scheduler.step(losses.detach())
        with scheduler.consensus():
            return {"outset": outset, "loss": validate(model, feed), "lr": scheduler.found_lr or lr}


def usual_peak(task: Large) -> tuple[float, float, int]:
    """The prior's learning rate at the peak, its error in decades, and the number of parameters."""
    num = sum(parameter.numel() for parameter in task.model().parameters())
    prior = prior_of(task.optimizer, momentum=0.9, num_parameters=num)
    assert prior is not None
    return 10**prior.mean * peak_over_mean(ONE_CYCLE_MEAN), prior.error, num


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    pairs = []
    for name in TASKS:
        own = [row for row in rows if row["task"] == name]
        grid = [row for row in own if row["method"] == "plain"]
        if not grid:
            continue
        best = min(grid, key=lambda row: finite(row["loss"]))
        found[f"best_lr_{name}"] = best["lr"]
        found[f"usual_over_best_{name}"] = usual_peak(TASKS[name])[0] / best["lr"]
        for row in own:
            if row["method"] == "hdet":
                behind = finite(row["loss"]) - best["loss"]
                pairs.append(
                    (100 * behind / best["loss"], 100 * behind / (best["outset"] - best["loss"]))
                )
    if pairs:
        found["runs"] = len(pairs)
        found["lost"] = sum(not share <= LOST_SHARE for _, share in pairs)
        found["median_pct"] = median(pct for pct, _ in pairs)
        found["worst_pct"] = max(pct for pct, _ in pairs)
        found["worst_gain_pct"] = max(share for _, share in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=list(TASKS), action="append")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    kept = read_result(PATH)
    rows: list[dict[str, Any]] = list(kept.get("rows", []))

    def keep(row: dict[str, Any], begun: float) -> None:
        rows.append(row)
        settings = {"steps": STEPS, "replicas": REPLICAS, "starts": STARTS}
        write_result(
            PATH,
            headline=headline(rows),
            settings=settings,
            seeds=[SEED],
            kept=kept or None,
            rows=rows,
        )
        print(f"{time.monotonic() - begun:6.1f} s {row}", flush=True)

    device = torch.device(options.device)
    for name in options.only or list(TASKS):
        if not any(row["task"] == name for row in rows):
            _study(name, device, keep)


def _study(name: str, device: torch.device, keep: Any) -> None:
    """The grid of a task, then hdet."""
    task = TASKS[name]
    feed, (usual, error, num) = Feed(task, device), usual_peak(task)
    found: dict[int, float] = {}
    places = list(FIRST_PLACES)
    base = {"task": name, "parameters": num, "usual": usual, "error": error}
    while places and len(found) < MOST_GRID:
        place, begun = places.pop(0), time.monotonic()
        lr = usual * RATIO**place
        made = run_plain(task, feed, lr, device)
        found[place] = finite(made["loss"])
        keep({**base, "method": "plain", "start": None, "lr": lr, **made}, begun)
        if not places:
            best = min(found, key=found.__getitem__)
            places = [p for p in (best - 1, best + 1) if p not in found]
    best_lr = usual * RATIO ** min(found, key=found.__getitem__)
    for start in STARTS:
        begun = time.monotonic()
        made = run_hdet(task, feed, best_lr * start, device)
        keep({**base, "method": "hdet", "start": start, **made}, begun)


if __name__ == "__main__":
    main()
