"""Does a run end as good as the best of a grid, from any learning rate? -> settle.json

    python -m benchmarks.learning_rate.settle [--quick] [--only language] [--data FOLDER]
        [--out FILE] [--minutes 8.5] [--methods "hdet;Prodigy"]

For every task a grid of fixed learning rates is trained with OneCycleLR, and one with warm-up and
cosine. The best is picked on seeds of its own and trained again on the seeds that are reported: its
loss there, seed by seed, is the reference. Then every method starts from the best learning rate
times 1/1000 to 1000, with the same steps, samples, schedule and number of replicas.
Regret is (validation loss - reference) / reference.

Runs are stacked, many in one go (fleet.py), and kept in FILE as they end: the same command goes on
where it was stopped, or where `--minutes` were over. Delete FILE after a change of the code.
`python -m benchmarks.learning_rate.settle_page` makes the tables and the figure of FILE.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.learning_rate.methods.bench import SYNC_EVERY, Bench, Ended, N, Run
from benchmarks.learning_rate.methods.registry import METHODS, Method
from benchmarks.learning_rate.methods.single import trained
from benchmarks.learning_rate.regret import (
    FRESH,
    LOST_PCT,
    REFERENCE,
    SELECTION,
    rows_of,
    table_of,
)
from benchmarks.learning_rate.settle_headline import headline
from benchmarks.result_file import RESULTS, plain_json, read_result, write_result
from benchmarks.zoo.entries import ENTRIES
from benchmarks.zoo.tasks import Plan

STARTS = (1e-3, 1e-2, 0.1, 1 / 3, 1.0, 3.0, 10.0, 100.0, 1000.0)
FEW_STARTS = (1e-2, 1.0, 100.0)
LOOKED_AT = (0, 1, 2, 3, 4)
"""Seeds whose runs were looked at while the rules of hdet were changed."""
SELECTION_SEEDS = (100, 101, 102)
PRETRAINING_SEED = 200
GOALS = {"p90_pct": 2.0, "worst_pct": 4.0, "restart_pct": 2.0, "scout_time_pct": 3.0}
"""What hdet was meant to reach; pages say which of them it misses."""
DEFINITIONS = {
    "starts": STARTS,
    "few_starts": FEW_STARTS,
    "lost_pct": LOST_PCT,
    "goals": GOALS,
    "seeds_looked_at": LOOKED_AT,
    "fresh_seeds": FRESH,
}
"""What pages need to explain the numbers of the file."""
SECOND, SMALL_GRID = "warm-up and cosine", "small grid"
HALF_GRID = 5
"""The grid reaches this many factors of two to both sides of its middle, and is widened."""


class Job(NamedTuple):
    task: str
    method: str
    lr: float
    seed: int
    steps: int


class TimeIsUp(Exception):
    """What is known is in the file."""


class Book:
    """All runs that were made, in a file."""

    def __init__(self, path: Path, minutes: float) -> None:
        self._path, self._start, self._limit = path, time.perf_counter(), 60 * minutes
        self.known: dict[Job, Ended] = {}
        self.seconds: dict[str, float] = {}
        self.plans: dict[str, Plan] = {}
        self._kept = results = read_result(path)
        if results:
            self.seconds = results["seconds"]
            known = results.get("settings", {}).get("plans", {})
            self.plans = {name: Plan(*plan) for name, plan in known.items()}
            for row in results["runs"]:
                self.known[Job(**row["job"])] = Ended(**row["ended"])

    @property
    def folder(self) -> Path:
        return self._path.parent

    def spent(self) -> float:
        return time.perf_counter() - self._start

    def make(
        self, jobs: Sequence[Job], at_once: int, train: Callable[[Sequence[Run]], list[Ended]]
    ) -> list[Ended]:
        """The runs of one task and one method; those that are missing are made now."""
        jobs = [job._replace(lr=float(f"{job.lr:.7g}")) for job in jobs]  # as in the file
        missing = [job for job in dict.fromkeys(jobs) if job not in self.known]
        for first in range(0, len(missing), at_once):
            part = missing[first : first + at_once]
            what = f"{part[0].task}: {part[0].method}"
            if self.spent() > self._limit - self.seconds.get(what, 0.0):
                raise TimeIsUp
            begin = time.perf_counter()
            ended = train([Run(job.lr, job.seed) for job in part])
            took = time.perf_counter() - begin
            self.known.update(zip(part, ended, strict=True))
            self.seconds[what] = took
            print(f"{self.spent():6.0f} s  {what}: {len(part)} runs in {took:.1f} s", flush=True)
            self.write()
        return [self.known[job] for job in jobs]

    def write(self, *, finished: bool = False) -> None:
        """All that is known; when it is finished with what it comes to."""
        runs = plain_json(
            [{"job": job._asdict(), "ended": ended._asdict()} for job, ended in self.known.items()]
        )
        numbers: dict[str, Any] = {}
        if any(job.method == "hdet" for job in self.known) and finished:
            rows = rows_of(runs)
            numbers = headline(rows, runs)
            print(table_of(rows))
        write_result(
            self._path,
            headline=numbers,
            settings={
                "replicas": N,
                "sync_every": SYNC_EVERY,
                "plans": {name: list(plan) for name, plan in self.plans.items()},
                **DEFINITIONS,
            },
            seeds=sorted({job.seed for job in self.known if job.seed < SELECTION}),
            kept=self._kept,
            seconds=self.seconds,
            runs=runs,
        )


class Settler:
    """One task: its grid, its reference, and what every method makes of every start."""

    def __init__(self, name: str, settings: "Settings", book: Book) -> None:
        self.name, self.settings, self.book = name, settings, book
        entry = ENTRIES[name]
        self.plan = entry.quick if settings.quick else entry.full
        book.plans[name] = self.plan
        self.on_gpu = torch.cuda.is_available()
        device = torch.device("cuda" if self.on_gpu else "cpu")
        start = {}
        if name.startswith("fine-tuning"):
            start = {"start": self._pretrained(device)}
        task = entry.make(self.plan, settings.folder, device, **start)
        self.bench = Bench(task, self.plan, entry.half and self.on_gpu, self.on_gpu)
        self.at_once = entry.rows if self.on_gpu else 32

    def _pretrained(self, device: torch.device) -> dict[str, Tensor]:
        """The language model at the best learning rate of its grid, made once."""
        path = self.book.folder / (
            "pretrained.quick.pt" if self.settings.quick else "pretrained.pt"
        )
        if not path.exists():
            other = Settler("language, AdamW", self.settings, self.book)
            torch.save(trained(other.bench, Run(other.best(), PRETRAINING_SEED)), path)
        state: dict[str, Tensor] = torch.load(path, map_location=device)
        return state

    def jobs(self, method: str, lrs: Iterable[float], seeds: Iterable[int]) -> list[Job]:
        seeds = list(seeds)
        return [Job(self.name, method, lr, seed, self.plan.steps) for lr in lrs for seed in seeds]

    def make(self, method: str, jobs: Sequence[Job], bench: Bench | None = None) -> list[Ended]:
        how = METHODS[method]
        # A row of a population has an eighth of the batch: the memory of its weights is the limit.
        at_once = self.at_once if how.rows == 1 else max(4 * self.at_once // how.rows, 1)
        return self.book.make(jobs, at_once, lambda runs: how.train(bench or self.bench, runs))

    # The grid -----------------------------------------------------------------------------------

    def best(self, method: str = REFERENCE) -> float:
        """Of the grid, widened while it sits at an end; on seeds that are not reported."""
        curve = self.curve(method)
        return min(curve, key=curve.__getitem__)

    def curve(self, method: str = REFERENCE) -> dict[float, float]:
        """The mean loss at every learning rate of the grid."""
        half = HALF_GRID - 1 if self.settings.quick else HALF_GRID
        low, high = -half, half
        while True:
            grid = [self.plan.middle * 2.0**place for place in range(low, high + 1)]
            ended = self.make(method, self.jobs(method, grid, self.settings.selection))
            num = len(self.settings.selection)
            losses = [
                fmean(worst_if_lost(end.live["loss"]) for end in ended[at : at + num])
                for at in range(0, len(ended), num)
            ]
            curve = dict(zip(grid, losses, strict=True))
            at = min(range(len(grid)), key=losses.__getitem__)
            if 0 < at < len(grid) - 1:
                return curve
            low, high = (low - 2, high) if at == 0 else (low, high + 2)

    def stable(self) -> float:
        """The largest learning rate of the grid that is not lost; the grid is extended for it."""
        curve = self.curve()
        limit = min(curve.values()) * (1 + LOST_PCT / 100)
        lr = max(lr for lr, loss in curve.items() if loss <= limit)
        while lr >= max(curve):
            job = self.jobs(REFERENCE, [2 * lr], self.settings.selection)
            loss = fmean(worst_if_lost(end.live["loss"]) for end in self.make(REFERENCE, job))
            curve[2 * lr] = loss
            if loss > limit:
                break
            lr *= 2
        return lr

    # The runs -----------------------------------------------------------------------------------

    def settle(self, chosen: Sequence[str]) -> None:
        best, reported = self.best(), {*self.settings.seeds, *self.settings.fresh}
        self.make(REFERENCE, self.jobs(REFERENCE, [best], sorted(reported)))
        for method in chosen:
            how = METHODS.get(method)
            if how is None or self.plan.optimizer not in how.optimizers:
                continue
            if how.kind in ("guard", "second"):  # below
                continue
            if how.kind == "groups" and len(self.bench.task.groups) == 1:
                continue
            lrs, seeds = self._share(how)
            self.make(method, self.jobs(method, [best * start for start in lrs], seeds))
        if SECOND in chosen:
            again = self.best(SECOND)
            self.make(SECOND, self.jobs(SECOND, [again], self.settings.seeds))
        if "hdet, no scout" in chosen:
            wild = [10 * self.stable()]
            for method in (REFERENCE, "hdet, no scout"):
                self.make(method, self.jobs(method, wild, self.settings.seeds))
        if SMALL_GRID in chosen:
            self._make_small_grid()

    def _share(self, how: Method) -> tuple[Sequence[float], Sequence[int]]:
        """From which starts and with which seeds a method is tried."""
        settings = self.settings
        if how.kind == "hdet":
            return settings.starts, settings.seeds
        if how.kind in ("default", "groups"):
            return settings.starts, settings.fresh
        if not how.takes_lr:
            return (1.0,), settings.seeds
        if how.kind == "plain":
            return settings.few_starts if settings.quick else settings.starts, settings.seeds[:3]
        if how.kind == "control":
            return (1.0,), settings.seeds[:3]
        return settings.few_starts, settings.seeds[:3]

    def _make_small_grid(self) -> None:
        """What the same compute buys as a sweep: nine runs of a ninth of the steps."""
        plan = self.plan._replace(steps=self.plan.steps // 9)
        grid = [self.plan.middle * 2.0**place for place in range(-4, 5)]
        bench = self.bench._replace(plan=plan)
        for seed in self.settings.seeds:
            jobs = [Job(self.name, REFERENCE, lr, seed, plan.steps) for lr in grid]
            self.make(REFERENCE, jobs, bench)


def worst_if_lost(loss: float | None) -> float:
    return loss if loss is not None and math.isfinite(loss) else math.inf


class Settings(NamedTuple):
    quick: bool
    folder: Path | None
    starts: Sequence[float] = STARTS
    few_starts: Sequence[float] = FEW_STARTS
    seeds: Sequence[int] = LOOKED_AT
    fresh: Sequence[int] = FRESH
    selection: Sequence[int] = SELECTION_SEEDS


QUICK_METHODS = ("hdet", "OneCycleLR", "Prodigy", "Schedule-Free AdamW")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models, few starts, one seed")
    parser.add_argument("--only", default="", help="the beginnings of task names, by semicolons")
    parser.add_argument("--methods", help="by semicolons; all by default")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop before, go on later")
    parser.add_argument("--data", type=Path, default=os.environ.get("HDET_DATA"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = None if options.data is None else Path(options.data)
    settings = Settings(options.quick, folder)
    if options.quick:
        settings = settings._replace(
            starts=(1e-3, 1.0, 1000.0),
            few_starts=(1e-2, 1.0),
            seeds=(0,),
            fresh=(0,),
            selection=(100,),
        )
    known = (*METHODS, SMALL_GRID)
    chosen = QUICK_METHODS if options.quick else known
    if options.methods:
        chosen = tuple(options.methods.split(";"))
        if unknown := sorted(set(chosen) - set(known)):
            parser.error(f"--methods must be among {list(known)}, got {unknown}.")
    wanted = [name for name in ENTRIES if name.startswith(tuple(options.only.split(";")))]
    if not wanted:
        parser.error(f"--only must begin some of {list(ENTRIES)}, got {options.only!r}.")
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    book = Book(
        options.out or RESULTS / ("settle.quick.json" if options.quick else "settle.json"),
        options.minutes,
    )
    try:
        for name in wanted:
            Settler(name, settings, book).settle(chosen)
        book.write(finished=True)
    except TimeIsUp:
        print("the time is up: the same command goes on from here")


if __name__ == "__main__":
    main()
