"""Methods with N rows for each run: Local SGD, DiLoCo and population-based training."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import hdet
from benchmarks.learning_rate.methods.bench import Bench, Ended, Run, split
from benchmarks.learning_rate.methods.rows import Average, both
from benchmarks.learning_rate.methods.schedules import shape
from benchmarks.learning_rate.methods.single import outer_step


class Population:
    """N rows for each run, which end a cycle together."""

    shares_gradients = False
    schedule = "one cycle"
    begin = 0
    """The steps that were spent otherwise."""

    def __init__(self, bench: Bench, runs: Sequence[Run]) -> None:
        self.bench, self.runs, self.replicas = bench, runs, bench.replicas
        self.fleet = bench.fleet([run.seed for run in runs for _ in range(self.replicas)])
        self.rule = bench.rule(self.fleet)
        self.wave = shape(self.schedule, bench.plan.steps, self.rule.cycles_momentum)
        peaks = torch.tensor([run.lr for run in runs], dtype=torch.float64)
        peaks = peaks.repeat_interleave(self.replicas)[:, None]
        self.peaks = peaks.expand(-1, len(bench.task.groups)).to(self.fleet.weights).clone()

    def place(self, step: int) -> int:
        """Where the schedule is."""
        return step

    def lrs(self, step: int) -> Tensor:
        return self.peaks * self.wave.lrs[step]

    def end_cycle(self, step: int, losses: Tensor) -> None:
        """At the end of a cycle, with the mean loss of every replica, [runs, N]."""

    def after(self, step: int) -> None:
        """After every step."""

    def train(self) -> list[Ended]:
        bench, fleet, count = self.bench, self.fleet, len(self.runs)
        batch = bench.task.batches([run.seed for run in self.runs])
        average, active = Average(fleet, bench.plan.steps), torch.ones(len(fleet))
        steps = torch.zeros(count, dtype=torch.long, device=fleet.device)
        sums, num = torch.zeros(len(fleet), device=fleet.device, dtype=torch.float64), 0
        highest = torch.zeros_like(self.peaks[:, 0])
        for now in range(self.begin, bench.plan.steps):
            sums += fleet.losses(*split(batch(steps + now), self.replicas))
            num += 1
            if self.shares_gradients:
                shared = fleet.gradients.view(count, self.replicas, -1).mean(1, keepdim=True)
                fleet.gradients.view(count, self.replicas, -1).copy_(
                    shared.expand(-1, self.replicas, -1)
                )
            lrs = self.lrs(now)
            highest = torch.maximum(highest, lrs.amax(1))
            momenta = torch.full_like(lrs[:, :1], self.wave.momenta[self.place(now)])
            self.rule.step(lrs, momenta)
            self.after(now + 1)
            average.add(active.to(fleet.device))
            if (now + 1) % self.bench.sync_every == 0 or now + 1 == bench.plan.steps:
                self.end_cycle(now + 1, (sums / num).view(count, self.replicas))
                self.last = (sums / num).view(count, self.replicas)
                sums, num = torch.zeros_like(sums), 0
        pairs = both(bench, fleet, fleet.weights, average)
        chosen = [run * self.replicas + place for run, place in enumerate(self.representatives())]
        return [Ended(*pairs[row], lr=float(highest[row])) for row in chosen]

    def representatives(self) -> list[int]:
        """The replica that speaks for each run."""
        return [0] * len(self.runs)

    def mean(self, tensor: Tensor) -> Tensor:
        """Over the replicas of each run, [runs, 1, ...]."""
        return tensor.view(len(self.runs), self.replicas, *tensor.shape[1:]).mean(1, keepdim=True)

    def spread(self, tensor: Tensor, mean: Tensor) -> None:
        tensor.view(len(self.runs), self.replicas, *tensor.shape[1:]).copy_(
            mean.expand(-1, self.replicas, *mean.shape[2:])
        )

    def average_buffers(self) -> None:
        for buffer in self.fleet.buffers.values():
            if buffer.is_floating_point():
                self.spread(buffer, self.mean(buffer))


class LocalSGD(Population):
    """Weights and optimizer states are averaged at the end of every cycle."""

    def end_cycle(self, step: int, losses: Tensor) -> None:
        for tensor in (self.fleet.weights, *self.rule.states()):
            self.spread(tensor, self.mean(tensor))
        self.average_buffers()


class DiLoCo(Population):
    """An outer step on the mean of what the replicas have changed; optimizer states are kept."""

    schedule = "warm-up and cosine"

    def __init__(self, bench: Bench, runs: Sequence[Run]) -> None:
        super().__init__(bench, runs)
        self._slow = self.mean(self.fleet.weights)
        self._velocity = torch.zeros_like(self._slow)

    def end_cycle(self, step: int, losses: Tensor) -> None:
        outer_step(self._slow, self._velocity, self.mean(self.fleet.weights))
        self.spread(self.fleet.weights, self._slow)
        self.average_buffers()


class PBT(Population):
    """The worst quarter takes over from the best, and explores; as Ray's defaults have it.

    Its members begin over the same four decades as a scout.
    """

    def __init__(self, bench: Bench, runs: Sequence[Run]) -> None:
        super().__init__(bench, runs)
        decades = hdet.Scout().decades
        span = 10 ** (decades * (torch.arange(self.replicas) / (self.replicas - 1) - 0.5)).to(
            self.peaks
        )
        self._low, self._high = self.peaks * span[0], self.peaks * span[-1]
        self.peaks = self.peaks * span.repeat(len(runs))[:, None]
        self._draws = [torch.Generator().manual_seed(run.seed) for run in runs]

    def end_cycle(self, step: int, losses: Tensor) -> None:
        if step >= self.bench.plan.steps:
            return
        for run, draw in enumerate(self._draws):
            row = losses[run].nan_to_num(math.inf)
            order = (run * self.replicas + row.argsort()).tolist()
            for worst, best in zip(
                order[-self.replicas // 4 :], order[: self.replicas // 4], strict=True
            ):
                self._exploit(worst, best, draw)

    def _exploit(self, worst: int, best: int, draw: torch.Generator) -> None:
        tensors = [self.fleet.weights, *self.rule.states(), *self.fleet.buffers.values()]
        for tensor in tensors:
            tensor[worst] = tensor[best]
        chance, way = torch.rand(2, generator=draw).tolist()
        if chance < 0.25:
            low, high = float(self._low[worst, 0]), float(self._high[worst, 0])
            self.peaks[worst] = low * (high / low) ** way
        else:
            self.peaks[worst] = self.peaks[best] * (1.2 if way < 0.5 else 0.8)

    def representatives(self) -> list[int]:
        best: list[int] = self.last.nan_to_num(math.inf).argmin(1).tolist()
        return best


def population(kind: type[Population]) -> Callable[[Bench, Sequence[Run]], list[Ended]]:
    return lambda bench, runs: kind(bench, runs).train()
