"""What the review of the paper asked for -> replication_review.json

    HDET_DATA=FOLDER python -m benchmarks.replication.review [--quick | --smoke] [--only PART]

- networks: 10 000 images of CIFAR-10 at half size, and WikiText-2 by bytes, against OneCycle and
  cosine at the best of a grid, with equal samples and with equal time. CIFAR-100 and the training
  part of WikiText-2 are not among the data: its first part is trained on, its test part judges.
- intervals: the length of a cycle T and the number of replicas N, for a spread with shared and with
  local gradients, and for local gradients without a spread.
- factorial: alpha, T, sigma and lambda of the paper's controller, from a good learning rate and
  from one that is ten times too low.
- quadratics: noise, batch size and averaging, beside their closed forms.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks.replication import quadratics
from benchmarks.replication.jobs import Row
from benchmarks.replication.ranker import (
    NUM_REPLICAS,
    SPREAD,
    Ranking,
    Replicas,
    load,
    train_plain,
    train_replicas,
)
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
from benchmarks.result_file import RESULTS
from benchmarks.zoo.models import GPT
from benchmarks.zoo.runs import run_stacked
from benchmarks.zoo.small.catalogue import TASKS
from benchmarks.zoo.small.optimizers import adamw
from benchmarks.zoo.small.task import Schedule, SmallTask, with_steps
from benchmarks.zoo.small.texts import SIZE, byte_task
from benchmarks.zoo.small.train import train

PATH = RESULTS / "replication_review.json"
PARTS = ("networks", "intervals", "factorial", "quadratics")
SEEDS = {"full": (0, 1, 2, 3, 4), "quick": (0,), "smoke": (0,)}
GRID_SEEDS = {"full": (100, 101), "quick": (100,), "smoke": (100,)}
GRID = {"full": range(-4, 5), "quick": range(-2, 3), "smoke": range(2)}
"""Factors of two around the typical learning rate of the optimizer."""


# Networks ---------------------------------------------------------------------------------------

NETWORKS = ("images", "text")
Options = dict[str, Any]
PLAIN: dict[str, Schedule] = {"OneCycle": "onecycle", "cosine": "cosine"}
LONGER = "OneCycle, as long as hdet takes"
ALONE = "replicas alone"
"""Without anything of hdet but their own BatchNorm: each sees an eighth of a batch."""
AWAY = {"OneCycle, from a tenth": 0.1, "OneCycle, from ten times": 10.0}
WAYS: dict[str, tuple[float, Options]] = {
    ALONE: (1.0, {"scout": None, "guard": None}),
    "hdet": (1.0, {}),
    "hdet, from a tenth": (0.1, {}),
    "hdet, from ten times": (10.0, {}),
    "the paper": (1.0, {"preset": "paper", "sync_every": 20}),
    "the paper, from a tenth": (0.1, {"preset": "paper", "sync_every": 20}),
    "the paper, cycles of two steps, from a tenth": (0.1, {"preset": "paper", "sync_every": 2}),
}
"""What the learning rate is in units of the best for OneCycle, and the options of HDET."""


def network(name: str, size: str) -> SmallTask:
    """A task of this part; for the tests, one whose data is installed."""
    if size == "smoke":
        images = TASKS["conv_digits_default_init_adam"]
        text = byte_task("text", adamw(0.1), "stdlib", lambda: GPT(SIZE), "onecycle")
        return replace({"images": images, "text": text}[name], steps=8)
    text = byte_task("text", adamw(0.1), "wikitext", lambda: GPT(SIZE), "onecycle")
    task = {"images": TASKS["conv_cifar_batchnorm_adamw"], "text": text}[name]
    return task if size == "full" else replace(task, steps=150)


def run_network(job: Job, folder: str | None) -> Row:
    """One run of a grid, of a plain schedule, or with hdet."""
    task, way = network(job["task"], job["size"]), job["way"]
    begun = time.process_time()
    if way in WAYS:
        factor, options = WAYS[way]
        task, lr = replace(task, schedule="onecycle"), job["lr"] * factor
        ended = run_stacked(task, lr, job["seed"], NUM_REPLICAS, **options)
        return {"loss": ended.loss, "seconds": time.process_time() - begun}
    task = replace(task, schedule=PLAIN.get(way, "onecycle"))
    if "steps" in job:
        task = with_steps(task, job["steps"])
    found = train(task, job["lr"] * AWAY.get(way, 1.0), job["seed"])
    return {"loss": found["loss"], "seconds": time.process_time() - begun}


def grid_jobs(size: str) -> list[Job]:
    """Plain runs at all learning rates of the grids."""
    return [
        {
            "part": "grid",
            "task": name,
            "size": size,
            "way": way,
            "seed": seed,
            "lr": network(name, size).middle * 2.0**place,
        }
        for name in NETWORKS
        for way in PLAIN
        for seed in GRID_SEEDS[size]
        for place in GRID[size]
    ]


def best_lr(rows: Sequence[Row], task: str, way: str) -> float:
    """Of a grid, by the mean over its seeds."""
    own = [r for r in rows if (r["part"], r.get("task"), r.get("way")) == ("grid", task, way)]
    lrs = dict.fromkeys(row["lr"] for row in own)
    means = {lr: fmean(finite(row["loss"]) for row in own if row["lr"] == lr) for lr in lrs}
    return min(means, key=means.__getitem__)


def network_jobs(size: str, rows: Sequence[Row]) -> list[Job]:
    """Everything but the runs that are as long as those of hdet."""
    made: list[Job] = []
    for name, seed in product(NETWORKS, SEEDS[size]):
        own = {"part": "networks", "task": name, "size": size, "seed": seed}
        made += [{**own, "way": way, "lr": best_lr(rows, name, way)} for way in PLAIN]
        made += [
            {**own, "way": way, "lr": best_lr(rows, name, "OneCycle")} for way in (*AWAY, *WAYS)
        ]
    return made


def longer_jobs(size: str, rows: Sequence[Row]) -> list[Job]:
    """OneCycle with as many steps as replicas alone make in the time of hdet."""
    made: list[Job] = []
    for name in NETWORKS:
        seconds = {
            way: median(row["seconds"] for row in of(rows, "networks", task=name, way=way))
            for way in (ALONE, "hdet")
        }
        steps = round(network(name, size).steps * max(seconds["hdet"] / seconds[ALONE], 1.0))
        lr = best_lr(rows, name, "OneCycle")
        made += [
            {"part": "networks", "task": name, "size": size, "seed": seed, "way": LONGER}
            | {"lr": lr, "steps": steps}
            for seed in SEEDS[size]
        ]
    return made


# Intervals, and the controller's numbers -----------------------------------------------------

CYCLES = {"full": (5, 20, 50, 200), "quick": (5, 50), "smoke": (5,)}
REPLICAS = {"full": (2, 4, 8, 16), "quick": (2, 8), "smoke": (2,)}
FANS: dict[str, Options] = {
    "shared gradients": {"spread": SPREAD},
    "local gradients": {"spread": SPREAD, "gradients": "local"},
    "local gradients, no spread": {"spread": 0.0, "gradients": "local"},
}
LEVELS = {
    "spread": (1 / 9, 1 / 3),
    "sync_every": (4, 20),
    "temperature": (0.002, 0.1),
    "step_size": (0.1, 0.5),
}
"""alpha, T, sigma and lambda."""
STARTS = (1.0, 0.1)
RANKER = "feed"


def ranker_grid_jobs(size: str) -> list[Job]:
    return [
        {"part": "grid", "task": RANKER, "size": size, "way": "OneCycle", "seed": seed}
        | {"lr": 4e-3 * 2.0**place}
        for seed in GRID_SEEDS[size]
        for place in GRID[size]
    ]


def plain_ranker_jobs(size: str, rows: Sequence[Row]) -> list[Job]:
    lr = best_lr(rows, RANKER, "OneCycle")
    own = {"part": "intervals", "size": size, "way": "plain", "lr": lr, "num": 1, "every": 0}
    return [{**own, "seed": seed} for seed in SEEDS[size]]


def interval_jobs(size: str, rows: Sequence[Row]) -> list[Job]:
    lr = best_lr(rows, RANKER, "OneCycle")
    return plain_ranker_jobs(size, rows) + [
        {"part": "intervals", "size": size, "way": way, "lr": lr}
        | {"num": num, "every": every, "seed": seed}
        for seed in SEEDS[size]
        for way in FANS
        for num in REPLICAS[size]
        for every in CYCLES[size]
    ]


def factorial_jobs(size: str, rows: Sequence[Row]) -> list[Job]:
    lr = best_lr(rows, RANKER, "OneCycle")
    levels = [dict(zip(LEVELS, chosen, strict=True)) for chosen in product(*LEVELS.values())]
    if size == "smoke":
        levels = levels[:: len(levels) - 1]
    return [
        {"part": "factorial", "size": size, "lr": lr, "start": start, "seed": seed, **level}
        for seed in SEEDS[size]
        for start in STARTS
        for level in levels
    ]


def ranking(job: Job, folder: str | None) -> Ranking:
    return load({"task": RANKER, "size": job["size"]}, folder)


def run_plain_ranker(job: Job, folder: str | None) -> Row:
    found = train_plain(ranking(job, folder), job["lr"], job["seed"], None)
    return {"loss": found["validation_loss"]}


def run_interval(job: Job, folder: str | None) -> Row:
    """A fixed spread, or none, and averages after every so many steps."""
    if job["way"] == "plain":
        return run_plain_ranker(job, folder)
    task = ranking(job, folder)

    def schedule(replicas: Replicas, optimizer: Any) -> hdet.HDET:
        base = OneCycleLR(optimizer, max_lr=job["lr"], total_steps=task.steps)
        return hdet.HDET(
            base,
            scout=None,
            guard=None,
            controller=None,
            sync_every=min(job["every"], task.steps),
            seed=job["seed"],
            **FANS[job["way"]],
            **replicas,
        )

    found = train_replicas(task, schedule, job["lr"], job["seed"], None, num_replicas=job["num"])
    return {"loss": found.row["validation_loss"]}


def run_factorial(job: Job, folder: str | None) -> Row:
    """The paper's controller with other numbers."""
    task, lr = ranking(job, folder), job["lr"] * job["start"]

    def schedule(replicas: Replicas, optimizer: Any) -> hdet.HDET:
        numbers = {name: job[name] for name in LEVELS}
        return hdet.OneCycleHDET(
            optimizer, max_lr=lr, total_steps=task.steps, seed=job["seed"], **numbers, **replicas
        )

    return {"loss": train_replicas(task, schedule, lr, job["seed"], None).row["validation_loss"]}


