"""Does it pay to move the learning rate where the schedule is wrong? -> wrong.json

    python -m benchmarks.learning_rate.wrong [--quick] [--data FOLDER] [--grid FILE] [--out FILE]

The language model and the feed ranker, without a scout, from the best learning rate of the grid, in
four situations: as it should be; under a OneCycleLR that is twice as long as the run; under one
that ends half-way, and holds what is left; with another text from the middle of the run on. Beside
fixed learning rates from a quarter to four times that: `hdet.Tracker` over a spread with shared
gradients, by a probe on the present data, as the library has it, and the paper's preset. Regret is
against the best of the fixed ones in the same situation, on the same seeds.
"""

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.learning_rate.methods.bench import Bench, Ended, Run
from benchmarks.learning_rate.methods.populations import Population
from benchmarks.learning_rate.methods.single import plain
from benchmarks.learning_rate.methods.steered import Paper, Tracked
from benchmarks.learning_rate.names import TASK_WORDS
from benchmarks.learning_rate.regret import best_of_grid, by
from benchmarks.result_file import RESULTS, write_result
from benchmarks.zoo import tasks
from benchmarks.zoo.entries import ENTRIES
from benchmarks.zoo.tasks import Batches, Plan, Task

SEEDS, FACTORS = (5, 6, 7), (0.25, 0.5, 1.0, 2.0, 4.0)
SCHEDULES = {"right": "one cycle", "too long": "too long", "too short": "too short"}
SHIFT = "another text"
TASKS = ("language, AdamW", "ranking, feed")


class Shifted:
    """Two tasks with one model: the second one's data from the middle of the run on."""

    def __init__(self, first: Task, second: Task, steps: int) -> None:
        self._both, self._half, self._made = (first, second), steps // 2, 0
        self.task = second._replace(batches=self._batches, probe=self._probe)

    def _batches(self, seeds: Sequence[int]) -> Batches:
        both, self._made = [task.batches(seeds) for task in self._both], 0

        def batch(steps: Tensor) -> tuple[Tensor, ...]:
            self._made += 1
            return both[self._made > self._half](steps)

        return batch

    def _probe(self, model: Any) -> Tensor:
        """Batches of the present data that are held out."""
        return self._both[self._made > self._half].probe(model)


def situations(
    name: str, plan: Plan, folder: Path | None, device: torch.device
) -> dict[str, tuple[str, Task]]:
    task = ENTRIES[name].make(plan, folder, device)
    found = {about: (schedule, task) for about, schedule in SCHEDULES.items()}
    if name.startswith("language"):
        other = tasks.language(plan, folder, device, text="text")
        found[SHIFT] = "one cycle", Shifted(task, other, plan.steps).task
    return found


def under(kind: type[Population], schedule: str) -> type[Population]:
    return type(kind.__name__, (kind,), {"schedule": schedule})


def measured(bench: Bench, schedule: str, best: float) -> dict[str, Any]:
    """Mean regrets over seeds, in %."""
    fixed = [Run(best * factor, seed) for factor in FACTORS for seed in SEEDS]
    losses = [loss_of(end) for end in plain(bench, fixed, schedule=schedule)]
    grid = dict(zip(FACTORS, zip(*[iter(losses)] * len(SEEDS), strict=True), strict=True))
    least = min(grid, key=lambda factor: fmean(grid[factor]))
    found: dict[str, Any] = {f"fixed, x {f:g}": mean_regret(grid[f], grid[least]) for f in FACTORS}
    for name, kind in {"tracker": Tracked, "paper": Paper}.items():
        runs = [Run(best, seed) for seed in SEEDS]
        ended = under(kind, schedule)(bench, runs).train()
        found[name] = mean_regret([loss_of(end) for end in ended], grid[least])
        found[f"{name} moved"] = [end.notes["moved"] for end in ended]
    return found


def loss_of(end: Ended) -> float:
    loss = end.live["loss"]
    return loss if loss is not None and math.isfinite(loss) else math.inf


def mean_regret(losses: Sequence[float], reference: Sequence[float]) -> float:
    return 100 * fmean(own / its - 1 for own, its in zip(losses, reference, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models, two CPU cores")
    parser.add_argument("--data", type=Path, default=os.environ.get("HDET_DATA"))
    parser.add_argument("--grid", type=Path, default=RESULTS / "settle.json")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs = by(json.loads(options.grid.read_text())["runs"], lambda run: run["job"]["task"])
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = torch.device("cuda" if on_gpu else "cpu")
    found: dict[str, Any] = {}
    for name in TASKS:
        entry = ENTRIES[name]
        plan = entry.quick if options.quick else entry.full
        best = best_of_grid(runs[name])
        folder = options.data and Path(options.data)
        for about, (schedule, task) in situations(name, plan, folder, device).items():
            bench = Bench(task, plan, entry.half and on_gpu, on_gpu)
            found[f"{name}: {about}"] = results = measured(bench, schedule, best)
            shown = {key: round(value, 2) for key, value in results.items() if "moved" not in key}
            print(f"{name}: {about}: {shown}", flush=True)
    write_result(
        options.out or RESULTS / "wrong.json",
        headline=headline(found),
        settings={"factors": FACTORS},
        seeds=SEEDS,
        situations=found,
    )


def headline(found: dict[str, Any]) -> dict[str, float]:
    results = {}
    for key, table in found.items():
        task, about = key.split(": ", 1)
        for name in ("fixed, x 1", "tracker", "paper"):
            results[f"{TASK_WORDS[task]}_{about}_{name}_pct"] = table[name]
    return results


if __name__ == "__main__":
    main()
