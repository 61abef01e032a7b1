"""What others offer without a sweep, each at its best published recipe, on a small task."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.zoo.runs import Outcome
from benchmarks.zoo.small.task import SmallTask, make_schedule
from benchmarks.zoo.small.train import one_thread

WARM_UP, CLIP = 0.05, 1.0
RANGE_STEPS, RANGE_DECADES, RANGE_DIVISOR = 100, (-7.0, 1.0), 10.0
"""An LR range test: a learning rate that rises from 1e-7 to 10 in 100 steps, and a tenth of the one
with the lowest loss."""

Peer = Callable[[SmallTask, int], Outcome]


def adamw(task: SmallTask, seed: int) -> Outcome:
    """AdamW at 1e-3, with warm-up and cosine."""
    return _train(task, seed, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))


def prodigy(task: SmallTask, seed: int) -> Outcome:
    """Prodigy as its authors advise with a warm-up: safeguard and bias correction."""
    from prodigyopt import Prodigy

    def make(model: nn.Module) -> Any:
        return Prodigy(
            model.parameters(),
            lr=1.0,
            weight_decay=0.01,
            safeguard_warmup=True,
            use_bias_correction=True,
        )

    return _train(task, seed, make)


def dadapt(task: SmallTask, seed: int) -> Outcome:
    """D-Adapt AdamW, with warm-up and cosine."""
    from dadaptation import DAdaptAdam

    def make(model: nn.Module) -> Any:
        return DAdaptAdam(model.parameters(), lr=1.0, decouple=True, weight_decay=0.01)

    return _train(task, seed, make)


def schedule_free(task: SmallTask, seed: int) -> Outcome:
    """Schedule-Free AdamW at its default learning rate, with its own warm-up and no schedule."""
    from schedulefree import AdamWScheduleFree

    def make(model: nn.Module) -> Any:
        steps = int(WARM_UP * task.steps)
        return AdamWScheduleFree(model.parameters(), lr=2.5e-3, warmup_steps=steps)

    return _train(task, seed, make, shape=lambda step: 1.0)


def prodigy_schedule_free(task: SmallTask, seed: int) -> Outcome:
    """Prodigy-plus-Schedule-Free with nothing set: no schedule, and its own limit of updates."""
    from prodigyplus.prodigy_plus_schedulefree import ProdigyPlusScheduleFree

    def make(model: nn.Module) -> Any:
        return ProdigyPlusScheduleFree(model.parameters())

    return _train(task, seed, make, shape=lambda step: 1.0, clip=None)


def step_law(task: SmallTask, seed: int) -> Outcome:
    """Step Law (arXiv 2503.04715) for a language model: a peak from its size and its tokens.

    It was fitted on models and data that are thousands of times larger.
    """
    model = task.make_model(seed)
    embedded = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    size = sum(p.numel() for p in model.parameters()) - embedded
    tokens = task.steps * task.batches(seed)(0)[0].numel()
    lr = 1.79 * size**-0.713 * tokens**0.307
    return _train(task, seed, lambda model: torch.optim.AdamW(model.parameters(), lr=lr))


def range_test(task: SmallTask, seed: int) -> Outcome:
    """An LR range test with the task's own optimizer, then the task's schedule from its result."""
    lr = range_lr(task, seed)
    model = task.make_model(seed)
    optimizer = task.make_optimizer(model, lr)
    schedule = make_schedule(task, optimizer, lr)
    return _loop(task, seed, model, optimizer, schedule.step, task.clip, lr)


def range_lr(task: SmallTask, seed: int) -> float:
    """What a range test finds; its steps are not charged."""
    low, high = RANGE_DECADES
    with one_thread():
        model = task.make_model(seed)
        optimizer, batches = task.make_optimizer(model, 1.0), task.batches(seed)
        units = [float(group["lr"]) for group in optimizer.param_groups]
        seen: list[tuple[float, float]] = []
        for step in range(RANGE_STEPS):
            lr = 10 ** (low + (high - low) * step / (RANGE_STEPS - 1))
            for group, unit in zip(optimizer.param_groups, units, strict=True):
                group["lr"] = unit * lr
            optimizer.zero_grad()
            loss = task.loss(model, *batches(step))
            value = float(loss.detach())
            if not math.isfinite(value) or value > 4 * min([v for v, _ in seen] or [value]):
                break
            seen.append((value, lr))
            loss.backward()
            optimizer.step()
    return min(seen)[1] / RANGE_DIVISOR


def _train(
    task: SmallTask,
    seed: int,
    make: Callable[[nn.Module], Any],
    *,
    shape: Callable[[int], float] | None = None,
    clip: float | None = CLIP,
) -> Outcome:
    """Train with another optimizer, by default with warm-up and cosine, and clipping."""
    model = task.make_model(seed)
    optimizer = make(model)
    warm = max(int(WARM_UP * task.steps), 1)

    def cosine(step: int) -> float:
        part = (step - warm) / max(task.steps - warm, 1)
        return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * min(part, 1)))

    schedule = LambdaLR(optimizer, shape or cosine)
    return _loop(task, seed, model, optimizer, schedule.step, clip, math.nan)


def _loop(
    task: SmallTask,
    seed: int,
    model: nn.Module,
    optimizer: Optimizer,
    advance: Callable[[], None],
    clip: float | None,
    lr: float,
) -> Outcome:
    outset = task.validate(model)["loss"]
    batches = task.batches(seed)
    model.train()
    _mode(optimizer, "train")
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(task.steps):
            optimizer.zero_grad()
            loss = task.loss(model, *batches(step))
            if not bool(loss.detach().isfinite()):
                break
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            advance()
        _mode(optimizer, "eval")
        if hasattr(optimizer, "eval"):
            _renew_statistics(task, model, seed)
        scores = task.validate(model)
    finite = math.isfinite(scores["loss"])
    loss_now = scores["loss"] if finite else math.nan
    return Outcome(loss_now, outset, scores.get("accuracy"), lr, 1.0, 0, 0, "")


def _mode(optimizer: Any, name: str) -> None:
    """Schedule-Free evaluates with other weights than it trains with."""
    if hasattr(optimizer, name):
        getattr(optimizer, name)()


@torch.no_grad()
def _renew_statistics(task: SmallTask, model: nn.Module, seed: int, num: int = 50) -> None:
    """BatchNorm's statistics belong to the weights of training: its authors say to renew them."""
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return
    own = copy.deepcopy(model)
    own.train()
    batches = task.batches(seed)
    for step in range(num):
        task.loss(own, *batches(step))
    for buffer, renewed in zip(model.buffers(), own.buffers(), strict=True):
        buffer.copy_(renewed)


PEERS: dict[str, Peer] = {
    "AdamW at 1e-3": adamw,
    "Prodigy": prodigy,
    "Schedule-Free AdamW": schedule_free,
    "D-Adapt Adam": dadapt,
    "Prodigy-plus-Schedule-Free": prodigy_schedule_free,
    "LR range test": range_test,
    "Step Law": step_law,
}
"""GPA (arXiv 2512.17131) and ScheduleFree+ (arXiv 2605.19095) are missing. The first has a learning
rate to tune, and is a control of tails in `benchmarks/replication`. The second has no package, and
its paper is about language models alone."""
LANGUAGE_MODELS = ("gru_stdlib_adamw",)
"""The reporting tasks that a law of language models applies to."""