def quadratic_jobs(size: str) -> list[Job]:
    return [
        {"part": "quadratics", "what": what, "value": value, "seed": seed}
        for what, (_, values) in quadratics.QUESTIONS.items()
        for value in values
        for seed in SEEDS[size]
    ]


def run(job: Job, *, folder: str | None) -> Row:
    """Make one row."""
    torch.set_num_threads(1)
    if job["part"] == "quadratics":
        return quadratics.run(job["what"], job["value"], job["seed"])._asdict()
    if job["part"] == "grid":
        plain = run_plain_ranker if job["task"] == RANKER else run_network
        return plain(job, folder)
    parts: dict[str, Callable[[Job, str | None], Row]] = {
        "networks": run_network,
        "intervals": run_interval,
        "factorial": run_factorial,
    }
    return parts[job["part"]](job, folder)


# What runs come to ------------------------------------------------------------------------------


def of(rows: Sequence[Row], part: str, **wanted: Any) -> list[Row]:
    """The rows of a part that have these values."""
    return [
        row
        for row in rows
        if row["part"] == part and all(row.get(name) == value for name, value in wanted.items())
    ]


def above(ours: Sequence[Row], theirs: Sequence[Row]) -> tuple[float, float]:
    """How far losses are above others in percent, seed by seed: mean and standard error."""
    others = {row["seed"]: finite(row["loss"]) for row in theirs}
    pairs = [(finite(row["loss"]), others[row["seed"]]) for row in ours if row["seed"] in others]
    found = [100 * (own / other - 1) for own, other in pairs]
    if not found or not all(map(math.isfinite, found)):
        return math.nan if not found else math.inf, math.nan
    return mean_and_error(found)


