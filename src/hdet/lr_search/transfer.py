"""From short rounds of one replica to a whole run of all replicas.

Plain Python floats, no torch.
"""

import math
from typing import NamedTuple

from hdet.lr_search.constants import (
    CEILING_BELOW_DIVERGENCE,
    FLOOR_BELOW_DIVERGENCE,
    FLOOR_BELOW_DIVERGENCE_SGD,
    HALF_EFFECT_NOISE,
    MAX_GRADIENT_NOISE,
    MAX_HORIZON_POWER,
    MAX_PEAK_OVER_MEAN,
    MIN_LENGTH_RATIO,
    SGD_LIKE,
)


class GradientNorms(NamedTuple):
    """How far the gradients of replicas with equal weights agree.

    Attributes:
        alone: The mean squared norm of a replica's gradient.
        together: The squared norm of the mean gradient.
    """

    alone: float
    together: float

    def noise(self, num_replicas: int) -> float:
        """The variance of one replica's gradient, in units of the squared true gradient.

        >>> GradientNorms(alone=2.0, together=1.125).noise(8)
        1.0
        """
        variance = (self.alone - self.together) * num_replicas / (num_replicas - 1)
        signal = self.together - variance / num_replicas
        return min(variance / signal, MAX_GRADIENT_NOISE) if signal > 0 else MAX_GRADIENT_NOISE


class RoundChoice(NamedTuple):
    """The choice of rounds, and the steps of each round."""

    factor: float
    steps: int


def batch_scaling(
    rule: str, optimizer: str, num_replicas: int, noise: float | None = None
) -> float:
    """The factor by which a learning rate grows from the batch of one replica to that of all.

    The noisier the gradients, the more a larger batch lets the learning rate grow: the best one for
    a batch of size b goes with 1 / (1 + noise / b) (McCandlish et al., 1812.06162). For optimizers
    like Adam the batch itself accounts for the root of that. The other root corrects short rounds,
    which choose too low where gradients are noisy: nothing in them averages the noise. Without a
    known noise the factor is the root of N for Adam and N for SGD.

    >>> batch_scaling("auto", "AdamW", 16), batch_scaling("auto", "SGD", 16)
    (4.0, 16.0)
    >>> batch_scaling("none", "SGD", 16)
    1.0
    >>> round(batch_scaling("auto", "AdamW", 16, noise=1.0), 3)
    1.882
    """
    if rule == "auto" and noise is not None:
        return num_replicas * (1 + noise) / (num_replicas + noise)
    if rule == "auto":
        rule = "linear" if optimizer in SGD_LIKE else "sqrt"
    return {"sqrt": math.sqrt(num_replicas), "linear": float(num_replicas), "none": 1.0}[rule]


def extrapolate_to_horizon(
    coarse: RoundChoice, close: RoundChoice, full: int, noise: float | None = None
) -> float:
    """The choice that rounds of `full` steps would make, where the refinement had shorter ones.

    While weights have far to go, the best learning rate of k steps goes with about 1 / k: rounds of
    five steps choose far too high. The change of the choice from the sweeps to the longer rounds of
    the refinement is extrapolated. Noisy gradients lower the choice of longer rounds, too; a larger
    batch takes that part back, so it is left out.

    >>> extrapolate_to_horizon(RoundChoice(4.0, 6), RoundChoice(2.0, 12), full=24)
    1.0
    >>> extrapolate_to_horizon(RoundChoice(4.0, 6), RoundChoice(2.0, 12), full=12)
    2.0
    >>> extrapolate_to_horizon(RoundChoice(1.0, 6), RoundChoice(2.0, 12), 24)
    2.0
    >>> extrapolate_to_horizon(RoundChoice(4.0, 6), RoundChoice(2.0, 8), full=24)
    2.0
    """
    if not MIN_LENGTH_RATIO * coarse.steps <= close.steps < full or close.factor >= coarse.factor:
        return close.factor
    rate = math.log(coarse.factor / close.factor) / math.log(close.steps / coarse.steps)
    power = min(rate, MAX_HORIZON_POWER) / (1 + (noise or 0.0) / HALF_EFFECT_NOISE)
    return float(close.factor * (close.steps / full) ** power)


def lr_floor(rule: str, optimizer: str, divergence: float | None) -> float:
    """The learning rate that is needlessly low for the full batch, by where scores explode.

    Rounds of a few steps prefer what gains at once. With noisy gradients, or with normalisation,
    a learning rate that pays in a whole run may lose in them. The distance of the best learning
    rate to the explosion differs less between tasks (benchmarks/results/explosion.json).

    >>> lr_floor("auto", "AdamW", 180.0), lr_floor("auto", "SGD", 40.0)
    (2.0, 2.0)
    >>> lr_floor("auto", "Adam", None)
    0.0
    """
    if divergence is None or rule == "none":
        return 0.0
    return divergence / (
        FLOOR_BELOW_DIVERGENCE_SGD if optimizer in SGD_LIKE else FLOOR_BELOW_DIVERGENCE
    )


def lr_ceiling(optimizer: str, divergence: float | None) -> float:
    """The mean learning rate that is too high for a run, by where scores explode.

    >>> lr_ceiling("AdamW", 2.0), lr_ceiling("SGD", 2.0), lr_ceiling("AdamW", None)
    (0.125, 2.0, inf)
    """
    if divergence is None:
        return math.inf
    return divergence if optimizer in SGD_LIKE else divergence / CEILING_BELOW_DIVERGENCE


def peak_over_mean(mean_share: float) -> float:
    """The peak of a schedule over its mean, from its mean in units of the given learning rate.

    Rounds use a constant learning rate. The gain of a run depends on the mean of its learning rates
    much more than on their peak. A schedule that rises above the given learning rate may have a
    mean above it: then the result is below 1.

    >>> peak_over_mean(0.5), peak_over_mean(1.0), peak_over_mean(0.01), peak_over_mean(4.0)
    (2.0, 1.0, 2.5, 0.25)
    """
    return 1.0 if not mean_share else min(1 / mean_share, MAX_PEAK_OVER_MEAN)
