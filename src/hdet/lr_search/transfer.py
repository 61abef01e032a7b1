"""From short rounds of one replica to a run of all: how far a learning rate may grow.

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
    """How far the gradients of replicas agree that stand at the same place."""

    alone: float
    """The mean squared norm of a replica's gradient."""
    together: float
    """The squared norm of their mean."""

    def noise(self, num_replicas: int) -> float:
        """The variance of one replica's gradient, in units of the squared true gradient.

        >>> GradientNorms(alone=2.0, together=1.125).noise(8)
        1.0
        """
        variance = (self.alone - self.together) * num_replicas / (num_replicas - 1)
        signal = self.together - variance / num_replicas
        return min(variance / signal, MAX_GRADIENT_NOISE) if signal > 0 else MAX_GRADIENT_NOISE


class RoundChoice(NamedTuple):
    """What rounds have chosen."""

    factor: float
    steps: int
    """Of each of these rounds."""


def batch_scaling(
    rule: str, optimizer: str, num_replicas: int, noise: float | None = None
) -> float:
    """By how much a learning rate grows with the batch of all replicas.

    A larger batch lets it grow as far as gradients are noise: the best one for a batch of size b
    goes with 1 / (1 + noise / b) (McCandlish et al., 1812.06162). For optimizers like Adam the
    batch itself accounts for the root of that alone; but short rounds are too timid where
    gradients are noise, since nothing in them averages it out, and the other root makes up for it
    (docs/scout.md). If the noise is not known, a root for Adam and all of it for SGD.

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
    """What rounds of `full` steps would choose, where close ones had to be shorter.

    While weights have far to go, what gains most in k steps is about 1 / k: rounds of five steps
    choose far more than a run can bear. How the choice went down from the rounds over the whole
    range to the longer ones around it says how it would go on. Where gradients are noise, longer
    rounds choose less for that reason too, which a larger batch takes back.

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
    """What is needlessly low for the batch of all replicas, by where scores explode.

    Rounds of a few steps prefer what gains at once; where gradients are noise, or normalisation
    makes up for steps that are too long, what pays in the end may lose ground in them. How far
    below an explosion the best learning rate lies differs less (docs/scout.md).

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
    """What is too high for the mean of a run's learning rates, by where scores explode.

    >>> lr_ceiling("AdamW", 2.0), lr_ceiling("SGD", 2.0), lr_ceiling("AdamW", None)
    (0.125, 2.0, inf)
    """
    if divergence is None:
        return math.inf
    return divergence if optimizer in SGD_LIKE else divergence / CEILING_BELOW_DIVERGENCE


def peak_over_mean(mean_share: float) -> float:
    """How far a schedule peaks above its mean: rounds are made at a constant learning rate.

    What a run gains depends on the mean of its learning rates much more than on their peak, as
    long as it comes down in the end. One that rises above the learning rate that was given has a
    mean above it, and must be lowered.

    >>> peak_over_mean(0.5), peak_over_mean(1.0), peak_over_mean(0.01), peak_over_mean(4.0)
    (2.0, 1.0, 2.5, 0.25)
    """
    return 1.0 if not mean_share else min(1 / mean_share, MAX_PEAK_OVER_MEAN)
