"""What does one learning rate per group gain, and can a scout measure it? -> groups.json

    python -m benchmarks.learning_rate.groups [--quick] [--only "ranking, feed"] [--data FOLDER]
        [--out FILE]

The tasks are the two rankers, with the four parameter groups of the paper. All runs start from the
best learning rate of the grid. The benchmark measures three things:

- The truth: how whole runs end if the learning rate of one group is four times higher or lower.
- The gain of a round: how the same changes move the score after one round of a scout.
- The divergence threshold: where scores explode if the learning rate of one group alone rises.

A scout that finds a learning rate for each group would have to predict the first from the others.
"""

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch

from benchmarks.learning_rate.methods.bench import Bench, N
from benchmarks.learning_rate.methods.rows import train_rows
from benchmarks.learning_rate.methods.schedules import RowPlan, shape
from benchmarks.learning_rate.names import TASK_WORDS
from benchmarks.learning_rate.regret import best_of_grid, by
from benchmarks.result_file import RESULTS, write_result
from benchmarks.zoo.entries import ENTRIES
from hdet.lr_search.evidence import divergence_of
from hdet.lr_search.observations import Observation

FACTOR = 4.0
TRUTH_SEEDS, ROUND_SEEDS, BLAST_SEEDS = range(3), range(12), range(3)
LOW = {"gains": 1 / 8, "explosions": 1 / 16}
"""Shares of the best learning rate: for rounds with the batch of one replica, and for the groups
that do not change."""
LADDER = [4.0**rung for rung in range(-3, 9)]
GAIN_STEPS, BLAST_STEPS = 30, 12


class Change(NamedTuple):
    """The factor of one group's learning rate, or of all groups if `group` is None."""

    group: int | None
    factor: float

    def lrs(self, lr: float, groups: int) -> tuple[float, ...]:
        return tuple(
            lr * (self.factor if self.group in (None, group) else 1.0) for group in range(groups)
        )


def truth(bench: Bench, best: float, changes: Sequence[Change]) -> dict[Change, list[float]]:
    """Return how much higher the loss of whole runs ends, in percent of the runs without a change.

    The first of the changes must be no change. Each list has one entry for each seed.
    """
    groups = len(bench.task.groups)
    plans = [RowPlan(s, change.lrs(best, groups)) for change in changes for s in TRUTH_SEEDS]
    losses = [float(end.live["loss"] or math.nan) for end in train_rows(bench, plans)]
    num = len(TRUTH_SEEDS)
    base = losses[:num]
    return {
        change: [100 * (loss / base[s] - 1) for s, loss in enumerate(losses[at : at + num])]
        for at, change in zip(range(0, len(losses), num), changes, strict=True)
    }


