"""hdet with a scout at the start, and hdet with a guard that starts a run again."""

import math
from collections.abc import Sequence

from hdet.control.stall_detector import (
    MAX_CYCLE,
    MAX_SHARE_OF_RUN,
    StallDetector,
    is_far_off,
    is_too_late_to_restart,
)

import hdet
from benchmarks.learning_rate.methods.bench import Bench, Ended, Run
from benchmarks.learning_rate.methods.guards import Means, RowGuards
from benchmarks.learning_rate.methods.rows import train_rows
from benchmarks.learning_rate.methods.schedules import RowPlan, RowSchedules
from benchmarks.learning_rate.methods.search import Signal, plan_by_search, start_of
from hdet.lr_search.reasons import Reason, describe


def with_scout(
    bench: Bench,
    runs: Sequence[Run],
    *,
    by: Signal = "probe",
    guard: bool = True,
    scout: hdet.Scout | None = None,
) -> list[Ended]:
    """hdet: a scout, then a plain run that a guard looks after."""
    plans, searches = plan_by_search(bench, runs, by=by, scout=scout)
    watch = RowGuards(hdet.Guard()) if guard else None
    ended = train_rows(bench, plans, watch=watch)
    notes = [
        {
            "points": [list(point) for point in search.points],
            "close": [list(point) for point in search.refined_observations],
            "noise": search.noise,
            "outset": search.start_score,
            "steps": search.used,
            "edge": search.lowest_lost,
            "explosion": search.divergence,
            "found": search.found,
            "reason": describe(search.reasons),
            "returns": watch.returns[row] if watch is not None else 0,
        }
        for row, search in enumerate(searches)
    ]
    return [end._replace(notes=note) for end, note in zip(ended, notes, strict=True)]


def with_restart(bench: Bench, runs: Sequence[Run]) -> list[Ended]:
    """hdet with `scout="restart"`: a guard, a look at the beginning whether the learning rate is
    hopeless, and a scout from the first weights for a run that is stuck all the same.

    A run that its scout would leave as it is goes on here as if nothing had been.
    """
    plans, looks = plan_by_search(bench, runs, by="probe", brief=True)
    watched = []
    for place, (run, search) in enumerate(zip(runs, looks, strict=True)):
        begin = start_of(bench, search)
        if not is_far_off(begin.factor) or begin.factor > 1 or begin.reason is Reason.NOTHING_FOUND:
            watched.append(place)
            plans[place] = plans[place]._replace(peaks=(run.lr,) * len(plans[place].peaks))
    stuck = stuck_at(bench, plans) if watched else []  # a single row has no rule for vmap
    since = {place: stuck[place] for place in watched}
    again = [place for place, step in since.items() if step is not None]
    if again:
        steps = [since[place] or 0 for place in again]
        found, _ = plan_by_search(bench, [runs[place] for place in again], by="probe", since=steps)
        for place, plan in zip(again, found, strict=True):
            plans[place] = plan if is_far_off(plan.peaks[0] / runs[place].lr) else plans[place]
    watch = RowGuards(hdet.Guard())
    ended = train_rows(bench, plans, watch=watch)
    notes = [
        {"returns": returns, "stuck": since.get(place), "begin": plan.begin}
        for place, (returns, plan) in enumerate(zip(watch.returns, plans, strict=True))
    ]
    return [end._replace(notes=note) for end, note in zip(ended, notes, strict=True)]


def stuck_at(bench: Bench, runs: Sequence[RowPlan]) -> list[int | None]:
    """The step at which each run is found to be stuck; none for one that is not."""
    found: list[int | None] = [None] * len(runs)
    fleet = bench.fleet([run.seed for run in runs], capture=False)
    rule, watches = bench.rule(fleet), [StallDetector() for _ in runs]
    schedules = RowSchedules(runs, "one cycle", bench.plan.steps, rule)
    batch, means = bench.task.batches([run.seed for run in runs]), Means(len(runs), fleet.device)
    for now in range(min(MAX_CYCLE * bench.sync_every, bench.plan.steps // MAX_SHARE_OF_RUN)):
        losses = fleet.losses(*batch(schedules.steps[now]))
        rule.step(schedules.lrs[now], schedules.momenta[now])
        means.add(losses)
        if now == 0:
            for watch, loss in zip(watches, losses.tolist(), strict=True):
                watch.set_first_loss(loss)
        steps = [run.begin + now + 1 for run in runs]
        ends = [row for row, step in enumerate(steps) if step % bench.sync_every == 0]
        finite = fleet.weights.isfinite().all(1).tolist() if ends else []
        for row, (loss, error) in zip(ends, means.end(ends), strict=True):
            cycle = now // bench.sync_every  # those that have ended before
            if found[row] is not None or is_too_late_to_restart(
                cycle, steps[row], bench.plan.steps
            ):
                continue
            if now + 1 < bench.sync_every:  # what a look has left of its first cycle
                continue
            if watches[row].reason(loss if finite[row] else math.nan, error):
                found[row] = steps[row]
        if None not in found:
            break
    return found
