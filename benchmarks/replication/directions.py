"""The future directions of the paper, each answered with runs -> replication_directions.json

    HDET_DATA=FOLDER python -m benchmarks.replication.directions [--quick | --smoke] [--only PART]

- spreads: a spread for each group, narrow or wide where the loss is sensitive to its learning rate.
- layers: a group for each depth, from a checkpoint: does discriminative fine-tuning appear?
- optimizers: learning rates by group under AdamW, which adapts itself, and under SGD.
- epochs: 0.7 of an epoch and 2.1, with three times as many cycles.
- stream: KuaiRand in the order of time, at a constant learning rate, with long and short cycles.
- smoothing: losses that are smoothed over cycles before the paper's controller compares them.
- members: how replicas differ just before an average, beside runs of their own.

Changes are in percent of the validation loss of plain training at the best of a grid, seed by seed.
A stream has no end: there it is the mean loss of samples just before they are trained on.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.replication import members
from benchmarks.replication.direction_runs import (
    DEPTHS,
    plain_stream,
    ranking_of,
    sensitivities,
    smoothed,
    spreads_by,
    steered,
    steered_stream,
    stream_of,
)
from benchmarks.replication.jobs import Row
from benchmarks.replication.ranker import EARLIER, Trained, train_plain
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

PATH = RESULTS / "replication_directions.json"
TASKS = ("feed", "census")
SMOKE_TASKS = TASKS[:1]
SEEDS = {"full": range(5), "quick": range(1), "smoke": range(1)}
LAYER_SEEDS = {"full": range(10), "quick": range(2), "smoke": range(1)}
GRID_SEEDS = {"full": (100, 101), "quick": (100,), "smoke": (100,)}
GRIDS: dict[str, Sequence[float]] = {
    "AdamW": [5e-4 * 2.0**place for place in range(7)],
    "SGD": [0.0125 * 2.0**place for place in range(8)],
}
SMOKE_GRID = 2
"""The number of learning rates of a grid in tests."""
PLAIN, CONTROLLERS = "plain", ("paper", "tracker")
POWERS = {"equal": 0.0, "narrow where sensitive": -0.5, "wide where sensitive": 0.5}
MEMBERS = (*members.GRADIENTS, members.OWN_RUNS)
EPOCHS, CYCLES, KEPT, STARTS = (1, 3), (100, 20, 5), (0.0, 0.5, 0.9), (1.0, 0.1)
STREAM = "stream"
SHARE_OF_AN_EPOCH = 1 - EARLIER
"""Of which a run from nothing sees all, since the data of the checkpoint are left out."""


# Runs -------------------------------------------------------------------------------------------


def run(job: Job, *, folder: str | None) -> Row:
    """Train once."""
    torch.set_num_threads(1)
    return RUNS[job["part"]](job, folder)


def run_grid(job: Job, folder: str | None) -> Row:
    """Plain training; `of` says which of the parts it is a reference for."""
    if job["task"] == STREAM:
        return {"loss": plain_stream(stream_of(job["size"], folder), job["lr"], job["seed"])}
    ranking = ranking_of(job["task"], job["size"], folder, job["kind"], job["epochs"])
    return {"loss": train_plain(ranking, job["lr"], job["seed"], None)["validation_loss"]}


def run_spread(job: Job, folder: str | None) -> Row:
    slopes = sensitivities(job["task"], job["size"], folder, job["lr"])
    spreads = spreads_by(slopes, POWERS[job["spreads"]])
    ranking = ranking_of(job["task"], job["size"], folder)
    trained = steered(ranking, job["way"], job["lr"], job["seed"], spreads=spreads)
    return {"loss": loss_of(trained), "spreads_by_group": spreads}


def run_layers(job: Job, folder: str | None) -> Row:
    """From a checkpoint; the mean log learning rate of each depth after the hand-over."""
    ranking = ranking_of(job["task"], job["size"], folder, "by depth")
    lr, seed = job["lr"], job["seed"]
    trained = steered(ranking, job["way"], lr, seed, low=lr)
    plain = train_plain(ranking, lr, seed, lr)["validation_loss"]
    lrs = trained.group_lrs
    first = int(0.3 * len(next(iter(lrs.values()), [])))
    places = {name: fmean(map(math.log, lrs[name][first:])) for name in DEPTHS if lrs.get(name)}
    return {"loss": loss_of(trained), "plain_loss": plain, "places": places}


def run_steered(job: Job, folder: str | None) -> Row:
    ranking = ranking_of(job["task"], job["size"], folder, job["kind"], job["epochs"])
    return {"loss": loss_of(steered(ranking, job["way"], job["lr"], job["seed"]))}


def run_stream(job: Job, folder: str | None) -> Row:
    stream, lr = stream_of(job["size"], folder), job["lr"] * job["start"]
    if job["way"] == PLAIN:
        return {"loss": plain_stream(stream, lr, job["seed"])}
    return {"loss": steered_stream(stream, job["way"], lr, job["seed"], job["every"])}


def run_smoothing(job: Job, folder: str | None) -> Row:
    ranking = ranking_of(job["task"], job["size"], folder)
    lr = job["lr"] * job["start"]
    return {"loss": loss_of(smoothed(ranking, job["kept"], lr, job["seed"]))}


def run_members(job: Job, folder: str | None) -> Row:
    ranking = ranking_of(job["task"], job["size"], folder)
    return members.measure(ranking, job["way"], job["lr"], job["seed"])


def loss_of(trained: Trained) -> float:
    return float(trained.row["validation_loss"])


RUNS: dict[str, Callable[[Job, str | None], Row]] = {
    "grid": run_grid,
    "spreads": run_spread,
    "layers": run_layers,
    "optimizers": run_steered,
    "epochs": run_steered,
    "stream": run_stream,
    "smoothing": run_smoothing,
    "members": run_members,
}
PARTS = tuple(part for part in RUNS if part != "grid")


# Jobs -------------------------------------------------------------------------------------------


def tasks_of(size: str) -> Sequence[str]:
    return SMOKE_TASKS if size == "smoke" else TASKS


def references(size: str, parts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What plain training must be known for."""
    for task in tasks_of(size):
        yield {"task": task, "kind": "AdamW", "epochs": 1}
        if "optimizers" in parts:
            yield {"task": task, "kind": "SGD", "epochs": 1}
        if "epochs" in parts:
            yield {"task": task, "kind": "AdamW", "epochs": EPOCHS[-1]}
    if "stream" in parts:
        yield {"task": STREAM, "kind": "AdamW", "epochs": 1}


