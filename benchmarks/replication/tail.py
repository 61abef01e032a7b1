"""Does an ensemble in the tail of a run beat plain training? -> replication_tail.json

    HDET_DATA=FOLDER python -m benchmarks.replication.tail [--quick | --smoke] [--only TASK]

Five recipes that part replicas late, and average them, against plain training at the best learning
rate of a grid, running means of its weights, and primal averaging with one worker. All see the same
samples as often. These rules were set before the first run:

- A recipe stops after four seeds if it is worse than the best control, by two standard errors, on
  two tasks.
- It wins a task if it is better than the best control of this task by two standard errors.
- It wins if it wins two of three tasks on ten seeds, and again on ten fresh seeds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.replication.jobs import Row, is_row_of
from benchmarks.replication.script import (
    Job,
    Tables,
    change,
    finite,
    mean_and_error,
    parse,
    path_of,
    show,
    worker,
)
from benchmarks.replication.tail_tasks import TASKS, bench_of, calibration, relative
from benchmarks.replication.tail_training import (
    RECIPES,
    WHOLE,
    Tail,
    Trunk,
    best_member,
    greedy_soup,
    whole,
)
from benchmarks.result_file import RESULTS, plain_json, read_result, write_result

PATH = RESULTS / "replication_tail.json"
GRID_SEEDS = (100, 101, 102)
FIRST, REST, FRESH = range(4), range(4, 10), range(10, 20)
APART = range(300, 308)
"""Of the runs whose differences are measured: eight plain runs are the ensemble to compare with."""
HALF_GRID = 3
"""Factors of two to both sides of the middle; a grid is widened while its end is the best."""
GPA = [name for name in WHOLE if name.startswith("GPA")]
CONTROLS = ("plain", "EMA 1 %", "EMA 5 %", "GPA")
COOL = "R2 divergent cool-down"
PICKS = {f"{COOL}, greedy soup": greedy_soup, f"{COOL}, best member": best_member}
TRIED = (*RECIPES, *PICKS, "R5 anytime average")
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


def run(job: Job, *, folder: str | None) -> Row:
    """Train the runs of one job, all of them at once."""
    torch.set_num_threads(1)
    kinds: dict[str, Callable[[Job, str | None], Row]] = {
        "grid": grid,
        "tails": tails,
        "differences": differences,
    }
    return kinds[job["kind"]](job, folder)


def grid(job: Job, folder: str | None) -> Row:
    """The mean loss of a whole run at every learning rate of a grid."""
    bench = bench_of(job["task"], job["size"], folder)
    seeds = SIZES[job["size"]].grid
    lrs = [bench.plan.middle * 2.0**place for place in range(job["low"], job["high"] + 1)]
    pairs = [(lr, seed) for lr in lrs for seed in seeds]
    found = whole(bench, job["method"], [lr for lr, _ in pairs], [seed for _, seed in pairs])
    losses = [finite(one["loss"]) for one in found]
    means = [fmean(losses[at : at + len(seeds)]) for at in range(0, len(losses), len(seeds))]
    return {"curve": dict(zip([f"{lr:.6g}" for lr in lrs], means, strict=True))}


def tails(job: Job, folder: str | None) -> Row:
    """The losses of all recipes and controls, seed by seed."""
    bench, seeds = bench_of(job["task"], job["size"], folder), numbers_of(job["seeds"])
    trunk = Trunk(bench, seeds, job["lrs"]["plain"])
    losses = {"plain": trunk.losses(trunk.fleet.weights)}
    losses |= {name: trunk.losses(mean.weights) for name, mean in trunk.means.items()}
    for name, method in (("GPA", job["gpa"]), ("R5 anytime average",) * 2):
        if name == "GPA" or name in job["tried"]:
            lrs = [job["lrs"][method]] * len(seeds)
            losses[name] = [one["loss"] for one in whole(bench, method, lrs, seeds)]
    for name, recipe in RECIPES.items():
        picks = {pick: choose for pick, choose in PICKS.items() if pick.startswith(name)}
        wanted = {pick: choose for pick, choose in picks.items() if pick in job["tried"]}
        if name not in job["tried"] and not wanted:
            continue
        members = Tail(trunk, recipe, TASKS[job["task"]].regularise).train()
        losses[name] = trunk.losses(members.mean(1))
        losses |= {pick: trunk.losses(choose(trunk, members)) for pick, choose in wanted.items()}
    return {"losses": losses}


def differences(job: Job, folder: str | None) -> Row:
    """How members differ, how sure they are, and how flat the place of their mean is."""
    bench, seeds = bench_of(job["task"], job["size"], folder), numbers_of(job["seeds"])
    trunk = Trunk(bench, seeds, job["lrs"]["plain"])
    flat = {"plain": trunk.fleet.weights, "EMA 5 %": trunk.means["EMA 5 %"].weights}
    found: Row = {}
    truth = bench.task.truth
    if truth is not None:
        found["runs of their own"] = calibration(answers_of(trunk, trunk.fleet.weights), truth)
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


def losses_of(rows: Sequence[Row], task: str, seeds: Sequence[int]) -> dict[str, list[float]]:
    """The losses of every candidate that all of these seeds have, in their order."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["kind"] != "tails" or row["task"] != task:
            continue
        for name, losses in row["losses"].items():
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
    """All rows of the file, and how more of them are made."""

    def __init__(self, arguments: Sequence[str] | None) -> None:
        question = (__doc__ or "").splitlines()[0]
        options = parse(question, arguments, list(TASKS))
        self.size, self.tasks = options.size, options.only
        self.path = path_of(PATH, options)
        self._kept = read_result(self.path)
        self.rows: list[Row] = list(self._kept.get("rows", []))
        self._run = worker(run, options)
        self.seeds = SIZES[self.size]

    def make(self, jobs: Sequence[Job]) -> None:
        """Run what is missing; all rows are kept as they end."""
        others = [row for row in self.rows if not any(is_row_of(job, row) for job in jobs)]

        def keep(now: Sequence[Row]) -> None:
            self.rows = plain_json([*others, *now])  # as the file has them
            self._write()

        made = self._run(jobs, known=self.rows, keep=keep)
        self.rows = [*others, *made]

    def grids(self) -> None:
        """A grid for each method of whole runs, widened while its end is the best."""
        jobs = [self._grid(t, m, -HALF_GRID, HALF_GRID) for t in self.tasks for m in WHOLE]
        self.make(jobs)
        while self.size == "full":
            wider = [w for job in jobs if (w := self._wider(job)) is not None]
            if not wider:
                return
            self.make(wider)
            jobs = [self._joined(job) for job in jobs]

    def _grid(self, task: str, method: str, low: int, high: int) -> dict[str, Any]:
        own = {"task": task, "size": self.size, "kind": "grid", "method": method}
        return {**own, "low": low, "high": high}

    def _wider(self, job: Job) -> dict[str, Any] | None:
        best = best_lrs(self.rows, job["task"])[job["method"]]
        place = round(math.log2(best / bench_middle(job["task"], self.size)))
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
            for row in self.rows
            if row["kind"] == "grid"
            and (row["task"], row["method"]) == (job["task"], job["method"])
        ]
        low, high = min(row["low"] for row in own), max(row["high"] for row in own)
        return {**job, "low": low, "high": high}

    def tails(self, seeds: Sequence[int], tried: Sequence[str]) -> None:
        """All recipes that are still tried, on these seeds."""
        if seeds and tried:
            self.make([self._job("tails", task, seeds, tried=list(tried)) for task in self.tasks])

    def differences(self) -> None:
        self.make([self._job("differences", task, self.seeds.apart) for task in self.tasks])

    def _job(self, kind: str, task: str, seeds: Sequence[int], **more: Any) -> Job:
        return {
            "task": task,
            "size": self.size,
            "kind": kind,
            "seeds": f"{min(seeds)}-{max(seeds)}",
            "lrs": best_lrs(self.rows, task),
            "gpa": best_gpa(self.rows, task),
            **more,
        }

    def known_seeds(self) -> list[int]:
        """The seeds of the first comparison that are done, for all tasks."""
        done = [*self.seeds.first, *self.seeds.rest]
        whole = all(losses_of(self.rows, task, done) for task in self.tasks)
        return done if whole else list(self.seeds.first)

    def tables(self) -> Tables:
        done = [row["task"] for row in self.rows if row["kind"] == "tails"]
        tasks = list(dict.fromkeys(done))
        return {
            "tails": table(self.rows, tasks, self.known_seeds()),
            "tails_on_fresh_seeds": table(self.rows, tasks, self.seeds.fresh),
            "differences": difference_table(self.rows),
        }

    def headline(self) -> Row:
        """Of each recipe, against the best control of each task."""
        found: Row = {}
        for name in TRIED:
            # A recipe that was stopped has the seeds until then.
            seeds = next(
                (
                    some
                    for some in (self.known_seeds(), list(self.seeds.first))
                    if all(name in losses_of(self.rows, task, some) for task in self.tasks)
                ),
                [],
            )
            pairs = [gain(self.rows, task, name, seeds) for task in self.tasks]
            if seeds:
                found[name] = {
                    "mean_gain_pct": fmean(mean for mean, _ in pairs),
                    "standard_error": math.hypot(*(error for _, error in pairs)) / len(pairs),
                    "tasks_won": won(self.rows, name, seeds, self.tasks),
                    "tasks": len(pairs),
                    "seeds": len(seeds),
                }
        return found

    def _write(self) -> None:
        write_result(
            self.path,
            headline=self.headline(),
            settings={"size": self.size, "rules": {"errors": ERRORS, "tasks": TASKS_TO_WIN}},
            seeds=sorted(
                {seed for r in self.rows if r["kind"] == "tails" for seed in numbers_of(r["seeds"])}
            ),
            kept=self._kept or None,
            tables=self.tables(),
            rows=self.rows,
        )


