"""Does a run find the best values of other hyperparameters? -> knobs.json, knobs.fresh.json

    python -m benchmarks.knobs.knobs [--quick] [--only dropout,momentum] [--first-seed 5]
        [--workers 2] [--out FILE]

Every problem has a best value that is known (zoo/problems.py). Runs start ten times too low and ten
times too high, with N = 8 replicas on one device, by the noise-aware Tracker and by the
paper's rule on the same probe. A run is judged by the value it ends with and by the validation loss
of its consensus, beside those of the best fixed value: known in closed form, or the best of a grid
on the mean of all seeds, whose runs have the same replicas, data and length. The four learning
rates of a transformer follow OneCycleLR with shared gradients, and are found by a scout too; its
text is in $HDET_DATA (benchmarks/zoo/data.py), or what scikit-learn has, which is too short. A last
problem has six knobs at once, one of which does nothing. "Recompiles" counts how often torch
compiled anything after the first cycle in a run of 50 cycles with every kind of knob on, its model
and its optimizer compiled. Runs are kept as they end: the same command goes on where it was
stopped. Delete FILE's `.part` after a change of the code.
"""

import argparse
import dataclasses
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch

import hdet
from benchmarks.knobs.counts import counts
from benchmarks.knobs.headline import headline
from benchmarks.knobs.recompiles import recompiles
from benchmarks.result_file import RESULTS, read_result, write_result
from benchmarks.zoo.problem import Problem, off, ratio
from benchmarks.zoo.problems import PROBLEMS, SIX, SPACES

N = 8
SEEDS = 5
FACTOR, SHARE = 1.5, 0.01
CONTROLLERS = {"tracker": hdet.Tracker(), "paper": hdet.PaperController()}


class Ended(NamedTuple):
    """How a run ended."""

    values: dict[str, float]
    loss: float
    moves: dict[str, list[float]]
    """What every knob did in each cycle, in its space."""


def train(
    problem: Problem,
    seed: int,
    starts: Mapping[str, float],
    controller: Any | None,
    scout: hdet.Scout | None = None,
) -> Ended:
    """One run; without a controller at fixed values, or at those that a scout finds."""
    torch.manual_seed(seed)
    task = problem.make(seed, starts)
    dims = (0,) * len(task.batch(0, N))  # a mixture of problems has batches of different sizes
    ensemble = hdet.StackedReplicas(task.model, N, batch_dim=dims)
    optimizer = ensemble.optimizer(task.optimizer)
    num_steps = problem.cycles * task.sync_every
    knobs = task.knobs
    if controller is None:
        knobs = [dataclasses.replace(knob, spread=0.0) for knob in knobs]
    scheduler = hdet.HDET(
        task.schedule(optimizer, num_steps),
        model=task.model,
        replicas=ensemble,
        knobs=knobs,
        probe=hdet.Probe(task.score, tail=task.tail),
        controller=controller,
        scout=scout,
        gradients=task.gradients,
        sync_every=task.sync_every,
        total_steps=num_steps,
        seed=seed,
        preset="paper",
    )
    losses: list[float] = []
    path: list[dict[str, float]] = [scheduler.get_knobs()]
    for step in range(num_steps):
        each = ensemble.losses(task.loss, *task.batch(step, N))
        optimizer.zero_grad()
        each.sum().backward()
        optimizer.step()
        scheduler.step(each.detach())
        if (step + 1) % task.sync_every == 0:
            path.append(scheduler.get_knobs())
            if len(path) > problem.cycles + 1 - task.judged_cycles:
                with torch.no_grad():
                    losses.append(task.judge(ensemble.consensus().eval()))
    found = {
        name: path[-1][name] * start if name.startswith("lr/") else path[-1][name]
        for name, start in starts.items()
        if name in path[-1]
    }
    moves = {name: [math.log(b[name] / a[name]) for a, b in pairwise(path)] for name in path[0]}
    return Ended(found, sum(losses) / len(losses), moves)


class Job(NamedTuple):
    """One run that is to be made, in a process of its own."""

    problem: str
    seed: int
    starts: tuple[tuple[str, float], ...]
    controller: str | None


