"""Schedules of rows: the learning rate and the momentum of every row at every step."""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from benchmarks.learning_rate.methods.bench import WARM_UP, Bench, Run
from benchmarks.learning_rate.rules import Rule
from hdet.scheduler.schedule_clock import ScheduleClock


class Shape(NamedTuple):
    """A schedule around 1, and the momentum beside it, for every step."""

    lrs: list[float]
    momenta: list[float]


@cache
def shape(name: str, steps: int, cycles_momentum: bool) -> Shape:
    if name == "one cycle":
        return _one_cycle(steps, cycles_momentum)
    if name == "too long":  # for a run that ends half-way
        long = _one_cycle(2 * steps, cycles_momentum)
        return Shape(long.lrs[:steps], long.momenta[:steps])
    if name == "too short":  # for a run that goes on with what is left at its end
        short = _one_cycle(steps // 2, cycles_momentum)
        rest = steps - steps // 2
        return Shape(short.lrs + short.lrs[-1:] * rest, short.momenta + short.momenta[-1:] * rest)
    rising = max(round(WARM_UP * steps), 1)
    falling = {
        "constant": lambda step: 1.0,
        "warm-up": lambda step: min((step + 1) / rising, 1.0),
        "cosine": lambda step: _half_wave(step / steps),
        "warm-up and cosine": lambda step: (
            (step + 1) / rising if step < rising else _half_wave((step - rising) / (steps - rising))
        ),
    }[name]
    return Shape([falling(step) for step in range(steps)], [0.9] * steps)


def _half_wave(way: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * way))


def _one_cycle(steps: int, cycles_momentum: bool) -> Shape:
    """What torch's own does."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    schedule = OneCycleLR(optimizer, 1.0, total_steps=steps, cycle_momentum=cycles_momentum)
    lrs, momenta = [], []
    for step in range(steps):
        lrs.append(float(optimizer.param_groups[0]["lr"]))
        momenta.append(float(optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        if step < steps - 1:
            schedule.step()
    return Shape(lrs, momenta)


def places(steps: int, begin: int) -> list[int]:
    """Where the schedule of a run is that has spent its first steps otherwise."""
    clock = ScheduleClock(0, steps)
    if begin:
        clock.scouted(begin)
    at = []
    for step in range(begin, steps):
        at.append(clock.base_step)
        clock.due(step + 1)
    return at


class RowPlan(NamedTuple):
    """One row: its samples, the peak for each group, and the step it begins at."""

    seed: int
    peaks: tuple[float, ...]
    begin: int = 0
    places: tuple[int, ...] | None = None
    """Where its schedule is at each of its steps; by default as the library has it."""


def plans_of(bench: Bench, runs: Sequence[Run]) -> list[RowPlan]:
    return [RowPlan(run.seed, (run.lr,) * len(bench.task.groups)) for run in runs]


class RowSchedules:
    """The learning rates, [steps, R, G], and momenta, [steps, R, 1], of a stack of rows."""

    def __init__(self, plans: Sequence[RowPlan], name: str, steps: int, rule: Rule) -> None:
        like = rule.fleet.weights
        wave = shape(name, steps, rule.cycles_momentum)
        lrs = torch.zeros(steps, len(plans), len(plans[0].peaks), dtype=torch.float64)
        momenta = torch.full((steps, len(plans), 1), wave.momenta[-1], dtype=torch.float64)
        self._wave = wave.lrs
        self._places = [plan.places or places(steps, plan.begin) for plan in plans]
        for row, plan in enumerate(plans):
            at = torch.tensor(self._places[row])
            peaks = torch.tensor(plan.peaks, dtype=torch.float64)
            lrs[: len(at), row] = torch.tensor(wave.lrs, dtype=torch.float64)[at, None] * peaks
            momenta[: len(at), row, 0] = torch.tensor(wave.momenta, dtype=torch.float64)[at]
        self.lrs, self.momenta = lrs.to(like), momenta.to(like)
        begins = torch.tensor([plan.begin for plan in plans])
        steps_of = begins + torch.arange(steps)[:, None]
        self.steps = steps_of.clamp(max=steps - 1).to(like.device)
        self.active = (steps_of < steps).to(like.device)
        self.finished = [(row >= steps).nonzero().flatten().tolist() for row in steps_of]
        """The rows that have made all their steps."""

    def share(self, row: int, now: int) -> float:
        """The learning rate of a row at one of its steps, in units of its peak."""
        return self._wave[self._places[row][now]]

    def highest_after(self, row: int, now: int) -> float:
        """The highest learning rate of a row after one of its steps, in units of its peak."""
        at = self._places[row]
        return max(self._wave[at[min(now + 1, len(at) - 1)] :])
