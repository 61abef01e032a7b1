"""Does the paper's table hold on public data? -> replication_table1.json

    HDET_DATA=FOLDER python -m benchmarks.replication.table1 [--quick | --smoke] [--only TASK]

Low is the best learning rate of a grid on other seeds. High is 3, 6, 9 and 40 times that; the paper
has 9 times a conservative one. Every row sees the same data in the same order. Controls, which the
paper lacks, say what the checkpoint does without HDET, what HDET does at a learning rate that is
right, what its decay does without the losses, and how a conservative learning rate ends. Rows are
kept as they end; the same command goes on from there.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import torch

from benchmarks.replication.jobs import Row
from benchmarks.replication.ranker import (
    EARLIER,
    HIGH_ROWS,
    LOW_ROWS,
    NOISE,
    NUM_PARTS,
    NUM_REPLICAS,
    ROWS,
    SPREAD,
    SYNC_EVERY,
    load,
    train,
)
from benchmarks.replication.script import (
    TABLE1,
    Job,
    change,
    finite,
    mean_and_error,
    parse,
    path_of,
    show,
    worker,
)
from benchmarks.result_file import plain_json, read_result, summarise_again, write_result

GRID = tuple(5e-4 * 2**k for k in range(8))
GRID_SEEDS = (100, 101, 102)
RATIOS = (3, 6, 9, 40)
SEEDS = tuple(range(10))
PAPER_RATIO = 9
EFFECTS = {
    "warm start": ("HDET", "HDET without warm start"),
    "averaging": ("HDET without auto-LR", "Warm-Init"),
    "auto-LR": ("HDET", "HDET without auto-LR"),
}
"""A part of the method, and the rows with and without it."""
EFFECTS_RATIO = 3
"""Where no row crashes."""
LEARNT = 0.9
"""A training loss below this share of the entropy of the labels has learnt something."""
MEASURES = {
    "train_loss": "Training loss",
    "validation_loss": "Validation loss",
    "validation_auc": "AUC",
    "validation_normalised_entropy": "NE",
}
SETTINGS = {
    "ratios": RATIOS,
    "grid_seeds": GRID_SEEDS,
    "replicas": NUM_REPLICAS,
    "spread": SPREAD,
    "noise": NOISE,
    "sync_every": SYNC_EVERY,
    "checkpoint_share": EARLIER,
}


def grid_jobs(size: str, tasks: Sequence[str]) -> list[Job]:
    seeds = GRID_SEEDS if size == "full" else GRID_SEEDS[:1]
    return [
        {"task": task, "size": size, "row": "Baseline-Low", "lr": lr, "seed": seed}
        for task in tasks
        for seed in seeds
        for lr in GRID
    ]


def table_jobs(size: str, low: Mapping[str, float]) -> list[Job]:
    """All runs of the table, the paper's ratio first."""
    seeds = {"full": SEEDS, "quick": SEEDS[:2], "smoke": SEEDS[:1]}[size]
    ratios = sorted(RATIOS, key=lambda ratio: ratio != PAPER_RATIO) if size != "smoke" else [9]
    pairs = [(name, 1) for name in LOW_ROWS] + [(name, r) for r in ratios for name in HIGH_ROWS]
    return [
        {"task": task, "size": size, "row": name, "ratio": ratio, "low": lr, "seed": seed}
        for ratio in (1, *ratios)
        for task, lr in low.items()
        for seed in seeds
        for name, of in pairs
        if of == ratio
    ]


def run(job: Job, *, folder: str | None) -> Row:
    """Train one run of the grid or of the table."""
    torch.set_num_threads(1)
    low = job.get("low", job.get("lr"))
    lr = job["lr"] if "lr" in job else low * job["ratio"]
    return train(load(job, folder), job["row"], lr, low, job["seed"])


def best_of(grid: Sequence[Row]) -> dict[str, float]:
    """For each task the learning rate with the lowest mean validation loss."""
    found = {}
    for task in dict.fromkeys(row["task"] for row in grid):
        own = [row for row in grid if row["task"] == task]
        means = {
            lr: fmean(finite(row["validation_loss"]) for row in own if row["lr"] == lr)
            for lr in dict.fromkeys(row["lr"] for row in own)
        }
        found[task] = min(means, key=means.__getitem__)
    return found