def work(job: Job) -> Ended:
    torch.set_num_threads(1)
    problem = next(one for one in [*PROBLEMS, SIX] if one.name == job.problem)
    scout = hdet.Scout() if job.controller == "scout" else None
    controller = CONTROLLERS.get(job.controller) if job.controller else None
    return train(problem, job.seed, dict(job.starts), controller, scout)


def frozen(values: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(values.items())


class Bench:
    """Makes runs in a few processes, keeps each as it ends, and says how far it is."""

    def __init__(self, workers: int, kept: Path) -> None:
        self._pool = ProcessPoolExecutor(workers)
        self._start = time.perf_counter()
        self._kept = kept
        """One line for each run; the same command goes on from there."""
        self._known: dict[str, Ended] = {}
        if kept.exists():
            for line in kept.read_text().splitlines():
                job, ended = json.loads(line)
                self._known[json.dumps(job)] = Ended(*ended)

    def __call__(self, what: str, jobs: Sequence[Job]) -> list[Ended]:
        made = {
            self._pool.submit(work, job): json.dumps(job)
            for job in jobs
            if json.dumps(job) not in self._known
        }
        done = len(jobs) - len(made)
        for number, future in enumerate(as_completed(made), start=done + 1):
            self._keep(made[future], future.result())
            spent = time.perf_counter() - self._start
            print(f"\r{spent:5.0f} s  {what}: {number} of {len(jobs)}  ", end="", flush=True)
        print()
        return [self._known[json.dumps(job)] for job in jobs]

    def _keep(self, job: str, ended: Ended) -> None:
        self._known[job] = ended
        self._kept.parent.mkdir(exist_ok=True)
        with self._kept.open("a") as lines:
            lines.write(f"[{job}, {json.dumps(ended)}]\n")

    def close(self) -> None:
        """All is in the result: nothing is left to go on from."""
        self._kept.unlink(missing_ok=True)


def rows_of(problem: Problem, seeds: Sequence[int], bench: Bench) -> Iterator[dict[str, Any]]:
    """For every seed, side and rule: how far from the best the run ended."""
    values = {seed: known(problem, seed) for seed in seeds}
    fixed = [Job(problem.name, s, frozen(v), None) for s in seeds for v in values[s]]
    made = iter(bench(f"{problem.name}, fixed values", fixed))
    losses = {seed: [next(made).loss for _ in values[seed]] for seed in seeds}
    # On the mean of all seeds: the best of nine runs of one seed is the luckiest of them too.
    means = [sum(each) / len(seeds) for each in zip(*losses.values(), strict=True)]
    place = min(range(len(means)), key=means.__getitem__)
    jobs, about = [], []
    for seed in seeds:
        best, loss = values[seed][place], losses[seed][place]
        for factor in problem.factors:
            start = {n: off(problem.space, v, factor) for n, v in best.items()}
            for rule in rules_for(problem):
                jobs.append(Job(problem.name, seed, frozen(start), rule))
                about.append((seed, factor, rule, best, loss))
    for (seed, factor, rule, best, loss), ended in zip(
        about, bench(f"{problem.name}, from both sides", jobs), strict=True
    ):
        ratios = {n: ratio(problem.space, ended.values[n], v) for n, v in best.items()}
        if problem.joint:
            ratios = {"all": geometric_mean(ratios.values())}
        yield {
            "problem": problem.name,
            "seed": seed,
            "start": factor,
            "rule": rule,
            "best": best,
            "best_loss": loss,
            "grid": losses[seed] if problem.grid else None,
            "values": ended.values,
            "ratios": ratios,
            "loss": ended.loss,
            "within_factor": all(1 / FACTOR <= r <= FACTOR for r in ratios.values()),
            "within_share": ended.loss <= loss * (1 + SHARE),
        }


def rules_for(problem: Problem) -> list[str]:
    """Where all knobs are learning rates, a scout is the third."""
    return [*CONTROLLERS, "scout"] if problem.joint else list(CONTROLLERS)


def known(problem: Problem, seed: int) -> list[dict[str, float]]:
    """The values that fixed runs are made with: the best, or a grid."""
    if problem.best is not None:
        return [dict(problem.best(seed))]
    names = problem.make(seed, defaultdict(lambda: 0.5)).starts
    return [dict.fromkeys(names, value) for value in problem.grid]


def six_rows(seeds: Sequence[int], bench: Bench) -> list[dict[str, Any]]:
    jobs, about = [], []
    assert SIX.best is not None
    for seed in seeds:
        best = dict(SIX.best(seed))
        for factor in SIX.factors:
            start = {
                name: value if name == "dummy" else off(SPACES.get(name, "log"), value, factor)
                for name, value in best.items()
            }
            jobs.append(Job(SIX.name, seed, frozen(start), "tracker"))
            about.append((seed, factor, best))
    rows = []
    for (seed, factor, best), ended in zip(about, bench(SIX.name, jobs), strict=True):
        ratios = {n: ratio(SPACES.get(n, "log"), ended.values[n], v) for n, v in best.items()}
        rows.append(
            {
                "seed": seed,
                "start": factor,
                "ratios": ratios,
                "dummy_drift": math.log(ended.values["dummy"]),
                "dummy_moves": sum(move != 0 for move in ended.moves["dummy"]),
                "within_factor": all(
                    1 / FACTOR <= r <= FACTOR for n, r in ratios.items() if n != "dummy"
                ),
            }
        )
    return rows


# Output ------------------------------------------------------------------------------------------


def show(rows: Sequence[Mapping[str, Any]], six: Sequence[Mapping[str, Any]]) -> None:
    print(f"\n{'problem':<42}{'rule':<9}{'start':>6}  {'value / best':<24}{'loss / best':<20}")
    for problem in dict.fromkeys(row["problem"] for row in rows):
        for rule in (*CONTROLLERS, "scout"):
            for start in (0.1, 10.0):
                chosen = [
                    row
                    for row in rows
                    if (row["problem"], row["rule"], row["start"]) == (problem, rule, start)
                ]
                ratios = sorted(r for row in chosen for r in row["ratios"].values())
                losses = sorted(row["loss"] / row["best_loss"] for row in chosen)
                if chosen:
                    print(
                        f"{problem:<42}{rule:<9}{start:>6g}  {ratios[0]:.2f} to {ratios[-1]:<14.2f}"
                        f"  {losses[0]:.3f} to {losses[-1]:.3f}"
                    )
    for row in six:
        results = "  ".join(f"{name} {value:.2f}" for name, value in row["ratios"].items())
        print(f"six at once, seed {row['seed']}, start x {row['start']:g}: {results}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed of each problem")
    parser.add_argument("--only", default="", help="beginnings of problem names, by commas")
    parser.add_argument("--first-seed", type=int, default=0, help="others than 0 were not tuned on")
    parser.add_argument("--workers", type=int, default=2, help="processes that make runs")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + (1 if options.quick else SEEDS))
    wanted = tuple(name for name in options.only.split(",") if name)
    out = options.out or RESULTS / ("knobs.quick.json" if options.quick else "knobs.json")
    kept = read_result(out) if wanted else {}
    bench = Bench(options.workers, out.with_suffix(".part"))
    rows, six = list(kept.get("rows", [])), list(kept.get("six", []))
    for problem in PROBLEMS:
        if problem.name.startswith(wanted or ""):
            rows = [row for row in rows if row["problem"] != problem.name]
            rows += rows_of(problem, seeds, bench)
            write(out, rows, six, kept)
    if SIX.name.startswith(wanted or ""):
        six = six_rows(seeds, bench)
    if "recompiles".startswith(wanted or ""):
        count = recompiles(10 if options.quick else 50)
        kept = {**kept, "headline": {**kept.get("headline", {}), "recompiles": count}}
    show(rows, six)
    for name, value in write(out, rows, six, kept).items():
        print(f"{name}: {value}")
    bench.close()


def write(out: Path, rows: Any, six: Any, kept: Mapping[str, Any]) -> dict[str, Any]:
    count = kept.get("headline", {}).get("recompiles")
    found = {**headline(rows, six), "recompiles": count, **counts(rows, six)}
    numbers = {name: value for name, value in found.items() if value == value}  # what was run
    write_result(
        out,
        headline=numbers,
        settings={"replicas": N, "factor": FACTOR, "share": SHARE},
        seeds=sorted({row["seed"] for row in [*rows, *six]}),
        kept=kept or None,
        rows=rows,
        six=six,
    )
    return numbers


if __name__ == "__main__":
    main()
