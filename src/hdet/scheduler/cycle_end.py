"""The end of a cycle: replicas exchange reports, then the run rolls back or averages.

The guard comes first, so that bad weights are never averaged. Then the replicas average, and the
controller moves the knobs.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import NoReturn

import torch
from torch import Tensor

from hdet._validation import number_of
from hdet.control.guard_monitor import ABSTENTION, RELIEF
from hdet.control.replica_health import ReplicaHealth, ReplicasLost, check_health
from hdet.records.events import ConvergeCost, CycleEvent, ExcludedReplica, GuardEvent
from hdet.records.knob_entries import MovedKnob, knob_entries
from hdet.records.writer import Timers
from hdet.scheduler.loop_checks import warn_without_losses
from hdet.scheduler.run import Run
from hdet.scheduler.search_phase import SearchPhase
from hdet.scheduler.search_result import shares_of_rest
from hdet.signals.exchange import CycleReport
from hdet.tensors.timing import Stopwatch
from hdet.weights.inventory import ALL_KINDS, WEIGHTS, TensorKind
from hdet.weights.restore_points import GoodPoint

MIN_DIFFERENCES = 6
"""Differences between losses that show how much the losses of a cycle vary, at least."""


class CycleEnd:
    """Ends the cycles of a run whose replicas stay the same."""

    def __init__(self, run: Run, search_phase: SearchPhase) -> None:
        self._run, self._search_phase = run, search_phase
        self._has_said_memory = False

    def close(self, trained_with: Sequence[float]) -> None:
        """End a cycle, whose last step had these base learning rates."""
        run = self._run
        run.weights.averager.finish_average_()  # where the cycle is shorter than `overlap`
        unread = run.bound_knobs.unread()  # before a probe reads knobs that training does not
        scores = None
        if run.knob_bank.is_spread():
            scores = run.probe(run.knob_bank.cycle, run.settings.sync_every)
        stopwatch = Stopwatch(run.device())
        report = self._exchange(scores)
        if run.knob_bank.cycle == 0:
            run.bound_knobs.check_read(unread, run.progress.step)
        if self._rolls_back(report):
            return
        sees_new_data = run.good_point is not None and run.good_point.monitor.sees_new_data
        health, num_bytes = self._average(report, waits=sees_new_data)
        stopwatch.mark()
        event = self._move_knobs(report, health, trained_with, num_bytes)
        correction = self._correct_scale()
        run.next_cycle()
        if run.good_point is not None and run.good_point.monitor.is_best:
            run.good_point.take(run.progress.step)
            if not self._has_said_memory:
                self._has_said_memory = True
                run.log.info(f"guard keeps a snapshot of {run.good_point.memory()}.")
        timers = run.log.probe_timers if scores is not None else Timers()
        run.log.write(event, replace(timers, converge=stopwatch), wait=run.progress.is_over())
        if correction is not None:
            run.log.write(correction)
        if sees_new_data:
            self._search_phase.search_new_data()

    def _correct_scale(self) -> GuardEvent | None:
        """Raise the scale again where the guard has lowered it for nothing."""
        run = self._run
        monitor = None if run.good_point is None else run.good_point.monitor
        if monitor is None or (monitor.scale_correction == 1.0 and not monitor.sees_new_data):
            return None
        factor, step = monitor.scale_correction, run.progress.step
        run.knob_bank.rescale(factor)
        if monitor.sees_new_data:
            reason = ABSTENTION
            run.log.info(
                f"guard abstains at step {step}: {ABSTENTION}. It multiplies the learning rate by "
                f"{factor:.3g}. If the loss does not show quality, give Guard(metric=...)."
            )
        else:
            reason = RELIEF
            run.log.info(f"guard raised the learning rate again, by {factor:.3g}: {RELIEF}.")
        return GuardEvent(step=step, reason=reason, back_to=step, factor=factor)

    def note_first_loss(self, report: CycleReport) -> None:
        """Tell the guard the loss of the first step, once."""
        if self._run.good_point is not None:
            monitor = self._run.good_point.monitor
            monitor.set_first_loss(report.first_loss, report.first_error)
            if self._run.replicas.size == 1:
                monitor.lower_first_error(report.first_error)

    def _exchange(self, scores: Tensor | None) -> CycleReport:
        run = self._run
        # Under a spread trainable parameters differ anyway.
        trainable = () if run.knob_bank.is_spread() else (TensorKind.TRAINABLE,)
        averages_state = run.settings.optimizer_state == "average"
        state = (TensorKind.OPTIMIZER_STATE,) if averages_state else ()
        several = run.replicas.size > 1
        compare = (*trainable, TensorKind.FROZEN, TensorKind.BUFFERS, *state) if several else ()
        # Distances cost a pass over the weights, and only the record shows them.
        measures, metric = several and run.has_record, self._metric()
        report = run.exchange(*compare, measures=measures, scores=scores, metric=metric)
        self._check_losses(report)
        self._check_scores(report)
        if metric is None:
            warn_without_losses(run, report)
        return report

    def _metric(self) -> Tensor | None:
        """What the user's metric of the guard returns, once for each replica of this process."""
        run = self._run
        metric = None if run.good_point is None else run.good_point.monitor.guard.metric
        if metric is None:
            return None
        value = metric()
        number = math.nan if value is None else number_of("metric", value)
        number = number if math.isfinite(number) else math.nan
        return torch.full((len(run.replicas.local),), number, dtype=torch.float64)

    def _rolls_back(self, report: CycleReport) -> bool:
        """Restore earlier weights if the run fails; return whether it did."""
        run = self._run
        self.note_first_loss(report)
        if run.good_point is not None and (reason := self._failure(run.good_point, report)):
            self._roll_back(run.good_point, reason)
            return True
        return False

    def _move_knobs(
        self,
        report: CycleReport,
        health: ReplicaHealth,
        trained_with: Sequence[float],
        num_bytes: int,
    ) -> CycleEvent:
        """Let the controller move the knobs, and return the event of the cycle."""
        run = self._run
        used = [(knob.state.scale, knob.factors()) for knob in run.knob_bank.knobs]
        moves = run.knob_bank.move_knobs(
            report.losses, health.comparable, report.errors, report.scores
        )
        losses = [loss for r in health.healthy if (loss := report.losses[r]) is not None]
        if run.base.wants_metric and losses:
            run.base.advance(fmean(losses))
        rows = zip(run.knob_bank.knobs, used, moves.moves, moves.slopes, strict=True)
        moved = [MovedKnob(knob, *at, move, slope) for knob, at, move, slope in rows]
        scores = report.scores
        return CycleEvent(
            step=run.progress.step,
            excluded=ExcludedReplica.from_reasons(health.excluded),
            converge=ConvergeCost(bytes=num_bytes),
            cycle=run.knob_bank.cycle,
            losses=tuple(report.losses),
            loss_errors=tuple(report.errors),
            weights=None if moves.weights is None else tuple(moves.weights),
            distances=tuple(report.distances),
            scores=None if scores is None else tuple(fmean(s) if s else None for s in scores),
            lr_trace=run.log.traced(),
            knobs=knob_entries(run.base.names, trained_with, moved, num_replicas=run.replicas.size),
        )

    def _check_losses(self, report: CycleReport) -> None:
        run = self._run
        compares = run.knob_bank.needs_losses and run.settings.probe is None
        needed = run.base.wants_metric or compares
        if needed and not run.progress.is_partial_cycle:
            report.require_losses(run.progress.step)
        if len(set(report.num_observed)) > 1:
            run.log.warn_once(
                "observed",
                f"replicas observed different numbers of losses, {report.num_observed}, in the "
                f"cycle that ends at step {run.progress.step}. Call `step(loss)` once for every "
                "attempted optimizer step, also for one that GradScaler skipped.",
            )

    def _check_scores(self, report: CycleReport) -> None:
        lost = [
            replica
            for replica, scores in enumerate(report.scores or [])
            if not all(map(math.isfinite, scores))
        ]
        if lost:
            self._run.log.warn_once(
                "scores",
                f"the probe of replica(s) {lost} is not finite at step "
                f"{self._run.progress.step}: they are excluded from the comparison.",
            )

    def _average(self, report: CycleReport, *, waits: bool = False) -> tuple[ReplicaHealth, int]:
        run = self._run
        if run.replicas.size == 1:
            return ReplicaHealth((0,), {}, (0,)), 0
        health = self._check_health(report)
        run.log.say_excluded(health.excluded, run.progress.step)
        run.weights.loss_scale.equalize_(health.healthy)
        # An excluded replica needs the mean now, and so does the end of the run.
        waits = waits or bool(health.excluded) or run.progress.is_over()
        if run.settings.overlap and not waits:
            run.progress.average_due_at = run.progress.step + run.settings.overlap
            run.progress.forward_due_at = run.progress.step + run.settings.overlap // 2
            return health, run.weights.averager.start_average_(report.agreed)
        policy = run.settings.optimizer_state
        averages_state = policy == "average" and report.optimizer_states_match
        kinds = ALL_KINDS if averages_state else WEIGHTS
        exact = bool(health.excluded)  # error feedback of an excluded replica means nothing
        num_bytes = run.weights.averager.average_(health.healthy, kinds, report.agreed, exact=exact)
        if policy == "reset":
            run.weights.reset_state_()
        elif health.excluded and not averages_state:
            num_bytes += run.reseed(health)
        return health, num_bytes

    def _check_health(self, report: CycleReport) -> ReplicaHealth:
        """Find the replicas to average; under a guard, without outliers where weights differ."""
        run = self._run
        health = check_health(report.losses, report.finite, step=run.progress.step)
        if run.good_point is None or not run.can_diverge():
            return health
        losses = [loss if r in health.healthy else None for r, loss in enumerate(report.losses)]
        return health.without(run.good_point.monitor.outliers(losses, report.errors))

    def _failure(self, good_point: GoodPoint, report: CycleReport) -> str | None:
        """Return why the guard must roll back, before the weights are averaged; else None."""
        loss, error = self._mean_loss(report)
        lr, monitor = self._run.rates.highest, good_point.monitor
        if loss is not None and math.isnan(loss):
            return monitor.record_failure("no replica has finite weights and a finite loss", lr=lr)
        if report.num_bad_buffers and report.num_bad_buffers > good_point.num_bad_buffers():
            return monitor.record_failure("buffers are not finite", lr=lr)
        if monitor.guard.metric is not None:
            loss, error = report.metric, None
        return monitor.check_cycle(loss, error, lr=lr, vanished=report.vanished)

    def _mean_loss(self, report: CycleReport) -> tuple[float | None, float | None]:
        """Return the mean loss of healthy replicas and its error; NaN if no replica is."""
        try:
            healthy = self._check_health(report).healthy
            loss, error = report.mean_of(healthy)
            # A few differences between losses do not show how much they vary.
            num = sum(max(report.num_observed[replica] - 1, 0) for replica in healthy)
            return loss, error if num >= MIN_DIFFERENCES else None
        except ReplicasLost:
            return math.nan, None

    def _roll_back(self, good_point: GoodPoint, reason: str) -> None:
        """Restore the best weights and lower the ceiling. Schedule and data continue."""
        run, monitor = self._run, good_point.monitor
        good_point.restore()
        run.weights.loss_scale.equalize_(range(run.replicas.size))
        if run.settings.overlap:  # each replica kept its weights of before the average arrived
            run.average_now()
        if monitor.is_out_of_retries:
            self._give_up(good_point, reason)
        ahead = self._highest_lr_ahead()
        factor = monitor.scale_factor(run.rates.highest, ahead)
        run.knob_bank.rescale(factor)
        run.next_cycle()
        run.log.info(
            f"guard restored the weights of step {good_point.step} at step {run.progress.step} "
            f"({reason}); {_what_follows(factor, ahead)}."
        )
        run.log.write(
            GuardEvent(
                step=run.progress.step,
                reason=reason,
                back_to=good_point.step,
                factor=factor,
                scales=run.knob_bank.scales(),
            )
        )

    def _highest_lr_ahead(self) -> float:
        """The highest learning rate of the rest of the run, in units of the given one."""
        run = self._run
        now = run.base.share_of(run.knob_bank.lrs(run.base.lrs))
        base = run.base.share_of(run.base.lrs)
        rest = shares_of_rest(run) if run.one_cycle is None else None
        return max(now, rest.highest * now / base) if rest is not None and base else now

    def _give_up(self, good_point: GoodPoint, reason: str) -> NoReturn:
        run, monitor = self._run, good_point.monitor
        num, step = monitor.consecutive_rollbacks - 1, run.progress.step
        run.knob_bank.rescale(monitor.end_rollbacks())
        run.start_cycle(is_partial=True)
        run.rates.write(everything=True)
        run.log.write(
            GuardEvent(step=step, reason=f"stopped: {reason}", back_to=good_point.step), wait=True
        )
        raise ReplicasLost(
            f"the guard restored the run {num} times in a row, and the run fails again at step "
            f"{step} ({reason}). All replicas have the weights of step {good_point.step}. Save "
            "them, and resume with a lower learning rate."
        )


def _what_follows(factor: float, ahead: float) -> str:
    """Say what a rollback does to the learning rate, whose highest value `ahead` is known."""
    if factor == 1.0:
        return "the learning rate is kept"  # spared, or below the ceiling already
    return (
        f"the learning rate is multiplied by {factor:.3g}, its peak from now on is "
        f"{factor * ahead:.3g} x the given one"
    )
