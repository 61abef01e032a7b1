"""How far below where scores explode does the best learning rate lie? -> explosion.json

    python -m benchmarks.learning_rate.explosion [--quick] [--data FOLDER] [--out FILE]
    python -m benchmarks.learning_rate.explosion --scouts [--only NAME] [--data FOLDER] [--out FILE]
                                                                the scouts alone, anew

A scout sees a few steps. What gains most in them is often far below what ends best; where scores
explode is seen in them just as well. For variants of the language model and of its fine-tuning
(size, batch, length, optimizer) a grid of learning rates is trained to the end, and rounds of 6
and of 12 steps are made with an eighth of the batch over eight decades. The file also has what a
scout finds there, with a probe and by losses, from three starts, and what that costs by the curve
of the grid.
"""

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hdet
from benchmarks.learning_rate.methods.bench import Bench, N, Run, split
from benchmarks.learning_rate.methods.schedules import shape
from benchmarks.learning_rate.methods.search import Signal, search_lrs, start_of
from benchmarks.learning_rate.methods.single import plain
from benchmarks.learning_rate.regret import loss_at, percent
from benchmarks.result_file import RESULTS, made_with, word_of, write_result
from benchmarks.zoo import tasks
from benchmarks.zoo.entries import GPT_SIZE, TINY
from benchmarks.zoo.models import Size
from benchmarks.zoo.tasks import Plan
from hdet.lr_search.evidence import divergence_of
from hdet.lr_search.observations import Observation

ROUNDS = (6, 12)
SEEDS, GRID_SEEDS = (0, 1, 2), (100, 101)
STARTS = (1 / 30, 1.0, 30.0)
"""Of a scout, in units of the best learning rate."""
SIGNALS: tuple[Signal, ...] = ("probe", "losses")
SMALL = Size(256, 128, 4, 4, 96)
MIDDLE = {"AdamW": 2e-3, "SGD": 0.4}
PER_DECADE, DECADES = 3, 8


class Variant(NamedTuple):
    """What is trained, and how."""

    size: Size
    optimizer: str
    batch: int
    steps: int
    tuned: bool = False
    """Whether it begins with the pre-trained language model."""

    def plan(self) -> Plan:
        return Plan(self.optimizer, self.steps, self.batch, MIDDLE[self.optimizer], self.size)


VARIANTS = {
    "small, batch 16": Variant(SMALL, "AdamW", 16, 1000),
    "small, batch 16, SGD": Variant(SMALL, "SGD", 16, 1000),
    "small, batch 64": Variant(SMALL, "AdamW", 64, 1000),
    "small, 300 steps": Variant(SMALL, "AdamW", 16, 300),
    "fine-tuning, SGD": Variant(GPT_SIZE, "SGD", 16, 800, tuned=True),
    "fine-tuning": Variant(GPT_SIZE, "AdamW", 16, 800, tuned=True),
    "small, batch 64, SGD": Variant(SMALL, "SGD", 64, 1000),
    "small, batch 8": Variant(SMALL, "AdamW", 8, 1000),
    "large, SGD": Variant(GPT_SIZE, "SGD", 16, 800),
    "small, 4000 steps": Variant(SMALL, "AdamW", 16, 4000),
    "fine-tuning, batch 64, 300 steps": Variant(GPT_SIZE, "AdamW", 64, 300, tuned=True),
    "large": Variant(GPT_SIZE, "AdamW", 16, 800),
    "small, 4000 steps, SGD": Variant(SMALL, "SGD", 16, 4000),
}
QUICK = {"tiny": Variant(TINY, "AdamW", 16, 200), "tiny, SGD": Variant(TINY, "SGD", 16, 200)}


# Training -------------------------------------------------------------------------------------


def grid_of(bench: Bench, places: Sequence[int]) -> list[list[float]]:
    """[learning rate, loss at the end] of every run."""
    runs = [Run(bench.plan.middle * 2.0**place, s) for place in places for s in GRID_SEEDS]
    ended = plain(bench, runs)
    return [[run.lr, _or_nan(end.live["loss"])] for run, end in zip(runs, ended, strict=True)]


def _or_nan(loss: float | None) -> float:
    return math.nan if loss is None else loss


