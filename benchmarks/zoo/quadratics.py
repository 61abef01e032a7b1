"""Momentum and learning rates: quadratics whose optimum moves at every cycle."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import hdet
from benchmarks.zoo.problem import Batch, Task, generator


class Quadratic(nn.Module):
    """0.5 sum_i h_i (w_i - target_i)^2, with noise in the gradient."""

    def __init__(self, curvatures: Tensor) -> None:
        super().__init__()
        self.curvatures: Tensor
        self.weight = nn.Parameter(torch.zeros(len(curvatures)))
        self.register_buffer("curvatures", curvatures)

    def forward(self, target: Tensor, noise: Tensor) -> Tensor:
        gap = self.weight - target
        return (0.5 * self.curvatures * gap * gap + noise * self.weight).mean()


class Moving:
    """A target that jumps at the start of every cycle, the same for all replicas."""

    def __init__(self, seed: int, size: int, sync_every: int, noise: float) -> None:
        self._seed, self._size, self._every, self._noise = seed, size, sync_every, noise

    def target(self, cycle: int) -> Tensor:
        return torch.randn(self._size, generator=generator(self._seed * 10_007 + cycle))

    def batch(self, step: int, num: int) -> Batch:
        draw = generator(self._seed * 1_000_003 + step + 1)
        noise = self._noise * torch.randn(self._size, generator=draw)
        return self.target(step // self._every).repeat(num), noise.repeat(num)


QUADRATIC_CYCLE = 40
RATE = 1.0
MOMENTUM_NOISE = 0.01


def momentum_best(_: int) -> dict[str, float]:
    """The momentum with the least expected loss after a cycle.

    From the recursion of (gap, velocity) in each direction: its mean, and its covariance.
    """
    h = _curvatures().double()
    betas = torch.linspace(0.01, 0.995, 2000, dtype=torch.float64)[:, None]
    gap = torch.full((len(betas), len(h)), 2.0**0.5, dtype=torch.float64)
    velocity = gg = gv = vv = torch.zeros_like(gap)
    for _step in range(QUADRATIC_CYCLE):
        velocity = betas * velocity + h * gap
        gap = gap - RATE * velocity
        # v' = beta v + h g + noise, g' = g - rate v'
        new = betas**2 * vv + 2 * betas * h * gv + h**2 * gg + MOMENTUM_NOISE**2
        cross = betas * gv + h * gg
        vv, gv, gg = new, cross - RATE * new, gg - 2 * RATE * cross + RATE**2 * new
    return {"momentum": float(betas[(h * (gap.square() + gg)).mean(1).argmin()])}


def _curvatures(size: int = 256) -> Tensor:
    return torch.logspace(math.log10(0.02), math.log10(1.0), size)


def quadratic_task(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    knobs: list[Any],
    moving: Moving,
    **more: Any,
) -> Task:
    cycle = [0]

    def loss(model: Any, target: Tensor, noise: Tensor) -> Tensor:
        return model(target, noise)

    def batch(step: int, num: int) -> Batch:
        cycle[0] = step // QUADRATIC_CYCLE
        return moving.batch(step, num)

    def score(model: Any) -> Tensor:
        target = moving.target(cycle[0])
        return model(target, torch.zeros_like(target))

    task = Task(
        model, optimizer, knobs, loss, batch, score, lambda model: float(score(model)), **more
    )
    task.sync_every, task.judged_cycles = QUADRATIC_CYCLE, 6
    return task


def momentum(seed: int, starts: Mapping[str, float]) -> Task:
    curvatures = _curvatures()
    model = Quadratic(curvatures)
    # The loss is a mean: the learning rate is that of the sum.
    rate = RATE * len(curvatures)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=starts["momentum"])
    knobs = [hdet.momentum(bounds=(0.01, 0.995))]
    moving = Moving(seed, len(curvatures), QUADRATIC_CYCLE, MOMENTUM_NOISE)
    return quadratic_task(model, optimizer, knobs, moving, starts=dict(starts))


GROUPS = {"a": 0.25, "b": 0.5, "c": 1.0, "d": 2.0}
GRADIENT_NOISE = 0.2


def rates_best(_: int) -> dict[str, float]:
    """eta with the least 2 c^T + eta^2 s^2 (1 - c^T) / (1 - c), c = (1 - eta h)^2."""
    return {f"lr/{name}": rate_best(curvature) for name, curvature in GROUPS.items()}


def rate_best(curvature: float) -> float:
    rates = torch.logspace(-4, math.log10(1.9 / curvature), 8000, dtype=torch.float64)
    contraction = (1 - rates * curvature) ** 2
    left = contraction**QUADRATIC_CYCLE
    # A gap between two targets has twice the variance of one.
    loss = 2 * left + rates**2 * GRADIENT_NOISE**2 * (1 - left) / (1 - contraction)
    return float(rates[loss.argmin()])


class Groups(nn.Module):
    """A quadratic of several groups, each with one curvature."""

    def __init__(self, size: int = 128) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {name: Quadratic(torch.full((size,), h)) for name, h in GROUPS.items()}
        )

    def forward(self, target: Tensor, noise: Tensor) -> Tensor:
        parts = list(self.parts.values())
        pieces = zip(parts, target.chunk(len(parts)), noise.chunk(len(parts)), strict=True)
        return torch.stack([part(*piece) for part, *piece in pieces]).sum()


def rates(seed: int, starts: Mapping[str, float]) -> Task:
    model = Groups()
    size = 128
    groups = [
        {"params": list(part.parameters()), "name": name, "lr": size * starts[f"lr/{name}"]}
        for name, part in model.parts.items()
    ]
    moving = Moving(seed, size * len(GROUPS), QUADRATIC_CYCLE, GRADIENT_NOISE)
    knobs = [hdet.lr(spread=0.5)]
    return quadratic_task(model, torch.optim.SGD(groups), knobs, moving, starts=dict(starts))