def grid_jobs(size: str, parts: Sequence[str]) -> list[Job]:
    return [
        {"part": "grid", **what, "size": size, "lr": lr, "seed": seed}
        for what in references(size, parts)
        for seed in GRID_SEEDS[size]
        for lr in GRIDS[what["kind"]][: SMOKE_GRID if size == "smoke" else None]
    ]


def best_lr(rows: Sequence[Row], what: Mapping[str, Any]) -> float:
    """Of a grid, by the mean over its seeds."""
    own = [row for row in of(rows, "grid", **what) if row["seed"] >= min(GRID_SEEDS["full"])]
    lrs = dict.fromkeys(row["lr"] for row in own)
    means = {lr: fmean(finite(row["loss"]) for row in own if row["lr"] == lr) for lr in lrs}
    return float(min(means, key=means.__getitem__))


def plain_jobs(size: str, parts: Sequence[str], rows: Sequence[Row]) -> list[Job]:
    """Plain training at the best of each grid, on the reported seeds."""
    return [
        {"part": "grid", **what, "size": size, "lr": best_lr(rows, what), "seed": seed}
        for what in references(size, parts)
        for seed in SEEDS[size]
    ]


def jobs(part: str, size: str, rows: Sequence[Row]) -> list[Job]:
    """The runs of a part, at the best learning rates of the grids."""
    seeds, ways, tasks = SEEDS[size], CONTROLLERS, tasks_of(size)
    num = 1 if size == "smoke" else None
    spreads, every, kept, starts = (list(v)[:num] for v in (POWERS, CYCLES, KEPT, STARTS))
    own = {"part": part, "size": size}
    lrs = {
        (what["task"], what["kind"], what["epochs"]): best_lr(rows, what)
        for what in references(size, [part])
    }
    usual = {task: lrs[task, "AdamW", 1] for task in tasks}
    if part == "spreads":
        return [
            {**own, "task": t, "way": w, "spreads": s, "lr": usual[t], "seed": seed}
            for seed, t, w, s in product(seeds, tasks, ways, spreads)
        ]
    if part == "layers":
        return [
            {**own, "task": t, "way": w, "lr": usual[t], "seed": seed}
            for seed, t, w in product(LAYER_SEEDS[size], tasks, ways)
        ]
    if part == "members":
        return [
            {**own, "task": t, "way": w, "lr": usual[t], "seed": seed}
            for seed, t, w in product(seeds, tasks, MEMBERS)
        ]
    if part in ("optimizers", "epochs"):
        return [
            {**own, "task": t, "kind": k, "epochs": e, "way": w, "lr": lr, "seed": seed}
            for seed, w in product(seeds, ways)
            for (t, k, e), lr in lrs.items()
        ]
    if part == "smoothing":
        return [
            {**own, "task": t, "kept": k, "start": start, "lr": usual[t], "seed": seed}
            for seed, t, k, start in product(seeds, tasks, kept, starts)
        ]
    cycles = [(PLAIN, 0), *product(ways, every)]
    lr = lrs[STREAM, "AdamW", 1]
    return [
        {**own, "task": STREAM, "way": w, "every": t, "start": start, "lr": lr, "seed": seed}
        for seed, (w, t), start in product(seeds, cycles, starts)
    ]