def rounds_of(bench: Bench, seed: int) -> dict[str, Any]:
    """What every learning rate scores after some steps, from the same weights."""
    num = PER_DECADE * DECADES  # whole rounds of N replicas
    lrs = [bench.plan.middle * 10 ** (place / PER_DECADE - DECADES / 2) for place in range(num)]
    fleet = bench.fleet([seed] * num, capture=False)
    rule = bench.rule(fleet)
    batch = bench.task.batches([seed] * (num // N))
    speeds = torch.tensor(lrs, dtype=torch.float64).to(fleet.weights)[:, None]
    wave = shape("one cycle", bench.plan.steps, rule.cycles_momentum)
    momenta = torch.full_like(speeds, wave.momenta[0])
    step = torch.zeros(num // N, dtype=torch.long, device=fleet.device)
    results = {"lrs": lrs, "seed": seed, "outset": fmean(_scores(bench, fleet, fleet.weights)[:N])}
    passed: list[Tensor] = []
    for now in range(max(ROUNDS)):
        fleet.losses(*split(batch(step + now), N))
        rule.step(speeds, momenta)
        passed.append(fleet.weights.clone())
        if now + 1 in ROUNDS:
            late = passed[len(passed) // 2 :]
            mean = torch.stack(late).mean(0)
            results[f"after {now + 1}"] = _scores(bench, fleet, mean)
    return results


def _scores(bench: Bench, fleet: Any, weights: Tensor) -> list[float]:
    found = fleet.evaluate(bench.task.probe, weights=weights, training=True)
    scores: list[float] = found.double().mean(1).tolist()
    return scores


def scouts_of(bench: Bench, grid: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """The learning rates that scouts begin with."""
    runs = [Run(best_of(grid) * start, seed) for start in STARTS for seed in SEEDS]
    found: dict[str, list[float]] = {}
    for signal in SIGNALS:
        searches = search_lrs(bench, runs, by=signal, scout=hdet.Scout())
        pairs = zip(runs, searches, strict=True)
        found[signal] = [run.lr * start_of(bench, search).factor for run, search in pairs]
    return found


# What it says ---------------------------------------------------------------------------------


def curve_of(grid: Sequence[Sequence[float]]) -> dict[float, float]:
    """The mean loss of every learning rate, from the lowest up; infinite if one is not finite."""
    seen: dict[float, list[float]] = {}
    for lr, loss in sorted(grid, key=lambda pair: pair[0]):
        seen.setdefault(lr, []).append(math.inf if loss is None or math.isnan(loss) else loss)
    return {lr: fmean(losses) for lr, losses in seen.items()}


def best_of(grid: Sequence[Sequence[float]]) -> float:
    """The learning rate that ends best, between those of the grid: a parabola in its logarithm."""
    curve = curve_of(grid)
    lrs, losses = list(curve), list(curve.values())
    at = min(range(len(lrs)), key=losses.__getitem__)
    if not 0 < at < len(lrs) - 1:
        return lrs[at]
    below, low, above = losses[at - 1 : at + 2]
    bend = below - 2 * low + above
    # Beside a cliff a parabola says nothing.
    is_bowl = bend > 0 and max(below, above) < 1.3 * low
    return lrs[at] * 2 ** (0.5 * (below - above) / bend) if is_bowl else lrs[at]


def explodes_at(results: Mapping[str, Any], num_steps: int) -> float | None:
    scores = [
        None if s is None or not math.isfinite(s) else s for s in results[f"after {num_steps}"]
    ]
    points = [Observation(lr, score) for lr, score in zip(results["lrs"], scores, strict=True)]
    return divergence_of(points, results["outset"])


def distance(case: Mapping[str, Any], num_steps: int) -> float:
    """Where scores explode, in units of the learning rate that ends best."""
    found = [explodes_at(results, num_steps) or math.inf for results in case["rounds"]]
    return median(found) / best_of(case["grid"])


class Found(NamedTuple):
    """What the scouts of a variant have come to."""

    ratio: float
    """In units of the best, in the middle."""
    regret: float
    """What it costs, in %, in the middle."""
    worst: float


def found_in(case: Mapping[str, Any], signal: str) -> Found:
    curve = curve_of(case["grid"])
    lowest, lrs = min(curve.values()), case["scouts"][signal]
    regrets = [100 * (loss_at(curve, lr) / lowest - 1) for lr in lrs]
    return Found(median(lrs) / best_of(case["grid"]), median(regrets), max(regrets))


def headline(cases: Mapping[str, Any]) -> dict[str, Any]:
    results: dict[str, Any] = {"variants": len(cases)}
    for optimizer in ("AdamW", "SGD"):
        own = [case for case in cases.values() if case["optimizer"] == optimizer]
        for num_steps in ROUNDS:
            far = [distance(case, num_steps) for case in own]
            name = f"{optimizer.lower()}_{num_steps}_steps"
            results[f"{name}_nearest"], results[f"{name}_farthest"] = min(far), max(far)
            results[f"{name}_mean"] = geometric_mean(far)
        for signal in SIGNALS:
            regrets = [found_in(case, signal).regret for case in own]
            results[f"{optimizer.lower()}_scout_by_{signal}_median_pct"] = median(regrets)
    for name, case in cases.items():
        for signal in SIGNALS:
            found, key = found_in(case, signal), f"{word_of(name)}_{signal}"
            results[f"{key}_pct"], results[f"{key}_worst_pct"] = found.regret, found.worst
            results[f"{key}_ratio"] = found.ratio
    return results


def table(cases: Mapping[str, Any]) -> str:
    lines = [
        "| | best learning rate | explodes after 6 steps at | after 12 | a scout finds, "
        "with a probe | that costs, % (worst) | by losses | that costs, % (worst) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, case in cases.items():
        six, twelve = (distance(case, num) for num in ROUNDS)
        cells = [f"{best_of(case['grid']):.2g}", f"x {six:.2g}", f"x {twelve:.2g}"]
        for signal in SIGNALS:
            found = found_in(case, signal)
            cells += [f"x {found.ratio:.2g}", f"{percent(found.regret)} ({percent(found.worst)})"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def case_of(bench: Bench, variant: Variant, places: Sequence[int]) -> dict[str, Any]:
    return {
        "optimizer": variant.optimizer,
        "batch": variant.batch,
        "steps": variant.steps,
        "rounds": [rounds_of(bench, seed) for seed in SEEDS],
        "grid": grid_of(bench, places),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two tiny variants, a coarse grid")
    parser.add_argument("--scouts", action="store_true", help="these alone; the rest is kept")
    parser.add_argument("--only", help="variants whose name contains it; the others are kept")
    parser.add_argument("--data", type=Path, default=os.environ.get("HDET_DATA"))
    parser.add_argument("--checkpoint", type=Path, default=RESULTS / "pretrained.pt")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = None if options.data is None else Path(options.data)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    out = options.out or RESULTS / ("explosion.quick.json" if options.quick else "explosion.json")
    keeps = options.scouts or options.only is not None
    known: dict[str, Any] = json.loads(out.read_text()) if keeps else {"cases": {}}
    cases = known["cases"]
    variants = QUICK if options.quick else VARIANTS
    chosen = [name for name in variants if options.only is None or options.only in name]
    if not chosen:
        parser.error(f"--only must be a part of one of {list(variants)}, got {options.only!r}")
    for name in chosen:
        variant = variants[name]
        start: dict[str, Any] = {}
        if variant.tuned:
            start = {"text": "text", "start": torch.load(options.checkpoint, map_location=device)}
        task = tasks.language(variant.plan(), folder=folder, device=device, **start)
        bench = Bench(task, variant.plan(), on_gpu, on_gpu)
        if not options.scouts:
            places = range(-6, 7, 3) if options.quick else range(-7, 8)
            cases[name] = case_of(bench, variant, places)
        cases[name]["scouts"] = scouts_of(bench, cases[name]["grid"])
        cases[name]["scouts_on"] = made_with()["device"]
        print(f"{name}: done", flush=True)
    write_result(
        out,
        headline=headline(cases),
        settings={"replicas": N, "grid_seeds": GRID_SEEDS, "starts": STARTS},
        seeds=SEEDS,
        kept=known,
        cases=cases,
    )
    print(table(cases))


if __name__ == "__main__":
    main()
