"""How does regret depend on the length of a run and on its replicas? -> curves.json

    python -m benchmarks.learning_rate.curves [--data FOLDER] [--out FILE] [--minutes 8]

The small language model of the settling benchmark in runs of 1000, 4000 and 16000 steps with eight
replicas, and in runs of 1000 steps with 2, 4 and 16: hdet with a probe from a hundredth of the best
learning rate, from it and from a hundred times it. The samples of a step are the same for all.
What is known is written as it comes; the same command goes on from there.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.learning_rate.methods.bench import Bench, Ended, Run
from benchmarks.learning_rate.methods.scout import with_scout
from benchmarks.learning_rate.methods.single import plain
from benchmarks.result_file import RESULTS, write_result
from benchmarks.zoo.entries import ENTRIES

CASES = [(1000, 8), (1000, 2), (1000, 4), (1000, 16), (4000, 8), (16000, 8)]
STARTS, SEEDS, SELECTION = (0.01, 1.0, 100.0), (0, 1, 2), (100, 101)
GRID = [2.0**place for place in range(-4, 4)]


def best_lr(bench: Bench) -> float:
    lrs = [bench.plan.middle * factor for factor in GRID]
    ended = plain(bench, [Run(lr, seed) for lr in lrs for seed in SELECTION])
    num = len(SELECTION)
    losses = [
        fmean(end.live["loss"] or math.inf for end in ended[at : at + num])
        for at in range(0, len(ended), num)
    ]
    return lrs[min(range(len(lrs)), key=losses.__getitem__)]


def regrets(bench: Bench, best: float) -> dict[str, list[float]]:
    reference = [float(end.live["loss"] or math.nan) for end in _plain_at(bench, best)]
    runs = [Run(best * start, seed) for start in STARTS for seed in SEEDS]
    losses = [end.live["loss"] or math.inf for end in with_scout(bench, runs)]
    num = len(SEEDS)
    return {
        f"x{start:g}": [
            100 * (loss / base - 1)
            for loss, base in zip(losses[at * num : (at + 1) * num], reference, strict=True)
        ]
        for at, start in enumerate(STARTS)
    }


def _plain_at(bench: Bench, lr: float) -> list[Ended]:
    return plain(bench, [Run(lr, seed) for seed in SEEDS])


def headline(cases: Mapping[str, Any]) -> dict[str, float]:
    """The median and the worst regret of every case."""
    results = {}
    for case in cases.values():
        name = f"{case['steps']}_steps_{case['replicas']}_replicas"
        regrets = [regret for part in case["regret_pct"].values() for regret in part]
        results[f"regret_pct_{name}"] = median(regrets)
        results[f"worst_pct_{name}"] = max(regrets)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HDET_DATA"))
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--out", type=Path, default=RESULTS / "curves.json")
    options = parser.parse_args()
    known: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    cases = known.get("cases", {})
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    entry = ENTRIES["language, AdamW"]
    lrs = {case["steps"]: case["best"] for case in cases.values()}
    begun = time.perf_counter()
    for steps, num in CASES:
        name = f"{steps} steps, {num} replicas"
        if name in cases or time.perf_counter() - begun > 60 * options.minutes:
            continue
        plan = entry.quick._replace(steps=steps)
        task = entry.make(plan, options.data and Path(options.data), device)
        cycle = max(steps // 30, 1)
        bench = Bench(task, plan, entry.half and on_gpu, on_gpu, num, cycle)
        best = lrs.setdefault(steps, 0.0) or best_lr(bench)
        lrs[steps] = best
        found = regrets(bench, best)
        cases[name] = {"steps": steps, "replicas": num, "best": best, "regret_pct": found}
        cases[name]["device"] = torch.cuda.get_device_name() if on_gpu else "cpu"
        middle = median(value for values in found.values() for value in values)
        cases[name]["median_regret_pct"] = middle
        print(f"{name}: {middle:.2f} % at {best:g}  {found}", flush=True)
        settings = {"starts": STARTS, "grid": GRID, "selection_seeds": SELECTION}
        write_result(
            options.out,
            headline=headline(cases),
            settings=settings,
            seeds=SEEDS,
            kept=known,
            cases=cases,
        )


if __name__ == "__main__":
    main()