# What runs come to --------------------------------------------------------------------------------


def of(rows: Sequence[Row], part: str, **wanted: Any) -> list[Row]:
    """The rows of a part that have these values."""
    return [
        row
        for row in rows
        if row["part"] == part and all(row.get(name) == value for name, value in wanted.items())
    ]


def against_plain(
    rows: Sequence[Row], ours: Sequence[Row], kind: str = "AdamW", epochs: int = 1
) -> tuple[float, float]:
    """How far losses are above plain training at its best in percent: mean and standard error."""
    if not ours:
        return math.nan, math.nan
    what = {"task": ours[0]["task"], "kind": kind, "epochs": epochs}
    plain = of(rows, "grid", **what, lr=best_lr(rows, what))
    others = {row["seed"]: finite(row["loss"]) for row in plain}
    found = [
        100 * (finite(row["loss"]) / others[row["seed"]] - 1)
        for row in ours
        if row["seed"] in others
    ]
    if not found or not all(map(math.isfinite, found)):
        return (math.inf if found else math.nan), math.nan
    return mean_and_error(found)


def spread_table(rows: Sequence[Row]) -> list[list[str]]:
    head = ["Controller", "Spread of a group", *TASKS]
    body = [
        [
            way,
            spreads,
            *(
                change(*against_plain(rows, of(rows, "spreads", task=t, way=way, spreads=spreads)))
                for t in TASKS
            ),
        ]
        for way, spreads in product(CONTROLLERS, POWERS)
    ]
    return [head, *body]


def depth_correlation(row: Row) -> float:
    """The rank correlation of depth and learning rate; 1 if deeper layers have higher ones."""
    order = sorted(DEPTHS, key=row["places"].__getitem__)
    num = len(DEPTHS)
    squares = sum((place - order.index(name)) ** 2 for place, name in enumerate(DEPTHS))
    return 1 - 6 * squares / (num * (num**2 - 1))


def layer_table(rows: Sequence[Row]) -> list[list[str]]:
    """How far learning rates rise with depth; 0 is chance."""
    head = ["Task", "Controller", "Rank correlation with depth", "Loss above plain, %"]
    body = []
    for task, way in product(TASKS, CONTROLLERS):
        own = [row for row in of(rows, "layers", task=task, way=way) if row["places"]]
        if own:
            mean, error = mean_and_error([depth_correlation(row) for row in own])
            above = [100 * (finite(row["loss"]) / row["plain_loss"] - 1) for row in own]
            rank = f"{mean:+.2f}" if math.isnan(error) else f"{mean:+.2f} ± {error:.2f}"
            body.append([task, way, rank, change(*mean_and_error(above))])
    return [head, *body]


def kind_table(rows: Sequence[Row], part: str, key: str) -> list[list[str]]:
    """A line for each controller, and each optimizer or number of epochs."""
    head = ["Controller", key.capitalize(), *TASKS]
    values = dict.fromkeys(row[key] for row in of(rows, part))
    body = []
    for way, value in product(CONTROLLERS, values):
        options: dict[str, Any] = {"kind": "AdamW", "epochs": 1, key: value}
        cells = [
            change(*against_plain(rows, of(rows, part, task=task, way=way, **options), **options))
            for task in TASKS
        ]
        shown = f"{SHARE_OF_AN_EPOCH * value:.1f}" if key == "epochs" else f"{value}"
        body.append([way, shown, *cells])
    return [head, *body]