def network_table(rows: Sequence[Row]) -> list[list[str]]:
    """For each way, how far it ends above OneCycle at the best of its grid."""
    head = ["Way", *NETWORKS]
    ways = [*PLAIN, LONGER, *AWAY, *WAYS]
    body = [
        [
            way,
            *(
                change(
                    *above(
                        of(rows, "networks", task=task, way=way),
                        of(rows, "networks", task=task, way="OneCycle"),
                    )
                )
                for task in NETWORKS
            ),
        ]
        for way in ways
    ]
    return [head, *(line for line in body if any(line[1:]))]


def interval_table(rows: Sequence[Row]) -> list[list[str]]:
    """For each way, N and T, how far it ends above plain training."""
    plain = of(rows, "intervals", way="plain")
    every = sorted({row["every"] for row in rows if row["part"] == "intervals"} - {0})
    num = sorted({row["num"] for row in rows if row["part"] == "intervals"} - {1})
    head = ["Way", "Replicas", *(f"T = {steps}" for steps in every)]
    body = []
    for way, count in product(FANS, num):
        own = partial(of, rows, "intervals", way=way, num=count)
        body.append([way, f"{count}", *(change(*above(own(every=t), plain)) for t in every)])
    return [head, *body]


def pooled_intervals(rows: Sequence[Row]) -> Row:
    """How far each way ends above plain training over all N and T; the error is that over seeds."""
    plain = of(rows, "intervals", way="plain")
    found: Row = {}
    for way in FANS:
        by_seed = [above(of(rows, "intervals", way=way, seed=row["seed"]), [row]) for row in plain]
        means = [mean for mean, _ in by_seed if not math.isnan(mean)]
        if means:
            found[f"intervals {way} pct"], found[f"intervals {way} error"] = mean_and_error(means)
    return found


