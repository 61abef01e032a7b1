"""Replicas that come and go: they meet at the end of a cycle, and what one breaks off never was."""

from statistics import fmean

from hdet.records.events import ConvergeCost, ConvergeEvent, ExcludedReplica, NoteEvent
from hdet.records.writer import Timers
from hdet.replicas.protocol import ElasticReplicas, Interrupted, Members
from hdet.scheduler.cycle_end import CycleEnd
from hdet.scheduler.run import Run
from hdet.tensors.timing import Stopwatch
from hdet.weights.inventory import WEIGHTS


class ElasticSync:
    """The meetings of a run over torchft's manager."""

    def __init__(self, run: Run, replicas: ElasticReplicas, cycle_end: CycleEnd) -> None:
        self._run, self._replicas, self._cycle_end = run, replicas, cycle_end
        self.begin()

    def begin(self) -> None:
        """Here or where a state was loaded: without a place in the spread, until they have met."""
        self._replicas.first_step = self._run.step
        self._run.knob_bank.rest()
        self._first = self._run.progress_state()

    def meet(self, ran_with: list[float] | None, *, anew: bool = False) -> None:
        """Whoever is there ends the cycle together, or only converges where it is no end; if one
        leaves meanwhile, it never was."""
        run = self._run
        replicas = self._replicas
        if replicas.shared and run.step == replicas.first_step:
            return  # nobody has made a step, nor knows of the others
        replicas.start_quorum(anew=anew)
        undo, progress_state = run.parameters.snapshot_weights(), run.progress_state()
        run.held_lines = []
        reason = "this replica was not to go on"
        try:
            members = replicas.check_members()
            if members.have_changed or ran_with is None:
                self._average_members(members)
            else:
                self._cycle_end.close(ran_with)
        except Interrupted as error:
            reason = str(error)
        finally:
            lines, run.held_lines = run.held_lines, None
        if replicas.commit():
            for event, timers, wait in lines:
                run.write_record(event, timers, wait=wait)
            return
        undo()
        if not (replicas.have_synced or replicas.has_healed):
            # What one attempts alone does not count: who comes next begins at the first step.
            progress_state, run.step = self._first, self._first["step"]
        run.restore_progress(progress_state)
        run.knob_bank.resize(replicas.size)
        run.start_cycle(is_partial=True)
        run.lr_trace.clear()
        run.diverged = True
        self._note_members(f"the converge was undone: {reason}")
        if run.is_over() and ran_with is not None:
            self.meet(None, anew=True)  # there is no next cycle to do it in

    def _average_members(self, members: Members) -> None:
        """The mean of those who have trained together; and where there are others than before, a
        new spread for all. What they have seen in this cycle was seen in another one, and is
        dropped.
        """
        run = self._run
        stopwatch = Stopwatch(run.device())
        call, verdict = run.exchange_health(*WEIGHTS)
        lost = tuple(verdict.excluded)
        verdict = verdict.without(dict.fromkeys(members.newcomers, "has just joined"))
        num_bytes = run.parameters.averager.average_(verdict.fit, WEIGHTS, call.agreed)
        if lost:
            num_bytes += run.parameters.reseed_state_(verdict.fit[0], lost)
        stopwatch.mark()
        event = ConvergeEvent(
            step=run.step,
            excluded=ExcludedReplica.from_reasons(verdict.excluded),
            converge=ConvergeCost(bytes=num_bytes),
        )
        run.write_record(event, Timers(converge=stopwatch), wait=True)
        if not members.have_changed:
            run.start_cycle(is_partial=True)
            return
        run.knob_bank.move_knobs([None] * run.replicas.size, ())  # what decays goes on to decay
        losses = [loss for r in verdict.fit if (loss := call.losses[r]) is not None]
        if run.base.wants_metric and losses:
            run.base.advance(fmean(losses))
        run.knob_bank.resize(run.replicas.size)
        run.next_cycle()
        self._note_members(f"{run.replicas.size} replicas take part")

    def _note_members(self, text: str) -> None:
        run = self._run
        measures = {"replicas": run.replicas.size}
        run.write_record(NoteEvent(step=run.step, text=text, measures=measures))
