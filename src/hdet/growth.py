"""From short rounds of one replica to a run of all: how far a learning rate may grow.

Plain Python floats, no torch.
"""

import math
from typing import NamedTuple

PLAIN = ("SGD", "ASGD")
"""Optimizers whose steps are as long as the gradients; others are like Adam."""
NOISIEST = 1e6
"""Beyond it gradients are nothing but noise."""
FAR, FAR_SGD = 90.0, 20.0
"""A constant learning rate so many times below where scores explode is needlessly low."""
NEAR = 16.0
"""A constant learning rate was never the best that is less than so many times below it. For SGD
nothing of the kind is known (docs/scout.md)."""
CLEARLY = 1.5
"""Rounds that are less than so many times longer than others say nothing about longer ones: their
choices differ by where the points of a sweep happen to lie."""
FASTEST = 1.0
"""What gains most in k steps goes with 1 / k at most: then it is how far one comes that counts."""
CALM = 2.0
"""At this noise of gradients half of what longer rounds lower is put down to the noise."""
STEEPEST = 2.5
"""A schedule that peaks further above its mean is taken for one that peaks so far."""


class Agreement(NamedTuple):
    """How far the gradients of replicas agree that stand at the same place."""

    alone: float
    """The mean squared norm of a replica's gradient."""
    together: float
    """The squared norm of their mean."""

    def noise(self, num_replicas: int) -> float:
        """The variance of one replica's gradient, in units of the squared true gradient.

        >>> Agreement(alone=2.0, together=1.125).noise(8)
        1.0
        """
        variance = (self.alone - self.together) * num_replicas / (num_replicas - 1)
        signal = self.together - variance / num_replicas
        return min(variance / signal, NOISIEST) if signal > 0 else NOISIEST


class Tried(NamedTuple):
    """What rounds have chosen."""

    factor: float
    steps: int
    """Of each of these rounds."""


def grown(rule: str, optimizer: str, num_replicas: int, noise: float | None = None) -> float:
    """By how much a learning rate grows with the batch of all replicas.

    A larger batch lets it grow as far as gradients are noise: the best one for a batch of size b
    goes with 1 / (1 + noise / b) (McCandlish et al., 1812.06162). For optimizers like Adam the
    batch itself accounts for the root of that alone; but short rounds are too timid where
    gradients are noise, since nothing in them averages it out, and the other root makes up for it
    (docs/scout.md). If the noise is not known, a root for Adam and all of it for SGD.

    >>> grown("auto", "AdamW", 16), grown("auto", "SGD", 16), grown("none", "SGD", 16)
    (4.0, 16.0, 1.0)
    >>> round(grown("auto", "AdamW", 16, noise=1.0), 3)
    1.882
    """
    if rule == "auto" and noise is not None:
        return num_replicas * (1 + noise) / (num_replicas + noise)
    if rule == "auto":
        rule = "linear" if optimizer in PLAIN else "sqrt"
    return {"sqrt": math.sqrt(num_replicas), "linear": float(num_replicas), "none": 1.0}[rule]


def longer(coarse: Tried, close: Tried, full: int, noise: float | None = None) -> float:
    """What rounds of `full` steps would choose, where close ones had to be shorter.

    While weights have far to go, what gains most in k steps is about 1 / k: rounds of five steps
    choose far more than a run can bear. How the choice went down from the rounds over the whole
    range to the longer ones around it says how it would go on. Where gradients are noise, longer
    rounds choose less for that reason too, which a larger batch takes back.

    >>> longer(Tried(4.0, 6), Tried(2.0, 12), full=24)
    1.0
    >>> longer(Tried(4.0, 6), Tried(2.0, 12), full=12), longer(Tried(1.0, 6), Tried(2.0, 12), 24)
    (2.0, 2.0)
    >>> longer(Tried(4.0, 6), Tried(2.0, 8), full=24)
    2.0
    """
    if not CLEARLY * coarse.steps <= close.steps < full or close.factor >= coarse.factor:
        return close.factor
    rate = math.log(coarse.factor / close.factor) / math.log(close.steps / coarse.steps)
    power = min(rate, FASTEST) / (1 + (noise or 0.0) / CALM)
    return float(close.factor * (close.steps / full) ** power)


def least(rule: str, optimizer: str, explosion: float | None) -> float:
    """What is needlessly low for the batch of all replicas, by where scores explode.

    Rounds of a few steps prefer what gains at once; where gradients are noise, or normalisation
    makes up for steps that are too long, what pays in the end may lose ground in them. How far
    below an explosion the best learning rate lies differs less (docs/scout.md).

    >>> least("auto", "AdamW", 180.0), least("auto", "SGD", 40.0), least("auto", "Adam", None)
    (2.0, 2.0, 0.0)
    """
    if explosion is None or rule == "none":
        return 0.0
    return explosion / (FAR_SGD if optimizer in PLAIN else FAR)


def most(optimizer: str, explosion: float | None) -> float:
    """What is too high for the mean of a run's learning rates, by where scores explode.

    >>> most("AdamW", 2.0), most("SGD", 2.0), most("AdamW", None)
    (0.125, 2.0, inf)
    """
    if explosion is None:
        return math.inf
    return explosion if optimizer in PLAIN else explosion / NEAR


def peak_of(mean_share: float) -> float:
    """How far a schedule peaks above its mean: rounds are made at a constant learning rate.

    What a run gains depends on the mean of its learning rates much more than on their peak, as
    long as it comes down in the end. One that rises above the learning rate that was given has a
    mean above it, and must be lowered.

    >>> peak_of(0.5), peak_of(1.0), peak_of(0.01), peak_of(4.0)
    (2.0, 1.0, 2.5, 0.25)
    """
    return 1.0 if not mean_share else min(1 / mean_share, STEEPEST)