def scores(
    bench: Bench, seeds: Sequence[int], lrs: Sequence[tuple[float, ...]], num_steps: int
) -> tuple[list[float], list[list[float]]]:
    """Return the scores before the first step and after a round, for each seed.

    A score after the round is that of the tail average: the mean of the weights over the last half
    of the steps. Each seed has one such score for each entry of `lrs`.
    """
    rows = [seed for seed in seeds for _ in lrs]
    fleet = bench.fleet(rows, capture=False)
    rule, batch = bench.rule(fleet), bench.task.batches(rows)
    results = torch.tensor([each for _ in seeds for each in lrs]).to(fleet.weights)
    first = shape("one cycle", bench.plan.steps, rule.cycles_momentum).momenta[0]
    momenta, mean = torch.full_like(results[:, :1], first), torch.zeros_like(fleet.weights)
    start = fleet.evaluate(bench.task.probe, training=True).double().mean(1)
    steps, tail = torch.zeros(len(rows), dtype=torch.long, device=fleet.device), num_steps // 2
    for step in range(num_steps):
        fleet.losses(*(part[:, : max(part.shape[1] // N, 1)] for part in batch(steps + step)))
        rule.step(results, momenta)
        if step >= num_steps - tail:
            mean += fleet.weights / tail
    ended = fleet.evaluate(bench.task.probe, weights=mean, training=True).double().mean(1)
    return start[:: len(lrs)].tolist(), ended.view(len(seeds), -1).tolist()


def gains(bench: Bench, best: float, changes: Sequence[Change]) -> dict[Change, list[float]]:
    """Return how much higher the score after a round is than without a change.

    The unit is the gain of a round without a change. Each list has one entry for each seed.
    """
    groups = len(bench.task.groups)
    lrs = [change.lrs(LOW["gains"] * best, groups) for change in changes]
    start, ended = scores(bench, ROUND_SEEDS, lrs, GAIN_STEPS)
    gain = fmean(before - row[0] for before, row in zip(start, ended, strict=True))
    return {c: [(row[at] - row[0]) / gain for row in ended] for at, c in enumerate(changes)}


def explosions(bench: Bench, best: float, group: int | None) -> list[float | None]:
    """Return the divergence threshold of one group, in units of the best learning rate."""
    groups = len(bench.task.groups)
    low = LOW["explosions"]
    lrs = [Change(group, factor / low).lrs(low * best, groups) for factor in LADDER]
    start, ended = scores(bench, BLAST_SEEDS, lrs, BLAST_STEPS)
    found = []
    for before, row in zip(start, ended, strict=True):
        points = [
            Observation(factor, score if math.isfinite(score) else None)
            for factor, score in zip(LADDER, row, strict=True)
        ]
        found.append(divergence_of(points, before))
    return found


def measured(bench: Bench, best: float) -> dict[str, Any]:
    names = bench.task.groups
    changes = [Change(None, 1.0)]
    changes += [Change(group, f) for group in range(len(names)) for f in (1 / FACTOR, FACTOR)]
    results: dict[str, Any] = {"best": best, "groups": list(names), "changes": {}, "explosions": {}}
    ends, rounds = truth(bench, best, changes), gains(bench, best, changes)
    for change in changes[1:]:
        assert change.group is not None
        results["changes"][f"{names[change.group]} x {change.factor:g}"] = {
            "truth_pct": fmean(ends[change]),
            "truth_pct_of_each_seed": ends[change],
            "round": fmean(rounds[change]),
            "round_error": stdev(rounds[change]) / len(rounds[change]) ** 0.5,
        }
    for group in (None, *range(len(names))):
        name = "all" if group is None else names[group]
        results["explosions"][name] = explosions(bench, best, group)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--only", default="ranking", help="the beginning of task names")
    parser.add_argument("--data", type=Path, default=os.environ.get("HDET_DATA"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs = by(json.loads((RESULTS / "settle.json").read_text())["runs"], lambda r: r["job"]["task"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    out = options.out or RESULTS / ("groups.quick.json" if options.quick else "groups.json")
    results: dict[str, Any] = {"headline": {}, "tasks": {}}
    for name, entry in ENTRIES.items():
        if not name.startswith(options.only):
            continue
        plan = entry.quick if options.quick else entry.full
        task = entry.make(plan, options.data and Path(options.data), device)
        print(name, flush=True)
        found = measured(Bench(task, plan, capture=on_gpu), best_of_grid(runs[name]))
        results["tasks"][name] = found
        least = min(found["changes"].items(), key=lambda pair: pair[1]["truth_pct"])
        results["headline"][f"{TASK_WORDS[name]}_best_change"] = least[0]
        results["headline"][f"{TASK_WORDS[name]}_best_change_pct"] = least[1]["truth_pct"]
        write_result(
            out,
            **results,
            settings={"factor": FACTOR, "round_seeds": ROUND_SEEDS},
            seeds=TRUTH_SEEDS,
        )
        for change, numbers in found["changes"].items():
            print(
                f"  {change:<24} ends {numbers['truth_pct']:+.2f} %   after a round "
                f"{numbers['round']:+.3f} ± {numbers['round_error']:.3f}"
            )
        print(f"  explodes at {found['explosions']}", flush=True)


if __name__ == "__main__":
    main()
