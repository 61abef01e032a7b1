"""What do the steps of a scout cost, and should a run keep its weights? -> rewind.json

    python -m benchmarks.learning_rate.rewind [--quick] [--only language] [--data FOLDER]
        [--out FILE]

The reference is a run at the best learning rate of the grid, with all its steps. The benchmark
compares it with two kinds of runs on the same seeds:

- Runs at the same learning rate that lack the first 3 % of their steps. Their schedules make up for
  the missing steps in different ways, or not at all.
- Runs with a scout. They restore the first weights, or continue from the weights of replicas of the
  scout.

It reads the best learning rates from results/settle.json.
"""

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hdet
from benchmarks.learning_rate.fleet import Fleet
from benchmarks.learning_rate.methods.bench import Bench, N, Run
from benchmarks.learning_rate.methods.rows import train_rows
from benchmarks.learning_rate.methods.schedules import RowPlan, places
from benchmarks.learning_rate.methods.search import search_lrs, start_of
from benchmarks.learning_rate.names import TASK_WORDS
from benchmarks.learning_rate.regret import best_of_grid, by
from benchmarks.learning_rate.rules import Rule
from benchmarks.result_file import RESULTS, write_result
from benchmarks.zoo.entries import ENTRIES
from hdet.lr_search.plan import Search

SEEDS, STARTS = range(6), (1.0, 0.1)
SETTINGS = {"starts": STARTS, "fewer_steps_pct": 100 * hdet.Scout().share}
ROWS = 48
"""Runs that are trained together, at most."""


def late(steps: int, begin: int, until: int) -> tuple[int, ...]:
    """Return the schedule's step for each step of a run that starts at step `begin`.

    The schedule starts at 0, runs faster, and reaches the step of the run at step `until`.
    """
    pace = until / (until - begin)
    return tuple(
        round((step - begin) * pace) if step < until else step for step in range(begin, steps)
    )


