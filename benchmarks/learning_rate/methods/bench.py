"""A stack of runs: what it is trained on, with how many replicas, and what it ends with."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks.learning_rate.fleet import Fleet
from benchmarks.learning_rate.rules import RULES, Rule
from benchmarks.zoo.tasks import Plan, Task

N = 8
SYNC_EVERY = 50
WARM_UP = 0.05
"""Of the steps, before a cosine and for Schedule-Free."""
DECAY = {"AdamW": 0.01, "SGD": 5e-4}


class Run(NamedTuple):
    """From which learning rate, with which samples."""

    lr: float
    seed: int


class Ended(NamedTuple):
    """What became of a run."""

    live: Mapping[str, float | None]
    """What its weights measure; none (in a file) for what is not finite."""
    averaged: Mapping[str, float | None]
    """The same for a running mean of the weights over the last twentieth of the run."""
    lr: float
    """The learning rate it was trained with, at its highest."""
    notes: dict[str, Any] = {}  # noqa: RUF012 (never changed)


class Bench(NamedTuple):
    """What a stack of runs is trained on."""

    task: Task
    plan: Plan
    half: bool = False
    capture: bool = False
    replicas: int = N
    sync_every: int = SYNC_EVERY

    def fleet(self, seeds: Sequence[int], *, capture: bool = True) -> Fleet:
        models = [self.task.model(seed) for seed in seeds]
        return Fleet(
            models,
            self.task.loss,
            self.task.group_of,
            half=self.half,
            capture=self.capture and capture,
        )

    def rule(self, fleet: Fleet, name: str | None = None) -> Rule:
        kind = name or self.plan.optimizer
        made: Rule = RULES[kind](fleet, **({"decay": DECAY[kind]} if kind in DECAY else {}))
        return made


def split(batch: Sequence[Tensor], num: int) -> list[Tensor]:
    """The samples of every run, shared out among its replicas."""
    return [part.reshape(len(part) * num, part.shape[1] // num, *part.shape[2:]) for part in batch]
