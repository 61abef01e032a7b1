"""What runs lost by their starting learning rate: regret, and the few numbers that sum it up.

Regret is (validation loss - reference) / reference, in percent. The reference of a seed is the run
with that seed at the best learning rate of the grid, which was picked on other seeds.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, permutations
from statistics import fmean, geometric_mean, median
from typing import Any, NamedTuple

from benchmarks.learning_rate.methods.registry import METHODS

HDET, DEFAULT, REFERENCE = "hdet", "hdet, no probe", "OneCycleLR"
SELECTION = 100
"""Seeds from here on pick the best of a grid, and are not reported."""
FRESH = (5, 6, 7, 8, 9)
"""Seeds of methods that were changed after runs with the other seeds were looked at. The best
learning rate is trained with them for nothing but to be their reference."""
LOST_PCT = 20.0
"""A run that ends so far behind is lost."""


class Row(NamedTuple):
    """One reported run."""

    task: str
    method: str
    start: float
    seed: int
    lr: float
    """At its highest, in units of the best."""
    regret: float
    """Of the loss, in percent; infinite if it is not finite."""
    averaged: float
    """The same for the averaged weights."""
    measures: Mapping[str, float]


def rows_of(runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Every run beside the best of its task's grid, seed by seed."""
    rows = []
    for task, own in by(runs, lambda run: run["job"]["task"]).items():
        own = full_runs(own)
        best, reference = best_of_grid(own), reference_of(own)
        for run in own:
            job, ended = run["job"], run["ended"]
            is_reference = job["method"] == REFERENCE and job["seed"] in FRESH
            if job["seed"] < SELECTION and not is_reference:
                base = reference[job["seed"]]
                rows.append(
                    Row(
                        task,
                        job["method"],
                        job["lr"] / best if METHODS[job["method"]].takes_lr else math.nan,
                        job["seed"],
                        ended["lr"] / best,
                        _regret(ended["live"]["loss"], base),
                        _regret(ended["averaged"]["loss"], base),
                        ended["live"],
                    )
                )
    return rows


def from_common_starts(rows: Sequence[Row]) -> list[Row]:
    """The rows without those of the plain schedule that are there only to be compared with.

    These are further seeds at the best learning rate, and learning rates that are not stable. Of
    the plain schedule those seeds count that have all starts of hdet.
    """
    starts: dict[str, set[float]] = defaultdict(set)
    found: dict[tuple[str, int], set[float]] = defaultdict(set)
    for row in rows:
        if row.method == HDET:
            starts[row.task].add(_place(row))
        elif row.method == REFERENCE:
            found[row.task, row.seed].add(_place(row))
    return [
        row
        for row in rows
        if row.method != REFERENCE
        or (_place(row) in starts[row.task] and starts[row.task] <= found[row.task, row.seed])
    ]


def _place(row: Row) -> float:
    return round(math.log10(row.start), 3)


