"""What a learning rate costs a small task, read off the curve of its grid."""

import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.result_file import RESULTS

PATH = RESULTS / "zoo_curves.json"
STEP = 10**0.25
"""The ratio of neighbours in a grid."""


def lr_at(middle: float, place: int) -> float:
    """The learning rate at a place of the grid; that of place 0 is the middle."""
    return middle * STEP**place


def place_of(middle: float, lr: float) -> int:
    return round(math.log(lr / middle, STEP))


def mean_losses(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[float, float]]:
    """Of every task, in order of learning rates: the mean validation loss over the seeds.

    It is infinite if that of a seed is not finite.
    """
    losses: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        losses[row["task"]][row["lr"]].append(finite(row["loss"]))
    return {
        task: {lr: fmean(own) for lr, own in sorted(by_lr.items())}
        for task, by_lr in losses.items()
    }


def finite(loss: float | None) -> float:
    """A loss; infinity for nan and for the null that files have in its place."""
    return loss if loss is not None and math.isfinite(loss) else math.inf


@cache
def curves(path: Path = PATH) -> dict[str, dict[float, float]]:
    """The mean losses in the result file."""
    return mean_losses(json.loads(path.read_text())["rows"])


@cache
def curve_rows(task: str, path: Path = PATH) -> list[dict[str, Any]]:
    """The runs of a task in the result file."""
    return [row for row in json.loads(path.read_text())["rows"] if row["task"] == task]


def best_lr(task: str, path: Path = PATH) -> float:
    """The learning rate with the lowest mean loss."""
    curve = curves(path)[task]
    return min(curve, key=curve.__getitem__)


def regret(task: str, lr: float, path: Path = PATH) -> float:
    """How far the loss ends above that of the best learning rate, as a part of it.

    Between two learning rates of the grid, the loss is interpolated over their logarithm. Beyond
    the grid it is that of the end, but infinite above a grid whose last loss is infinite.
    """
    curve = curves(path)[task]
    return interpolated(curve, lr) / min(curve.values()) - 1


def interpolated(curve: Mapping[float, float], lr: float) -> float:
    """The loss at a learning rate; learning rates of the curve are in order."""
    lrs = list(curve)
    above = bisect_left(lrs, lr)
    if above == len(lrs) or above == 0:
        return curve[lrs[above and -1]]
    low, high = lrs[above - 1], lrs[above]
    part = math.log(lr / low) / math.log(high / low)
    if part > 1 - 1e-9:  # no product of zero and infinity
        return curve[high]
    return (1 - part) * curve[low] + part * curve[high]
