"""The end of a cycle: what replicas tell each other, and whether the run goes on from there.

The guard comes first: a consensus that is not good is never made. Then the replicas converge, and
the controller moves the knobs.
"""

import math
from statistics import fmean

from torch import Tensor

from hdet.control.replica_health import ReplicaHealth, ReplicasLost, check_health
from hdet.control.spike_guard import RELIEF
from hdet.control.stall_detector import is_too_late_to_restart
from hdet.records.events import ConvergeCost, CycleEvent, ExcludedReplica, GuardEvent, LRTracePoints
from hdet.records.knob_entries import MovedKnob, knob_entries
from hdet.records.writer import Timers
from hdet.scheduler.run import Run
from hdet.scheduler.search_phase import SearchPhase
from hdet.signals.exchange import CycleReport
from hdet.tensors.timing import Stopwatch
from hdet.weights.inventory import ALL_KINDS, WEIGHTS, TensorKind
from hdet.weights.restore_points import GoodPoint, SecondStart


class CycleEnd:
    """Closes the cycles of a run."""

    def __init__(self, run: Run, search_phase: SearchPhase) -> None:
        self._run, self._search_phase = run, search_phase

    def close(self, ran_with: list[float]) -> None:
        run = self._run
        run.parameters.averager.finish_average_()  # in a last cycle that is shorter than the delay
        unread = run.bound_knobs.unread()  # before a probe reads what training does not
        probed = None
        if run.knob_bank.is_spread():
            probed = run.probe(run.knob_bank.cycle, run.settings.sync_every)
        stopwatch = Stopwatch(run.device())
        call = self._exchange(probed)
        if run.knob_bank.cycle == 0:
            run.bound_knobs.check_read(unread, run.step)
        if self._rolls_back(call):
            return
        sees_new_data = run.good_point is not None and run.good_point.monitor.sees_new_data
        verdict, num_bytes = self._converge(call, waits=sees_new_data)
        stopwatch.mark()
        event = self._steer(call, verdict, ran_with, num_bytes)
        scale_correction = (
            1.0 if run.good_point is None else run.good_point.monitor.scale_correction
        )
        if scale_correction != 1.0:
            run.knob_bank.rescale(scale_correction)
        run.next_cycle()
        if run.good_point is not None:
            run.good_point.take(run.step)
        watches = run.probe_watches if probed is not None else {}
        run.write_record(event, Timers(converge=stopwatch, **watches), wait=run.is_over())
        if scale_correction != 1.0:
            run.write_record(
                GuardEvent(step=run.step, reason=RELIEF, back_to=run.step, factor=scale_correction)
            )
        if sees_new_data:
            self._search_phase.search_new_data()

    def note_first_loss(self, call: CycleReport) -> None:
        """That of a run's first step, once: whoever watches it compares the first cycle with it."""
        if self._run.good_point is not None:
            self._run.good_point.monitor.set_first_loss(call.first_loss, call.first_error)
        if self._search_phase.second_start is not None:
            self._search_phase.second_start.stall_detector.set_first_loss(
                call.first_loss, call.first_error
            )

    def _exchange(self, probed: Tensor | None) -> CycleReport:
        run = self._run
        # Under a spread the parameters that train differ: no need to look.
        trainable = () if run.knob_bank.is_spread() else (TensorKind.TRAINABLE,)
        averages_state = run.settings.optimizer_state == "average"
        state = (TensorKind.OPTIMIZER_STATE,) if averages_state else ()
        several = run.replicas.size > 1
        compare = (*trainable, TensorKind.FROZEN, TensorKind.BUFFERS, *state) if several else ()
        call = run.exchange(*compare, measures=several, probed=probed)
        self._check_losses(call)
        self._check_scores(call)
        if run.good_point is not None and all(loss is None for loss in call.losses):
            run.warn_once("guard", "a guard sees nothing without losses: call `step(loss)`.")
        return call

    def _rolls_back(self, call: CycleReport) -> bool:
        """Whether the cycle was not good enough to go on from: then the run was taken back."""
        run = self._run
        self.note_first_loss(call)
        second = self._search_phase.second_start
        if second is not None and self._restarts(second, call):
            return True
        if run.good_point is not None and (reason := self._spike(run.good_point, call)):
            self._roll_back(run.good_point, reason)
            return True
        return False

    def _restarts(self, second: SecondStart, call: CycleReport) -> bool:
        """Whether the run is stuck, and was taken back to its first weights."""
        run = self._run
        if is_too_late_to_restart(run.knob_bank.cycle, run.step, run.settings.total_steps):
            self._search_phase.drop_second_start()
            return False
        loss, error = self._mean_loss(call)
        if second.skips_next_check:
            second.skips_next_check = False
            return False
        reason = second.stall_detector.reason(loss, error)
        if reason is None or loss is None:
            return False
        # What is worse than the first weights is nothing to come back to.
        for_good = not (call.first_loss is not None and loss < call.first_loss)
        if not for_good:
            self._converge(call, waits=True)
        self._search_phase.restart(second, reason, for_good=for_good)
        return True

    def _steer(
        self, call: CycleReport, verdict: ReplicaHealth, ran_with: list[float], num_bytes: int
    ) -> CycleEvent:
        """Move knobs and a schedule that waits for losses; what the record says of it."""
        run = self._run
        used = [(knob.state.scale, knob.factors()) for knob in run.knob_bank.knobs]
        steered = run.knob_bank.move_knobs(call.losses, verdict.sound, call.errors, call.scores)
        losses = [loss for r in verdict.fit if (loss := call.losses[r]) is not None]
        if run.base.wants_metric and losses:
            run.base.advance(fmean(losses))
        rows = zip(run.knob_bank.knobs, used, steered.moves, steered.slopes, strict=True)
        moved = [MovedKnob(knob, *at, move, slope) for knob, at, move, slope in rows]
        scores = call.scores
        return CycleEvent(
            step=run.step,
            excluded=ExcludedReplica.from_reasons(verdict.excluded),
            converge=ConvergeCost(bytes=num_bytes),
            cycle=run.knob_bank.cycle,
            losses=tuple(call.losses),
            loss_errors=tuple(call.errors),
            weights=None if steered.weights is None else tuple(steered.weights),
            distances=tuple(call.distances),
            scores=None if scores is None else tuple(fmean(s) if s else None for s in scores),
            lr_trace=LRTracePoints() if run.recorder is None else run.lr_trace.points(),
            knobs=knob_entries(run.base.names, ran_with, moved, num_replicas=run.replicas.size),
        )

    def _check_losses(self, call: CycleReport) -> None:
        run = self._run
        compares = run.knob_bank.needs_losses and run.settings.probe is None
        needed = run.base.wants_metric or compares
        if needed and not run.is_partial:
            call.require_losses(run.step)
        if len(set(call.num_observed)) > 1:
            run.warn_once(
                "observed",
                f"replicas observed {call.num_observed} losses in the cycle that ends at step "
                f"{run.step}. Call `step()` once for every attempted optimizer step, also "
                "for one that GradScaler skipped: otherwise the replicas drift apart in time.",
            )

    def _check_scores(self, call: CycleReport) -> None:
        lost = [
            replica
            for replica, scores in enumerate(call.scores or [])
            if not all(map(math.isfinite, scores))
        ]
        if lost:
            self._run.warn_once(
                "scores",
                f"the probe of replica(s) {lost} is not finite at step {self._run.step}: they are "
                "left out of the comparison.",
            )

    def _converge(self, call: CycleReport, *, waits: bool = False) -> tuple[ReplicaHealth, int]:
        run = self._run
        if run.replicas.size == 1:
            return ReplicaHealth((0,), {}, (0,)), 0
        verdict = self._triage(call)
        # One that is lost must not train on, nor a run that ends here.
        waits = waits or bool(verdict.excluded) or run.is_over()
        if run.settings.overlap and not waits:
            run.average_due_at = run.step + run.settings.overlap
            run.forward_due_at = run.step + run.settings.overlap // 2
            return verdict, run.parameters.averager.start_average_(call.agreed)
        policy = run.settings.optimizer_state
        averages_state = policy == "average" and call.optimizer_states_match
        kinds = ALL_KINDS if averages_state else WEIGHTS
        exact = bool(verdict.excluded)  # one that is lost has nothing to say in short
        num_bytes = run.parameters.averager.average_(verdict.fit, kinds, call.agreed, exact=exact)
        if policy == "reset":
            run.parameters.reset_state_()
        elif verdict.excluded and not averages_state:
            num_bytes += run.reseed(verdict)
        return verdict, num_bytes

    def _triage(self, call: CycleReport) -> ReplicaHealth:
        """Who is averaged; outliers are not, where weights can be apart and a guard looks."""
        run = self._run
        verdict = check_health(call.losses, call.finite, step=run.step)
        if run.good_point is None or not run.can_diverge():
            return verdict
        losses = [loss if r in verdict.fit else None for r, loss in enumerate(call.losses)]
        return verdict.without(run.good_point.monitor.outliers(losses, call.errors))

    def _spike(self, good_point: GoodPoint, call: CycleReport) -> str | None:
        """Why the consensus is not good, if it is not: before it is made, nothing is harmed."""
        loss, error = self._mean_loss(call)
        if loss is not None and math.isnan(loss):
            return good_point.monitor.record_failure(
                "no replica has finite weights and a finite loss"
            )
        return good_point.monitor.check_cycle(loss, error)

    def _mean_loss(self, call: CycleReport) -> tuple[float | None, float | None]:
        """Of the replicas that are fit, with its standard error; not a number if none is."""
        try:
            return call.mean_of(self._triage(call).fit)
        except ReplicasLost:
            return math.nan, None

    def _roll_back(self, good_point: GoodPoint, reason: str) -> None:
        """To the last good weights, with a lower scale; the schedule and the data go on."""
        run = self._run
        watch = good_point.monitor
        good_point.restore()
        if run.settings.overlap:  # what was kept is what each had before the mean came
            run.average_now()
        if watch.is_out_of_retries:
            num = watch.consecutive_rollbacks - 1
            run.knob_bank.rescale(watch.end_rollbacks())
            run.start_cycle(is_partial=True)
            run.write(everything=True)
            run.write_record(
                GuardEvent(step=run.step, reason=f"stopped: {reason}", back_to=good_point.step),
                wait=True,
            )
            raise ReplicasLost(
                f"the run was taken back {num} times in a row, and spikes again at "
                f"step {run.step} ({reason}). All replicas have the weights of step "
                f"{good_point.step}: save them, and resume with a lower learning rate."
            )
        run.knob_bank.rescale(watch.scale_factor())
        run.next_cycle()
        run.write_record(
            GuardEvent(
                step=run.step,
                reason=reason,
                back_to=good_point.step,
                factor=watch.scale_factor(),
                scales=run.knob_bank.scales(),
            )
        )