def bench_middle(task: str, size: str) -> float:
    return float(getattr(TASKS[task], size).middle)


def table(rows: Sequence[Row], tasks: Sequence[str], seeds: Sequence[int]) -> list[list[str]]:
    """For each task the best control, then how much better each recipe is."""
    head, body = ["Recipe", *tasks], []
    known = [losses_of(rows, task, seeds) for task in tasks]
    if not tasks or not all(known):
        return [head]
    body.append(["best control", *(best_control(losses) for losses in known)])
    for name in (*CONTROLS, *TRIED):
        cells = [change(*gain(rows, task, name, seeds)) for task in tasks]
        if any(cells):
            body.append([name, *cells])
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


def main(arguments: Sequence[str] | None = None) -> Path:
    work = Work(arguments)
    seeds, tasks = work.seeds, work.tasks
    work.grids()
    work.tails(seeds.first, TRIED)
    left = [name for name in TRIED if not stopped(work.rows, name, seeds.first, tasks)]
    work.tails(seeds.rest, left)
    both = [*seeds.first, *seeds.rest]
    winners = [name for name in left if won(work.rows, name, both, tasks) >= TASKS_TO_WIN]
    work.tails(seeds.fresh, winners)
    work.differences()
    show(work.tables())
    return work.path


if __name__ == "__main__":
    main()
