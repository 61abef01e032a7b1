"""The decision of a learning-rate search: from observations to a learning rate.

`estimate` is a pure function. The library and the benchmarks call the same one.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from hdet.lr_search.constants import (
    HALF_EFFECT_NOISE,
    HOPELESS_SHARE,
    LIKELY_OVER_FLOOR,
    MARGIN_TO_LIMIT,
    MIN_TRUSTED_STEPS,
    REFINE_STEPS,
    SGD_LIKE,
    SWEEP_STEPS,
)
from hdet.lr_search.observations import Observation, Observations
from hdet.lr_search.reasons import Reason, describe
from hdet.lr_search.response import (
    SweepResult,
    divergence_threshold,
    judge_sweep,
    keep_margin,
    refine_choice,
)
from hdet.lr_search.transfer import (
    RoundChoice,
    batch_scaling,
    extrapolate_to_horizon,
    lr_ceiling,
    lr_floor,
)


class Estimate(NamedTuple):
    """The learning rate that a run starts with, and why.

    Attributes:
        factor: The learning rate, in units of the given one.
        reason: The rule that decided.
        declined: The factor that was found where the given learning rate is kept.
    """

    factor: float
    reason: Reason
    declined: float | None = None

    @property
    def text(self) -> str:
        """The reason, for a record."""
        return describe([self.reason], declined=self.declined)


class Conclusion(NamedTuple):
    """What the rounds of a search come to, for the batch of one replica.

    Attributes:
        found: The choice; None if the scores prefer no learning rate.
        lowest_lost: The lowest learning rate that is lost; None if none is.
        divergence: The learning rate where scores explode; None if they do not.
        reasons: Why.
    """

    found: float | None
    lowest_lost: float | None
    divergence: float | None
    reasons: tuple[Reason, ...]


class SearchContext(NamedTuple):
    """What an estimate depends on beside the observations.

    Attributes:
        num_replicas: Replicas of the run.
        optimizer: The name of the optimizer's class.
        batch_rule: How a learning rate grows with the batch of all replicas.
        sweep_steps: Steps of a round of a sweep.
        refine_steps: Steps of a round of the refinement.
        peak: The peak of the schedule over its mean.
        highest: The highest learning rate of the schedule over the given one.
        conclusion: What a plan concluded when it ended; None concludes from the observations.
    """

    num_replicas: int
    optimizer: str = ""
    batch_rule: str = "auto"
    sweep_steps: int = SWEEP_STEPS
    refine_steps: int = REFINE_STEPS
    peak: float = 1.0
    highest: float = 1.0
    conclusion: Conclusion | None = None


def estimate(observations: Observations, context: SearchContext) -> Estimate:
    """The learning rate that a run starts with, for the batch of all replicas and the schedule.

    The estimate stays below what was lost with the batch of one replica, and within what was tried.
    It does not lie far below where scores explode: what is worse than the start in a few steps may
    still pay in a whole run.
    """
    done = context.conclusion or conclude(observations, context)
    peak, rise = context.peak, max(context.highest, 1.0)
    lowest = floor_lr(done.divergence, context) * peak
    if done.divergence is not None:
        lowest = min(lowest, done.divergence / MARGIN_TO_LIMIT / rise)
    lost = min(filter(None, [done.lowest_lost, done.divergence]), default=None)
    if done.found is None:
        kept = Estimate(keep_margin(lost, rise) / rise, Reason.NOTHING_FOUND)
        return Estimate(lowest, Reason.BELOW_FLOOR) if lowest else kept
    chosen = Estimate(scale_to_full_batch(done.found, observations, context) * peak, Reason.FOUND)
    # Short rounds choose low learning rates already where gradients are noisy.
    calm = 1 + (observations.noise or 0.0) / HALF_EFFECT_NOISE
    likely = likely_lr(done.divergence, context) * calm * peak
    if _are_rounds_too_short(done, observations, context) and chosen.factor > likely:
        chosen = Estimate(likely, Reason.ROUNDS_TOO_SHORT)
    if lost is None:
        limit = Estimate(observations.points[-1].factor, Reason.WITHIN_TRIED_RANGE)
    else:
        limit = Estimate(lost / MARGIN_TO_LIMIT, Reason.BELOW_LOWEST_LOST)
    highest = max(limit.factor, done.found) / rise
    if chosen.factor > highest:
        chosen = limit._replace(factor=highest)
    floor = Estimate(lowest, Reason.BELOW_FLOOR)
    return max(chosen, floor, key=lambda one: one.factor)


def conclude(observations: Observations, context: SearchContext) -> Conclusion:
    """What complete sweeps, and a complete refinement if there is one, come to."""
    first_choice = judge_sweep(observations.points, observations.start_score)
    if not observations.refined:
        return conclusion_of(first_choice, observations.points)
    refined = refined_choice(first_choice, observations, context)
    return conclusion_of(refined, observations.points, first_choice)


def conclusion_of(
    result: SweepResult,
    points: Sequence[Observation],
    first_choice: SweepResult | None = None,
    *more: Reason,
) -> Conclusion:
    """The conclusion of a search that ends with `result`, with more reasons.

    Scores explode where the sweeps say so, since a refinement does not reach so far up.
    """
    divergence = divergence_of(first_choice or result, points)
    return Conclusion(result.factor, result.lowest_lost, divergence, (*result.reasons, *more))


def refined_choice(
    first_choice: SweepResult, observations: Observations, context: SearchContext
) -> SweepResult:
    """The choice of a complete refinement, as rounds of full length would make it."""
    result = refine_choice(observations.refined, first_choice)
    is_choice = Reason.REFINED in result.reasons  # a margin to what is lost is none
    if result.factor is None or first_choice.factor is None or not is_choice:
        return result
    coarse = RoundChoice(first_choice.factor, context.sweep_steps)
    close = RoundChoice(result.factor, context.refine_steps)
    factor = extrapolate_to_horizon(coarse, close, REFINE_STEPS, observations.noise)
    if factor == result.factor:
        return result
    reasons = (*result.reasons, Reason.LOWERED_FOR_LONGER_ROUNDS)
    return result._replace(factor=factor, reasons=reasons)


def divergence_of(result: SweepResult, points: Sequence[Observation]) -> float | None:
    """The learning rate where scores explode; None without a reference to measure them by."""
    if math.isnan(result.reference):
        return None
    gain = math.inf  # a gain by chance says nothing
    if result.factor is not None:
        below = result.lowest_lost or math.inf  # a good score above it is luck
        scores = [p.score for p in points if p.score is not None and p.factor < below]
        gain = result.reference - min(scores, default=math.inf)
    return divergence_threshold(points, result.reference, gain)


def is_hopeless(result: SweepResult, observations: Observations, context: SearchContext) -> bool:
    """Whether the given learning rate is far too high, whatever the peak of the schedule is."""
    if result.shift:
        return result.shift < 0
    best = result.factor or result.lowest_lost
    seen = math.inf if best is None else scale_to_full_batch(best, observations, context)
    divergence = divergence_of(result, observations.points)
    return min(seen, lr_ceiling(context.optimizer, divergence)) < HOPELESS_SHARE


def scale_to_full_batch(factor: float, observations: Observations, context: SearchContext) -> float:
    """A learning rate for the batch of one replica, scaled to the batch of all of them."""
    growth = batch_scaling(
        context.batch_rule, context.optimizer, context.num_replicas, observations.noise
    )
    return factor * growth


def likely_lr(divergence: float | None, context: SearchContext) -> float:
    """A learning rate that may be right for the full batch, by where scores explode.

    Infinite if they do not explode.
    """
    return LIKELY_OVER_FLOOR * lr_floor("auto", context.optimizer, divergence) or math.inf


def floor_lr(divergence: float | None, context: SearchContext) -> float:
    """The learning rate below which a run is needlessly slow; 0 if that is not known."""
    return lr_floor(context.batch_rule, context.optimizer, divergence)


def _are_rounds_too_short(
    done: Conclusion, observations: Observations, context: SearchContext
) -> bool:
    """Whether no round is long enough to trust, or a refinement does not confirm a sweep.

    Optimizers like SGD are left out: short rounds were not tested with them.
    """
    if context.optimizer in SGD_LIKE:
        return False
    if observations.refined:
        is_confirmed = Reason.REFINED in done.reasons
        return context.refine_steps < MIN_TRUSTED_STEPS or not is_confirmed
    return context.sweep_steps < MIN_TRUSTED_STEPS
