"""Does an order of decay of the four groups emerge, as in figure 3? -> replication_groups.json

    HDET_DATA=FOLDER python -m benchmarks.replication.groups [--quick | --smoke] [--only TASK]

The paper sees the learning rate of the transformer decay fastest, that of the group without decay
slowest, and about a fifth of the peak left at the end. Its controller, the same by a probe, and
hdet's tracker run on both rankers from a checkpoint, at the best learning rate and at nine times
that. Equation 8 decays by a fixed factor a cycle. In a run of few cycles no signal can outweigh it,
so the runs at the best learning rate are also made three epochs long, with more than 300 cycles.

A group's place is its mean log learning rate from the hand-over until a twentieth of the peak is
left. Kendall's W says whether seeds agree on any order: 0 for none, 1 if all are equal.
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
from benchmarks.replication.ranker import (
    NOISE,
    SYNC_EVERY,
    TEMPERATURE_OF_CODE,
    Replicas,
    load,
    train_replicas,
)
from benchmarks.replication.script import Job, Script
from benchmarks.result_file import RESULTS
from benchmarks.zoo.tasks import GROUPS

CONTROLLERS: dict[str, dict[str, float]] = {
    "paper": {},
    "paper, temperature of its code": {"temperature": TEMPERATURE_OF_CODE},
    "paper, by a probe": {},
    "tracker": {},
}
"""What is set of the controller."""
BY_LOSSES = ("paper", "paper, temperature of its code")
LENGTHS = {"short": (1, SYNC_EVERY), "long": (3, 7)}
"""Epochs, and steps of a cycle."""
RATIOS = {"short": (1, 9), "long": (1,)}
MOST_CYCLES = 64
"""Of a run, whose learning rates its row keeps."""
HANDED_OVER, LEFT = 0.3, 0.05
"""The share of the run before the controller takes over, and that of the peak that still counts."""
SEEDS = {"full": range(20), "quick": range(2), "smoke": range(1)}
FASTEST, SLOWEST = "transformer", "no_decay"
CHANCE = 1 / 12
"""Of four groups in random order: one is the lowest, and another one the highest."""


def jobs(size: str, low: Mapping[str, float]) -> list[Job]:
    names = list(CONTROLLERS) if size != "smoke" else ["paper", "tracker"]
    lengths = [length for length in LENGTHS if size != "smoke" or length == "short"]
    return [
        {"task": task, "size": size, "controller": name, "epochs": epochs, "every": every}
        | {"ratio": ratio, "low": lr, "seed": seed}
        for length in lengths
        for epochs, every in [LENGTHS[length]]
        for seed in SEEDS[size]
        for task, lr in low.items()
        for name in names
        for ratio in RATIOS[length]
    ]


def run(job: Job, *, folder: str | None) -> Row:
    """Train once; return the learning rates of the groups beside the measures."""
    torch.set_num_threads(1)
    ranking, low, seed = load(job, folder), job["low"], job["seed"]
    lr, is_paper = low * job["ratio"], job["controller"].startswith("paper")

    def schedule(replicas: Replicas, optimizer: Any) -> hdet.HDET:
        common: dict[str, Any] = {"sync_every": ranking.sync_every, "seed": seed, **replicas}
        common |= CONTROLLERS[job["controller"]]
        if job["controller"] not in BY_LOSSES:
            common["probe"] = ranking.task.probe
        if is_paper:
            return hdet.OneCycleHDET(optimizer, max_lr=lr, total_steps=ranking.steps, **common)
        base = OneCycleLR(optimizer, max_lr=lr, total_steps=ranking.steps)
        options: dict[str, Any] = {
            "knobs": [hdet.lr()],
            "controller": hdet.Tracker(),
            "scout": None,
            "guard": None,
        }
        return hdet.HDET(base, **options, **common)

    found = train_replicas(ranking, schedule, lr, seed, low, NOISE if is_paper else 0.0)
    lrs = {name: thinned(course) for name, course in found.group_lrs.items()}
    return found.row | {"cycles": len(found.events.of("cycle")), "group_lrs": lrs}


def thinned(course: Sequence[float]) -> list[float]:
    """At most so many values, at equal distances from the last one on."""
    step = max(math.ceil(len(course) / MOST_CYCLES), 1)
    return list(course[::-step])[::-1]


def places(row: Row) -> dict[str, float]:
    """The mean log learning rate of each group while the learning rate still matters."""
    lrs = row["group_lrs"]
    num = len(lrs[GROUPS[0]])
    first = int(HANDED_OVER * num)
    least = LEFT * row["low"] * row["ratio"]
    middle = [median(lrs[name][cycle] for name in GROUPS) for cycle in range(num)]
    last = next((at for at in range(first + 1, num) if middle[at] < least), num)
    return {name: fmean(map(math.log, lrs[name][first:last])) for name in GROUPS}


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


def agreement(own: Sequence[Row]) -> tuple[float, float]:
    """Kendall's W over runs, and the chance of as much agreement among random orders.

    The chance is that of a chi-squared distribution with three degrees of freedom.
    """
    num, size = len(own), len(GROUPS)
    sums = [sum(rank_of(row, group) for row in own) for group in GROUPS]
    spread = math.fsum((total - num * (size + 1) / 2) ** 2 for total in sums)
    w = 12 * spread / (num**2 * (size**3 - size))
    chi = num * (size - 1) * w
    return w, math.erfc(math.sqrt(chi / 2)) + math.sqrt(2 * chi / math.pi) * math.exp(-chi / 2)


def table(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each task, controller and ratio."""
    head = ["Task", "Controller", "Cycles", "LR / best", "Paper's order", "Chance of as many"]
    head += [f"Rank of {name}" for name in GROUPS]
    head += ["Kendall's W", "Chance of as much", "Final LR / given", "Crashed"]
    body = []
    for line in dict.fromkeys(map(line_of, rows)):
        own = [row for row in rows if line_of(row) == line and row["group_lrs"]]
        if not own:
            continue
        task, name, _, ratio = line
        count = sum(map(has_papers_order, own))
        ranks = [fmean(rank_of(row, group) for row in own) for group in GROUPS]
        w, chance = agreement(own)
        body.append(
            [
                task,
                name,
                f"{own[0]['cycles']}",
                f"{ratio}",
                f"{count} of {len(own)}",
                f"{chance_of(count, len(own)):.3f}",
                *(f"{rank:.2f}" for rank in ranks),
                f"{w:.2f}",
                f"{chance:.1g}",
                f"{median(residual(row) for row in own):.2g}",
                f"{sum(row['is_crashed'] for row in own)} of {len(own)}",
            ]
        )
    return [head, *body]


