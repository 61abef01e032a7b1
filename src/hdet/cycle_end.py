"""The end of a cycle: what replicas tell each other, and whether the run goes on from there.

The guard comes first: a consensus that is not good is never made. Then the replicas converge, and
the controller moves the knobs.
"""

import math
from statistics import fmean
from typing import Any

from torch import Tensor

from hdet.body import PARTS
from hdet.guard import RELIEF, ReplicasLost, Triage, triage
from hdet.record import Stopwatch, converge_line, cycle_line, guard_line
from hdet.refuge import Refuge
from hdet.roll_call import RollCall
from hdet.run import Run
from hdet.scouting import Scouting
from hdet.second_start import SecondStart
from hdet.stuck import is_late


class CycleEnd:
    """Closes the cycles of a run."""

    def __init__(self, run: Run, scouting: Scouting) -> None:
        self._run, self._scouting = run, scouting

    def close(self, ran_with: list[float]) -> None:
        run = self._run
        run.parameters.land_()  # in a last cycle that is shorter than the delay
        unread = run.hands.unread()  # before a probe reads what training does not
        probed = None
        if run.steering.is_spread():
            probed = run.probe(run.steering.cycle, run.settings.sync_every)
        stopwatch = Stopwatch(run.device())
        call = self._hear_all(probed)
        if run.steering.cycle == 0:
            run.hands.check_read(unread, run.step)
        if self._goes_back(call):
            return
        sees_new_data = run.refuge is not None and run.refuge.watch.sees_new_data
        verdict, num_bytes = self._converge(call, waits=sees_new_data)
        stopwatch.mark()
        line = {
            **converge_line(run.step, verdict, num_bytes),
            **self._steer(call, verdict, ran_with),
        }
        relief = 1.0 if run.refuge is None else run.refuge.watch.relief
        if relief != 1.0:
            run.steering.rescale(relief)
        run.next_cycle()
        if run.refuge is not None:
            run.refuge.keep(run.step)
        watches = run.probe_watches if probed is not None else {}
        run.write_record(line, {"converge": stopwatch, **watches}, wait=run.is_over())
        if relief != 1.0:
            run.write_record(guard_line(run.step, RELIEF, run.step, relief))
        if sees_new_data:
            self._scouting.look_again()

    def note_first_loss(self, call: RollCall) -> None:
        """That of a run's first step, once: whoever watches it compares the first cycle with it."""
        if self._run.refuge is not None:
            self._run.refuge.watch.begin(call.first_loss, call.first_error)
        if self._scouting.second_start is not None:
            self._scouting.second_start.stuck.begin(call.first_loss, call.first_error)

    def _hear_all(self, probed: Tensor | None) -> RollCall:
        run = self._run
        # Under a spread the parameters that train differ: no need to look.
        moving = () if run.steering.is_spread() else ("moving",)
        moments = ("state",) if run.settings.optimizer_state == "average" else ()
        several = run.replicas.size > 1
        compare = (*moving, "still", "buffers", *moments) if several else ()
        call = run.roll_call(*compare, measures=several, probed=probed)
        self._check_losses(call)
        self._check_scores(call)
        if run.refuge is not None and all(loss is None for loss in call.losses):
            run.warn_once("guard", "a guard sees nothing without losses: call `step(loss)`.")
        return call

    def _goes_back(self, call: RollCall) -> bool:
        """Whether the cycle was not good enough to go on from: then the run was taken back."""
        run = self._run
        self.note_first_loss(call)
        second = self._scouting.second_start
        if second is not None and self._starts_again(second, call):
            return True
        if run.refuge is not None and (reason := self._spike(run.refuge, call)):
            self._go_back(run.refuge, reason)
            return True
        return False

    def _starts_again(self, second: SecondStart, call: RollCall) -> bool:
        """Whether the run is stuck, and was taken back to its first weights."""
        run = self._run
        if is_late(run.steering.cycle, run.step, run.settings.total_steps):
            self._scouting.forget_first_weights()
            return False
        loss, error = self._mean_loss(call)
        if second.has_just_looked:
            second.has_just_looked = False
            return False
        reason = second.stuck.reason(loss, error)
        if reason is None or loss is None:
            return False
        # What is worse than the first weights is nothing to come back to.
        for_good = not (call.first_loss is not None and loss < call.first_loss)
        if not for_good:
            self._converge(call, waits=True)
        self._scouting.start_again(second, reason, for_good=for_good)
        return True

    def _steer(self, call: RollCall, verdict: Triage, ran_with: list[float]) -> dict[str, Any]:
        """Move knobs and a schedule that waits for losses; what the record says of it."""
        run = self._run
        used = [(knob.state.scale, knob.factors()) for knob in run.steering.knobs]
        steered = run.steering.steer(call.losses, verdict.sound, call.errors, call.scores)
        losses = [loss for r in verdict.fit if (loss := call.losses[r]) is not None]
        if run.base.wants_metric and losses:
            run.base.advance(fmean(losses))
        return cycle_line(
            run.steering.cycle,
            run.base.names,
            call.losses,
            call.errors,
            call.distances,
            call.scores,
            steered,
            ran_with,
            run.steering.knobs,
            used,
            {} if run.recorder is None else run.course.points(),
        )

    def _check_losses(self, call: RollCall) -> None:
        run = self._run
        compares = run.steering.needs_losses and run.settings.probe is None
        needed = run.base.wants_metric or compares
        if needed and not run.cut_short:
            call.require_losses(run.step)
        if len(set(call.num_observed)) > 1:
            run.warn_once(
                "observed",
                f"replicas observed {call.num_observed} losses in the cycle that ends at step "
                f"{run.step}. Call `step()` once for every attempted optimizer step, also "
                "for one that GradScaler skipped: otherwise the replicas drift apart in time.",
            )

    def _check_scores(self, call: RollCall) -> None:
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

    def _converge(self, call: RollCall, *, waits: bool = False) -> tuple[Triage, int]:
        run = self._run
        if run.replicas.size == 1:
            return Triage((0,), {}, (0,)), 0
        verdict = self._triage(call)
        # One that is lost must not train on, nor a run that ends here.
        waits = waits or bool(verdict.excluded) or run.is_over()
        if run.settings.overlap and not waits:
            run.lands_at = run.step + run.settings.overlap
            run.passes_on_at = run.step + run.settings.overlap // 2
            return verdict, run.parameters.start_converge_(call.agreed)
        policy = run.settings.optimizer_state
        averages_state = policy == "average" and call.states_match
        parts = PARTS if averages_state else PARTS[:-1]
        exact = bool(verdict.excluded)  # one that is lost has nothing to say in short
        num_bytes = run.parameters.converge_(verdict.fit, parts, call.agreed, exact=exact)
        if policy == "reset":
            run.parameters.reset_state_()
        elif verdict.excluded and not averages_state:
            num_bytes += run.reseed(verdict)
        return verdict, num_bytes

    def _triage(self, call: RollCall) -> Triage:
        """Who is averaged; outliers are not, where weights can be apart and a guard looks."""
        run = self._run
        verdict = triage(call.losses, call.finite, step=run.step)
        if run.refuge is None or not run.can_diverge():
            return verdict
        losses = [loss if r in verdict.fit else None for r, loss in enumerate(call.losses)]
        return verdict.without(run.refuge.watch.outliers(losses, call.errors))

    def _spike(self, refuge: Refuge, call: RollCall) -> str | None:
        """Why the consensus is not good, if it is not: before it is made, nothing is harmed."""
        loss, error = self._mean_loss(call)
        if loss is not None and math.isnan(loss):
            return refuge.watch.lost("no replica has finite weights and a finite loss")
        return refuge.watch.spiked(loss, error)

    def _mean_loss(self, call: RollCall) -> tuple[float | None, float | None]:
        """Of the replicas that are fit, with its standard error; not a number if none is."""
        try:
            return call.mean_of(self._triage(call).fit)
        except ReplicasLost:
            return math.nan, None

    def _go_back(self, refuge: Refuge, reason: str) -> None:
        """To the last good weights, with a lower scale; the schedule and the data go on."""
        run = self._run
        watch = refuge.watch
        refuge.go_back()
        if run.settings.overlap:  # what was kept is what each had before the mean came
            run.come_together()
        if watch.gives_up:
            num = watch.in_a_row - 1
            run.steering.rescale(watch.surrender())
            run.begin_anew(cut_short=True)
            run.write(everything=True)
            line = guard_line(run.step, f"stopped: {reason}", refuge.step, None)
            run.write_record(line, wait=True)
            raise ReplicasLost(
                f"the run was taken back {num} times in a row, and spikes again at "
                f"step {run.step} ({reason}). All replicas have the weights of step "
                f"{refuge.step}: save them, and resume with a lower learning rate."
            )
        run.steering.rescale(watch.factor())
        run.next_cycle()
        line = guard_line(run.step, reason, refuge.step, watch.factor())
        run.write_record({**line, "scales": run.steering.scales()})
