"""The decision of a learning-rate search: from observations to a learning rate, and how sure.

`estimate` is a pure function. The library and the benchmarks call the same one.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from hdet.lr_search.constants import (
    CAUTION,
    GRID_ERRORS,
    GRID_MARGIN,
    GRID_STEP,
    MARGIN_TO_DIVERGENCE,
    PRIOR_ERROR,
    PRIOR_TAIL,
    UNKNOWN_ERROR,
)
from hdet.lr_search.evidence import (
    Belief,
    belief_of_divergence,
    belief_of_gains,
    divergence_of,
)
from hdet.lr_search.observations import Observations
from hdet.lr_search.prior import Prior
from hdet.lr_search.reasons import Reason, describe


class Estimate(NamedTuple):
    """The learning rate that a run starts with, how sure it is, and why.

    Attributes:
        factor: The learning rate, in units of the given one.
        reason: What decided.
        within: The factor that the evidence leaves open, as if it knew every task.
        shares: Evidence (`prior`, `gains`, `divergence`) -> its share in the decision.
        declined: The factor that was found where the given learning rate is kept.
    """

    factor: float
    reason: Reason
    within: float = math.inf
    shares: dict[str, float] = {}  # noqa: RUF012 - never changed
    declined: float | None = None

    @property
    def text(self) -> str:
        """The reason, for a record."""
        return describe([self.reason], declined=self.declined)

    @property
    def stated_within(self) -> float:
        """The best learning rate probably lies within this factor: what people are told.

        Rounds see one task, and not how the best learning rates of tasks differ. That is the error
        of a prior. Without this floor, of the estimates that seem surer one in five was right.
        """
        return max(self.within, 10**PRIOR_ERROR)

    @property
    def is_guess(self) -> bool:
        """Whether what is usual supports it more than what was seen."""
        return self.shares.get("prior", 1.0) > 0.5


class SearchContext(NamedTuple):
    """What an estimate depends on beside the observations.

    Attributes:
        prior: The usual mean learning rate, relative to the given one; None if not known.
        peak: The peak of the schedule over its mean.
        highest: The highest learning rate of the schedule over the given one.
        bounds: The lowest and the highest peak, in units of the given learning rate.
    """

    prior: Prior | None = None
    peak: float = 1.0
    highest: float = 1.0
    bounds: tuple[float, float] = (0.0, math.inf)


def estimate(observations: Observations, context: SearchContext) -> Estimate:
    """The learning rate that a run starts with.

    Three pieces of evidence are combined, each with its error: which learning rates are usual,
    where short rounds gain most, and where they explode. Whatever they say, the run starts below
    half of the lowest learning rate that exploded, and within the bounds.
    """
    found = _unbounded(observations, context)
    low, high = context.bounds
    if low <= found.factor <= high:
        return found
    factor = min(max(found.factor, low), high)
    return found._replace(factor=factor, reason=Reason.WITHIN_BOUNDS)


def _unbounded(observations: Observations, context: SearchContext) -> Estimate:
    points, start = observations.points, observations.reference
    if not points:
        return Estimate(1.0, Reason.NOTHING_FOUND)
    divergence = divergence_of(points, start)
    beliefs = {
        "gains": belief_of_gains(points, start, context.prior.decades if context.prior else 0.0),
        "divergence": belief_of_divergence(divergence),
    }
    seen = {name: belief for name, belief in beliefs.items() if belief is not None}
    mean, error = _combined(list(seen.values()), context.prior)
    shares = _shares(seen, context.prior, mean)
    is_mostly_prior = shares["prior"] > 0.5
    if is_mostly_prior and context.prior is None:
        return Estimate(1.0, Reason.NOTHING_FOUND)
    factor = 10 ** (mean - CAUTION * error) * context.peak
    reason = Reason.MOSTLY_USUAL if is_mostly_prior else Reason.FOUND
    limit = math.inf
    if divergence is not None:
        limit = divergence / MARGIN_TO_DIVERGENCE / max(context.highest, 1.0)
    if factor > limit:
        factor, reason = limit, Reason.BELOW_DIVERGENCE
    return Estimate(factor, reason, 10**error, shares)


def _combined(beliefs: Sequence[Belief], prior: Prior | None) -> tuple[float, float]:
    """Mean and error of all evidence together.

    The prior has heavy tails: it gives way where what was seen contradicts it.
    """
    usual = Belief(0.0, UNKNOWN_ERROR) if prior is None else Belief(prior.mean, prior.error)
    means, errors = zip(usual, *beliefs, strict=True)
    margin = max(GRID_MARGIN, GRID_ERRORS * min(errors))
    low, high = min(means) - margin, max(means) + margin
    num = math.ceil((high - low) / GRID_STEP)
    grid = [low + GRID_STEP * place for place in range(num + 1)]
    logs = [sum(_log_density(x, belief) for belief in beliefs) + _log_prior(x, prior) for x in grid]
    highest = max(logs)
    weights = [math.exp(log - highest) for log in logs]
    total = sum(weights)
    mean = sum(w * x for w, x in zip(weights, grid, strict=True)) / total
    variance = sum(w * (x - mean) ** 2 for w, x in zip(weights, grid, strict=True)) / total
    return mean, math.sqrt(variance)


def _log_density(x: float, belief: Belief) -> float:
    return -0.5 * ((x - belief.mean) / belief.error) ** 2


def _log_prior(x: float, prior: Prior | None) -> float:
    """A Student density, or next to nothing."""
    if prior is None:
        return -0.5 * (x / UNKNOWN_ERROR) ** 2
    square = ((x - prior.mean) / prior.error) ** 2
    return -0.5 * (PRIOR_TAIL + 1) * math.log1p(square / PRIOR_TAIL)


def _shares(seen: dict[str, Belief], prior: Prior | None, mean: float) -> dict[str, float]:
    """The share of each piece of evidence: its precision among all of them."""
    weights = {"prior": 1 / UNKNOWN_ERROR**2, "gains": 0.0, "divergence": 0.0}
    if prior is not None:
        square = (mean - prior.mean) ** 2 / PRIOR_TAIL
        weights["prior"] = 1 / (prior.error**2 + square)  # less where it is contradicted
    weights |= {name: 1 / belief.error**2 for name, belief in seen.items()}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