CATCHING_UP: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "over the whole run": lambda steps, begin: tuple(places(steps, begin)),
    "in a third of it": lambda steps, begin: late(steps, begin, steps // 3),
    "in a tenth of it": lambda steps, begin: late(steps, begin, steps // 10),
    "not at all": lambda steps, begin: tuple(range(begin, steps)),
}


class LastRound(NamedTuple):
    """The replicas after the last round of a scout."""

    tensors: list[Tensor]
    """Weights, optimizer states and buffers, each of shape [N, ...]."""

    def mean(self, chosen: Sequence[int]) -> list[Tensor]:
        """Return the mean of some replicas. Integers are those of the first of them."""
        return [
            t[chosen].double().mean(0).to(t) if t.is_floating_point() else t[chosen[0]]
            for t in self.tensors
        ]


def tensors_of(fleet: Fleet, rule: Rule) -> list[Tensor]:
    """Return weights, optimizer states and buffers, with one row for each run or replica."""
    return [fleet.weights, *rule.states(), *fleet.buffers.values()]


def gained(search: Search) -> dict[int, float]:
    """Return the gain of each replica whose score after the last round is below the start."""
    seen = {point.factor: point.score for point in search.observations.points}
    assert search.start_score is not None
    gains = {
        replica: search.start_score - score
        for replica, factor in enumerate(search.last_factors)
        if (score := seen[factor]) is not None
    }
    return {replica: gain for replica, gain in gains.items() if gain > 0}


def chosen_by(search: Search, gains: dict[int, float]) -> list[int]:
    """Return the replica with the highest learning rate that does not exceed the scout's choice.

    That is a mean learning rate of the run, like those of the rounds. If all exceed it, return the
    highest.
    """
    below = [r for r in gains if search.last_factors[r] <= search.estimate().factor]
    return [max(below or gains)]


GOING_ON: dict[str, Callable[[Search, dict[int, float]], list[int]]] = {
    "back to the weights of before": lambda search, gains: [],
    "from the best replica": lambda search, gains: [max(gains, key=gains.__getitem__)],
    "from the mean of all that gained": lambda search, gains: list(gains),
    "from the one that was chosen": chosen_by,
}


def compared(bench: Bench, best: float) -> dict[str, list[float]]:
    """Return the final losses of each variant, one for each seed.

    The first variant is the reference. Variants with a scout have each seed once for each start.
    """
    groups, steps = len(bench.task.groups), bench.plan.steps
    spent = int(hdet.Scout().share * steps)
    whole = [RowPlan(seed, (best,) * groups) for seed in SEEDS]
    plans = {"all steps": whole}
    for how, played in CATCHING_UP.items():
        cut = played(steps, spent)
        shorter = [plan._replace(begin=spent, places=cut) for plan in whole]
        plans[f"3 % fewer, made up {how}"] = shorter
    losses = {name: trained(bench, part) for name, part in plans.items()}
    last_rounds: dict[Run, LastRound] = {}

    def look(runs: Sequence[Run], fleet: Fleet, rule: Rule) -> None:
        for at, run in enumerate(runs):
            own = slice(at * N, (at + 1) * N)
            tensors = [tensor[own].clone() for tensor in tensors_of(fleet, rule)]
            last_rounds[run] = LastRound(tensors)

    runs = [Run(best * start, seed) for start in STARTS for seed in SEEDS]
    searches = search_lrs(bench, runs, by="probe", scout=hdet.Scout(), look=look)
    after_search = []
    for run, search in zip(runs, searches, strict=True):
        lr = run.lr * start_of(bench, search).factor
        after_search.append(RowPlan(run.seed, (lr,) * groups, search.used))
    for how, choose in GOING_ON.items():
        starts = [
            last_rounds[run].mean(kept) if gains and (kept := choose(search, gains)) else None
            for run, search in zip(runs, searches, strict=True)
            for gains in [gained(search)]
        ]
        losses[f"scout, {how}"] = trained(bench, after_search, starts)
        print(f"  {how}", flush=True)
    return losses


def trained(
    bench: Bench, plans: Sequence[RowPlan], starts: Sequence[list[Tensor] | None] | None = None
) -> list[float]:
    """Train runs to their end and return their final losses, NaN for a run that is lost.

    Args:
        bench: The task and the length of a run.
        plans: The seed, the learning rates and the schedule of each run.
        starts: The tensors that each run starts from. None is a fresh model.
    """
    found: list[float] = []
    for first in range(0, len(plans), ROWS):
        given = [None] * len(plans) if starts is None else starts[first : first + ROWS]

        def start(fleet: Fleet, rule: Rule, given: Sequence[list[Tensor] | None] = given) -> None:
            for row, tensors in enumerate(given):
                for own, outcome in zip(tensors_of(fleet, rule), tensors or [], strict=False):
                    own[row] = outcome

        ended = train_rows(bench, plans[first : first + ROWS], start=start)
        found += [float(end.live["loss"] or "nan") for end in ended]
    return found


def summed_up(losses: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return by how many percent each variant ends above the reference of the same seed."""
    reference = losses["all steps"]
    outcome = {}
    for name, each in losses.items():
        regrets = [
            100 * (loss / reference[at % len(reference)] - 1) for at, loss in enumerate(each)
        ]
        error = stdev(regrets) / len(regrets) ** 0.5
        outcome[name] = {"mean_pct": fmean(regrets), "error_pct": error, "worst_pct": max(regrets)}
    return outcome


SHORT = {
    "3 % fewer, made up over the whole run": "fewer_steps",
    "scout, back to the weights of before": "scout",
    "scout, from the best replica": "from_best_replica",
}
"""Short names of variants in the headline. Other variants have their own names there."""


def headline(tasks: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Return the mean regret of each variant on each task, in percent."""
    return {
        f"{TASK_WORDS[task]}_{SHORT.get(how, how)}_pct": numbers["mean_pct"]
        for task, table in tasks.items()
        for how, numbers in table.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--only", default="", help="the beginnings of task names, by semicolons")
    parser.add_argument("--data", type=Path, default=os.environ.get("HDET_DATA"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs = by(json.loads((RESULTS / "settle.json").read_text())["runs"], lambda r: r["job"]["task"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    out = options.out or RESULTS / ("rewind.quick.json" if options.quick else "rewind.json")
    outcome: dict[str, Any] = {"headline": {}, "tasks": {}, "losses": {}}
    for name, entry in ENTRIES.items():
        if not name.startswith(tuple(options.only.split(";"))):
            continue
        plan, start = entry.quick if options.quick else entry.full, {}
        if name.startswith("fine-tuning"):
            start = {"start": torch.load(out.parent / "pretrained.pt", map_location=device)}
        task = entry.make(plan, options.data and Path(options.data), device, **start)
        bench = Bench(task, plan, entry.half and on_gpu, on_gpu)
        print(name, flush=True)
        losses = compared(bench, plan.middle if options.quick else best_of_grid(runs[name]))
        outcome["losses"][name], outcome["tasks"][name] = losses, summed_up(losses)
        outcome["headline"] = headline(outcome["tasks"])
        write_result(out, **outcome, settings=SETTINGS, seeds=SEEDS)
        for how, numbers in outcome["tasks"][name].items():
            print(
                f"  {how:<50}" + "  ".join(f"{key} {value:.2f}" for key, value in numbers.items())
            )


if __name__ == "__main__":
    main()