def line_of(row: Row) -> tuple[str, str, str, int]:
    length = next(name for name, (epochs, _) in LENGTHS.items() if epochs == row["epochs"])
    return row["task"], row["controller"], length, row["ratio"]


def rank_of(row: Row, group: str) -> float:
    """1 for the group with the lowest learning rate, 4 for the highest; ties share their ranks."""
    found = places(row)
    own = found[group]
    return 0.5 + sum((value < own) + 0.5 * (value == own) for value in found.values())


def residual(row: Row) -> float:
    """The last learning rate, as a share of the peak: the mean over groups."""
    peak = row["low"] * row["ratio"]
    return fmean(lrs[-1] / peak for lrs in row["group_lrs"].values())


def headline(rows: Sequence[Row]) -> Row:
    """Over both tasks where nothing crashes, then for each line of the table."""
    found: Row = {}
    for name in CONTROLLERS:
        for length in LENGTHS:
            own = [
                row for row in rows if line_of(row)[1:] == (name, length, 1) and row["group_lrs"]
            ]
            if own:
                count = sum(map(has_papers_order, own))
                found[f"{name} {length}"] = {
                    "papers_order": count,
                    "runs": len(own),
                    "chance": chance_of(count, len(own)),
                    "final_share": median(map(residual, own)),
                }
    for line in dict.fromkeys(map(line_of, rows)):
        own = [row for row in rows if line_of(row) == line and row["group_lrs"]]
        w, chance = agreement(own) if own else (math.nan, math.nan)
        crashed = sum(row["is_crashed"] for row in own)
        task, name, length, ratio = line
        numbers = {"w": w, "chance_of_w": chance, "crashed": crashed, "runs": len(own)}
        found[f"{task} {name} {length} x{ratio}"] = numbers
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
