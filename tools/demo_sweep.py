"""Makes src/hdet/cli/demo_sweep.json: the sweep that the demo draws as a reference.

    python -m tools.demo_sweep [--jobs 2] [--commit HASH]

Each task of the demo is trained with plain OneCycleLR from a grid of learning rates, with some
seeds. No hdet is involved. It takes about five minutes of one core.
"""

import argparse
import json
import math
import platform
import subprocess
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.optim.lr_scheduler import OneCycleLR

from hdet.cli.demo_data import TASKS, Batches, Task

OUT = Path(__file__).parents[1] / "src/hdet/cli/demo_sweep.json"
SEEDS = (0, 1, 2)
CENTRES = {"conv-net": 0.05, "transformer": 0.016}
STEPS_TO_EACH_SIDE, STEP = 4, 10**0.5

Row = dict[str, Any]


def grid(task: Task) -> list[float]:
    """Nine learning rates, two for each decade."""
    places = range(-STEPS_TO_EACH_SIDE, STEPS_TO_EACH_SIDE + 1)
    return [float(f"{CENTRES[task.name] * STEP**place:.2g}") for place in places]


def train(task_name: str, lr: float, seed: int) -> Row:
    """One plain run."""
    torch.set_num_threads(1)
    (task,) = (one for one in TASKS if one.name == task_name)
    device = torch.device("cpu")
    model, data = task.network(seed, device), Batches(task, device, seed)
    optimizer = task.optimizer(model, lr)
    schedule = OneCycleLR(optimizer, lr, total_steps=task.steps, cycle_momentum=False)
    for step in range(task.steps):
        optimizer.zero_grad()
        task.loss(model, *data.batch(step)).backward()
        optimizer.step()
        schedule.step()
    measures = data.evaluate(model)
    shown = {k: float(f"{v:.5g}") if math.isfinite(v) else None for k, v in measures.items()}
    return {"task": task_name, "lr": lr, "seed": seed, **shown}


def best(rows: list[Row]) -> Row:
    """The learning rate with the lowest mean loss over the seeds, and its range over them."""
    by_lr: dict[float, list[Row]] = {}
    for row in rows:
        by_lr.setdefault(row["lr"], []).append(row)
    finite = {lr: of for lr, of in by_lr.items() if all(row["loss"] is not None for row in of)}
    lr, chosen = min(finite.items(), key=lambda pair: fmean(row["loss"] for row in pair[1]))
    ranges: dict[str, list[float]] = {
        name: [min(row[name] for row in chosen), max(row[name] for row in chosen)]
        for name in ("loss", "accuracy")
        if name in chosen[0]
    }
    return {"lr": lr, "runs": len(by_lr), "seeds": len(chosen), **ranges}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--commit", default="")
    chosen = options.parse_args()
    head = ["git", "rev-parse", "--short=10", "HEAD"]
    commit = chosen.commit or subprocess.check_output(head, text=True).strip()
    with ProcessPoolExecutor(chosen.jobs) as pool:
        jobs = [
            pool.submit(train, task.name, lr, seed)
            for task in reversed(TASKS)
            for lr in grid(task)
            for seed in SEEDS
        ]
        rows = [job.result() for job in jobs]
    rows.sort(key=lambda row: (row["task"], row["lr"], row["seed"]))
    result = {
        "made_by": "python -m tools.demo_sweep",
        "commit": commit,
        "date": date.today().isoformat(),
        "device": "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seeds": list(SEEDS),
        "schedule": "OneCycleLR",
        "steps": {task.name: task.steps for task in TASKS},
        "best": {t.name: best([row for row in rows if row["task"] == t.name]) for t in TASKS},
    }
    text = json.dumps(result, indent=1)[:-2] + ',\n "rows": [\n  '
    OUT.write_text(text + ",\n  ".join(json.dumps(row) for row in rows) + "\n ]\n}\n")
    print(json.dumps(result["best"], indent=1))


if __name__ == "__main__":
    main()
