"""A guard for every row, by the library's own watch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import hdet
from benchmarks.learning_rate.fleet import Fleet
from benchmarks.learning_rate.methods.bench import Bench, N, split
from benchmarks.learning_rate.methods.schedules import RowPlan, RowSchedules
from benchmarks.learning_rate.rules import Rule
from hdet.control.guard_monitor import GuardMonitor
from hdet.weights.gradient_watch import VANISHED_RATIO


class Means:
    """The mean loss of every row in its cycle, and the standard error, as the library has them."""

    def __init__(self, num: int, device: torch.device) -> None:
        self._sums = torch.zeros(num, dtype=torch.float64, device=device)
        self._jumps, self._before = torch.zeros_like(self._sums), torch.zeros_like(self._sums)
        self._counts = [0] * num

    def add(self, losses: Tensor) -> None:
        later = torch.tensor([count > 0 for count in self._counts], device=losses.device)
        self._sums += losses
        self._jumps += torch.where(later, (losses.double() - self._before).square(), 0.0)
        self._before = losses.double()
        self._counts = [count + 1 for count in self._counts]

    def end(self, rows: Sequence[int]) -> list[tuple[float, float | None]]:
        """Those of some rows, whose next cycle begins."""
        sums, jumps, results = self._sums.tolist(), self._jumps.tolist(), []
        for row in rows:
            num = self._counts[row]
            error = math.sqrt(jumps[row] / (2 * (num - 1) * num)) if num > 1 else None
            results.append((sums[row] / num, error))
            self._sums[row], self._jumps[row], self._counts[row] = 0.0, 0.0, 0
        return results


class RowGuards:
    """A guard for every row: hdet's own monitor, and the best weights, which it goes back to."""

    def __init__(self, guard: hdet.Guard) -> None:
        self._guard = guard
        self.stopped: set[int] = set()
        self.returns: list[int] = []

    def start(
        self,
        bench: Bench,
        fleet: Fleet,
        rule: Rule,
        plans: Sequence[RowPlan],
        schedules: RowSchedules,
    ) -> None:
        self._steps, self._sync_every = bench.plan.steps, bench.sync_every
        self._fleet, self._rule, self._legs, self._schedules = fleet, rule, plans, schedules
        self._monitors = [GuardMonitor(self._guard) for _ in plans]
        self._means = Means(len(plans), fleet.device)
        self._first: list[float] | None = None
        self._first_errors = _errors_of_first(bench, fleet, plans)
        self._first_norms = torch.zeros(0)
        self._highest = [0.0] * len(plans)
        """The highest learning rate of each row in its cycle, in units of its peak."""
        self.scales = torch.ones(len(plans), 1, dtype=fleet.weights.dtype, device=fleet.device)
        self.returns = [0] * len(plans)
        self._kept = [tensor.clone() for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        return [self._fleet.weights, *self._rule.states(), *self._fleet.buffers.values()]

    def _norms(self) -> Tensor:
        """The norm of each tensor's gradient in every row, [R, tensors]."""
        blocks = self._fleet.layout.blocks
        return torch.stack([self._fleet.gradients[:, block].norm(dim=1) for block in blocks], 1)

    def see(self, now: int, losses: Tensor) -> None:
        if self._first is None:
            self._first, self._first_norms = losses.tolist(), self._norms()
        self._means.add(losses)
        steps = [plan.begin + now + 1 for plan in self._legs]
        active = [r for r, step in enumerate(steps) if step <= self._steps]
        active = [r for r in active if r not in self.stopped]
        for row in active:
            lr = self._schedules.share(row, now) * float(self.scales[row])
            self._highest[row] = max(self._highest[row], lr)
        ends = [r for r in active if steps[r] % self._sync_every == 0 or steps[r] == self._steps]
        if not ends:
            return
        finite = self._fleet.weights.isfinite().all(1).tolist()
        known = self._first_norms > 0
        vanished = ((self._norms() < VANISHED_RATIO * self._first_norms) & known).double().mean(1)
        for row, (loss, error) in zip(ends, self._means.end(ends), strict=True):
            self._monitors[row].set_first_loss(self._first[row], self._first_errors[row])
            self._judge(row, now, loss if finite[row] else math.nan, error, float(vanished[row]))
            self._highest[row] = 0.0

    def _judge(self, row: int, now: int, loss: float, error: float | None, vanished: float) -> None:
        monitor, lr = self._monitors[row], self._highest[row]
        if math.isfinite(loss):
            reason = monitor.check_cycle(loss, error, lr=lr, vanished=vanished)
        else:
            reason = monitor.record_failure("not finite", lr=lr)
        if reason is None:
            self.scales[row] *= monitor.scale_correction
            if monitor.is_best:
                for kept, tensor in zip(self._kept, self._tensors(), strict=True):
                    kept[row] = tensor[row]
            return
        self.returns[row] += 1
        for kept, tensor in zip(self._kept, self._tensors(), strict=True):
            tensor[row] = kept[row]
        if monitor.is_out_of_retries:
            self.stopped.add(row)
            self.scales[row] = 0.0
        ahead = self._schedules.highest_after(row, now) * float(self.scales[row])
        self.scales[row] *= monitor.scale_factor(lr, ahead)


def _errors_of_first(bench: Bench, fleet: Fleet, plans: Sequence[RowPlan]) -> list[float]:
    """The error of the first loss of every row, by how its replicas would differ."""
    batch = bench.task.batches([plan.seed for plan in plans])
    steps = torch.tensor([plan.begin for plan in plans], device=fleet.device)
    parts = [part.unflatten(0, (-1, N)) for part in split(batch(steps), N)]
    losses = torch.stack(
        [
            fleet.evaluate(bench.task.loss, batch=[p[:, place] for p in parts], training=True)
            for place in range(N)
        ]
    )
    errors: list[float] = (losses.double().std(0) / math.sqrt(N)).tolist()
    return errors
