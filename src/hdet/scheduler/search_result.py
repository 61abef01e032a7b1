"""What a learning-rate search leads to: its event, the message about it, and its cautions."""

import math
from collections.abc import Mapping, Sequence

import torch

from hdet.control.stall_detector import is_far_off
from hdet.lr_search.estimator import Estimate
from hdet.lr_search.observations import Observation
from hdet.lr_search.reasons import Reason, describe
from hdet.lr_search.trigger import SearchTrigger
from hdet.records.events import SearchEvent, TriedRate
from hdet.scheduler.base_schedule import ScheduleShares
from hdet.scheduler.run import Run
from hdet.scheduler.search_trial import SearchTrial


def remaining_shares(run: Run, trial: SearchTrial) -> ScheduleShares:
    """Return the rest of the base schedule in units of the learning rates of the search."""
    rest = shares_of_rest(run)
    now = run.base.share_of(run.base.lrs) if trial.trigger.is_mid_run else 1.0
    if rest is None or not now:
        return ScheduleShares(1.0, 1.0)
    return ScheduleShares(*(share / now for share in rest))


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


def is_lr_at_fault(trial: SearchTrial, estimate: Estimate) -> bool:
    """Return whether the given learning rate is far off, beyond doubt.

    A learning rate that gains nothing in a few steps is no proof. One that diverges is.
    """
    divergence = trial.search.divergence
    is_sure = estimate.reason is not Reason.NOTHING_FOUND or (
        divergence is not None and divergence < 1
    )
    has_stalled = trial.trigger is SearchTrigger.STALLED
    return is_sure and is_far_off(estimate.factor) and (has_stalled or estimate.factor < 1)


def result_line(trial: SearchTrial, estimate: Estimate) -> str:
    """Return the line that says what the scout chose, for the log.

    The learning rate is that of the first parameter group.
    """
    search, given = trial.search, trial.rates[0]
    tried = [point.factor * given for point in (*search.points, *search.refined_observations)]
    spans = f"; range tried {min(tried):.2g} to {max(tried):.2g}" if tried else ""
    whose = "present" if trial.trigger.is_mid_run else "given"
    return (
        f"scout chose {given * estimate.factor:.3g} ({estimate.factor:.3g} x the {whose} "
        f"{given:.3g}) after {search.used} steps{spans}; compared by {trial.compared_by}; "
        f"{estimate.text}."
    )


def caution_about(trial: SearchTrial, estimate: Estimate) -> str:
    """Return a warning for a user who would trust the result; empty if it can be trusted."""
    advice = _advice(trial, estimate)
    if not advice:
        return ""
    what = f"begins with {estimate.factor:.3g} times the given learning rate"
    if trial.trigger.is_mid_run:
        what = f"goes on with {estimate.factor:.3g} times its learning rate"
    return f"the scout {advice} ({describe(trial.search.reasons)}): the run {what}."


def _advice(trial: SearchTrial, estimate: Estimate) -> str:
    search = trial.search
    if Reason.INTERRUPTED in search.reasons:
        purpose = "try a learning rate" if search.found is None else "refine its choice"
        return (
            "was interrupted by a `converge()` or a non-finite loss, and no steps were left to "
            f"{purpose}"
        )
    if Reason.NO_TIME in search.reasons and search.found is not None:
        return (
            "found its best learning rate at the end of the range that it tried, and no steps were "
            "left to try more; give a nearer learning rate, more replicas or a larger "
            "`Scout(share=...)`"
        )
    if estimate.reason is not Reason.NOTHING_FOUND:
        return ""
    found = "found no difference between learning rates"
    return f"{found}; a `probe=` tells more than losses" if trial.compared_by == "losses" else found


def search_event(
    step: int, trial: SearchTrial, rates: Mapping[str, float], estimate: Estimate | None
) -> SearchEvent:
    """Return the event of a round; `estimate` is that of the last round."""
    search = trial.search
    return SearchEvent(
        step=step,
        mid_run=trial.trigger.is_mid_run,
        compared_by=trial.compared_by,
        points=_tried_rates(search.points),
        refined=_tried_rates(search.refined_observations),
        noise=search.noise,
        reference_lrs=rates,
        found=search.found,
        factor=None if estimate is None else estimate.factor,
        factor_reason="" if estimate is None else estimate.text,
        lowest_lost=search.lowest_lost,
        divergence=search.divergence,
        reason=describe(search.reasons),
    )


def _tried_rates(points: Sequence[Observation]) -> tuple[TriedRate, ...]:
    return tuple(
        TriedRate(factor=p.factor, score=p.score, error=p.error, bad_batch=p.bad_batch)
        for p in points
    )
