"""A run while its replicas scout: they set out, come back, and begin with what was found."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hdet.control.stall_detector import is_far_off
from hdet.lr_search.budget import check_room
from hdet.lr_search.constants import (
    DEFAULT_TAIL,
    LOSS_ROUND_PARTS,
    MAX_HELD_OUT_PARTS,
    NUM_HELD_OUT_PARTS,
)
from hdet.lr_search.estimator import Estimate
from hdet.lr_search.observations import Observation
from hdet.lr_search.reasons import Reason, describe
from hdet.lr_search.scout import AllRatesDiverged, Scout
from hdet.lr_search.transfer import peak_over_mean
from hdet.lr_search.trigger import SearchTrigger, trigger_of_state
from hdet.records.events import GuardEvent, SearchEvent, TriedRate
from hdet.replicas.protocol import records_calls
from hdet.scheduler.base_schedule import ScheduleShares
from hdet.scheduler.compatibility import why_no_scout
from hdet.scheduler.run import Run
from hdet.scheduler.search_trial import SearchTrial
from hdet.signals.exchange import CycleReport
from hdet.weights.restore_points import SecondStart

NO_LOOK = "no other learning rate was tried after a change of the data"
LOOKED = "after a change of the data other learning rates were tried"
BY_LOSSES = "the loss function cannot be called again with a batch of before"
VOID = "losses were not finite on any replica in a round of the scout that ended"


class SearchPhase:
    """Sends the replicas of a run out, at its beginning, when it is stuck, or when asked to."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.second_start: SecondStart | None = None
        """The way back to the first weights, as long as it may be needed."""

    def start(self, told: Mapping[str, Any] | None = None) -> None:
        """Start to scout, or go on with a search that a checkpoint has told of."""
        run = self._run
        trigger = trigger_of_state(told)
        late = None if told is None else told.get("late")
        scout = run.settings.scout if late is None else Scout(**late["scout"])
        if run.trial is not None:
            self._end_trial(run.trial)
        self.drop_second_start()
        if scout is None or run.model is None or (run.step > 0 and told is None):
            return
        if run.replicas.size == 1:
            run.warn_once("scout", "`scout` needs several replicas: the learning rate is kept.")
            return
        total = run.settings.total_steps if late is None else late["total_steps"]
        # A checkpoint of the first look holds the weights that the run began with.
        is_fresh = told is None or told.get("brief", False)
        looks = scout.restart and trigger is SearchTrigger.START and is_fresh
        try:
            check_room(scout, num_replicas=run.replicas.size, total_steps=total)
        except ValueError as error:
            if told is None:
                raise
            # With fewer replicas than it was begun with.
            run.warn_once("scout", f"{error} The scout ends, and the learning rate is kept.")
            return
        if looks:
            self.second_start = SecondStart(
                run.optimizer, run.model, run.parameters, run.progress_state
            )
        trial = self._start_trial(scout, run.model, total, trigger, told)
        if trial.search.is_over:
            self._conclude(trial)

    def check_can_search(self, scout: Scout) -> tuple[nn.Module, int | None]:
        """The model and the steps that are left, if a scout can be made in mid-run."""
        run = self._run
        problem = why_no_scout(run.settings, run.base, run.replicas, run.model)
        if run.one_cycle is not None:
            problem = (
                "`scout_again()` is for hdet.HDET: the paper's controller has its own schedule"
            )
        elif run.trial is not None:
            problem = "`scout_again()` must wait until the replicas have scouted"
        elif run.replicas.size == 1:
            problem = "`scout_again()` needs several replicas, got one"
        if problem is not None or run.model is None:
            raise RuntimeError(f"{problem}.")
        total = run.settings.total_steps
        left = None if total is None else max(total - run.step, 0)
        check_room(scout, num_replicas=run.replicas.size, total_steps=left)
        return run.model, left

    def again(
        self,
        scout: Scout,
        model: nn.Module,
        left: int | None,
        trigger: SearchTrigger = SearchTrigger.REQUESTED,
    ) -> None:
        """In mid-run, from the weights of now."""
        self.drop_second_start()
        self._run.training_loss.clear_first()
        self._start_trial(scout, model, left, trigger)

    def search_new_data(self) -> None:
        """The data has changed: with `scout="restart"`, whether the learning rate of now is
        hopeless with it. A run that is nearly over has no time for that."""
        scout = self._run.settings.scout
        if scout is None or not scout.restart:
            return
        scout = replace(scout, steps=None)  # nobody has asked for rounds of that length here
        try:
            model, left = self.check_can_search(scout)
        except (RuntimeError, ValueError) as problem:
            step = self._run.step
            reason = f"{NO_LOOK}: {problem}"
            self._run.write_record(GuardEvent(step=step, reason=reason, back_to=step))
            return
        self.again(scout, model, left, SearchTrigger.NEW_DATA)

    def interrupt(self, trial: SearchTrial) -> None:
        """Everyone comes back in the middle of a round, as before a checkpoint."""
        run = self._run
        trial.interrupt()
        self._reset_evidence()
        if trial.search.is_over:
            self._conclude(trial)
        run.write(everything=True)

    def _reset_evidence(self) -> None:
        self._run.training_loss.clear_first()
        self._run.start_cycle(is_partial=True)

    def _start_trial(
        self,
        scout: Scout,
        model: nn.Module,
        total_steps: int | None,
        trigger: SearchTrigger,
        told: Mapping[str, Any] | None = None,
    ) -> SearchTrial:
        """Around what was given; or, in mid-run, around the learning rates of now."""
        run = self._run
        rates = run.knob_bank.lrs(run.base.lrs) if trigger.is_mid_run else run.base.peaks
        trial = run.trial = SearchTrial(
            scout,
            run.optimizer,
            model,
            run.parameters,
            run.replicas,
            total_steps,
            rates=rates,
            kind=type(run.optimizers[0]).__name__,
            shared=run.settings.gradients == "shared",
            probes=run.settings.probe is not None,
            trigger=trigger,
        )
        if told is not None:
            trial.resume(told)
        if run.settings.probe is None and records_calls(run.replicas):
            trial.use_held_out(run.replicas.hold_out(NUM_HELD_OUT_PARTS, MAX_HELD_OUT_PARTS))
        run.knob_bank.rest()
        return trial

    def step(self, trial: SearchTrial) -> None:
        run = self._run
        run.step += 1
        run.diverged = True
        if trial.is_held_out_step:
            trial.end_held_out_step()
            self._reset_evidence()
        elif self._advance(trial):
            self._end_round(trial)
        run.write(everything=True)

    def _advance(self, trial: SearchTrial) -> bool:
        """One step of a round; whether it is over."""
        run, num_steps = self._run, trial.search.num_steps
        left, losses = trial.steps_left() - 1, run.training_loss.last()
        probe = run.settings.probe
        if probe is not None or trial.held_out is not None:
            tail = DEFAULT_TAIL if probe is None else probe.tail
            if left < math.ceil(tail * num_steps):
                run.parameters.tail.add()
        elif left == num_steps // LOSS_ROUND_PARTS:
            run.training_loss.clear()  # judged by the last part of a round
        return trial.advance(losses)

    def _end_round(self, trial: SearchTrial) -> None:
        run = self._run
        try:
            call = self._score_round(trial)
            if call.scores is None:
                call.require_losses(run.step)
            points = trial.points(call)
            # What kills the lowest learning rate out of the blue is not the learning rate.
            if all(point.score is None for point in points) and min(points).glitch:
                run.warn_once("batch", f"{VOID} at step {run.step}: it is made again.")
                self.interrupt(trial)
                return
            trial.judge(points, call, self._score_start(trial, call))
        except Exception as problem:  # what there was before is not lost
            run.parameters.restore_(trial.start)
            if self.second_start is not None and self.second_start.can_return:
                run.restore_progress(self.second_start.restore_last())
            self.drop_second_start()
            run.start_cycle(is_partial=True)
            self._end_trial(trial)
            run.write(everything=True)
            is_check = trial.trigger is SearchTrigger.NEW_DATA
            if not (is_check and isinstance(problem, AllRatesDiverged)):
                raise
            run.training_loss.clear_first()
            run.warn_once("look", f"{LOOKED}: every learning rate blows up; the guard goes on.")
            reason = f"{LOOKED}: every one blows up"
            run.write_record(GuardEvent(step=run.step, reason=reason, back_to=run.step))
            return
        trial.restore()
        self._reset_evidence()
        self._conclude(trial)

    def _score_round(self, trial: SearchTrial, *, alike: bool = False) -> CycleReport:
        run = self._run
        # The same batches in all rounds.
        num_steps = trial.search.num_steps
        probed = run.probe(cycle=0, sync_every=num_steps, fresh=True, alike=alike)
        if trial.held_out is not None:
            try:
                with run.without_regularization():
                    probed = trial.scores(alike=alike)
            except Exception as problem:  # nobody has asked for that
                why = f"{BY_LOSSES} ({type(problem).__name__}: {problem})"
                run.warn_once("held out", f"the scout compares training losses, since {why}.")
                trial.compare_by_losses()
        return run.exchange(probed=probed)

    def _score_start(self, trial: SearchTrial, call: CycleReport) -> CycleReport | None:
        """By the same batches: once, unless they become more."""
        known = trial.search.start_score is not None and not trial.moves
        if call.scores is None or known:
            return None
        self._run.parameters.tail.clear()
        with self._run.parameters.at_snapshot(trial.start):
            return self._score_round(trial, alike=True)

    def _conclude(self, trial: SearchTrial) -> None:
        """If the search is over, begin the run with what was found."""
        run = self._run
        search, begin = trial.search, None
        peaks = dict(zip(run.base.names, trial.rates, strict=True))
        if search.is_over:
            shares = self._shares(trial)
            begin = search.estimate(peak=peak_over_mean(shares.mean), highest=shares.highest)
            begin = self._keep_or_change(trial, begin)
            if advice := self._advice(trial, begin):
                what = f"begins with {begin.factor:.3g} times the given learning rate"
                if trial.trigger.is_mid_run:
                    what = f"goes on with {begin.factor:.3g} times its learning rate"
                told = f"the scout {advice} ({describe(search.reasons)}): the run {what}."
                run.warn_once(f"scout at {run.step}", told)
            run.knob_bank.rescale(begin.factor)
            run.clock.scouted(run.step)
            self._end_trial(trial)
        run.write_record(_search_event(run.step, trial, peaks, begin))

    def _advice(self, trial: SearchTrial, begin: Estimate) -> str:
        """What a person should know who trusts in what was found; nothing if all is well."""
        search = trial.search
        if Reason.INTERRUPTED in search.reasons:
            rest = "try anything" if search.found is None else "look closely"
            cause = "a `converge()` or a bad batch"
            return f"was interrupted by {cause}, and no steps were left to {rest}"
        if Reason.NO_TIME in search.reasons and search.found is not None:
            return (
                "had no time to look beyond what it tried, at whose end the best lies; give a "
                "learning rate that is nearer, more replicas or a larger `Scout(share=...)`"
            )
        if begin.reason is not Reason.NOTHING_FOUND:
            return ""
        found = "found no learning rate to prefer"
        return f"{found}; a `probe=` tells more than losses" if trial.by == "losses" else found

    def restart(self, second: SecondStart, reason: str, *, for_good: bool) -> None:
        """The run is stuck: scout from its first weights, and see whether its learning rate is the
        fault. With `for_good` there is nothing to come back to."""
        run = self._run
        scout = run.settings.scout
        assert scout is not None
        assert run.model is not None
        run.restore_progress(second.restore(for_good=for_good))
        run.lr_trace.clear()
        run.training_loss.clear_first()
        run.start_cycle(is_partial=True)
        reason = f"{reason}: scouting from the first weights"
        run.write_record(GuardEvent(step=run.step, reason=reason, back_to=0))
        self._start_trial(scout, run.model, run.settings.total_steps, SearchTrigger.STALLED)

    def _keep_or_change(self, trial: SearchTrial, begin: Estimate) -> Estimate:
        """Where the given learning rate is to be kept: only what is far from it is a reason not to;
        before anything has gone wrong, only what is far lower."""
        if not trial.keeps_given_lr:
            return begin
        second, stuck = self.second_start, trial.trigger is SearchTrigger.STALLED
        exploded = trial.search.divergence
        # What is merely worse than none in a few steps is no proof; what explodes is.
        is_sure = begin.reason is not Reason.NOTHING_FOUND or (
            exploded is not None and exploded < 1
        )
        is_fault = is_sure and is_far_off(begin.factor) and (stuck or begin.factor < 1)
        can_return = second is not None and second.can_return
        if is_fault or (stuck and not can_return):
            if not trial.trigger.is_mid_run:  # in mid-run the guard knows what is good
                self._run.renew_good_point()
            self.drop_second_start()
            return begin
        if second is not None and can_return:
            self._run.restore_progress(second.restore_last())
            self.drop_second_start()
        elif second is not None:
            second.skips_next_check = True
        return Estimate(1.0, Reason.GIVEN_IS_KEPT, declined=begin.factor)

    def drop_second_start(self) -> None:
        if self.second_start is not None:
            self.second_start.close()
        self.second_start = None

    def _shares(self, trial: SearchTrial) -> ScheduleShares:
        """Of what is left of the base schedule, in units of what the scout has looked around; of a
        constant one unless all processes agree, who may not all know it."""
        run = self._run
        known = run.base.shares(run.settings.total_steps)
        now = run.base.share_of_now() if trial.trigger.is_mid_run else 1.0
        mine = [math.nan] * 2 if known is None or not now else [share / now for share in known]
        rows = torch.tensor([mine] * len(run.replicas.local), dtype=torch.float64)
        everyone = run.replicas.gather(run.replicas.gather_parts(rows).flatten(1)).unflatten(
            1, (-1, 2)
        )
        shares = {ScheduleShares(*share) for share in everyone.flatten(0, 1).tolist()}
        first = shares.pop()
        return ScheduleShares(1.0, 1.0) if shares or math.isnan(first.mean) else first

    def _end_trial(self, trial: SearchTrial) -> None:
        run = self._run
        trial.close(shared=run.settings.gradients == "shared")
        run.trial = None
        run.knob_bank.fan_out()


def _search_event(
    step: int, trial: SearchTrial, rates: Mapping[str, float], begin: Estimate | None
) -> SearchEvent:
    """The search at the end of a round; `begin` is the estimate after the last one."""
    search = trial.search
    return SearchEvent(
        step=step,
        mid_run=trial.trigger.is_mid_run,
        compared_by=trial.by,
        points=_tried_rates(search.points),
        refined=_tried_rates(search.refined_observations),
        noise=search.noise,
        reference_lrs=rates,
        found=search.found,
        factor=None if begin is None else begin.factor,
        factor_reason="" if begin is None else begin.text,
        lowest_lost=search.lowest_lost,
        divergence=search.divergence,
        reason=describe(search.reasons),
    )


def _tried_rates(points: Sequence[Observation]) -> tuple[TriedRate, ...]:
    return tuple(
        TriedRate(factor=p.factor, score=p.score, error=p.error, bad_batch=p.glitch) for p in points
    )
