"""Does an order of decay of the four groups emerge, as in figure 3? -> replication_groups.json

    HDET_DATA=FOLDER python -m benchmarks.replication.groups [--quick | --smoke] [--only TASK]

The paper sees the learning rate of the transformer decay fastest, that of the group without decay
slowest, and about a fifth of the peak left at the end. Its controller and hdet's tracker run on
both rankers, at the best learning rate and at nine times that, from a checkpoint. A group's place
is its mean log learning rate over the cycles after the hand-over, since final ones are often all on
the floor.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks.replication.jobs import Row
from benchmarks.replication.ranker import Replicas, load, train, train_replicas
from benchmarks.replication.script import Job, Script
from benchmarks.result_file import RESULTS
from benchmarks.zoo.tasks import GROUPS

CONTROLLERS = ("paper", "tracker")
RATIOS = (1, 9)
SEEDS = {"full": range(20), "quick": range(2), "smoke": range(1)}
FASTEST, SLOWEST = "transformer", "no_decay"
CHANCE = 1 / 12
"""Of four groups in random order: one is the lowest, and another one the highest."""


def jobs(size: str, low: Mapping[str, float]) -> list[Job]:
    return [
        {"task": task, "size": size, "controller": name, "ratio": ratio, "low": lr, "seed": seed}
        for seed in SEEDS[size]
        for task, lr in low.items()
        for name in CONTROLLERS
        for ratio in RATIOS
    ]


def run(job: Job, *, folder: str | None) -> Row:
    """Train once; return the learning rates of the groups beside the measures."""
    torch.set_num_threads(1)
    ranking, low, seed = load(job, folder), job["low"], job["seed"]
    lr = low * job["ratio"]
    if job["controller"] == "paper":
        return train(ranking, "HDET", lr, low, seed)

    def schedule(replicas: Replicas, optimizer: Any) -> hdet.HDET:
        base = OneCycleLR(optimizer, max_lr=lr, total_steps=ranking.steps)
        return hdet.HDET(
            base,
            sync_every=ranking.sync_every,
            knobs=[hdet.lr()],
            controller=hdet.Tracker(),
            probe=ranking.task.probe,
            scout=None,
            guard=None,
            seed=seed,
            **replicas,
        )

    found = train_replicas(ranking, schedule, lr, seed, low)
    return found.row | {"group_lrs": found.group_lrs}


def places(row: Row) -> dict[str, float]:
    """The mean log learning rate of each group over the last 70 % of the cycles."""
    lrs = row["group_lrs"]
    first = int(0.3 * len(lrs[GROUPS[0]]))
    return {name: fmean(map(math.log, lrs[name][first:])) for name in GROUPS}


def has_papers_order(row: Row) -> bool:
    """Whether the transformer is lowest and the group without decay highest."""
    found = places(row)
    return min(found, key=found.__getitem__) == FASTEST and (
        max(found, key=found.__getitem__) == SLOWEST
    )


def chance_of(count: int, num: int) -> float:
    """The chance of at least this many of the paper's orders among random ones.

    >>> round(chance_of(1, 1), 4)
    0.0833
    """
    terms = range(count, num + 1)
    return math.fsum(math.comb(num, k) * CHANCE**k * (1 - CHANCE) ** (num - k) for k in terms)


def table(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each task, controller and ratio."""
    head = ["Task", "Controller", "LR / best", "Paper's order", "Chance of as many"]
    head += [f"Rank of {name}" for name in GROUPS] + ["Final LR / given"]
    body = []
    for task, name, ratio in dict.fromkeys(_line(row) for row in rows):
        own = [row for row in rows if _line(row) == (task, name, ratio) and row["group_lrs"]]
        if not own:
            continue
        count = sum(map(has_papers_order, own))
        ranks = [fmean(rank_of(row, group) for row in own) for group in GROUPS]
        body.append(
            [
                task,
                name,
                f"{ratio}",
                f"{count} of {len(own)}",
                f"{chance_of(count, len(own)):.3f}",
                *(f"{rank:.2f}" for rank in ranks),
                f"{median(residual(row) for row in own):.2g}",
            ]
        )
    return [head, *body]


def _line(row: Row) -> tuple[str, str, int]:
    return row["task"], row["controller"], row["ratio"]


def rank_of(row: Row, group: str) -> int:
    """1 for the group with the lowest learning rate, 4 for that with the highest."""
    found = places(row)
    return 1 + sum(value < found[group] for value in found.values())


def residual(row: Row) -> float:
    """The last learning rate, as a share of the peak: the mean over groups."""
    peak = row["low"] * row["ratio"]
    return fmean(lrs[-1] / peak for lrs in row["group_lrs"].values())


def headline(rows: Sequence[Row]) -> Row:
    found: Row = {}
    for name in CONTROLLERS:
        own = [row for row in rows if row["controller"] == name and row["group_lrs"]]
        count = sum(map(has_papers_order, own))
        found[f"{name}_papers_order"] = count
        found[f"{name}_runs"] = len(own)
        found[f"{name}_chance"] = chance_of(count, len(own)) if own else math.nan
        found[f"{name}_final_share"] = median(map(residual, own)) if own else math.nan
    return found


SCRIPT = Script(
    path=RESULTS / "replication_groups.json",
    question=(__doc__ or "").splitlines()[0],
    jobs=jobs,
    run=run,
    headline=headline,
    tables=lambda rows: {"groups": table(rows)},
)


def main(arguments: Sequence[str] | None = None) -> Path:
    return SCRIPT.main(arguments)


if __name__ == "__main__":
    main()
