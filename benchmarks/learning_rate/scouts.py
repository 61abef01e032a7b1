"""What do hundreds of scouts find, and what does that cost? -> scouts.json

    python -m benchmarks.learning_rate.scouts [--only NAMES] [--by SIGNALS] [--data FOLDER]
        [--out FILE]

A scout takes a few steps, and what its learning rate costs can be read off the curve of the grid
that the settling benchmark has trained: so the tails of hundreds of scouts can be seen without one
whole run. Twenty seeds that no other result has, from six starts, 0.001 to 1000 times the best
learning rate; the rankers by default, which a CPU trains. What is known is kept, and the same
command goes on from there.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, get_args

import torch

import hdet
from benchmarks.learning_rate.methods.bench import Bench, Run
from benchmarks.learning_rate.methods.search import Signal, search_lrs, start_of
from benchmarks.learning_rate.names import TASK_WORDS
from benchmarks.learning_rate.regret import LOST_PCT, curve_of, loss_at, quantile
from benchmarks.result_file import RESULTS, read_result, write_result
from benchmarks.zoo.entries import ENTRIES

STARTS = (1e-3, 0.03, 1.0, 10.0, 100.0, 1e3)
SEEDS = range(300, 320)
AT_ONCE = 30


def made(bench: Bench, by: Signal, curve: dict[float, float]) -> list[dict[str, float]]:
    """What every scout begins with, in units of the best, and what that costs, in percent."""
    best = min(curve, key=curve.__getitem__)
    runs = [Run(best * start, seed) for seed in SEEDS for start in STARTS]
    results = []
    for first in range(0, len(runs), AT_ONCE):
        some = runs[first : first + AT_ONCE]
        searches = search_lrs(bench, some, by=by, scout=hdet.Scout())
        for run, search in zip(some, searches, strict=True):
            lr = run.lr * start_of(bench, search).factor
            cost = 100 * (loss_at(curve, lr) / curve[best] - 1)
            start = {"seed": run.seed, "start": run.lr / best}
            results.append({**start, "lr": lr / best, "cost_pct": cost, "steps": search.used})
    return results


def summed_up(scouts: Sequence[dict[str, float]]) -> dict[str, float]:
    costs = [scout["cost_pct"] for scout in scouts]
    return {
        "mean_pct": fmean(costs),
        "median_pct": median(costs),
        "p90_pct": quantile(costs, 0.9),
        "worst_pct": max(costs),
        "lost": sum(cost > LOST_PCT for cost in costs),
        "lowest_lr": min(scout["lr"] for scout in scouts),
        "highest_lr": max(scout["lr"] for scout in scouts),
    }


def headline(known: Mapping[str, Sequence[dict[str, float]]]) -> dict[str, float]:
    """The summary of every task and signal, under short names."""
    results: dict[str, float] = {}
    for key, scouts in known.items():
        task, signal = key.rsplit(", by ", 1)
        name = f"{TASK_WORDS[task]}_{signal}"
        results |= {f"{name}_{what}": value for what, value in summed_up(scouts).items()}
        results[f"{name}_runs"] = len(scouts)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="ranking", help="the beginnings of task names")
    parser.add_argument("--by", default=";".join(get_args(Signal)), help="by semicolons")
    parser.add_argument("--data", type=Path, default=os.environ.get("HDET_DATA"))
    parser.add_argument("--out", type=Path, default=RESULTS / "scouts.json")
    options = parser.parse_args()
    kept = read_result(options.out)
    known: dict[str, Any] = kept.get("scouts", {})
    runs = json.loads((RESULTS / "settle.json").read_text())["runs"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, entry in ENTRIES.items():
        # What is fine-tuned must be trained first.
        if name.startswith("fine-tuning") or not name.startswith(tuple(options.only.split(";"))):
            continue
        curve = curve_of([run for run in runs if run["job"]["task"] == name])
        task = entry.make(entry.full, options.data and Path(options.data), device)
        bench = Bench(task, entry.full, entry.half and device.type == "cuda")
        for by in get_args(Signal):
            key = f"{name}, by {by}"
            if key in known or by not in options.by.split(";"):
                continue
            known[key] = made(bench, by, curve)
            print(key, summed_up(known[key]), flush=True)
            write_result(
                options.out,
                headline=headline(known),
                settings={"starts": STARTS},
                seeds=SEEDS,
                kept=kept,
                scouts=known,
            )


if __name__ == "__main__":
    main()