def reference_of(runs: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """The loss of every seed at the best learning rate of the grid."""
    best = best_of_grid(runs)
    return {
        run["job"]["seed"]: run["ended"]["live"]["loss"]
        for run in runs
        if run["job"]["method"] == REFERENCE and math.isclose(run["job"]["lr"], best)
    }


def curve_of(runs: Iterable[Mapping[str, Any]], method: str = REFERENCE) -> dict[float, float]:
    """The mean loss of every learning rate of a grid, on the seeds that pick the best."""
    losses = defaultdict(list)
    for run in runs:
        if run["job"]["method"] == method and run["job"]["seed"] >= SELECTION:
            loss = run["ended"]["live"]["loss"]
            losses[run["job"]["lr"]].append(math.inf if loss is None else loss)
    return {lr: fmean(values) for lr, values in sorted(losses.items())}


def loss_at(curve: Mapping[float, float], lr: float) -> float:
    """The loss at a learning rate, between those of a grid; beyond its ends that of the end."""
    if lr <= min(curve):
        return curve[min(curve)]
    for (low, below), (high, above) in pairwise(sorted(curve.items())):
        if lr <= high:
            share = math.log(lr / low) / math.log(high / low)
            return below + share * (above - below)
    return curve[max(curve)]


def best_of_grid(runs: Iterable[Mapping[str, Any]]) -> float:
    curve = curve_of(runs)
    return min(curve, key=curve.__getitem__)


def _regret(loss: float | None, reference: float) -> float:
    known = loss is not None and math.isfinite(loss)
    return 100 * (loss - reference) / reference if known and loss is not None else math.inf


def by(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    parts = defaultdict(list)
    for item in items:
        parts[key(item)].append(item)
    return dict(parts)


# Numbers --------------------------------------------------------------------------------------


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def is_lost(row: Row) -> bool:
    return row.regret > LOST_PCT


class Luck(NamedTuple):
    """How far runs of the best learning rate lie apart, which differ in nothing but their seed."""

    most: float
    """Of nine in ten pairs, in %."""
    worst: float


def luck_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Luck]:
    """For every task: what the best learning rate itself loses, against itself."""
    found = {}
    for task, own in by(runs, lambda run: run["job"]["task"]).items():
        losses = reference_of(full_runs(own)).values()
        apart = [_regret(one, other) for one, other in permutations(losses, 2)]
        if apart:
            found[task] = Luck(quantile(apart, 0.9), max(apart))
    return found


def small_grids(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """What the steps of one run buy as a sweep: the regret of the best of several short runs.

    The best of them at the end, by the reported loss: an upper bound for every choice.
    """
    found = {}
    for task, own in by(runs, lambda run: run["job"]["task"]).items():
        full = max(run["job"]["steps"] for run in own)
        short = [run for run in own if run["job"]["steps"] < full]
        if short:
            reference = reference_of(full_runs(own))
            found[task] = [
                min(_regret(run["ended"]["live"]["loss"], reference[seed]) for run in part)
                for seed, part in by(short, lambda run: run["job"]["seed"]).items()
            ]
    return found


class Default(NamedTuple):
    """One learning rate for all tasks, as chosen on the others."""

    lr: float
    regret: float


def defaults(runs: Sequence[Mapping[str, Any]], optimizer: str) -> dict[str, Default]:
    """For every task with an optimizer: the mean of the best learning rates of the others."""
    tasks = by(runs, lambda run: run["job"]["task"])
    alike = {task: own for task, own in tasks.items() if optimizer in optimizer_of(task)}
    curves = {task: curve_of(full_runs(own)) for task, own in alike.items()}
    best = {task: min(curve, key=curve.__getitem__) for task, curve in curves.items()}
    found = {}
    for task, curve in curves.items():
        others = [lr for other, lr in best.items() if other != task]
        if others:
            lr = geometric_mean(others)
            found[task] = Default(lr, _regret(loss_at(curve, lr), curve[best[task]]))
    return found


def optimizer_of(task: str) -> str:
    return "SGD" if task.endswith("SGD") else "AdamW"


def full_runs(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those with all the steps of their task."""
    full = max(run["job"]["steps"] for run in runs)
    return [run for run in runs if run["job"]["steps"] == full]


def medians_of(rows: Sequence[Row], method: str) -> dict[str, float]:
    """The median regret of a method on each task it was tried on."""
    own = by((row for row in rows if row.method == method), lambda row: row.task)
    return {task: median(row.regret for row in part) for task, part in own.items()}


INFINITE_PCT = 1000.0
"""What an infinite regret counts for in a mean."""


def pairs_by_seed(rows: Sequence[Row], peer: str, task: str) -> list[tuple[float, float]]:
    """The mean regrets of hdet and of a peer, one pair for each seed that both have.

    Runs of one seed share their samples, and a peer that takes no learning rate has one run where
    hdet has nine: so all starts of a seed are one observation. hdet counts from those starts that
    the peer has, or from all if it takes none.
    """
    mine, theirs = (
        by((row for row in rows if (row.method, row.task) == (name, task)), lambda row: row.seed)
        for name in (HDET, peer)
    )
    pairs = []
    for seed in sorted(mine.keys() & theirs.keys()):
        starts = [row.start for row in theirs[seed] if not math.isnan(row.start)]
        own = [
            row
            for row in mine[seed]
            if not starts or any(math.isclose(row.start, start, rel_tol=1e-3) for start in starts)
        ]
        if own:
            pairs.append((_mean_regret(own), _mean_regret(theirs[seed])))
    return pairs


def _mean_regret(rows: Sequence[Row]) -> float:
    return fmean(min(row.regret, INFINITE_PCT) for row in rows)


def sign_test(wins: int, pairs: int) -> float:
    """The chance of at least this number of wins, if both are equally good."""
    return sum(math.comb(pairs, k) for k in range(wins, pairs + 1)) / 2**pairs


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# Words ----------------------------------------------------------------------------------------


def percent(value: float) -> str:
    if math.isnan(value):
        return ""
    if value > 999:
        return "lost"
    return f"{value:.0f}" if abs(value) >= 20 else f"{value:.1f}"


def table_of(rows: Sequence[Row], value: Callable[[Row], float] = lambda row: row.regret) -> str:
    """A method a line: what it loses on each task, in the middle and at its worst."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    lines = [
        "| | " + " | ".join(tasks) + " |",
        "|---|" + "---|" * len(tasks),
    ]
    for method in METHODS:
        cells = []
        for task in tasks:
            found = [value(row) for row in rows if (row.method, row.task) == (method, task)]
            cells.append(f"{percent(median(found))} ({percent(max(found))})" if found else "")
        if any(cells):
            bold = "**" if method == HDET else ""
            lines.append(f"| {bold}{method}{bold} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
