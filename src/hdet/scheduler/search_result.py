"""What a learning-rate search leads to: its event, the message about it, and its cautions."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch.optim import Optimizer

from hdet.lr_search.constants import (
    FAR_OFF_ERRORS,
    FAR_OFF_RATIO,
    GUESS_RATIO,
    MAX_PEAK_OVER_MEAN,
    PRIOR_ERROR,
)
from hdet.lr_search.estimator import Estimate
from hdet.lr_search.observations import Observation
from hdet.lr_search.prior import Prior, prior_of, prior_of_members
from hdet.lr_search.reasons import Reason, describe
from hdet.records.events import SearchEvent, TriedRate
from hdet.scheduler.base_schedule import ScheduleShares
from hdet.scheduler.run import Run
from hdet.scheduler.search_trial import SearchTrial
from hdet.tensors.joined_optimizer import members_of
from hdet.tensors.optimizers import class_names


def shares_of_rest(run: Run) -> ScheduleShares | None:
    """Return the rest of the base schedule in units of its peak; None unless all processes agree.

    All processes must call this together.
    """
    known = run.base.shares(run.settings.total_steps)
    mine = [math.nan] * 2 if known is None else list(known)
    rows = torch.tensor([mine] * len(run.replicas.local), dtype=torch.float64)
    gathered = run.replicas.gather(run.replicas.gather_parts(rows).flatten(1))
    everyone = gathered.unflatten(1, (-1, 2)).flatten(0, 1)
    shares = {ScheduleShares(*share) for share in everyone.tolist()}
    first = shares.pop()
    return None if shares or math.isnan(first.mean) else first


def prior_of_run(run: Run, rates: Sequence[float]) -> Prior | None:
    """Return the usual mean learning rate of the run's optimizer, in units of the given rates.

    Several optimizers count by the numbers of their parameters.
    """
    optimizers = members_of(run.optimizers[0])
    sizes = [_sizes_of_groups(optimizer) for optimizer in optimizers]
    total, left, members = sum(map(sum, sizes)), list(rates), []
    for optimizer, own in zip(optimizers, sizes, strict=True):
        mine, left = left[: len(own)], left[len(own) :]
        members.append((_prior_of_optimizer(optimizer, mine, own, total), sum(own)))
    return prior_of_members(members)


def _sizes_of_groups(optimizer: Optimizer) -> list[int]:
    """Return the number of trainable parameters of each group."""
    groups = optimizer.param_groups
    return [sum(p.numel() for p in group["params"] if p.requires_grad) for group in groups]


def _prior_of_optimizer(
    optimizer: Optimizer, rates: Sequence[float], sizes: Sequence[int], num_parameters: int
) -> Prior | None:
    """Return the prior of one optimizer, in units of the given rates of its groups.

    With several groups, that of the group with the most parameters counts. An optimizer that runs
    Muon on some groups only is known by those.
    """
    groups = optimizer.param_groups
    pairs = [
        (bool(group.get("use_muon", False)), size, place)
        for place, (group, size) in enumerate(zip(groups, sizes, strict=True))
        if rates[place] > 0
    ]
    if not pairs:
        return None
    place = max(pairs)[2]
    momentum = float(groups[place].get("momentum", 0.0) or 0.0)
    names = class_names(optimizer)
    known = prior_of(*names, momentum=momentum, num_parameters=num_parameters)
    return None if known is None else known._replace(mean=known.mean - math.log10(rates[place]))


def prior_around_now(run: Run) -> Prior:
    """Return the prior of a search in mid-run: what the run trains with, for the rest of it."""
    return Prior(-math.log10(peak_over_mean(_shares(run, is_mid_run=True).mean)), PRIOR_ERROR)


def estimate_of(run: Run, trial: SearchTrial) -> Estimate:
    """Return what a search that is over leads to, for the rest of the schedule."""
    shares = _shares(run, is_mid_run=trial.trigger.is_mid_run)
    return trial.search.estimate(
        peak=peak_over_mean(shares.mean),
        highest=shares.highest,
        bounds=bounds_of(run, trial),
    )


def bounds_of(run: Run, trial: SearchTrial) -> tuple[float, float]:
    """Return the factors that put the peak at the ends of `lr_bounds`."""
    if run.settings.lr_bounds is None:
        return 0.0, math.inf
    low, high = run.settings.lr_bounds
    unit = peak_of(run, trial) or 1.0
    return low / unit, high / unit


def peak_of(run: Run, trial: SearchTrial) -> float:
    """Return the peak of the first group that a factor of 1 stands for, before a rescaling."""
    is_mid_run = trial.trigger.is_mid_run
    return run.knob_bank.lrs(run.base.peaks)[0] if is_mid_run else trial.rates[0]


def _shares(run: Run, *, is_mid_run: bool) -> ScheduleShares:
    """Return the rest of the schedule in units of what the rates of the search stand for."""
    rest = shares_of_rest(run)
    now = run.base.share_of(run.base.lrs) if is_mid_run else 1.0
    if rest is None or not now:
        return ScheduleShares(1.0, 1.0)
    return ScheduleShares(*(share / now for share in rest))


def peak_over_mean(mean_share: float) -> float:
    """The peak of a schedule over its mean, from its mean in units of the given learning rate.

    Rounds use a constant learning rate. The gain of a run depends on the mean of its learning rates
    much more than on their peak. A schedule that rises above the given learning rate may have a
    mean above it: then the result is below 1.

    >>> peak_over_mean(0.5), peak_over_mean(1.0), peak_over_mean(0.01), peak_over_mean(4.0)
    (2.0, 1.0, 2.5, 0.25)
    """
    return 1.0 if not mean_share else min(1 / mean_share, MAX_PEAK_OVER_MEAN)


def is_far_off(estimate: Estimate) -> bool:
    """Whether the given learning rate is far from the estimate, beyond doubt."""
    if estimate.reason is Reason.NOTHING_FOUND:
        return False
    return abs(math.log(estimate.factor)) > max(
        math.log(FAR_OFF_RATIO), FAR_OFF_ERRORS * math.log(estimate.within)
    )


def keep_or_change(run: Run, trial: SearchTrial, estimate: Estimate) -> Estimate:
    """With `scout="restart"`, keep the given learning rate unless it is far off."""
    low, high = bounds_of(run, trial)
    if not trial.keeps_given_lr or is_far_off(estimate) or not low <= 1.0 <= high:
        return estimate
    return Estimate(
        1.0, Reason.GIVEN_IS_KEPT, estimate.within, estimate.shares, declined=estimate.factor
    )


def result_line(trial: SearchTrial, estimate: Estimate) -> str:
    """Return the line that says what the scout chose, for the log.

    The learning rate is that of the first parameter group.
    """
    search, given = trial.search, trial.rates[0]
    tried = [point.factor * given for point in search.observations.points]
    spans = f"; range tried {min(tried):.2g} to {max(tried):.2g}" if tried else ""
    whose = "present" if trial.trigger.is_mid_run else "given"
    return (
        f"scout chose {given * estimate.factor:.3g} ({estimate.factor:.3g} x the {whose} "
        f"{given:.3g}) after {search.used} steps{spans}; compared by {trial.compared_by}; "
        f"{estimate.text}{how_sure(estimate)}."
    )


def how_sure(estimate: Estimate) -> str:
    """Return how far off the best learning rate may be, and the shares of the evidence."""
    if not math.isfinite(estimate.within) or not estimate.shares:
        return ""
    parts = [f"{name} {share:.0%}" for name, share in estimate.shares.items() if share >= 0.005]
    within, evidence = estimate.stated_within, ", ".join(parts)
    return f"; the best is probably within a factor of {within:.2g} ({evidence})"


def caution_about(trial: SearchTrial, estimate: Estimate) -> str:
    """Return a warning for a user who would trust the result; empty if it can be trusted."""
    advice = _advice(trial, estimate)
    if not advice:
        return ""
    what = f"begins with {estimate.factor:.3g} times the given learning rate"
    if trial.trigger.is_mid_run:
        what = f"goes on with {estimate.factor:.3g} times its learning rate"
    return f"the scout {advice}: the run {what}."


def _advice(trial: SearchTrial, estimate: Estimate) -> str:
    reasons = trial.search.reasons
    if Reason.INTERRUPTED in reasons and not trial.search.observations.points:
        return (
            "was interrupted by a `converge()` or a non-finite loss, and no steps were left to "
            "try a learning rate"
        )
    found_nothing = estimate.reason is Reason.WITHIN_BOUNDS and not estimate.shares
    if found_nothing or estimate.reason is Reason.NOTHING_FOUND:
        return "found no difference between learning rates"
    if estimate.is_guess:
        # A learning rate that is lowered below an explosion has evidence.
        is_lower = estimate.factor < 1 / GUESS_RATIO
        lowered = is_lower and estimate.reason is not Reason.BELOW_DIVERGENCE
        changes = lowered or estimate.factor > GUESS_RATIO
        text = (
            "saw too little difference between learning rates to decide by it, and took mostly "
            "what is usual for this optimizer"
        )
        return text if changes else ""
    if Reason.NO_TIME in reasons and estimate.reason is not Reason.GIVEN_IS_KEPT:
        return (
            "found its best learning rate at the end of the range that it tried, and no steps were "
            "left to try more; give a nearer learning rate, more replicas or a larger "
            "`Scout(share=...)`"
        )
    return ""


def search_event(
    step: int, trial: SearchTrial, rates: Mapping[str, float], estimate: Estimate | None
) -> SearchEvent:
    """Return the event of a round; `estimate` is that of the last round."""
    search = trial.search
    return SearchEvent(
        step=step,
        mid_run=trial.trigger.is_mid_run,
        compared_by=trial.compared_by,
        points=_tried_rates(search.observations.points),
        reference_lrs=rates,
        factor=None if estimate is None else estimate.factor,
        factor_reason="" if estimate is None else estimate.text,
        within=None if estimate is None else estimate.stated_within,
        shares={} if estimate is None else estimate.shares,
        divergence=search.divergence,
        reason=describe(search.reasons),
    )


def _tried_rates(points: Sequence[Observation]) -> tuple[TriedRate, ...]:
    return tuple(
        TriedRate(factor=p.factor, score=p.score, error=p.error, bad_batch=p.bad_batch)
        for p in points
    )
