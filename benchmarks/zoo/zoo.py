"""Does a run end as good as the best of a sweep, on tasks nobody tuned on? -> zoo.json

    HDET_DATA=FOLDER python -m benchmarks.zoo.zoo [--part setting] [--methods NAMES] [--only TASK]
        [--workers 2] [--minutes M] [--out FILE]

Every task of the reporting half is trained with hdet as a new user would write it, from learning
rates 1/1000 to 1000 times the best of its grid (zoo_curves.json). Nothing is set but the model and
the replicas. Controls: one replica; the guard's ceiling with the usual learning rate of the
optimizer and no scout; plain runs at the best learning rate with fresh seeds, which say how much is
luck; and peers that need no sweep. Every run is kept as it ends; the same command goes on from
there. Every look at the reporting half is noted in experiments/LOG.md.
"""

import argparse
import math
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.result_file import RESULTS, read_result, write_result
from benchmarks.zoo.peers import LANGUAGE_MODELS, PEERS
from benchmarks.zoo.runs import Outcome, run_alone, run_stacked
from benchmarks.zoo.small.catalogue import REPORTING, SETTING, TASKS
from benchmarks.zoo.small.curve import best_lr
from benchmarks.zoo.small.task import SmallTask
from benchmarks.zoo.small.train import train
from benchmarks.zoo.usual_lr import usual_lr
from benchmarks.zoo.winner_takes_all import winner_takes_all
from benchmarks.zoo.zoo_headline import headline

PATH = RESULTS / "zoo.json"
STARTS = (1e-3, 0.01, 1 / 17, 1 / 3, 1.0, 3.0, 23.0, 100.0, 1000.0)
FEW_STARTS = (0.01, 1.0, 100.0)
HIGH_STARTS = (1.0, 3.0, 23.0, 100.0)
FIRST_STARTS = {*FEW_STARTS, *HIGH_STARTS} - {3.0, 23.0}
SEEDS, FRESH_SEEDS = (0, 1, 2), (50, 51, 52, 53, 54)


class Job(NamedTuple):
    task: str
    method: str
    start: float
    """The learning rate, in units of the best; nan where a method has none."""
    seed: int


Train = Callable[[SmallTask, float, int], Outcome]


class Method(NamedTuple):
    train: Train
    """(task, learning rate, seed) -> how it ended."""
    starts: tuple[float, ...] = (1.0,)
    seeds: tuple[int, ...] = SEEDS
    tasks: tuple[str, ...] | None = None
    """The tasks that it is for; None for all."""


def stacked(num_replicas: int) -> Train:
    return lambda task, lr, seed: run_stacked(task, lr, seed, num_replicas)


def plain(task: SmallTask, lr: float, seed: int) -> Outcome:
    scores = train(task, lr, seed)
    accuracy = scores.get("accuracy")
    return Outcome(scores["loss"], scores["outset"], accuracy, lr, 1.0, 0, 0, "")


def ceiling_alone(task: SmallTask, lr: float, seed: int) -> Outcome:
    return run_alone(task, lr, seed, scout=None)


def usual(task: SmallTask, lr: float, seed: int) -> Outcome:
    """The simplest thing that could work: one learning rate per optimizer, and the ceiling."""
    return run_alone(task, usual_lr(task), seed, scout=None)


def peer(name: str) -> Train:
    return lambda task, lr, seed: PEERS[name](task, seed)


METHODS: dict[str, Method] = {
    "hdet, 8 replicas": Method(stacked(8), STARTS),
    "hdet, 4 replicas": Method(stacked(4), FEW_STARTS),
    "hdet, 2 replicas": Method(stacked(2), FEW_STARTS),
    "hdet, 1 replica": Method(run_alone, HIGH_STARTS),
    "ceiling alone": Method(ceiling_alone, HIGH_STARTS),
    "usual learning rate and ceiling": Method(usual),
    "luck": Method(plain, seeds=FRESH_SEEDS),
    "winner takes all": Method(winner_takes_all, FEW_STARTS),
    **{name: Method(peer(name)) for name in PEERS},
}
METHODS["Step Law"] = METHODS["Step Law"]._replace(tasks=LANGUAGE_MODELS)


def run(job: Job) -> dict[str, Any]:
    """Train, and say what became of it."""
    task, best = TASKS[job.task], best_lr(job.task)
    task.validate(task.make_model(job.seed))  # the data is loaded before the clock starts
    begun = time.process_time()
    outcome = METHODS[job.method].train(task, best * job.start, job.seed)
    return {
        **job._asdict(),
        **asdict(outcome),
        "chosen": outcome.peak / best,
        "steps": task.steps,
        "seconds": round(time.process_time() - begun, 2),
    }


def jobs_of(tasks: Sequence[str], methods: Sequence[str]) -> list[Job]:
    """All runs. Those from many starts with further seeds come last: where the optimizer is known,
    the start hardly matters."""
    jobs = [
        Job(task, name, start, seed)
        for name in methods
        for task in METHODS[name].tasks or tasks
        if task in tasks
        for seed in METHODS[name].seeds
        for start in METHODS[name].starts
    ]
    return sorted(jobs, key=lambda job: job.seed in SEEDS[1:] and job.start not in FIRST_STARTS)


def key(row: Mapping[str, Any]) -> tuple[str, str, float, int]:
    return row["task"], row["method"], float(f"{row['start']:.6g}"), row["seed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=("setting", "reporting"), default="reporting")
    parser.add_argument("--only", choices=list(TASKS), action="append")
    parser.add_argument("--methods", help="by semicolons", default=";".join(METHODS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    setting = options.part == "setting"
    path = options.out or (RESULTS / "zoo_setting.json" if setting else PATH)
    tasks = [
        t for t in (SETTING if setting else REPORTING) if not options.only or t in options.only
    ]
    kept = read_result(path)
    rows: list[dict[str, Any]] = list(kept.get("rows", []))
    known = {key(row) for row in rows}
    missing = [
        job for job in jobs_of(tasks, options.methods.split(";")) if key(job._asdict()) not in known
    ]
    begun = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(
        options.workers, torch.set_num_threads, (1,)
    ) as pool:
        for done, row in enumerate(pool.imap_unordered(run, missing), 1):
            rows.append(row)
            rows.sort(key=key)
            _write(path, rows, kept)
            print(_line(row, done, len(missing), time.monotonic() - begun), flush=True)
            if time.monotonic() - begun > 60 * options.minutes:
                break


def _write(path: Path, rows: Sequence[dict[str, Any]], kept: Mapping[str, Any]) -> None:
    write_result(
        path,
        headline=headline(rows),
        settings={"starts": STARTS, "few_starts": FEW_STARTS, "high_starts": HIGH_STARTS},
        seeds=sorted({row["seed"] for row in rows}),
        kept=kept or None,
        rows=rows,
    )


def _line(row: Mapping[str, Any], done: int, num: int, seconds: float) -> str:
    return (
        f"{done:4d}/{num} {seconds / 60:6.1f} min  {row['method']:32s} {row['task']:36s} "
        f"x{row['start']:<7.3g} seed {row['seed']}  {row['outset']:8.4f} -> {row['loss']:8.4f}  "
        f"chosen x{row['chosen']:.2f}  {row['rollbacks']} rollbacks  {row['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
