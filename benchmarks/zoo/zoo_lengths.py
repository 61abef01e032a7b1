"""Short and long runs, few and many replicas: is the rate still found? -> zoo_lengths.json

    HDET_DATA=FOLDER python -m benchmarks.zoo.zoo_lengths [--workers 2] [--only TASK]

Tasks of the setting half, trained for other numbers of steps and with other numbers of replicas
than the rules were set with. The reference of each length is the best of five plain runs with
learning rates around the best one of the task's own length.
"""

import argparse
import math
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.learning_rate.regret import quantile
from benchmarks.result_file import RESULTS, read_result, write_result
from benchmarks.zoo.runs import run_alone, run_stacked
from benchmarks.zoo.small.catalogue import SETTING, TASKS
from benchmarks.zoo.small.curve import best_lr, finite
from benchmarks.zoo.small.task import with_steps
from benchmarks.zoo.small.train import train

PATH = RESULTS / "zoo_lengths.json"
LOST_SHARE = 20.0
CHOSEN = ("conv_mnist_sgd", "byte_gpt_adamw", "tabular_census_adamw", "regression_adam")
"""One of each family, with the optimizers that people use most."""
CASES = ((1, 300), (2, 300), (4, 300), (8, 300), (16, 300), (16, 0), (1, 16_000), (8, 16_000))
"""Replicas and steps; 0 steps: those of the task."""
STARTS, AROUND = (0.01, 1.0, 100.0), (0.25, 0.5, 1.0, 2.0, 4.0)


class Job(NamedTuple):
    task: str
    replicas: int
    """0: a plain run."""
    steps: int
    start: float


def run(job: Job) -> dict[str, Any]:
    task, lr = with_steps(TASKS[job.task], job.steps), best_lr(job.task) * job.start
    row: dict[str, Any] = {**job._asdict()}
    if job.replicas == 0:
        scores = train(task, lr, 0)
        return {**row, "loss": scores["loss"], "outset": scores["outset"]}
    made = run_alone(task, lr, 0) if job.replicas == 1 else run_stacked(task, lr, 0, job.replicas)
    chosen = made.peak / best_lr(job.task)
    found = {"chosen": chosen, "scout_steps": made.scout_steps, "rollbacks": made.rollbacks}
    return {**row, "loss": made.loss, "outset": made.outset, **found}


def jobs_of(names: Sequence[str]) -> list[Job]:
    """All runs, the long ones first: what ends last should be short."""
    jobs = []
    for name in names:
        cases = [(num, steps or TASKS[name].steps) for num, steps in CASES]
        plain = {(0, steps) for _, steps in cases}
        jobs += [Job(name, num, steps, start) for num, steps in cases for start in STARTS]
        jobs += [Job(name, num, steps, around) for num, steps in plain for around in AROUND]
    return sorted(jobs, key=lambda job: -job.steps * (4 if job.replicas > 1 else 1))


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of every number of replicas and steps: runs, lost, and how far behind."""
    plain: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in rows:
        if row["replicas"] == 0:
            plain[row["task"], row["steps"]].append(finite(row["loss"]))
    own = {name: task.steps for name, task in TASKS.items()}
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        best = min(plain[row["task"], row["steps"]], default=math.inf)
        if row["replicas"] == 0 or not math.isfinite(best):
            continue
        behind = finite(row["loss"]) - best
        steps = "own" if row["steps"] == own[row["task"]] else row["steps"]
        pair = 100 * behind / abs(best), 100 * behind / (row["outset"] - best)
        found[f"n{row['replicas']}_{steps}"].append(pair)
    return {
        name: {
            "runs": len(pairs),
            "lost": sum(not share <= LOST_SHARE for _, share in pairs),
            "median_pct": median(pct for pct, _ in pairs),
            "p90_pct": quantile([pct for pct, _ in pairs], 0.9),
            "median_gain_pct": median(share for _, share in pairs),
            "worst_gain_pct": max(share for _, share in pairs),
        }
        for name, pairs in sorted(found.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=SETTING, action="append")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    kept = read_result(PATH)
    rows: list[dict[str, Any]] = list(kept.get("rows", []))
    known = {tuple(row[field] for field in Job._fields) for row in rows}
    missing = [job for job in jobs_of(options.only or CHOSEN) if tuple(job) not in known]
    begun = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(
        options.workers, torch.set_num_threads, (1,)
    ) as pool:
        for done, row in enumerate(pool.imap_unordered(run, missing), 1):
            rows.append(row)
            rows.sort(key=lambda row: tuple(row[field] for field in Job._fields))
            settings = {"starts": STARTS, "around": AROUND, "cases": CASES}
            write_result(
                PATH,
                headline=headline(rows),
                settings=settings,
                seeds=[0],
                kept=kept or None,
                rows=rows,
            )
            minutes = (time.monotonic() - begun) / 60
            print(f"{done}/{len(missing)} {minutes:.1f} min {row}", flush=True)


if __name__ == "__main__":
    main()
