"""Which constants decide best on tasks that they were not set on? -> zoo_fit.json

    python -m benchmarks.zoo.zoo_fit [--out FILE]

The library's `estimate` is applied to the stored rounds of the setting half (zoo_rounds.json). What
its choice costs is read off the curves (zoo_curves.json). Leave one task out: the prior of a task
comes from the other tasks of its optimizer. Rows are variants: other constants, other lengths of
rounds, pieces of evidence left out. The library's own constants are the first row.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.learning_rate.regret import quantile
from benchmarks.result_file import RESULTS, read_result, write_result
from benchmarks.zoo import zoo_rounds
from benchmarks.zoo.small.catalogue import SETTING, TASKS
from benchmarks.zoo.small.curve import curve_rows, curves, interpolated
from benchmarks.zoo.usual_lr import mean_share
from hdet.lr_search import estimator, evidence
from hdet.lr_search.constants import PRIOR_ERROR
from hdet.lr_search.estimator import SearchContext, estimate
from hdet.lr_search.observations import Observation, Observations
from hdet.lr_search.prior import Prior
from hdet.scheduler.search_result import peak_over_mean

PATH = RESULTS / "zoo_fit.json"
NO_EVIDENCE = 1e3
"""An error so large that evidence says nothing."""
VARIANTS: dict[str, dict[str, float]] = {
    "as it is": {},
    "prior alone": {"GAIN_ERROR": NO_EVIDENCE, "DIVERGENCE_ERROR": NO_EVIDENCE},
    "without gains": {"GAIN_ERROR": NO_EVIDENCE},
    "without divergence": {"DIVERGENCE_ERROR": NO_EVIDENCE},
    "without prior": {"PRIOR_ERROR": 5.0},
    **{
        f"{name} = {value:g}": {name: value}
        for name, values in {
            "PRIOR_ERROR": (0.25, 0.5),
            "NEARLY_BEST_SHARE": (0.1, 0.2),
            "BEST_UNDER_PEAK": (0.0, 0.15, 0.35),
            "GAIN_ERROR": (0.15, 0.4),
            "LOW_GAIN_ERROR": (0.1, 0.4),
            "DIVERGENCE_OVER_BEST": (1.7, 2.2),
            "DIVERGENCE_ERROR": (0.6, 0.9),
            "CAUTION": (0.0, 0.5),
        }.items()
        for value in values
    },
}
GAIN_CAP = 25.0
"""A cost counts up to this share of the gain, in percent."""
SPACING = 2
"""Half a decade between learning rates, as eight replicas have it."""


class Choice(NamedTuple):
    """What one search chose."""

    task: str
    off: float
    """The logarithm of the choice over the best."""
    pct: float
    """What it costs, in percent of the loss."""
    share: float
    """What it costs, in percent of the gain."""
    within: float
    """The logarithm of the factor within which the best one is said to lie."""
    evidence: float
    """The logarithm of the factor that the evidence leaves open by itself."""


def family(task: str) -> str:
    """Tasks with one prior."""
    name = TASKS[task].optimizer.lower()
    return next((word for word in ("muon", "sgd") if word in name), "adam")


def best_mean_lr(task: str) -> float:
    """The logarithm of the best mean learning rate: the middle of those that cost little."""
    curve = curves()[task]
    gain, lowest = outset_of(task) - min(curve.values()), min(curve.values())
    weights = {lr: math.exp(-50 * (loss - lowest) / gain) for lr, loss in curve.items()}
    total = sum(weights.values())
    middle = sum(weight * math.log10(lr) for lr, weight in weights.items()) / total
    return middle + math.log10(mean_share(TASKS[task]))


def outset_of(task: str) -> float:
    return fmean(row["outset"] for row in curve_rows(task))


def searches(rows: Sequence[Mapping[str, Any]], steps: int) -> Iterator[tuple[str, Observations]]:
    """Every task with the observations of one search: each seed, and two grids."""
    for task in SETTING:
        for seed in zoo_rounds.SEEDS:
            own = [
                row
                for row in rows
                if (row["task"], row["seed"], row["steps"]) == (task, seed, steps)
            ]
            own.sort(key=lambda row: float(row["log_lr"]))
            for first in range(SPACING):
                yield (
                    task,
                    Observations([_point(row) for row in own[first::SPACING]], own[0]["start"]),
                )


def _point(row: Mapping[str, Any]) -> Observation:
    if row["gain"] is None:
        return Observation(10 ** row["log_lr"], None)
    # Of four batches; a search holds one out.
    error = row["error"] * math.sqrt(zoo_rounds.HELD_OUT_BATCHES)
    return Observation(10 ** row["log_lr"], row["start"] - row["gain"], error)


def choices(
    rows: Sequence[Mapping[str, Any]], changes: Mapping[str, float], steps: int
) -> list[Choice]:
    """What searches would choose with other constants, and what that costs."""
    best = {task: best_mean_lr(task) for task in SETTING}
    found = []
    with changed(changes):
        for task, observed in searches(rows, steps):
            share = mean_share(TASKS[task])
            others = [best[t] for t in SETTING if t != task and family(t) == family(task)]
            mean = fmean(others) if others else best[task]
            prior = Prior(mean, changes.get("PRIOR_ERROR", PRIOR_ERROR))
            context = SearchContext(prior, peak=peak_over_mean(share))
            decided = estimate(observed, context)
            lr, curve = decided.factor, curves()[task]
            cost = interpolated(curve, lr) - min(curve.values())
            gain = outset_of(task) - min(curve.values())
            found.append(
                Choice(
                    task,
                    math.log10(lr * share) - best[task],
                    100 * cost / abs(min(curve.values())),
                    min(100 * cost / gain, GAIN_CAP),
                    math.log10(decided.stated_within),
                    math.log10(decided.within),
                )
            )
    return found


@contextmanager
def changed(constants: Mapping[str, float]) -> Iterator[None]:
    """Inside, the search has other constants."""
    before = [
        (module, name, getattr(module, name))
        for module in (evidence, estimator)
        for name in constants
        if hasattr(module, name)
    ]
    try:
        for module, name, _ in before:
            setattr(module, name, constants[name])
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def summed_up(found: Sequence[Choice]) -> dict[str, float]:
    return {
        "off_decades": math.sqrt(fmean(one.off**2 for one in found)),
        "median_pct": median(one.pct for one in found),
        "p90_pct": quantile([one.pct for one in found], 0.9),
        "mean_gain_share_pct": fmean(one.share for one in found),
        "worst_gain_share_pct": max(one.share for one in found),
        "within_stated_share": fmean(abs(one.off) <= one.within for one in found),
        "within_evidence_share": fmean(abs(one.off) <= one.evidence for one in found),
    }


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The library's own constants, and the prior alone."""
    own, prior = rows[0], next(row for row in rows if row["variant"] == "prior alone")
    names = ("mean_gain_share_pct", "worst_gain_share_pct", "median_pct")
    return {
        "tasks": len(SETTING),
        "within_stated_share": own["within_stated_share"],
        "within_evidence_share": own["within_evidence_share"],
        **{name: own[name] for name in names},
        **{f"prior_alone_{name}": prior[name] for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=PATH)
    options = parser.parse_args()
    stored = read_result(zoo_rounds.PATH)["rows"]
    rows = []
    for variant, changes in VARIANTS.items():
        for steps in zoo_rounds.LENGTHS if variant in ("as it is", "prior alone") else (6,):
            rows.append(
                {"variant": variant, "steps": steps, **summed_up(choices(stored, changes, steps))}
            )
            print(rows[-1], flush=True)
    rows.sort(key=lambda row: (row["variant"] != "as it is", row["steps"] != 6))
    best = {task: best_mean_lr(task) for task in SETTING}
    write_result(
        options.out,
        headline=headline(rows),
        settings={"best_mean_log_lr": best},
        seeds=zoo_rounds.SEEDS,
        rows=rows,
    )


if __name__ == "__main__":
    main()
