"""Train rows to their end, and measure their weights and a running mean of them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.learning_rate.fleet import Fleet
from benchmarks.learning_rate.methods.bench import Bench, Ended
from benchmarks.learning_rate.methods.guards import RowGuards
from benchmarks.learning_rate.methods.schedules import RowPlan, RowSchedules
from benchmarks.learning_rate.rules import Rule
from benchmarks.zoo.tasks import Batches


class Average:
    """A running mean of weights and buffers over about a twentieth of the run."""

    def __init__(self, fleet: Fleet, steps: int) -> None:
        self._fleet, self._reach = fleet, max(0.05 * steps, 1.0)
        self.weights = fleet.weights.clone()
        self.buffers = {name: buffer.clone() for name, buffer in fleet.buffers.items()}
        self._done = 0

    def add(self, active: Tensor) -> None:
        self._done += 1
        by = max(1 / self._reach, 9 / (9 + self._done)) * active.to(self.weights)
        self.weights.lerp_(self._fleet.weights, by[:, None])
        for name, mine in self.buffers.items():
            theirs = self._fleet.buffers[name]
            if mine.is_floating_point():
                mine.lerp_(theirs, by.view(-1, *[1] * (mine.dim() - 1)))
            else:
                mine.copy_(theirs)


def measured(bench: Bench, fleet: Fleet, weights: Tensor) -> list[dict[str, float]]:
    answers = fleet.evaluate(bench.task.judge, weights=weights)
    return [bench.task.measures(answer) for answer in answers]


def both(
    bench: Bench, fleet: Fleet, live: Tensor, average: Average
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """What live and averaged weights come to."""
    found = measured(bench, fleet, live)
    kept, fleet.buffers = fleet.buffers, average.buffers
    pairs = list(zip(found, measured(bench, fleet, average.weights), strict=True))
    fleet.buffers = kept
    return pairs


def train_rows(
    bench: Bench,
    plans: Sequence[RowPlan],
    *,
    rule: str | None = None,
    schedule: str = "one cycle",
    watch: RowGuards | None = None,
    start: Callable[[Fleet, Rule], None] | None = None,
    after: Callable[[int, Fleet], None] | None = None,
) -> list[Ended]:
    """Train rows to their end."""
    fleet = bench.fleet([plan.seed for plan in plans])
    mover = bench.rule(fleet, rule)
    if start is not None:
        start(fleet, mover)
    schedules = RowSchedules(plans, schedule, bench.plan.steps, mover)
    batch = bench.task.batches([plan.seed for plan in plans])
    average = Average(fleet, bench.plan.steps)
    if watch is not None:
        watch.start(bench, fleet, mover, plans, schedules)
    for now in range(bench.plan.steps):
        fleet.hold(schedules.finished[now])
        losses = fleet.losses(*batch(schedules.steps[now]))
        lrs = schedules.lrs[now] if watch is None else schedules.lrs[now] * watch.scales
        mover.step(lrs, schedules.momenta[now])
        if after is not None:
            after(now + 1, fleet)
        if watch is not None:
            watch.see(now, losses)
        average.add(schedules.active[now])
    refresh_statistics(bench, fleet, mover, batch)
    pairs = both(bench, fleet, mover.answer(), average)
    peaks = schedules.lrs.amax((0, 2)).tolist()
    return [Ended(live, mean, peak) for (live, mean), peak in zip(pairs, peaks, strict=True)]


def refresh_statistics(bench: Bench, fleet: Fleet, rule: Rule, batch: Batches) -> None:
    """BatchNorm's running statistics, where other weights are evaluated than those that trained."""
    if rule.answer() is fleet.weights or not fleet.buffers:
        return
    kept, steps = fleet.weights.clone(), torch.zeros(len(fleet), dtype=torch.long)
    fleet.weights.copy_(rule.answer())
    for step in range(50):
        fleet.losses(*batch((steps + step).to(fleet.device)))
    fleet.weights.copy_(kept)