def of(rows: Sequence[Row], task: str, name: str, ratio: int) -> dict[int, Row]:
    """The rows of a line of the table, by seed."""
    ratio = ratio if ROWS[name].is_high else 1
    return {
        row["seed"]: row
        for row in rows
        if row["task"] == task and row["row"] == name and row["ratio"] == ratio
    }


def paired(ours: Mapping[int, Row], theirs: Mapping[int, Row], key: str) -> tuple[float, float]:
    """The mean difference over seeds in percent, and its standard error."""
    pairs = [(finite(ours[seed][key]), finite(theirs[seed][key])) for seed in ours]
    differences = [100 * (a / b - 1) for a, b in pairs]
    if not all(map(math.isfinite, differences)):
        return math.nan, math.nan
    return mean_and_error(differences)


def headline(rows: Sequence[Row], tasks: Sequence[str]) -> Row:
    """The numbers of KuaiRand at the paper's ratio without a name, the others with theirs."""
    found: Row = {}
    for task in tasks:
        for ratio in RATIOS:
            full = of(rows, task, "HDET", ratio)
            low = of(rows, task, "Baseline-Low", ratio)
            control = of(rows, task, "control: Low from the checkpoint", ratio)
            if not full or full.keys() - low.keys() or full.keys() - control.keys():
                continue
            before = "" if (task, ratio) == ("feed", PAPER_RATIO) else f"{task}_x{ratio}_"
            for name, theirs in (("low", low), ("low_plus_checkpoint", control)):
                mean, error = paired(full, theirs, "validation_loss")
                found[f"{before}full_vs_{name}_pct"] = mean
                found[f"{before}full_vs_{name}_error"] = error
            found[f"{before}crashed_rows"] = sum(map(has_crashed, lines(rows, task, ratio)))
            found[f"{before}crashed_runs"] = {
                name: sum(run["is_crashed"] for run in of(rows, task, name, ratio).values())
                for name in HIGH_ROWS
            }
            found[f"{before}crashed_after"] = {
                name: crash_place(of(rows, task, name, ratio).values())
                for name in ("Baseline-High", "Warm-Init")
            }
            found[f"{before}seeds"] = len(full)
            found[f"{before}better_auc"] = better_auc(full, low)
            found[f"{before}better_auc_than_low_plus_checkpoint"] = better_auc(full, control)
    return found | at_low(rows, tasks) | effects(rows, tasks)


def better_auc(ours: Mapping[int, Row], theirs: Mapping[int, Row]) -> int:
    """The number of seeds with the higher AUC."""
    return sum(ours[seed]["validation_auc"] > theirs[seed]["validation_auc"] for seed in ours)


def effects(rows: Sequence[Row], tasks: Sequence[str]) -> Row:
    """What each part of the method adds to the validation loss, in percent."""
    found: Row = {}
    for task in tasks:
        for part, (with_it, without) in EFFECTS.items():
            ours = of(rows, task, with_it, EFFECTS_RATIO)
            theirs = of(rows, task, without, EFFECTS_RATIO)
            if ours and not ours.keys() - theirs.keys():
                mean, error = paired(ours, theirs, "validation_loss")
                found[f"{task} effect of {part}"] = {"pct": mean, "error": error}
    return found


AT_LOW = {
    "hdet_at_low_vs_checkpoint": ("control: HDET at Low", "control: Low from the checkpoint"),
    "hdet_at_low_vs_decay_alone": ("control: HDET at Low", "control: decay alone at Low"),
    "hdet_at_low_with_temperature_of_code_vs_decay_alone": (
        "control: HDET at Low, temperature of its code",
        "control: decay alone at Low",
    ),
    "noise_vs_none": ("control: HDET at Low", "control: HDET at Low without noise"),
    "ninth_of_low_vs_low": ("control: a ninth of Low", "Baseline-Low"),
    "checkpoint_vs_low": ("control: Low from the checkpoint", "Baseline-Low"),
}