def stream_table(rows: Sequence[Row]) -> list[list[str]]:
    head = ["Controller", "Steps of a cycle", *(f"from {start:g} x the best" for start in STARTS)]
    body = []
    for way, every in [(PLAIN, 0), *product(CONTROLLERS, CYCLES)]:
        own = [of(rows, "stream", way=way, every=every, start=start) for start in STARTS]
        body.append([way, f"{every or ''}", *(change(*against_plain(rows, o)) for o in own)])
    return [head, *body]


def smoothing_table(rows: Sequence[Row]) -> list[list[str]]:
    head = ["Share kept of earlier losses", "From x the best", *TASKS]
    body = [
        [
            f"{kept:g}",
            f"{start:g}",
            *(
                change(*against_plain(rows, of(rows, "smoothing", task=t, kept=kept, start=start)))
                for t in TASKS
            ),
        ]
        for kept, start in product(KEPT, STARTS)
    ]
    return [head, *body]


def member_table(rows: Sequence[Row]) -> list[list[str]]:
    """Means over seeds."""
    heads = {
        "member_loss": "Loss of a member",
        "loss_of_mean_weights": "Of the mean weights",
        "ensemble_loss": "Of the mean answer",
        "ensemble_ece": "Calibration error of the mean answer",
        "disagreement": "Two members disagree",
        "sharpness": "Sharpness of a member",
        "sharpness_of_mean_weights": "Of the mean weights",
    }
    body = []
    for task, way in product(TASKS, MEMBERS):
        own = of(rows, "members", task=task, way=way)
        if own:
            cells = [
                f"{fmean(row[key] for row in own):.4f}" if key in own[0] else "" for key in heads
            ]
            body.append([task, way, *cells])
    return [["Task", "Members", *heads.values()], *body]


def with_numbers(table: list[list[str]]) -> list[list[str]]:
    """The lines that have numbers behind their first two words."""
    return [table[0], *(line for line in table[1:] if any(line[2:]))]


def tables(rows: Sequence[Row]) -> Tables:
    makers: dict[str, Callable[[Sequence[Row]], list[list[str]]]] = {
        "spreads": spread_table,
        "layers": layer_table,
        "optimizers": lambda rows: kind_table(rows, "optimizers", "kind"),
        "epochs": lambda rows: kind_table(rows, "epochs", "epochs"),
        "stream": stream_table,
        "smoothing": smoothing_table,
        "members": member_table,
    }
    return {part: with_numbers(make(rows)) for part, make in makers.items() if of(rows, part)}


def headline(rows: Sequence[Row]) -> Row:
    """The numbers that pages quote."""
    found: Row = {}
    for task, way in product(TASKS, CONTROLLERS):
        own = [row for row in of(rows, "layers", task=task, way=way) if row["places"]]
        if own:
            mean, error = mean_and_error([depth_correlation(row) for row in own])
            found[f"{task} {way} depth"] = {"correlation": mean, "error": error}
    for way, every, start in product(CONTROLLERS, CYCLES, STARTS):
        own = of(rows, "stream", way=way, every=every, start=start)
        if own:
            name = f"stream {way} T {every} from {start:g}"
            found[f"{name} pct"], found[f"{name} error"] = against_plain(rows, own)
    for task, way in product(TASKS, MEMBERS):
        own = of(rows, "members", task=task, way=way)
        if own:
            found[f"{task} {way} disagreement pct"] = 100 * fmean(r["disagreement"] for r in own)
    for task, way, spreads in product(TASKS, CONTROLLERS, POWERS):
        own = of(rows, "spreads", task=task, way=way, spreads=spreads)
        if own:
            name = f"{task} {way} {spreads}"
            found[f"{name} pct"], found[f"{name} error"] = against_plain(rows, own)
    return found


def main(arguments: Sequence[str] | None = None) -> Path:
    options = parse((__doc__ or "").splitlines()[0], arguments, PARTS)
    size, chosen = options.size, options.only

    def parts(rows: Sequence[Row]) -> dict[str, Any]:
        return {
            "headline": headline(rows),
            "settings": {"size": size},
            "seeds": sorted({row["seed"] for row in rows if row["part"] != "grid"}),
            "tables": tables(rows),
        }

    book = Book(path_of(PATH, options), run, options, parts)
    book.make(grid_jobs(size, chosen))
    book.make(plain_jobs(size, chosen, book.rows))
    for part in chosen:
        book.make(jobs(part, size, book.rows))
    book.summarise()
    return book.path


if __name__ == "__main__":
    main()
