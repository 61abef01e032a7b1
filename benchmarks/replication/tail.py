"""Does an ensemble in the tail of a run beat plain training? -> replication_tail.json

    HDET_DATA=FOLDER python -m benchmarks.replication.tail [--quick | --smoke] [--only TASK]
        [--device cuda]

Recipes that part replicas late, and average them, against plain training at the best learning rate
of a grid, running means of its weights, and primal averaging with one worker. All see the same
samples as often. Tasks are of two kinds: runs of a few epochs, and runs of many epochs with large
batches, where averages are known to gain. Recipes were chosen on seeds 200 to 207, and these rules
were set before the first run of the seeds below:

- A recipe stops in a kind after four seeds if it is worse than the best control, by two standard
  errors, on two of its tasks.
- It wins a task if it is better than the best control of this task by two standard errors.
- It wins a kind if it wins two of its three tasks on ten seeds, and again on ten fresh seeds.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.learning_rate.methods.bench import Bench
from benchmarks.replication.jobs import Row
from benchmarks.replication.script import (
    Book,
    Job,
    Tables,
    change,
    finite,
    mean_and_error,
    parse,
    path_of,
)
from benchmarks.replication.tail_tasks import KINDS, TASKS, bench_of, calibration, relative
from benchmarks.replication.tail_training import (
    REACHES,
    RECIPES,
    WHOLE,
    Tail,
    Trunk,
    best_member,
    greedy_soup,
    whole,
)
from benchmarks.result_file import RESULTS, word_of

PATH = RESULTS / "replication_tail.json"
GRID_SEEDS = (100, 101)
FIRST, REST, FRESH = range(4), range(4, 10), range(10, 20)
APART = range(300, 308)
"""Of the runs whose differences are measured: eight plain runs are the ensemble to compare with."""
HALF_GRIDS = {"plain": 2}
HALF_GRID = 1
"""Factors of two to both sides of the middle; a grid is widened while its end is the best."""
GPA = [name for name in WHOLE if name.startswith("GPA")]
CONTROLS = ("plain", *REACHES, "GPA")
COOL, ANYTIME = "R2 divergent cool-down", "R5 anytime average"
PICKS = {f"{COOL}, greedy soup": greedy_soup, f"{COOL}, best member": best_member}
TRIED = (*RECIPES, *PICKS, ANYTIME)
ERRORS, TASKS_TO_WIN = 2.0, 2


class Sizes(NamedTuple):
    """Which seeds a size has."""

    grid: Sequence[int]
    first: Sequence[int]
    rest: Sequence[int]
    fresh: Sequence[int]
    apart: Sequence[int]


SIZES = {
    "full": Sizes(GRID_SEEDS, FIRST, REST, FRESH, APART),
    "quick": Sizes(GRID_SEEDS[:1], FIRST, (), (), APART[:4]),
    "smoke": Sizes(GRID_SEEDS[:1], FIRST[:2], (), (), APART[:2]),
}


# Runs -------------------------------------------------------------------------------------------


def run(job: Job, *, folder: str | None, device: str = "cpu") -> Row:
    """Train the runs of one job, all of them at once."""
    torch.set_num_threads(1)
    kinds: dict[str, Callable[..., Row]] = {
        "grid": grid,
        "tails": tails,
        "differences": differences,
    }
    return kinds[job["kind"]](job, bench_of(job["task"], job["size"], folder, device))


def grid(job: Job, bench: Bench) -> Row:
    """The mean loss of a whole run at every learning rate of a grid."""
    seeds = SIZES[job["size"]].grid
    lrs = [bench.plan.middle * 2.0**place for place in range(job["low"], job["high"] + 1)]
    pairs = [(lr, seed) for lr in lrs for seed in seeds]
    found = whole(bench, job["method"], [lr for lr, _ in pairs], [seed for _, seed in pairs])
    losses = [finite(one["loss"]) for one in found]
    means = [fmean(losses[at : at + len(seeds)]) for at in range(0, len(losses), len(seeds))]
    return {"curve": dict(zip([f"{lr:.6g}" for lr in lrs], means, strict=True))}


def tails(job: Job, bench: Bench) -> Row:
    """The losses of all recipes and controls, seed by seed, and the shares of right answers."""
    found = {name: list(measures) for name, measures in candidates(job, bench)}
    right = {
        name: [one.get("accuracy", one.get("auc")) for one in measures]
        for name, measures in found.items()
    }
    return {
        "losses": {n: [one["loss"] for one in measures] for n, measures in found.items()},
        "right": {n: shares for n, shares in right.items() if shares[0] is not None},
    }


def candidates(job: Job, bench: Bench) -> Iterator[tuple[str, list[dict[str, float]]]]:
    """What the weights of each control, and of each recipe that is tried, are worth."""
    seeds, tried = numbers_of(job["seeds"]), job["tried"]
    trunk = Trunk(bench, seeds, job["lrs"]["plain"])
    for name, weights in {"plain": trunk.fleet.weights.clone(), **trunk.means}.items():
        yield name, trunk.measures(weights)
    for name, method in (("GPA", job["gpa"]), (ANYTIME, ANYTIME)):
        if name == "GPA" or name in tried:
            yield name, whole(bench, method, [job["lrs"][method]] * len(seeds), seeds)
    for name, recipe in RECIPES.items():
        picks = {p: choose for p, choose in PICKS.items() if p.startswith(name) and p in tried}
        if name in tried or picks:
            members = Tail(trunk, recipe, TASKS[job["task"]].regularise).train()
            yield name, trunk.measures(members.mean(1))
            for pick, choose in picks.items():
                yield pick, trunk.measures(choose(trunk, members))


def differences(job: Job, bench: Bench) -> Row:
    """How members differ, how sure they are, and how flat the place of their mean is."""
    trunk = Trunk(bench, numbers_of(job["seeds"]), job["lrs"]["plain"])
    flat = {"plain": trunk.fleet.weights.clone(), "EMA 5 %": trunk.means["EMA 5 %"]}
    found: Row = {}
    truth = bench.task.truth
    if truth is not None:
        found["runs of their own"] = calibration(answers_of(trunk, flat["plain"]), truth)
    for name in ("soup", COOL):
        members = Tail(trunk, RECIPES[name], TASKS[job["task"]].regularise).train()
        flat |= {name: members.mean(1), f"{name}, a member": members[:, 0].clone()}
        if truth is not None:
            each = [answers_of(trunk, members[:, r]) for r in range(members.shape[1])]
            rows = [calibration(one, truth) for one in torch.stack(each).transpose(0, 1)]
            found[name] = {key: fmean(row[key] for row in rows) for key in rows[0]}
    sharpness = {name: fmean(trunk.sharpness(weights)) for name, weights in flat.items()}
    return {"members": found, "sharpness": sharpness}


def answers_of(trunk: Trunk, weights: Tensor) -> Tensor:
    trunk.fleet.buffers = trunk.refreshed(weights)
    return trunk.fleet.evaluate(trunk.bench.task.judge, weights=weights)


def numbers_of(seeds: str) -> list[int]:
    """The seeds that a job names: "4-9"."""
    first, last = map(int, seeds.split("-"))
    return list(range(first, last + 1))


# What runs come to -------------------------------------------------------------------------------


def losses_of(
    rows: Sequence[Row], task: str, seeds: Sequence[int], what: str = "losses"
) -> dict[str, list[float]]:
    """The losses of every candidate that all of these seeds have, in their order."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["kind"] != "tails" or row["task"] != task:
            continue
        for name, losses in row[what].items():
            of_seed = dict(zip(numbers_of(row["seeds"]), losses, strict=True))
            found.setdefault(name, {}).update(of_seed)
    return {
        name: [finite(by_seed[seed]) for seed in seeds]
        for name, by_seed in found.items()
        if seeds and not set(seeds) - by_seed.keys()
    }