def factorial_effects(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """What the second level of each number adds to the loss in percent, by start."""
    found: dict[str, dict[str, float]] = {}
    for start in STARTS:
        own = of(rows, "factorial", start=start)
        for name, (low, high) in LEVELS.items():
            ends = [
                [finite(row["loss"]) for row in own if math.isclose(row[name], level, rel_tol=1e-5)]
                for level in (low, high)
            ]
            if all(ends):
                effect = 100 * (fmean(ends[1]) / fmean(ends[0]) - 1)
                found.setdefault(name, {})[f"from {start:g}"] = effect
    return found


def factorial_table(rows: Sequence[Row]) -> list[list[str]]:
    """Main effects, and how far the mean of all is above plain training."""
    head = ["Number", "Levels", *(f"from {start:g} x the best" for start in STARTS)]
    effects, plain = factorial_effects(rows), of(rows, "intervals", way="plain")
    body = [
        [name, " and ".join(f"{v:.3g}" for v in LEVELS[name]), *(f"{e:+.2f}" for e in by.values())]
        for name, by in effects.items()
    ]
    means = [
        change(above(of(rows, "factorial", start=start), plain)[0], math.nan) for start in STARTS
    ]
    return [head, *body, ["all, above plain", "", *means]]


def quadratic_table(rows: Sequence[Row]) -> list[list[str]]:
    """Measured beside predicted, means over seeds."""
    head = ["Question", "Value", "Measured", "Predicted"]
    body = []
    for what, (_, values) in quadratics.QUESTIONS.items():
        for value in values:
            own = of(rows, "quadratics", what=what, value=value)
            if own:
                means = [fmean(row[name] for row in own) for name in ("measured", "predicted")]
                body.append([what, f"{value:g}", *(f"{mean:.4g}" for mean in means)])
    return [head, *body]


def tables(rows: Sequence[Row]) -> Tables:
    made = {
        "networks": network_table(rows),
        "intervals": interval_table(rows),
        "factorial": factorial_table(rows),
        "quadratics": quadratic_table(rows),
    }
    return {name: made[name] for name in PARTS if of(rows, name)}


def headline(rows: Sequence[Row]) -> Row:
    """The differences that pages quote."""
    found: Row = {}
    for task, way in product(NETWORKS, [*PLAIN, LONGER, *AWAY, *WAYS]):
        if way != "OneCycle":
            base = of(rows, "networks", task=task, way="OneCycle")
            mean, error = above(of(rows, "networks", task=task, way=way), base)
            if not math.isnan(mean):
                found[f"{task} {way} vs OneCycle pct"] = mean
                found[f"{task} {way} vs OneCycle error"] = error
    found |= pooled_intervals(rows)
    effects = factorial_effects(rows).values()
    if effects:
        found["largest effect pct"] = max(abs(e) for by in effects for e in by.values())
    own = of(rows, "quadratics")
    if own:
        found["quadratics worst ratio"] = max(
            abs(math.log(row["measured"] / row["predicted"])) for row in own
        )
    return found


def main(arguments: Sequence[str] | None = None) -> Path:
    options = parse((__doc__ or "").splitlines()[0], arguments, PARTS)
    size = options.size

    def parts(rows: Sequence[Row]) -> dict[str, Any]:
        return {
            "headline": headline(rows),
            "settings": {"size": size, "grid": "2 ** " + f"{list(GRID[size])}"},
            "seeds": list(SEEDS[size]),
            "tables": tables(rows),
        }

    book = Book(path_of(PATH, options), run, options, parts)
    if "quadratics" in options.only:
        book.make(quadratic_jobs(size))
    if "networks" in options.only:
        book.make(grid_jobs(size))
        book.make(network_jobs(size, book.rows))
        book.make(longer_jobs(size, book.rows))
    if {"intervals", "factorial"} & set(options.only):
        book.make(ranker_grid_jobs(size))
        book.make(plain_ranker_jobs(size, book.rows))
    if "intervals" in options.only:
        book.make(interval_jobs(size, book.rows))
    if "factorial" in options.only:
        book.make(factorial_jobs(size, book.rows))
    book.summarise()
    return book.path


if __name__ == "__main__":
    main()
