"""Does the result of settle.json hold at the size of GPT-2 small, on one seed? -> confirm.json

    python -m benchmarks.learning_rate.confirm [--quick] [--data FOLDER] [--out FILE]

Three fixed learning rates under OneCycleLR, and hdet from the middle one and from a hundredth of
it, on bytes of `mdn_en_us`: 12 layers, 768 wide, 85 million parameters. One seed: this shows that
nothing breaks at a size that is too large for sweeps. It is no statistics.
"""

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning_rate.methods.bench import Bench, Ended, Run
from benchmarks.learning_rate.methods.scout import with_scout
from benchmarks.learning_rate.methods.single import plain
from benchmarks.result_file import RESULTS, write_result
from benchmarks.zoo import tasks
from benchmarks.zoo.entries import TINY
from benchmarks.zoo.models import Size
from benchmarks.zoo.tasks import Plan

FULL = Plan("AdamW", 1000, 16, 1e-3, Size(256, 256, 12, 12, 768))
QUICK = Plan("AdamW", 500, 16, 8e-3, TINY)
FIXED = (1 / 3, 1.0, 3.0)
"""In units of the middle learning rate."""
STARTS = (0.01, 1.0)
SEED = 0


def rows_of(bench: Bench) -> list[dict[str, Any]]:
    middle = bench.plan.middle
    rows = []
    for method, train, starts in (("OneCycleLR", plain, FIXED), ("hdet", with_scout, STARTS)):
        begin = time.perf_counter()
        ended: list[Ended] = train(bench, [Run(middle * start, SEED) for start in starts])
        took = time.perf_counter() - begin
        print(f"{method}: {len(ended)} runs in {took:.0f} s", flush=True)
        for start, end in zip(starts, ended, strict=True):
            rows.append({"method": method, "start": start, **end._asdict()})
    return rows


def headline(rows: list[dict[str, Any]], middle: float) -> dict[str, Any]:
    best = min(row["live"]["loss"] for row in rows if row["method"] != "hdet")
    own = {row["start"]: row["live"]["loss"] for row in rows if row["method"] == "hdet"}
    return {
        "best_fixed_loss": best,
        **{
            f"regret_from_1e{-round(math.log10(start * middle))}_pct": 100 * (loss / best - 1)
            for start, loss in own.items()
        },
        "worst_regret_pct": max(100 * (loss / best - 1) for loss in own.values()),
        "num_seeds": 1,
        "num_fixed_lrs": sum(row["method"] != "hdet" for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, a short run")
    parser.add_argument("--data", type=Path, default=os.environ.get("HDET_DATA"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.backends.cuda.matmul.allow_tf32 = True
    plan = QUICK if options.quick else FULL
    device = torch.device("cuda" if on_gpu else "cpu")
    task = tasks.language(plan, options.data and Path(options.data), device)
    rows = rows_of(Bench(task, plan, half=on_gpu, capture=on_gpu))
    for row in rows:
        print(f"{row['method']:<12} x {row['start']:<6.3g} peak {row['lr']:.2e}  {row['live']}")
    numbers = headline(rows, plan.middle)
    out = options.out or RESULTS / ("confirm.quick.json" if options.quick else "confirm.json")
    write_result(out, headline=numbers, settings={"plan": list(plan)}, seeds=[SEED], rows=rows)
    for name, value in numbers.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
