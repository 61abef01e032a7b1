"""What the tails are tried on: runs that see each sample a few times, and runs that overfit.

Averages of replicas are known to gain with large batches, over many epochs. Three tasks are of that
kind. The other three are what most runs are like.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.learning_rate.methods.bench import Bench
from benchmarks.zoo import tasks
from benchmarks.zoo.models import Size
from benchmarks.zoo.tasks import Plan, Task

Batch = Sequence[Tensor]
Regularise = Callable[[Batch, Tensor, Tensor], list[Tensor]]
"""(batch of every row, smoothing of each, dropped share of its inputs) -> what rows train on."""
NUM_IMAGES, FEW_IMAGES = (3000, 4000), (1500, 4000)
"""To train, and to test with: what two cores can train a hundred times."""
SHORT_TEXT = 200_000
"""Bytes, of which nine tenths are trained on."""


class Tailed(NamedTuple):
    """A task, how long it is trained, and how its batches are regularised."""

    make: Callable[..., Task]
    full: Plan
    quick: Plan
    smoke: Plan
    regularise: Regularise


def as_they_are(batch: Batch, smoothing: Tensor, dropped: Tensor) -> list[Tensor]:
    """For text, whose inputs are its targets: the members differ in weight decay alone."""
    return list(batch)


def images(batch: Batch, smoothing: Tensor, dropped: Tensor) -> list[Tensor]:
    """Smooth classes, and drop pixels."""
    x, y = batch
    classes = F.one_hot(y, 10).to(x)
    part = smoothing.view(-1, 1, 1)
    kept = kept_of(x[:, :, :1], dropped.view(-1, 1, 1, 1, 1))
    return [x * kept, classes * (1 - part) + part / 10]


def answers(batch: Batch, smoothing: Tensor, dropped: Tensor) -> list[Tensor]:
    """Smooth yes and no toward their shares, which differ much, and drop numbers of a row."""
    categories, numbers, labels = batch
    part = smoothing.view(-1, 1, 1)
    kept = kept_of(numbers, dropped.view(-1, 1, 1))
    share = labels.mean((0, 1))
    return [categories, numbers * kept, labels * (1 - part) + part * share]


def kept_of(like: Tensor, dropped: Tensor) -> Tensor:
    """0 where an input is dropped; the others grow, so that their mean stays."""
    return (torch.rand_like(like) >= dropped) / (1 - dropped)


TINY, SMOKE_SIZE = Size(256, 48, 2, 4, 64), Size(256, 16, 1, 2, 16)
FEW_EPOCHS = {
    "images, 16 epochs": Tailed(
        partial(tasks.vision, most=NUM_IMAGES),
        Plan("SGD", 750, 64, 0.1, 8),
        Plan("SGD", 200, 32, 0.1, 4),
        Plan("SGD", 16, 16, 0.1, 4),
        images,
    ),
    "census, 3 epochs": Tailed(
        partial(tasks.ranker, table="census"),
        Plan("AdamW", 1870, 128, 4e-3, 8),
        Plan("AdamW", 300, 64, 4e-3, 8),
        Plan("AdamW", 16, 16, 4e-3, 4),
        answers,
    ),
    "language, one epoch": Tailed(
        tasks.language,
        Plan("AdamW", 800, 32, 8e-3, TINY),
        Plan("AdamW", 200, 16, 8e-3, TINY),
        Plan("AdamW", 16, 16, 8e-3, SMOKE_SIZE),
        as_they_are,
    ),
}
MANY_EPOCHS = {
    "images, 60 epochs": Tailed(
        partial(tasks.vision, most=FEW_IMAGES),
        Plan("AdamW", 352, 256, 1.6e-2, 8),
        Plan("AdamW", 100, 64, 1.6e-2, 4),
        Plan("AdamW", 16, 16, 1.6e-2, 4),
        images,
    ),
    "census, 10 epochs": Tailed(
        partial(tasks.ranker, table="census"),
        Plan("AdamW", 1560, 512, 4e-3, 8),
        Plan("AdamW", 150, 256, 4e-3, 8),
        Plan("AdamW", 16, 16, 4e-3, 4),
        answers,
    ),
    "language, 20 epochs": Tailed(
        partial(tasks.language, text="text", most=SHORT_TEXT),
        Plan("AdamW", 590, 128, 8e-3, TINY),
        Plan("AdamW", 100, 64, 8e-3, TINY),
        Plan("AdamW", 16, 16, 8e-3, SMOKE_SIZE),
        as_they_are,
    ),
}
KINDS: dict[str, dict[str, Tailed]] = {
    "few epochs": FEW_EPOCHS,
    "many epochs, large batches": MANY_EPOCHS,
}
TASKS = FEW_EPOCHS | MANY_EPOCHS
_MADE: dict[tuple[str, ...], Bench] = {}


def bench_of(name: str, size: str, folder: str | None, device: str = "cpu") -> Bench:
    """A task in one size, made once for a process."""
    key = (name, size, folder or "", device)
    if key not in _MADE:
        plan: Plan = getattr(TASKS[name], size)
        where = torch.device(device)
        task = TASKS[name].make(plan, Path(folder) if folder else None, where)
        _MADE[key] = Bench(task, plan, capture=where.type == "cuda")
    return _MADE[key]


# How good and how different several answers are ------------------------------------------------


def calibration(logits: Tensor, truth: Tensor) -> dict[str, float]:
    """What an ensemble is worth, and how much its members differ.

    Args:
        logits: The answers of the members, [members, samples, classes or questions].
        truth: Classes, or yes or no for each question.

    Returns:
        The loss of the mean probabilities and of a member, the calibration errors of both, and
        how often two members decide differently.
    """
    each = probabilities(logits, truth)
    target = truth.flatten().long()
    mean = each.mean(0)
    picks = each.argmax(-1)
    pairs = [(a, b) for a in range(len(picks)) for b in range(a)]
    return {
        "ensemble_loss": float(F.nll_loss(mean.log(), target)),
        "member_loss": sum(float(F.nll_loss(one.log(), target)) for one in each) / len(each),
        "ensemble_ece": ece(mean, target),
        "member_ece": sum(ece(one, target) for one in each) / len(each),
        "disagreement": sum(float((picks[a] != picks[b]).float().mean()) for a, b in pairs)
        / max(len(pairs), 1),
    }


def probabilities(logits: Tensor, truth: Tensor) -> Tensor:
    """[members, decisions, classes]; a question of yes or no is a decision of two classes."""
    if truth.dim() == 1:
        return logits.softmax(-1)
    yes = logits.sigmoid().flatten(1)
    return torch.stack([1 - yes, yes], -1).clamp(1e-7, 1)


def ece(probability: Tensor, target: Tensor, bins: int = 15) -> float:
    """The expected calibration error: how far confidence is from accuracy, in equal bins."""
    sure, picked = probability.max(-1)
    right = (picked == target).float()
    bin_of = (sure * bins).long().clamp(max=bins - 1)
    gaps = sure.new_zeros(bins).index_add(0, bin_of, right - sure)
    return float(gaps.abs().sum()) / max(len(target), 1)


def relative(loss: float, control: float) -> float:
    """How much lower a loss is than a control, in percent; minus infinity if it is not finite."""
    return 100 * (1 - loss / control) if math.isfinite(loss) else -math.inf
