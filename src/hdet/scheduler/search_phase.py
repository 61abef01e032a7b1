"""Steps of a run while it searches for a learning rate: rounds, scores, and the conclusion."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from hdet.lr_search.budget import check_room
from hdet.lr_search.constants import DEFAULT_TAIL, LOSS_ROUND_PARTS, NUM_HELD_OUT_PARTS
from hdet.lr_search.scout import AllRatesDiverged, Scout
from hdet.lr_search.trigger import SearchTrigger, trigger_of_state
from hdet.records.events import GuardEvent
from hdet.replicas.protocol import records_calls
from hdet.scheduler.compatibility import why_no_scout
from hdet.scheduler.loop_checks import warn_of_equal_losses, warn_without_losses
from hdet.scheduler.mixing_optimizer import find_mixed, give_up_mixed
from hdet.scheduler.run import Run
from hdet.scheduler.search_result import (
    caution_about,
    estimate_of,
    keep_or_change,
    peak_of,
    prior_around_now,
    prior_of_run,
    result_line,
    search_event,
)
from hdet.scheduler.search_trial import SearchTrial
from hdet.signals.batch_exchange import exchange_batches
from hdet.signals.exchange import CycleReport
from hdet.signals.given_batches import GivenBatches, LossOf

NOT_SEARCHED = "no search after a change of the data"
ALL_DIVERGED = (
    "training diverges at every learning rate that the scout tried after a change of the data"
)


class SearchPhase:
    """Runs learning-rate searches: at the start, on request, or for new data."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._given: GivenBatches | None = None
        """The batches that the loop gave for this search, or for the next one."""

    def start(self, saved: Mapping[str, Any] | None = None) -> None:
        """Start to scout, or go on with a search that a checkpoint has saved of."""
        run, given = self._run, self._given
        trigger = trigger_of_state(saved)
        late = None if saved is None else saved.get("late")
        scout = run.settings.scout if late is None else Scout(**late["scout"])
        if run.progress.trial is not None:
            run.training_loss.clear_first()  # of a round that a loaded state replaces
            self._end_trial(run.progress.trial)
        self._given = given  # a checkpoint that replaces a search leaves its batches
        if scout is None or run.model is None or (run.progress.step > 0 and saved is None):
            return
        total = run.settings.total_steps if late is None else late["total_steps"]
        try:
            check_room(scout, num_replicas=run.replicas.size, total_steps=total)
        except ValueError as error:
            if saved is None:
                raise
            # The run resumes with fewer replicas.
            run.log.warn_once("scout", f"scout stopped: {error} The given learning rate is kept.")
            return
        trial = self._start_trial(scout, run.model, total, trigger, saved)
        if trial.search.is_over:
            self._conclude(trial)

    def check_can_search(self, scout: Scout) -> tuple[nn.Module, int | None]:
        """Return the model and the steps that are left, if a search can run in mid-run.

        Raises:
            RuntimeError: If it cannot.
            ValueError: If too few steps are left.
        """
        run = self._run
        problem = self._why_no_search("scout_again()")
        if problem is None and run.progress.trial is not None:
            problem = (
                "`scout_again()` was called while the scout is running. Wait until "
                "`scheduler.is_scouting` is False"
            )
        if problem is not None or run.model is None:
            raise RuntimeError(f"{problem}.")
        total = run.settings.total_steps
        left = None if total is None else max(total - run.progress.step, 0)
        check_room(scout, num_replicas=run.replicas.size, total_steps=left)
        return run.model, left

    def _why_no_search(self, call: str) -> str | None:
        """Return why this run cannot search, for an error of a call; None if it can."""
        run = self._run
        if run.one_cycle is not None:
            return (
                f"`{call}` is not available in OneCycleHDET, whose controller replaces the "
                "schedule. Use hdet.HDET"
            )
        return why_no_scout(run.settings, run.base, run.replicas, run.model)

    def hold_out(self, loss_of: LossOf, batch: Any) -> None:
        """Add a batch of the loop, on which this search or the next one compares replicas.

        Raises:
            RuntimeError: If no search can use it.
            TypeError: If `loss_of`, its result or the batch has the wrong type.
            ValueError: If the loss has a wrong shape, or is not finite.
        """
        run, trial = self._run, self._run.progress.trial
        problem = self._why_no_search("hold_out()")
        if problem is None and run.elastic is not None:
            problem = "`hold_out()` is not available with TorchftReplicas. Use `probe=`"
        elif problem is None and run.settings.probe is not None:
            problem = (
                "`hold_out()` cannot be used with `probe=`, which scores the replicas already. "
                "Leave one of them out"
            )
        elif trial is not None and trial.has_begun:
            problem = (
                "`hold_out()` must be called before the first step of a search. Call it before "
                "the first step of the run, or before `scout_again()`"
            )
        if problem is not None:
            raise RuntimeError(f"{problem}.")
        given = self._given or GivenBatches(
            run.replicas,
            [module for module in run.modules if module is not None],
            seed=run.settings.seed,
            together=run.weights.has_unreplicated,
            warn=run.log.warn,
        )
        with run.as_scored():
            given.add(loss_of, batch)
        self._given = given
        if trial is not None:
            trial.use_held_out(given)

    def _begin(self, trial: SearchTrial) -> None:
        """Exchange the batches that the loop gave. Processes that gave none take part."""
        run = self._run
        trial.has_begun = True
        if run.elastic is not None or run.settings.probe is not None:
            return
        try:
            if self._given is None:
                exchange_batches(run.replicas, [])
            else:
                self._given.share()
        except Exception:
            self._abandon(trial)
            raise

    def again(
        self,
        scout: Scout,
        model: nn.Module,
        left: int | None,
        trigger: SearchTrigger = SearchTrigger.REQUESTED,
    ) -> None:
        """Search in mid-run, from the present weights."""
        self._run.training_loss.clear_first()
        self._start_trial(scout, model, left, trigger)

    def search_new_data(self) -> None:
        """With `scout="restart"`, check whether the learning rate is far off for new data."""
        scout = self._run.settings.scout
        if scout is None or not scout.restart:
            return
        scout = replace(scout, steps=None)  # that length was asked for the start of the run
        try:
            model, left = self.check_can_search(scout)
        except (RuntimeError, ValueError) as problem:
            step = self._run.progress.step
            reason = f"{NOT_SEARCHED}: {problem}"
            self._run.log.write(GuardEvent(step=step, reason=reason, back_to=step))
            return
        self.again(scout, model, left, SearchTrigger.NEW_DATA)

    def interrupt(self, trial: SearchTrial) -> None:
        """Restore the start in the middle of a round, as before a checkpoint."""
        trial.interrupt()
        self._reset_evidence()
        if trial.search.is_over:
            self._conclude(trial)
        self._run.rates.write(everything=True)

    def _reset_evidence(self) -> None:
        self._run.training_loss.clear_first()
        self._run.start_cycle(is_partial=True)

    def _start_trial(
        self,
        scout: Scout,
        model: nn.Module,
        total_steps: int | None,
        trigger: SearchTrigger,
        saved: Mapping[str, Any] | None = None,
    ) -> SearchTrial:
        """Start a search around the given learning rates; in mid-run around the present ones."""
        run = self._run
        rates = run.knob_bank.lrs(run.base.lrs) if trigger.is_mid_run else run.base.peaks
        trial = run.progress.trial = SearchTrial(
            scout,
            run.optimizer,
            model,
            run.weights,
            run.replicas,
            total_steps,
            rates=rates,
            prior=prior_around_now(run) if trigger.is_mid_run else prior_of_run(run, rates),
            probes=run.settings.probe is not None,
            trigger=trigger,
        )
        if saved is not None:
            trial.resume(saved)
        if self._given is not None:
            trial.use_held_out(self._given)
        elif run.settings.probe is None and records_calls(run.replicas):
            trial.use_held_out(run.replicas.hold_out(NUM_HELD_OUT_PARTS, NUM_HELD_OUT_PARTS))
        run.knob_bank.rest()
        return trial

    def step(self) -> None:
        run, trial = self._run, self._run.progress.trial
        assert trial is not None
        run.progress.step += 1
        run.progress.replicas_differ = True
        with run.collective_call("a step of the scout"):
            if not trial.has_begun:
                self._begin(trial)
            if trial.is_held_out_step:
                trial.end_held_out_step()
                self._reset_evidence()
            elif (mixed := find_mixed(run, trial.update_watch)) is not None:
                self._abandon(trial)
                give_up_mixed(run, mixed)
            elif self._advance(trial):
                self._end_round(trial)

    def _advance(self, trial: SearchTrial) -> bool:
        """Make one step of a round; return whether the round is over."""
        run, num_steps = self._run, trial.search.num_steps
        left, losses = trial.steps_left() - 1, run.training_loss.last()
        probe = run.settings.probe
        if probe is not None or trial.held_out is not None:
            tail = DEFAULT_TAIL if probe is None else probe.tail
            if left < math.ceil(tail * num_steps):
                run.weights.tail.add()
        elif left == math.ceil(num_steps / LOSS_ROUND_PARTS):
            run.training_loss.clear()  # judged by the last part of a round
        return trial.advance(losses)

    def _end_round(self, trial: SearchTrial) -> None:
        run, step = self._run, self._run.progress.step
        try:
            report = self._score_round(trial)
            if report.scores is None:
                report.require_losses(step)
                warn_of_equal_losses(run, report)
            warn_without_losses(run, report)
            points = trial.points(report)
            # A learning rate that is low enough does not diverge without warning: a batch did it.
            if all(point.score is None for point in points) and min(points).bad_batch:
                run.log.warn_once(
                    "batch",
                    "no replica had a finite loss in the round of the scout that ended at step "
                    f"{step}. The round is repeated.",
                )
                self.interrupt(trial)
                return
            trial.judge(points, report, self._score_start(trial, report))
        except Exception as problem:
            self._abandon(trial)
            is_check = trial.trigger is SearchTrigger.NEW_DATA
            if not (is_check and isinstance(problem, AllRatesDiverged)):
                raise
            run.training_loss.clear_first()
            run.log.warn_once("new data", f"{ALL_DIVERGED}. The guard continues alone.")
            run.log.write(GuardEvent(step=step, reason=ALL_DIVERGED, back_to=step))
            return
        trial.restore()
        self._reset_evidence()
        self._conclude(trial)

    def _abandon(self, trial: SearchTrial) -> None:
        """End a search that failed, with the weights from before it."""
        run = self._run
        run.weights.restore_(trial.start)
        run.start_cycle(is_partial=True)
        self._end_trial(trial)
        run.rates.write(everything=True)

    def _score_round(self, trial: SearchTrial, *, alike: bool = False) -> CycleReport:
        run, num_steps = self._run, trial.search.num_steps
        # Cycle 0 in every round: all rounds are scored on the same batches.
        scores = run.probe(cycle=0, sync_every=num_steps, fresh=True, alike=alike)
        if trial.held_out is not None:
            try:
                with run.as_scored():
                    scores = trial.scores(alike=alike)
            except Exception as problem:  # held-out batches are an offer, not a request
                run.log.warn_once(
                    "held out",
                    "the scout compares training losses instead of held-out losses: the loss "
                    f"function failed on an earlier batch ({type(problem).__name__}: {problem}).",
                )
                trial.compare_by_losses()
        return run.exchange(scores=scores)

    def _score_start(self, trial: SearchTrial, report: CycleReport) -> CycleReport | None:
        """Score the start on the same batches: once, or in each round if batches are added."""
        known = trial.search.start_score is not None and not trial.compares_gains
        if report.scores is None or known:
            return None
        self._run.weights.tail.clear()
        with self._run.weights.at_snapshot(trial.start):
            return self._score_round(trial, alike=True)

    def _conclude(self, trial: SearchTrial) -> None:
        """Record a round. If the search is over, continue the run with its estimate."""
        run, search = self._run, trial.search
        rates = dict(zip(run.base.names, trial.rates, strict=True))
        estimate = None
        if search.is_over:
            estimate = keep_or_change(run, trial, estimate_of(run, trial))
            run.log.info(result_line(trial, estimate))
            if caution := caution_about(trial, estimate):
                run.log.warn_once(f"scout at {run.progress.step}", caution)
            run.progress.found_lr = peak_of(run, trial) * estimate.factor
            run.knob_bank.rescale(estimate.factor)
            run.clock.scouted(run.progress.step)
            run.weights.loss_scale.equalize_(range(run.replicas.size))
            self._end_trial(trial)
        run.log.write(search_event(run.progress.step, trial, rates, estimate))
        run.rates.write(everything=True)

    def _end_trial(self, trial: SearchTrial) -> None:
        run = self._run
        trial.close(shared=run.settings.gradients == "shared")
        run.progress.trial = self._given = None
        run.knob_bank.fan_out()
