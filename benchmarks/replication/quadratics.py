"""Noise, batch size and averaging on quadratics, measured and beside their closed forms.

The loss of a direction is h w^2 / 2; a gradient is h w plus noise of variance 1 / batch. What is
measured is simulated in float64, with many directions side by side. `theory.md` derives the forms.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

CURVATURE, NUM_REPLICAS = 0.5, 8
DIRECTIONS = 40_000
STEP, CYCLE = 0.4, 10
"""eta and T."""
TEMPERATURE, SPREAD = 1e3, 1 / 9
"""A temperature far above all differences of losses, where the softmax is linear."""


class Compared(NamedTuple):
    """A number that was measured, and the closed form."""

    measured: float
    predicted: float


def run(what: str, value: float, seed: int) -> Compared:
    """One comparison.

    Args:
        what: A key of `QUESTIONS`.
        value: What varies in it.
        seed: Of the noise.
    """
    draw = torch.Generator().manual_seed(seed)
    return QUESTIONS[what][0](value, draw)


def signal_to_noise(batch: float, draw: torch.Generator) -> Compared:
    """Mean over deviation of the hypergradient of one cycle, for batches of a size.

    Predicted: alpha |L'| sqrt(N v) / s_L, with L' and s_L from a run without a spread.
    """
    start, noise = 3.0, 1 / math.sqrt(batch)
    multipliers = 1 + SPREAD * torch.linspace(-1, 1, NUM_REPLICAS, dtype=torch.float64)
    losses = measured_losses(multipliers, start, noise, draw)
    weights = torch.softmax(-losses / TEMPERATURE, 0)
    pulls = (weights * multipliers[:, None]).sum(0) - 1
    variance = (NUM_REPLICAS + 1) / (3 * (NUM_REPLICAS - 1))
    slope = (mean_loss(1 + 1e-3, start, noise) - mean_loss(1 - 1e-3, start, noise)) / 2e-3
    deviation = float(losses.std(1).mean())
    ratio = SPREAD * abs(slope) * math.sqrt(NUM_REPLICAS * variance) / deviation
    return Compared(abs(float(pulls.mean() / pulls.std())), ratio)


def measured_losses(
    multipliers: Tensor, start: float, noise: float, draw: torch.Generator
) -> Tensor:
    """The loss of each replica at the end of a cycle, on a batch of its own."""
    weights = torch.full((len(multipliers), DIRECTIONS), start, dtype=torch.float64)
    for _ in range(CYCLE):
        gradients = CURVATURE * weights + noise * normal(weights.shape, draw)
        weights -= STEP * multipliers[:, None] * gradients
    return CURVATURE * weights**2 / 2 + noise * normal(weights.shape, draw) * weights


def mean_loss(multiplier: float, start: float, noise: float) -> float:
    """The expected loss at the end of a cycle."""
    keeps = 1 - multiplier * STEP * CURVATURE
    spread = (multiplier * STEP * noise) ** 2 * (1 - keeps ** (2 * CYCLE)) / (1 - keeps**2)
    return CURVATURE / 2 * (start**2 * keeps ** (2 * CYCLE) + spread)


def best_multiplier(cycle: float, draw: torch.Generator) -> Compared:
    """Where the comparison of a run at rest is lowest, for a length of the cycle. Predicted: 1/2.

    With shared gradients, a replica ends at w_0 + rho (w_T - w_0).
    """
    begin = stationary(draw)
    end = begin.clone()
    for _ in range(int(cycle)):
        end -= STEP * (CURVATURE * end + normal(end.shape, draw))
    multipliers = torch.linspace(0, 2, 401, dtype=torch.float64)
    losses = [float(((begin + rho * (end - begin)) ** 2).mean()) for rho in multipliers]
    return Compared(float(multipliers[losses.index(min(losses))]), 0.5)


def averaged(cycle: float, draw: torch.Generator) -> Compared:
    """How far the mean of replicas is below the mean of their losses, for a length of the cycle.

    With local gradients from one point. Predicted: h / 2 (1 - 1/N) times the variance of a replica.
    """
    weights = torch.full((NUM_REPLICAS, DIRECTIONS), 1.0, dtype=torch.float64)
    for _ in range(int(cycle)):
        weights -= STEP * (CURVATURE * weights + normal(weights.shape, draw))
    gap = CURVATURE / 2 * float((weights**2).mean() - (weights.mean(0) ** 2).mean())
    keeps = 1 - STEP * CURVATURE
    variance = STEP**2 * (1 - keeps ** (2 * cycle)) / (1 - keeps**2)
    return Compared(gap, CURVATURE / 2 * (1 - 1 / NUM_REPLICAS) * variance)


def growth(step: float, draw: torch.Generator) -> Compared:
    """The growth of the mean over one step above the stable one. Predicted: that of plain training.

    With shared gradients; a factor above 1 diverges, whatever is averaged.
    """
    multipliers = 1 + SPREAD * torch.linspace(-1, 1, NUM_REPLICAS, dtype=torch.float64)
    weights = torch.ones(NUM_REPLICAS, dtype=torch.float64)
    gradient = CURVATURE * weights.mean()
    ended = (weights - step / CURVATURE * multipliers * gradient).mean()
    return Compared(abs(float(ended)), abs(1 - step))


def stationary(draw: torch.Generator) -> Tensor:
    keeps = 1 - STEP * CURVATURE
    return STEP / math.sqrt(1 - keeps**2) * normal((DIRECTIONS,), draw)


def normal(shape: torch.Size | tuple[int, ...], draw: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=torch.float64)


QUESTIONS = {
    "signal to noise, by batch": (signal_to_noise, (4, 16, 64, 256)),
    "best multiplier at rest, by cycle": (best_multiplier, (2, 10, 50)),
    "gain of averaging, by cycle": (averaged, (1, 5, 20, 100)),
    "growth of the mean, by step": (growth, (1.9, 2.1, 3.0)),
}
"""A question -> how it is answered, and for which values."""
