"""Who survives a learning rate that crashes plain training? -> replication_stability.json

    HDET_DATA=FOLDER python -m benchmarks.replication.stability [--quick | --smoke] [--only TASK]

As figure 2 of the paper: 3, 9 and 40 times the best learning rate, from nothing and from a
checkpoint. Averaging alone has the paper's spread, with shared and with local gradients. The other
ways are hdet's: a guard alone, `scout="restart"`, and nothing set. Regret is how far the validation
loss ends above plain training at the best learning rate from the same start.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks.replication.jobs import Row
from benchmarks.replication.ranker import SPREAD, Replicas, load, train_plain, train_replicas
from benchmarks.replication.script import Job, Script, finite
from benchmarks.result_file import RESULTS

Options = dict[str, Any]
WAYS: dict[str, Options | None] = {
    "plain": None,
    "averaging, shared gradients": {"spread": SPREAD, "scout": None, "guard": None},
    "averaging, local gradients": {
        "spread": SPREAD,
        "scout": None,
        "guard": None,
        "gradients": "local",
    },
    "guard alone": {"scout": None},
    'scout="restart"': {"scout": "restart"},
    "nothing set": {},
}
"""The options of HDET; none for plain OneCycleLR."""
STARTS = ("nothing", "checkpoint")
RATIOS = {"full": (1, 3, 9, 40), "quick": (1, 9), "smoke": (1, 9)}
SEEDS = {"full": range(3), "quick": range(1), "smoke": range(1)}


def jobs(size: str, low: Mapping[str, float]) -> list[Job]:
    """All runs; at the best learning rate itself only plain training."""
    data = "smoke with a scout" if size == "smoke" else size
    starts = STARTS[:1] if size == "smoke" else STARTS
    return [
        {"task": t, "size": data, "way": w, "start": s, "ratio": r, "low": lr, "seed": seed}
        for seed in SEEDS[size]
        for t, lr in low.items()
        for s in starts
        for r in RATIOS[size]
        for w in WAYS
        if r > 1 or w == "plain"
    ]


def run(job: Job, *, folder: str | None) -> Row:
    """Train once; return measures, and what guard and scout did."""
    torch.set_num_threads(1)
    ranking, low, seed = load(job, folder), job["low"], job["seed"]
    lr, start = low * job["ratio"], low if job["start"] == "checkpoint" else None
    options = WAYS[job["way"]]
    if options is None:
        return train_plain(ranking, lr, seed, start)

    def schedule(replicas: Replicas, optimizer: Any) -> hdet.HDET:
        base = OneCycleLR(optimizer, max_lr=lr, total_steps=ranking.steps)
        averages: Options = {"sync_every": ranking.sync_every, "controller": None}
        more = averages if "spread" in options else {}
        return hdet.HDET(base, seed=seed, **options, **more, **replicas)

    found = train_replicas(ranking, schedule, lr, seed, start)
    rollbacks = sum(line["back_to"] != line["step"] for line in found.events.of("guard"))
    factors = [line["factor"] for line in found.events.of("scout") if line.get("factor")]
    return found.row | {"rollbacks": rollbacks, "factor": factors[-1] if factors else None}


def regrets(rows: Sequence[Row], way: str, start: str, ratio: int) -> list[float]:
    """In percent, over tasks and seeds; infinite where a run was not finite."""
    plain = {
        (row["task"], row["seed"]): row["validation_loss"]
        for row in rows
        if row["way"] == "plain" and row["ratio"] == 1 and row["start"] == start
    }
    own = of(rows, way, start, ratio)
    known = [row for row in own if (row["task"], row["seed"]) in plain]
    return [
        100 * (finite(row["validation_loss"]) / plain[row["task"], row["seed"]] - 1)
        for row in known
    ]


def of(rows: Sequence[Row], way: str, start: str, ratio: int) -> list[Row]:
    wanted = (way, start, ratio)
    return [row for row in rows if (row["way"], row["start"], row["ratio"]) == wanted]


def table(rows: Sequence[Row]) -> list[list[str]]:
    """For each way, start and ratio: crashed runs, and the mean regret of the others."""
    head = ["Way", "Start", "LR / best", "Crashed", "Mean regret of the others, %"]
    body = []
    for way in WAYS:
        for start in STARTS:
            for ratio in sorted({row["ratio"] for row in rows} - {1}):
                own = of(rows, way, start, ratio)
                found = regrets(rows, way, start, ratio)
                if not own or len(found) < len(own):
                    continue
                alive = [p for p, row in zip(found, own, strict=True) if not row["is_crashed"]]
                crashed = f"{len(own) - len(alive)} of {len(own)}"
                mean = f"{fmean(alive):.1f}" if alive else ""
                body.append([way, start, f"{ratio}", crashed, mean])
    return [head, *body]


def headline(rows: Sequence[Row]) -> Row:
    """Crashed runs of each way, over tasks, starts, ratios and seeds."""
    found: Row = {}
    for way in WAYS:
        own = [row for row in rows if row["way"] == way and row["ratio"] > 1]
        # A search that finds the same from several starts has made one run, and not several.
        distinct = {(r["task"], r["start"], r["seed"], r["validation_loss"]) for r in own}
        crashed = sum(row["is_crashed"] for row in own)
        found[way] = {"crashed": crashed, "runs": len(own), "distinct": len(distinct)}
    return found


SCRIPT = Script(
    path=RESULTS / "replication_stability.json",
    question=(__doc__ or "").splitlines()[0],
    jobs=jobs,
    run=run,
    headline=headline,
    tables=lambda rows: {"stability": table(rows)},
)


def main(arguments: Sequence[str] | None = None) -> Path:
    return SCRIPT.main(arguments)


if __name__ == "__main__":
    main()
