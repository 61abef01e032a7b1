"""Replicas that come and go: they meet at the end of a cycle, and what one breaks off never was."""

from statistics import fmean

from hdet.body import PARTS
from hdet.cycle_end import CycleEnd
from hdet.elastic import Interrupted, Members, TorchftReplicas
from hdet.record import Stopwatch, converge_line
from hdet.run import Run


class Meeting:
    """The meetings of a run over torchft's manager."""

    def __init__(self, run: Run, replicas: TorchftReplicas, cycle_end: CycleEnd) -> None:
        self._run, self._replicas, self._cycle_end = run, replicas, cycle_end
        self.begin()

    def begin(self) -> None:
        """Here or where a state was loaded: without a place in the spread, until they have met."""
        self._replicas.begins = self._run.step
        self._run.steering.rest()
        self._first = self._run.counted()

    def meet(self, ran_with: list[float] | None, *, anew: bool = False) -> None:
        """Whoever is there ends the cycle together, or only converges where it is no end; if one
        leaves meanwhile, it never was."""
        run = self._run
        replicas = self._replicas
        if replicas.shared and run.step == replicas.begins:
            return  # nobody has made a step, nor knows of the others
        replicas.convene(anew=anew)
        undo, counted, run.held_back = run.parameters.keep(), run.counted(), []
        reason = "this replica was not to go on"
        try:
            members = replicas.call()
            if members.have_changed or ran_with is None:
                self._take_in(members)
            else:
                self._cycle_end.close(ran_with)
        except Interrupted as error:
            reason = str(error)
        finally:
            lines, run.held_back = run.held_back, None
        if replicas.commit():
            for line, watches, wait in lines:
                run.write_record(line, watches, wait=wait)
            return
        undo()
        if not (replicas.have_met or replicas.has_healed):
            # What one attempts alone does not count: who comes next begins at the first step.
            counted, run.step = self._first, self._first["step"]
        run.count_from(counted)
        run.steering.resize(replicas.size)
        run.begin_anew(cut_short=True)
        run.course.clear()
        run.diverged = True
        self._say_who(f"the converge was undone: {reason}")
        if run.is_over() and ran_with is not None:
            self.meet(None, anew=True)  # there is no next cycle to do it in

    def _take_in(self, members: Members) -> None:
        """The mean of those who have trained together; and where there are others than before, a
        new spread for all. What they have seen in this cycle was seen in another one, and is
        dropped.
        """
        run = self._run
        stopwatch = Stopwatch(run.device())
        weights = PARTS[:-1]
        call, verdict = run.call_up(*weights)
        lost = tuple(verdict.excluded)
        verdict = verdict.without(dict.fromkeys(members.newcomers, "has just joined"))
        num_bytes = run.parameters.converge_(verdict.fit, weights, call.agreed)
        if lost:
            num_bytes += run.parameters.reseed_state_(verdict.fit[0], lost)
        stopwatch.mark()
        line = converge_line(run.step, verdict, num_bytes)
        run.write_record(line, {"converge": stopwatch}, wait=True)
        if not members.have_changed:
            run.begin_anew(cut_short=True)
            return
        run.steering.steer([None] * run.replicas.size, ())  # what decays goes on to decay
        losses = [loss for r in verdict.fit if (loss := call.losses[r]) is not None]
        if run.base.wants_metric and losses:
            run.base.advance(fmean(losses))
        run.steering.resize(run.replicas.size)
        run.next_cycle()
        self._say_who(f"{run.replicas.size} replicas take part")

    def _say_who(self, text: str) -> None:
        run = self._run
        line = {"event": "note", "step": run.step, "text": text}
        run.write_record({**line, "measures": {"replicas": run.replicas.size}})
