"""Ends of cycles where replicas join and leave: an interrupted one is undone."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from hdet.records.events import ConvergeCost, ConvergeEvent, ExcludedReplica, NoteEvent
from hdet.records.writer import Timers
from hdet.replicas.protocol import ElasticReplicas, Interrupted, Members
from hdet.scheduler.cycle_end import CycleEnd
from hdet.scheduler.run import Run
from hdet.tensors.timing import Stopwatch
from hdet.weights.inventory import WEIGHTS


class ElasticSync:
    """Ends the cycles of a run whose replicas come from torchft's manager."""

    def __init__(self, run: Run, replicas: ElasticReplicas, cycle_end: CycleEnd) -> None:
        self._run, self._replicas, self._cycle_end = run, replicas, cycle_end
        self.begin()

    def begin(self) -> None:
        """Start here, or where a state was loaded: without a spread until the first sync."""
        self._replicas.first_step = self._run.progress.step
        self._run.knob_bank.rest()
        self._first = self._run.progress_state()
        self._was_undone = False

    def close(self, trained_with: Sequence[float]) -> None:
        """End a cycle together with the replicas that take part."""
        self._sync(trained_with)
        if self._was_undone and self._run.progress.is_over():
            self._sync(None, anew=True)  # no other cycle follows in which to average

    def converge(self) -> None:
        """Average now, in mid-cycle."""
        self._sync(None)

    def _sync(self, trained_with: Sequence[float] | None, *, anew: bool = False) -> None:
        """Average, or end the cycle. If a replica leaves meanwhile, the sync is undone."""
        run, replicas = self._run, self._replicas
        self._was_undone = False
        if replicas.shared and run.progress.step == replicas.first_step:
            return  # no replica has made a step yet
        replicas.start_quorum(anew=anew)
        undo, before = run.weights.snapshot_weights(), run.progress_state()
        reason = "this replica could not commit"
        with run.log.held() as held:
            try:
                members = replicas.check_members()
                if members.have_changed or trained_with is None:
                    self._average_members(members)
                else:
                    self._cycle_end.close(trained_with)
            except Interrupted as error:
                reason = str(error)
        if replicas.commit():
            for event, timers, wait in held:
                run.log.write(event, timers, wait=wait)
            return
        undo()
        self._restore(before)
        self._note_members(f"the average was undone: {reason}")

    def _restore(self, before: dict[str, Any]) -> None:
        run, replicas = self._run, self._replicas
        self._was_undone = True
        if not (replicas.have_synced or replicas.has_healed):
            # Steps before the first sync do not count: a later replica begins at the first step.
            before, run.progress.step = self._first, self._first["step"]
        run.restore_progress(before)
        run.knob_bank.resize(replicas.size)
        run.start_cycle(is_partial=True)
        run.log.clear_trace()
        run.progress.replicas_differ = True

    def _average_members(self, members: Members) -> None:
        """Average the replicas that trained together, and spread all of them anew.

        The losses of this cycle are dropped: replicas that joined saw others.
        """
        run = self._run
        stopwatch = Stopwatch(run.device())
        report, health = run.exchange_health(*WEIGHTS)
        lost = tuple(health.excluded)
        run.log.say_excluded(health.excluded, run.progress.step)
        health = health.without(dict.fromkeys(members.newcomers, "has just joined"))
        num_bytes = run.weights.averager.average_(health.healthy, WEIGHTS, report.agreed)
        if lost:
            num_bytes += run.weights.reseed_state_(health.healthy[0], lost)
        run.weights.loss_scale.equalize_(health.healthy)
        stopwatch.mark()
        event = ConvergeEvent(
            step=run.progress.step,
            excluded=ExcludedReplica.from_reasons(health.excluded),
            converge=ConvergeCost(bytes=num_bytes),
        )
        run.log.write(event, Timers(converge=stopwatch), wait=True)
        if not members.have_changed:
            run.start_cycle(is_partial=True)
            return
        run.knob_bank.move_knobs([None] * run.replicas.size, ())  # the decay continues
        losses = [loss for r in health.healthy if (loss := report.losses[r]) is not None]
        if run.base.wants_metric and losses:
            run.base.advance(fmean(losses))
        run.knob_bank.resize(run.replicas.size)
        run.next_cycle()
        self._note_members(f"{run.replicas.size} replicas take part")

    def _note_members(self, text: str) -> None:
        run = self._run
        measures = {"replicas": run.replicas.size}
        run.log.write(NoteEvent(step=run.progress.step, text=text, measures=measures))
