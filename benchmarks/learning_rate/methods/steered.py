"""Methods with a spread and a controller: the paper's, the tracker, one learning rate per group."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import hdet
from benchmarks.learning_rate.methods.bench import Bench, Ended, Run
from benchmarks.learning_rate.methods.populations import Population
from benchmarks.learning_rate.methods.schedules import places
from benchmarks.learning_rate.methods.search import plan_by_search
from hdet.control.knob_bank import KnobBank
from hdet.control.one_cycle_bounds import OneCycleBounds
from hdet.knobs.specs import LearningRate, lr_knobs


class Steered(Population):
    """Shared gradients, a spread, and a controller that the library asks."""

    shares_gradients = True

    def __init__(self, bench: Bench, runs: Sequence[Run], begin: int = 0) -> None:
        super().__init__(bench, runs)
        self.begin = begin
        self._places = [0] * begin + places(bench.plan.steps, begin)
        self._steerings = [self.steering_of(run) for run in runs]
        for run, knob_bank in zip(runs, self._steerings, strict=True):
            knob_bank.start_if_due(begin, self._base_lrs(run, begin))
            knob_bank.fan_out()

    def steering_of(self, run: Run) -> KnobBank:
        raise NotImplementedError

    def scores(self) -> list[Any]:
        """What a probe says of the replicas of every run; nothing without one."""
        return [None] * len(self.runs)

    def place(self, step: int) -> int:
        return self._places[min(step, self.bench.plan.steps - 1)]

    def _base_lrs(self, run: Run, step: int) -> list[float]:
        return [run.lr * self.wave.lrs[self.place(step)]] * len(self.bench.task.groups)

    def lrs(self, step: int) -> Tensor:
        rows = [
            knob_bank.lrs(self._base_lrs(run, step), replica)
            for run, knob_bank in zip(self.runs, self._steerings, strict=True)
            for replica in range(self.replicas)
        ]
        return torch.tensor(rows, dtype=torch.float64).to(self.fleet.weights)

    def end_cycle(self, step: int, losses: Tensor) -> None:
        scores = self.scores()
        self.spread(self.fleet.weights, self.mean(self.fleet.weights))
        self.average_buffers()
        rows = zip(self.runs, self._steerings, losses.tolist(), scores, strict=True)
        for run, knob_bank, row, results in rows:
            if not all(map(math.isfinite, row)):
                continue  # shared gradients: all are lost at once
            knob_bank.move_knobs(row, range(self.replicas), scores=results)
            knob_bank.cycle += 1
            knob_bank.start_if_due(step, self._base_lrs(run, step))
            knob_bank.fan_out()

    def train(self) -> list[Ended]:
        ended = super().train()
        moved = [[knob.state.scale for knob in knob_bank.knobs] for knob_bank in self._steerings]
        return [end._replace(notes={"moved": m}) for end, m in zip(ended, moved, strict=True)]


class Paper(Steered):
    """The paper's preset: a spread of 1/9, its controller after the warm-up."""

    def steering_of(self, run: Run) -> KnobBank:
        groups, steps = self.bench.task.groups, self.bench.plan.steps
        return KnobBank(
            lr_knobs((LearningRate(),), groups, 1 / 9),
            num_replicas=self.replicas,
            design="permutation",
            sync_every=self.bench.sync_every,
            seed=0,
            controller=hdet.PaperController(warmup_steps=math.ceil(0.3 * steps)),
            total_steps=steps,
            one_cycle=OneCycleBounds([run.lr] * len(groups), [run.lr / 25e4] * len(groups)),
        )


class Tracked(Steered):
    """A tracker, which compares replicas by a probe at the mean of their last steps."""

    shared, relative = True, False

    def __init__(self, bench: Bench, runs: Sequence[Run], begin: int = 0) -> None:
        super().__init__(bench, runs, begin)
        self._tail = hdet.Probe(bench.task.probe).tail_steps(self.bench.sync_every)
        self._iterates = torch.zeros_like(self.fleet.weights)
        self._num_iterates = 0

    def steering_of(self, run: Run) -> KnobBank:
        knob = LearningRate(shared=self.shared)
        return KnobBank(
            lr_knobs((knob,), self.bench.task.groups, 1 / 9),
            num_replicas=self.replicas,
            design="orthogonal",
            sync_every=self.bench.sync_every,
            seed=0,
            controller=hdet.Tracker(relative=self.relative),
            total_steps=self.bench.plan.steps,
        )

    def after(self, step: int) -> None:
        steps = self.bench.plan.steps
        left = min(-step % self.bench.sync_every, steps - step)
        if left < self._tail:
            self._iterates += self.fleet.weights
            self._num_iterates += 1

    def scores(self) -> list[Any]:
        mean = self._iterates / self._num_iterates
        self._iterates, self._num_iterates = torch.zeros_like(mean), 0
        if not any(knob_bank.is_spread() for knob_bank in self._steerings):
            return [None] * len(self.runs)
        found = self.fleet.evaluate(self.bench.task.probe, weights=mean)
        rows: list[Any] = found.double().view(len(self.runs), self.replicas, -1).tolist()
        return rows


class ByGroup(Tracked):
    shared, relative = False, True


def by_group(bench: Bench, runs: Sequence[Run]) -> list[Ended]:
    """hdet with `knobs=[lr()]`: a scout, then one learning rate per group around what it found.

    All of a stack begin when the last has found something. There is no guard.
    """
    plans, _ = plan_by_search(bench, runs, by="probe")
    found = [Run(plan.peaks[0], plan.seed) for plan in plans]
    return ByGroup(bench, found, max(plan.begin for plan in plans)).train()