def at_low(rows: Sequence[Row], tasks: Sequence[str]) -> Row:
    """Comparisons of rows at Low, in percent of the validation loss."""
    found: Row = {}
    for task in tasks:
        for name, pair in AT_LOW.items():
            ours, theirs = (of(rows, task, row, 1) for row in pair)
            if ours and not ours.keys() - theirs.keys():
                mean, error = paired(ours, theirs, "validation_loss")
                found[f"{task}_{name}_pct"], found[f"{task}_{name}_error"] = mean, error
    return found


def lines(rows: Sequence[Row], task: str, ratio: int) -> list[list[Row]]:
    """The runs of each row at a high learning rate."""
    return [list(of(rows, task, name, ratio).values()) for name in HIGH_ROWS]


def has_crashed(runs: Sequence[Row]) -> bool:
    """Whether at least half of the runs have learnt nothing."""
    return bool(runs) and 2 * sum(run["is_crashed"] for run in runs) >= len(runs)


def crash_place(runs: Iterable[Row]) -> float:
    """The share of the run after which the training loss is that of the label shares.

    The median of the runs that crashed; nan if none did.
    """
    places = []
    for run in runs:
        if run["is_crashed"] and run["validation_normalised_entropy"]:
            entropy = run["validation_loss"] / run["validation_normalised_entropy"]
            learnt = [finite(loss) < LEARNT * entropy for loss in run["curve"]]
            places.append(max((at + 1 for at, yes in enumerate(learnt) if yes), default=0))
    return median(places) / NUM_PARTS if places else math.nan


def table(rows: Sequence[Row], task: str) -> list[list[str]]:
    """The paper's table of one task: a line for each row and ratio."""
    body, low = [], of(rows, task, "Baseline-Low", 1)
    for name in ROWS:
        for ratio in RATIOS if ROWS[name].is_high else (1,):
            own = of(rows, task, name, ratio)
            if not own or own.keys() - low.keys():
                continue
            runs = list(own.values())
            numbers = [_mean([run[key] for run in runs]) for key in MEASURES]
            crashed = f"{sum(run['is_crashed'] for run in runs)} of {len(runs)}"
            against = "" if own == low else change(*paired(own, low, "validation_loss"))
            body.append([name, f"{ratio}", *numbers, against, crashed])
    return [["Row", "LR / best", *MEASURES.values(), "Against Baseline-Low, %", "Crashed"], *body]


def _mean(values: Sequence[float | None]) -> str:
    found = [finite(value) for value in values]
    if not all(map(math.isfinite, found)):
        return "not finite"
    mean, error = mean_and_error(found)
    return f"{mean:.3f} ± {error:.3f}"


def main(arguments: Sequence[str] | None = None) -> Path:
    options = parse((__doc__ or "").splitlines()[0], arguments)
    size, tasks, path = options.size, options.only, path_of(TABLE1, options)
    kept, work = read_result(path), worker(run, options)
    grid: list[Row] = list(kept.get("grid", []))
    rows: list[Row] = list(kept.get("rows", []))

    def write(grid: Sequence[Row], made: Sequence[Row]) -> None:
        rows = plain_json(made)  # as the file has them, so that the headline follows from it
        names = dict.fromkeys(row["task"] for row in rows)
        write_result(
            path,
            headline=headline(rows, list(names)),
            settings={"size": size, "low": best_of(grid)} | SETTINGS,
            seeds=sorted({row["seed"] for row in rows}),
            kept=kept or None,
            tables={task: table(rows, task) for task in names},
            grid=grid,
            rows=rows,
        )

    others = [row for row in grid if row["task"] not in tasks]
    grid = work(grid_jobs(size, tasks), known=grid, keep=lambda now: write([*others, *now], rows))
    low, grid = {task: lr for task, lr in best_of(grid).items() if task in tasks}, [*others, *grid]
    rest = [row for row in rows if row["task"] not in tasks]
    jobs = table_jobs(size, low)
    rows = plain_json([*rest, *work(jobs, known=rows, keep=lambda now: write(grid, [*rest, *now]))])
    names = list(dict.fromkeys(row["task"] for row in rows))
    tables = {task: table(rows, task) for task in names}
    summarise_again(path, headline=headline(rows, names), tables=tables)
    show(tables)
    return path


if __name__ == "__main__":
    main()
