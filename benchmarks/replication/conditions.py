"""Where does an average of replicas gain, by batch and epochs? -> replication_conditions.json

    HDET_DATA=FOLDER python -m benchmarks.replication.conditions [--quick | --smoke]

The same images and network as in `tail`, with AdamW. Each cell has the best learning rate of a grid
of its own. How much lower the validation loss ends than plain training, in percent, and how many
more answers are right: for a long running mean of one run, and for replicas that part late.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.learning_rate.methods.bench import Bench
from benchmarks.replication.jobs import Row
from benchmarks.replication.script import (
    Book,
    Job,
    Tables,
    change,
    finite,
    mean_and_error,
    parse,
    path_of,
)
from benchmarks.replication.tail_tasks import NUM_IMAGES, images, relative
from benchmarks.replication.tail_training import RECIPES, Tail, Trunk, whole
from benchmarks.result_file import RESULTS
from benchmarks.zoo import tasks
from benchmarks.zoo.tasks import Plan

PATH = RESULTS / "replication_conditions.json"
CELLS = {
    "full": [(64, 5), (64, 20), (64, 60), (256, 20), (256, 60), (512, 60)],
    "quick": [(64, 5), (256, 10)],
    "smoke": [(16, 1)],
}
"""Batch and epochs."""
SMOKE_IMAGES = (256, 100)
GRID = [2e-3 * 2.0**place for place in range(6)]
GRID_SEEDS, SEEDS = (100, 101), {"full": range(6), "quick": range(2), "smoke": range(2)}
SHOWN = ("EMA 5 %", "EMA 15 %", "soup, last quarter", "R1 quadratic rule")


def jobs(size: str) -> list[Job]:
    return [{"size": size, "batch": batch, "epochs": epochs} for batch, epochs in CELLS[size]]


def run(job: Job, *, folder: str | None) -> Row:
    """Train a grid, then all seeds at its best learning rate, then their tails."""
    torch.set_num_threads(1)
    size, batch = job["size"], job["batch"]
    most = SMOKE_IMAGES if size == "smoke" else NUM_IMAGES
    plan = Plan("AdamW", job["epochs"] * most[0] // batch, batch, GRID[0], 8)
    where = Path(folder) if folder else None
    bench = Bench(tasks.vision(plan, where, torch.device("cpu"), most=most), plan)
    lrs = GRID[-2:] if size == "smoke" else GRID
    pairs = [(lr, seed) for lr in lrs for seed in GRID_SEEDS]
    ended = whole(bench, "plain", [lr for lr, _ in pairs], [seed for _, seed in pairs])
    losses = [finite(one["loss"]) for one in ended]
    num = len(GRID_SEEDS)
    lr = min(lrs, key=lambda lr: sum(losses[num * lrs.index(lr) :][:num]))
    trunk = Trunk(bench, SEEDS[size], lr)
    found = {"plain": trunk.measures(trunk.fleet.weights.clone())}
    for name in SHOWN:
        if name in RECIPES:
            weights = Tail(trunk, RECIPES[name], images).train().mean(1)
        else:
            weights = trunk.means[name]
        found[name] = trunk.measures(weights)
    return {
        "lr": lr,
        "losses": {name: [one["loss"] for one in each] for name, each in found.items()},
        "right": {name: [one["accuracy"] for one in each] for name, each in found.items()},
    }


def gain(row: Row, name: str) -> tuple[float, float]:
    """How much lower the loss is than that of plain training, in percent, and the error."""
    pairs = zip(row["losses"][name], row["losses"]["plain"], strict=True)
    return mean_and_error([relative(finite(own), finite(plain)) for own, plain in pairs])


def more_right(row: Row, name: str) -> tuple[float, float]:
    """How many more answers are right, in percent points, and the error."""
    pairs = zip(row["right"][name], row["right"]["plain"], strict=True)
    return mean_and_error([100 * (own - plain) for own, plain in pairs])


def tables(rows: Sequence[Row]) -> Tables:
    head = ["Batch", "Epochs", "Right answers, plain", *SHOWN]
    made: dict[str, list[list[str]]] = {}
    for name, measure in (("loss", gain), ("right", more_right)):
        made[name] = [head]
        for row in rows:
            share = f"{100 * fmean(row['right']['plain']):.1f} %"
            cells = [change(*measure(row, one)) for one in SHOWN]
            made[name].append([f"{row['batch']}", f"{row['epochs']}", share, *cells])
    return made


def headline(rows: Sequence[Row]) -> Row:
    found: Row = {}
    for row in rows:
        for name in SHOWN:
            key = f"batch {row['batch']} epochs {row['epochs']} {name}"
            found[f"{key} gain pct"], found[f"{key} error"] = gain(row, name)
            found[f"{key} points"] = more_right(row, name)[0]
    return found


def main(arguments: Sequence[str] | None = None) -> Path:
    options = parse((__doc__ or "").splitlines()[0], arguments)
    size = options.size

    def parts(rows: Sequence[Row]) -> dict[str, Any]:
        return {
            "headline": headline(rows),
            "settings": {"size": size, "images": NUM_IMAGES, "grid": GRID},
            "seeds": list(SEEDS[size]),
            "tables": tables(rows),
        }

    book = Book(path_of(PATH, options), run, options, parts)
    book.make(jobs(size))
    book.summarise()
    return book.path


if __name__ == "__main__":
    main()