def best_control(losses: Mapping[str, Sequence[float]]) -> str:
    return min(CONTROLS, key=lambda name: fmean(losses[name]))


def gain(rows: Sequence[Row], task: str, name: str, seeds: Sequence[int]) -> tuple[float, float]:
    """How much lower the loss is than the best control's, in percent, and the standard error."""
    losses = losses_of(rows, task, seeds)
    if name not in losses:
        return math.nan, math.nan
    control = losses[best_control(losses)]
    each = [relative(own, other) for own, other in zip(losses[name], control, strict=True)]
    if not all(map(math.isfinite, each)):
        return -math.inf, math.nan
    return mean_and_error(each)


def more_right(rows: Sequence[Row], task: str, name: str, seeds: Sequence[int]) -> float:
    """How many more answers are right than plain training's, in percent points; or the AUC."""
    right = losses_of(rows, task, seeds, "right")
    if name not in right:
        return math.nan
    return 100 * (fmean(right[name]) - fmean(right["plain"]))


def won(rows: Sequence[Row], name: str, seeds: Sequence[int], tasks: Sequence[str]) -> int:
    """The number of tasks on which a recipe is better by two standard errors."""
    pairs = [gain(rows, task, name, seeds) for task in tasks]
    return sum(mean > ERRORS * error for mean, error in pairs)


