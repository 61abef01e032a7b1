"""Which learning rate is best for every small task, and what do others cost? -> zoo_curves.json

    HDET_DATA=FOLDER python -m benchmarks.zoo.zoo_curves [--only NAME] [--workers 2] [--minutes M]

Nine learning rates around the middle of every task, four a decade, with three seeds. A grid grows
by two while its best lies within two of an end. The tasks of the setting part come first. Every run
is kept as it ends; the same command goes on from there. --quick tries a few short runs and keeps
them elsewhere.
"""

import argparse
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from benchmarks.result_file import read_result, write_result
from benchmarks.zoo.small.catalogue import REPORTING, SETTING, TASKS
from benchmarks.zoo.small.curve import PATH, STEP, finite, lr_at, place_of
from benchmarks.zoo.small.train import train

FIRST_PLACES = range(-4, 5)
MARGIN, MOST_PLACES = 2, 41
QUICK_PATH, QUICK_STEPS = Path("runs/zoo_curves.json"), 20
KEYS = ("loss", "accuracy", "outset", "train_loss")


class Job(NamedTuple):
    task: str
    place: int
    seed: int
    quick: bool = False


class Book:
    """The rows of a result file, and which runs they still lack."""

    def __init__(self, path: Path, seeds: Sequence[int], *, quick: bool) -> None:
        self.path, self.seeds, self.quick = path, seeds, quick
        self.known = read_result(path)
        self.rows: list[dict[str, Any]] = list(self.known.get("rows", []))

    def missing(self, names: Sequence[str]) -> list[Job]:
        """The runs that the present grids of some tasks lack."""
        return [
            job
            for name in names
            for place in self._grid(name)
            for seed in self.seeds
            if (job := Job(name, place, seed, self.quick)) not in self._losses(name)
        ]

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        order = {name: at for at, name in enumerate(TASKS)}
        self.rows.sort(key=lambda row: (order[row["task"]], row["lr"], row["seed"]))
        write_result(
            self.path,
            headline=headline(self.rows),
            settings={"step": STEP, "setting": SETTING, "reporting": REPORTING},
            seeds=sorted({row["seed"] for row in self.rows}),
            kept=self.known or None,
            rows=self.rows,
        )

    def _losses(self, name: str) -> dict[Job, float]:
        middle = TASKS[name].middle
        return {
            Job(name, place_of(middle, row["lr"]), row["seed"], self.quick): finite(row["loss"])
            for row in self.rows
            if row["task"] == name
        }

    def _grid(self, name: str) -> Sequence[int]:
        """The places of a task, with two more if the best of a complete grid is near an end."""
        if self.quick:
            return FIRST_PLACES[::4]
        losses = self._losses(name)
        return grown({(job.place, job.seed): loss for job, loss in losses.items()}, self.seeds)


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How much was trained."""
    return {
        "tasks": len({row["task"] for row in rows}),
        "runs": len(rows),
        "seconds_per_run": fmean(row["seconds"] for row in rows),
    }


def grown(losses: dict[tuple[int, int], float], seeds: Sequence[int]) -> range:
    """The places of a grid.

    Args:
        losses: (place, seed) -> the loss of a run.
        seeds: Those that every place is to have.
    """
    grid = FIRST_PLACES
    while len(grid) < MOST_PLACES:
        if any((place, seed) not in losses for place in grid for seed in seeds):
            return grid
        means = {place: fmean(losses[place, seed] for seed in seeds) for place in grid}
        best = min(grid, key=means.__getitem__)
        first = grid.start - MARGIN * (best - grid.start < MARGIN)
        stop = grid.stop + MARGIN * (grid.stop - 1 - best < MARGIN)
        if range(first, stop) == grid:
            return grid
        grid = range(first, stop)
    return grid


def run(job: Job) -> dict[str, Any]:
    """Train, and say what became of it."""
    task = TASKS[job.task]
    if job.quick:
        task = replace(task, steps=QUICK_STEPS)
    lr = float(f"{lr_at(task.middle, job.place):.7g}")  # as it stands in the file
    task.validate(task.make_model(job.seed))  # the data is loaded before the clock starts
    begun = time.process_time()
    outcome = train(task, lr, job.seed)
    return {
        "task": job.task,
        "lr": lr,
        "seed": job.seed,
        **{key: outcome[key] for key in KEYS if key in outcome},
        "seconds": time.process_time() - begun,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=list(TASKS), action="append")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    path = options.out or (QUICK_PATH if options.quick else PATH)
    book = Book(path, range(1 if options.quick else options.seeds), quick=options.quick)
    begun = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.workers, torch.set_num_threads, (1,)) as pool:
        for part in (SETTING, REPORTING):
            names = [name for name in part if options.only is None or name in options.only]
            while jobs := book.missing(names):
                for done, row in enumerate(pool.imap_unordered(run, jobs), 1):
                    book.add(row)
                    print(_line(row, done, len(jobs), time.monotonic() - begun), flush=True)
                    if time.monotonic() - begun > 60 * options.minutes:
                        return


def _line(row: dict[str, Any], done: int, num: int, seconds: float) -> str:
    return (
        f"{done:4d}/{num} {seconds / 60:6.1f} min  {row['task']:36s} {row['lr']:9.3g} "
        f"seed {row['seed']}  {row['outset']:8.4f} -> {row['loss']:8.4f}  {row['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
