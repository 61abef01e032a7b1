"""A guard for every row, by the library's own watch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import hdet
from benchmarks.learning_rate.fleet import Fleet
from benchmarks.learning_rate.methods.bench import Bench
from benchmarks.learning_rate.methods.schedules import RowPlan
from benchmarks.learning_rate.rules import Rule
from hdet.control.guard import GuardMonitor


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
    """A guard for every row: hdet's own watch, and the weights it goes back to."""

    def __init__(self, guard: hdet.Guard) -> None:
        self._guard = guard
        self.stopped: set[int] = set()
        self.returns: list[int] = []

    def start(self, bench: Bench, fleet: Fleet, rule: Rule, plans: Sequence[RowPlan]) -> None:
        self._steps, self._sync_every = bench.plan.steps, bench.sync_every
        self._fleet, self._rule, self._legs = fleet, rule, plans
        self._watches = [GuardMonitor(self._guard) for _ in plans]
        self._means = Means(len(plans), fleet.device)
        self._first: list[float] | None = None
        self.scales = torch.ones(len(plans), 1, dtype=fleet.weights.dtype, device=fleet.device)
        self.returns = [0] * len(plans)
        self._kept = [tensor.clone() for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        return [self._fleet.weights, *self._rule.states(), *self._fleet.buffers.values()]

    def see(self, now: int, losses: Tensor) -> None:
        if self._first is None:
            self._first = losses.tolist()
        self._means.add(losses)
        steps = [plan.begin + now + 1 for plan in self._legs]
        ends = [
            row
            for row, step in enumerate(steps)
            if (step % self._sync_every == 0 or step == self._steps) and step <= self._steps
            if row not in self.stopped
        ]
        if not ends:
            return
        finite = self._fleet.weights.isfinite().all(1).tolist()
        for row, (loss, error) in zip(ends, self._means.end(ends), strict=True):
            self._judge(row, loss, error, finite[row])

    def _judge(self, row: int, loss: float, error: float | None, finite: bool) -> None:
        watch = self._watches[row]
        assert self._first is not None
        watch.set_first_loss(self._first[row])
        sound = finite and math.isfinite(loss)
        reason = watch.check_cycle(loss, error) if sound else watch.record_failure("not finite")
        if reason is None:
            self.scales[row] *= watch.scale_correction
            for kept, tensor in zip(self._kept, self._tensors(), strict=True):
                kept[row] = tensor[row]
            return
        self.returns[row] += 1
        for kept, tensor in zip(self._kept, self._tensors(), strict=True):
            tensor[row] = kept[row]
        if watch.is_out_of_retries:
            self.stopped.add(row)
            self.scales[row] = 0.0
        self.scales[row] *= watch.scale_factor()