def stopped(rows: Sequence[Row], name: str, seeds: Sequence[int], tasks: Sequence[str]) -> bool:
    """Whether a recipe is worse by two standard errors, or not finite, on two tasks."""
    pairs = [gain(rows, task, name, seeds) for task in tasks]
    return sum(mean < -ERRORS * (error or 0) or mean == -math.inf for mean, error in pairs) >= 2


def best_lrs(rows: Sequence[Row], task: str) -> dict[str, float]:
    """Method of whole runs -> the best learning rate of its grid."""
    curves: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["kind"] == "grid" and row["task"] == task:
            curves.setdefault(row["method"], {}).update(row["curve"])
    return {
        method: float(min(curve, key=lambda lr: finite(curve[lr])))
        for method, curve in curves.items()
    }


def best_gpa(rows: Sequence[Row], task: str) -> str:
    """The slower or the faster mean, whichever ends lower on the seeds of the grid."""
    lowest = {
        name: min(
            finite(loss)
            for row in rows
            if row["kind"] == "grid" and row["task"] == task and row["method"] == name
            for loss in row["curve"].values()
        )
        for name in GPA
    }
    return min(lowest, key=lowest.__getitem__)


# The order of the work ------------------------------------------------------------------------


class Work:
    """What is run for the tasks of one kind, one thing after the other."""

    def __init__(self, book: Book, size: str, tasks: Sequence[str]) -> None:
        self.book, self.size, self.tasks, self.seeds = book, size, tasks, SIZES[size]

    def all(self) -> None:
        """Grids, the first seeds, the others of what is left, fresh ones of what wins."""
        seeds, tasks = self.seeds, self.tasks
        self.grids()
        self.tails(seeds.first, TRIED)
        rows = self.book.rows
        left = [name for name in TRIED if not stopped(rows, name, seeds.first, tasks)]
        self.tails(seeds.rest, left)
        rows, both = self.book.rows, [*seeds.first, *seeds.rest]
        self.tails(
            seeds.fresh, [name for name in left if won(rows, name, both, tasks) >= TASKS_TO_WIN]
        )
        self.book.make([self._job("differences", task, seeds.apart) for task in tasks])

    def grids(self) -> None:
        """A grid for each method of whole runs, widened while its end is the best."""
        jobs = [
            self._grid(task, method, -half, half)
            for task in self.tasks
            for method in WHOLE
            for half in [HALF_GRIDS.get(method, HALF_GRID)]
        ]
        self.book.make(jobs)
        while self.size == "full":
            wider = [w for job in jobs if (w := self._wider(job)) is not None]
            if not wider:
                return
            self.book.make(wider)
            jobs = [self._joined(job) for job in jobs]

    def _grid(self, task: str, method: str, low: int, high: int) -> dict[str, Any]:
        own = {"task": task, "size": self.size, "kind": "grid", "method": method}
        return {**own, "low": low, "high": high}

    def _wider(self, job: Job) -> dict[str, Any] | None:
        best = best_lrs(self.book.rows, job["task"])[job["method"]]
        middle = float(getattr(TASKS[job["task"]], self.size).middle)
        place = round(math.log2(best / middle))
        if job["low"] < place < job["high"]:
            return None
        low, high = (
            (job["low"] - 2, job["low"] - 1)
            if place == job["low"]
            else (job["high"] + 1, job["high"] + 2)
        )
        return self._grid(job["task"], job["method"], low, high)

    def _joined(self, job: Job) -> dict[str, Any]:
        own = [
            row
            for row in self.book.rows
            if row["kind"] == "grid"
            and (row["task"], row["method"]) == (job["task"], job["method"])
        ]
        low, high = min(row["low"] for row in own), max(row["high"] for row in own)
        return {**job, "low": low, "high": high}

    def tails(self, seeds: Sequence[int], tried: Sequence[str]) -> None:
        """All recipes that are still tried, on these seeds."""
        if seeds and tried:
            jobs = [self._job("tails", task, seeds, tried=list(tried)) for task in self.tasks]
            self.book.make(jobs)

    def _job(self, kind: str, task: str, seeds: Sequence[int], **more: Any) -> Job:
        return {
            "task": task,
            "size": self.size,
            "kind": kind,
            "seeds": f"{min(seeds)}-{max(seeds)}",
            "lrs": best_lrs(self.book.rows, task),
            "gpa": best_gpa(self.book.rows, task),
            **more,
        }


# The file ---------------------------------------------------------------------------------------


def seeds_of(rows: Sequence[Row], tasks: Sequence[str], name: str, sizes: Sizes) -> list[int]:
    """The seeds of the first comparison that a candidate has on all tasks; none without."""
    for seeds in ([*sizes.first, *sizes.rest], list(sizes.first)):
        if all(name in losses_of(rows, task, seeds) for task in tasks):
            return seeds
    return []


def table(
    rows: Sequence[Row], tasks: Sequence[str], sizes: Sizes, *, fresh: bool = False
) -> list[list[str]]:
    """For each task the best control, then how much better each recipe is than that."""
    head = ["Recipe", "Seeds", *tasks, "More right answers, points"]
    body = []
    for name in (*CONTROLS, *TRIED):
        seeds = list(sizes.fresh) if fresh else seeds_of(rows, tasks, name, sizes)
        cells = [change(*gain(rows, task, name, seeds)) for task in tasks]
        if not all(cells):
            continue
        right = [more_right(rows, task, name, seeds) for task in tasks]
        points = ", ".join(f"{value:+.2f}" for value in right if not math.isnan(value))
        body.append([name, f"{len(seeds)}", *cells, points])
    if body:
        seeds = list(sizes.fresh) if fresh else seeds_of(rows, tasks, "plain", sizes)
        best = [best_control(losses_of(rows, task, seeds)) for task in tasks]
        body.insert(0, ["best control", "", *best, ""])
    return [head, *body]


def difference_table(rows: Sequence[Row]) -> list[list[str]]:
    """How members differ, and how flat the places are."""
    head = ["Task", "Weights", "Loss of mean answer", "Of a member", "Calibration error"]
    head += ["Members disagree", "Sharpness"]
    body = []
    for row in rows:
        if row["kind"] != "differences":
            continue
        members, sharp = row["members"], row["sharpness"]
        for name in dict.fromkeys([*members, *sharp]):
            own = members.get(name, {})
            keys = ("ensemble_loss", "member_loss", "ensemble_ece", "disagreement")
            cells = [f"{own[key]:.4f}" if key in own else "" for key in keys]
            last = f"{sharp[name]:.4f}" if name in sharp else ""
            body.append([row["task"], name, *cells, last])
    return [head, *body]


def known_kinds(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The kinds of tasks that have runs, and their tasks."""
    done = {row["task"] for row in rows if row["kind"] == "tails"}
    kinds = {kind: [task for task in tasks if task in done] for kind, tasks in KINDS.items()}
    return {kind: tasks for kind, tasks in kinds.items() if tasks}


def tables(rows: Sequence[Row], size: str) -> Tables:
    sizes, made = SIZES[size], {}
    for kind, tasks in known_kinds(rows).items():
        made[word_of(kind)] = table(rows, tasks, sizes)
        again = table(rows, tasks, sizes, fresh=True)
        if len(again) > 1:
            made[word_of(f"{kind}, fresh seeds")] = again
    return {**made, "differences": difference_table(rows)}


def headline(rows: Sequence[Row], size: str) -> Row:
    """Of each recipe against the best control: over all tasks, then for each kind of tasks."""
    kinds, found = known_kinds(rows), {}
    for name in TRIED:
        parts = {kind: summary(rows, name, tasks, SIZES[size]) for kind, tasks in kinds.items()}
        parts = {kind: part for kind, part in parts.items() if part}
        if len(parts) == len(kinds) and parts:
            found[name] = joined(list(parts.values())) | parts
    return found


def summary(rows: Sequence[Row], name: str, tasks: Sequence[str], sizes: Sizes) -> Row:
    """The mean gain of a recipe over tasks; nothing if it was not tried."""
    seeds = seeds_of(rows, tasks, name, sizes)
    if not seeds:
        return {}
    pairs = [gain(rows, task, name, seeds) for task in tasks]
    found = {
        "mean_gain_pct": fmean(mean for mean, _ in pairs),
        "standard_error": math.hypot(*(error for _, error in pairs)) / len(pairs),
        "tasks_won": won(rows, name, seeds, tasks),
        "tasks": len(pairs),
        "seeds": len(seeds),
    }
    fresh = list(sizes.fresh)
    if fresh and all(name in losses_of(rows, task, fresh) for task in tasks):
        found["tasks_won_again"] = won(rows, name, fresh, tasks)
    return found


def joined(parts: Sequence[Row]) -> Row:
    """The same over the tasks of all kinds."""
    tasks = sum(part["tasks"] for part in parts)
    errors = [part["standard_error"] * part["tasks"] for part in parts]
    return {
        "mean_gain_pct": sum(part["mean_gain_pct"] * part["tasks"] for part in parts) / tasks,
        "standard_error": math.hypot(*errors) / tasks,
        "tasks_won": sum(part["tasks_won"] for part in parts),
        "tasks": tasks,
    }


def main(arguments: Sequence[str] | None = None) -> Path:
    question = (__doc__ or "").splitlines()[0]
    options = parse(question, arguments, list(TASKS), devices=("cpu", "cuda"))
    size = options.size

    def parts(rows: Sequence[Row]) -> dict[str, Any]:
        tried = [row["seeds"] for row in rows if row["kind"] == "tails"]
        return {
            "headline": headline(rows, size),
            "settings": {"size": size, "rules": {"errors": ERRORS, "tasks": TASKS_TO_WIN}},
            "seeds": sorted({seed for seeds in tried for seed in numbers_of(seeds)}),
            "tables": tables(rows, size),
        }

    book = Book(path_of(PATH, options), partial(run, device=options.device), options, parts)
    for tasks in KINDS.values():
        if chosen := [task for task in tasks if task in options.only]:
            Work(book, size, chosen).all()
    book.summarise()
    return book.path


if __name__ == "__main__":
    main()
