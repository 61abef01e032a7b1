"""A run while its replicas scout: they set out, come back, and begin with what was found."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hdet.base import Shares
from hdet.expedition import Expedition, scout_line
from hdet.growth import peak_of
from hdet.preset import unfit_for_scouts
from hdet.probe import TAIL
from hdet.record import guard_line
from hdet.roll_call import RollCall
from hdet.run import Run
from hdet.scout import (
    INTERRUPTED,
    NO_TIME,
    NOTHING_FOUND,
    Beginning,
    Lost,
    Scout,
    check_room,
)
from hdet.second_start import SecondStart
from hdet.stuck import is_far

NO_LOOK = "no other learning rate was tried after a change of the data"
LOOKED = "after a change of the data other learning rates were tried"
BY_LOSSES = "the loss function cannot be called again with a batch of before"
VOID = "losses were not finite on any replica in a round of the scout that ended"


class Scouting:
    """Sends the replicas of a run out, at its beginning, when it is stuck, or when asked to."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.second_start: SecondStart | None = None
        """The way back to the first weights, as long as it may be needed."""

    def set_out(self, told: Mapping[str, Any] | None = None) -> None:
        """Start to scout, or go on with a search that a checkpoint has told of."""
        run = self._run
        late = None if told is None else told.get("late")
        scout = run.settings.scout if late is None else Scout(**late["scout"])
        if run.expedition is not None:
            self._end_scout(run.expedition)
        self.forget_first_weights()
        if scout is None or run.model is None or (run.step > 0 and told is None):
            return
        if run.replicas.size == 1:
            run.warn_once("scout", "`scout` needs several replicas: the learning rate is kept.")
            return
        total = run.settings.total_steps if late is None else late["total_steps"]
        # A checkpoint of the first look holds the weights that the run began with.
        looks = scout.restart and (told is None or (late is None and told.get("brief", False)))
        try:
            check_room(scout, num_replicas=run.replicas.size, total_steps=total)
        except ValueError as error:
            if told is None:
                raise
            # With fewer replicas than it was begun with.
            run.warn_once("scout", f"{error} The scout ends, and the learning rate is kept.")
            return
        if looks:
            self.second_start = SecondStart(run.optimizer, run.model, run.parameters, run.counted)
        expedition = self._explore(
            scout,
            run.model,
            total,
            late=late is not None,
            brief=looks,
            stuck=told is not None and told.get("stuck", False),
            unasked=told is not None and told.get("unasked", False),
            told=told,
        )
        if expedition.search.is_over:
            self._conclude(expedition)

    def fit_to_scout(self, scout: Scout) -> tuple[nn.Module, int | None]:
        """The model and the steps that are left, if a scout can be made in mid-run."""
        run = self._run
        problem = unfit_for_scouts(run.base, run.model, run.replicas, run.settings.gradients)
        if run.takes_over is not None:
            problem = (
                "`scout_again()` is for hdet.HDET: the paper's controller has its own schedule"
            )
        elif run.expedition is not None:
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
        self, scout: Scout, model: nn.Module, left: int | None, *, unasked: bool = False
    ) -> None:
        """In mid-run, from the weights of now."""
        self.forget_first_weights()
        self._run.signal.set_out()
        self._explore(scout, model, left, late=True, brief=unasked, unasked=unasked)

    def look_again(self) -> None:
        """The data has changed: with `scout="restart"`, whether the learning rate of now is
        hopeless with it. A run that is nearly over has no time for that."""
        scout = self._run.settings.scout
        if scout is None or not scout.restart:
            return
        scout = replace(scout, steps=None)  # nobody has asked for rounds of that length here
        try:
            model, left = self.fit_to_scout(scout)
        except (RuntimeError, ValueError) as problem:
            step = self._run.step
            self._run.write_record(guard_line(step, f"{NO_LOOK}: {problem}", step, None))
            return
        self.again(scout, model, left, unasked=True)

    def interrupt(self, expedition: Expedition) -> None:
        """Everyone comes back in the middle of a round, as before a checkpoint."""
        run = self._run
        expedition.interrupt()
        self._all_are_back()
        if expedition.search.is_over:
            self._conclude(expedition)
        run.write(everything=True)

    def _all_are_back(self) -> None:
        self._run.signal.set_out()
        self._run.begin_anew(cut_short=True)

    def _explore(
        self,
        scout: Scout,
        model: nn.Module,
        total_steps: int | None,
        *,
        late: bool = False,
        brief: bool = False,
        stuck: bool = False,
        unasked: bool = False,
        told: Mapping[str, Any] | None = None,
    ) -> Expedition:
        """Around what was given; or, in mid-run, around the learning rates of now."""
        run = self._run
        rates = run.steering.lrs(run.base.lrs) if late else run.base.peaks
        expedition = run.expedition = Expedition(
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
            late=late,
            brief=brief,
            stuck=stuck,
            unasked=unasked,
        )
        if told is not None:
            expedition.resume(told)
        if run.settings.probe is None:
            expedition.listen_to(run.replicas.hold_out())
        run.steering.rest()
        return expedition

    def step(self, expedition: Expedition) -> None:
        run = self._run
        run.step += 1
        run.diverged = True
        if expedition.is_holding_out:
            expedition.end_held_out()
            self._all_are_back()
        elif self._advance(expedition):
            self._end_round(expedition)
        run.write(everything=True)

    def _advance(self, expedition: Expedition) -> bool:
        """One step of a round; whether it is over."""
        run, num_steps = self._run, expedition.search.num_steps
        left, losses = expedition.steps_left() - 1, run.signal.last()
        probe = run.settings.probe
        if probe is not None or expedition.held_out is not None:
            tail = TAIL if probe is None else probe.tail
            if left < math.ceil(tail * num_steps):
                run.parameters.add_iterate()
        elif left == num_steps // 2:
            run.signal.clear()  # judged by the second half of a round
        return expedition.advance(losses)

    def _end_round(self, expedition: Expedition) -> None:
        run = self._run
        try:
            call = self._score_round(expedition)
            if call.scores is None:
                call.require_losses(run.step)
            points = expedition.points(call)
            # What kills the lowest learning rate out of the blue is not the learning rate.
            if all(point.score is None for point in points) and min(points).glitch:
                run.warn_once("batch", f"{VOID} at step {run.step}: it is made again.")
                self.interrupt(expedition)
                return
            expedition.judge(points, call, self._score_outset(expedition, call))
        except Exception as problem:  # what there was before is not lost
            run.parameters.restore_(expedition.camp)
            if self.second_start is not None and self.second_start.can_return:
                run.count_from(self.second_start.return_())
            self.forget_first_weights()
            run.begin_anew(cut_short=True)
            self._end_scout(expedition)
            run.write(everything=True)
            if not (expedition.unasked and isinstance(problem, Lost)):
                raise
            run.signal.set_out()
            run.warn_once("look", f"{LOOKED}: every learning rate blows up; the guard goes on.")
            run.write_record(guard_line(run.step, f"{LOOKED}: every one blows up", run.step, None))
            return
        expedition.come_back()
        self._all_are_back()
        self._conclude(expedition)

    def _score_round(self, expedition: Expedition, *, alike: bool = False) -> RollCall:
        run = self._run
        # The same batches in all rounds.
        num_steps = expedition.search.num_steps
        probed = run.probe(cycle=0, sync_every=num_steps, fresh=True, alike=alike)
        if expedition.held_out is not None:
            try:
                with run.at_rest():
                    probed = expedition.scores(alike=alike)
            except Exception as problem:  # nobody has asked for that
                why = f"{BY_LOSSES} ({type(problem).__name__}: {problem})"
                run.warn_once("held out", f"the scout compares training losses, since {why}.")
                expedition.go_by_losses()
        return run.roll_call(probed=probed)

    def _score_outset(self, expedition: Expedition, call: RollCall) -> RollCall | None:
        """By the same batches: once, unless they become more."""
        known = expedition.search.outset is not None and not expedition.moves
        if call.scores is None or known:
            return None
        self._run.parameters.forget_iterates()
        with self._run.parameters.visit_snapshot(expedition.camp):
            return self._score_round(expedition, alike=True)

    def _conclude(self, expedition: Expedition) -> None:
        """If the search is over, begin the run with what was found."""
        run = self._run
        search, begin = expedition.search, None
        peaks = dict(zip(run.base.names, expedition.rates, strict=True))
        if search.is_over:
            shares = self._shares(expedition)
            begin = search.begin_with(peak=peak_of(shares.mean), highest=shares.highest)
            begin = self._begin_or_return(expedition, begin)
            if advice := self._advice(expedition, begin):
                what = f"begins with {begin.factor:.3g} times the given learning rate"
                if expedition.late:
                    what = f"goes on with {begin.factor:.3g} times its learning rate"
                told = f"the scout {advice} ({search.reason}): the run {what}."
                run.warn_once(f"scout at {run.step}", told)
            run.steering.rescale(begin.factor)
            run.clock.scouted(run.step)
            self._end_scout(expedition)
        run.write_record(scout_line(run.step, expedition, peaks, begin))

    def _advice(self, expedition: Expedition, begin: Beginning) -> str:
        """What a person should know who trusts in what was found; nothing if all is well."""
        search = expedition.search
        if INTERRUPTED in search.reason:
            rest = "try anything" if search.found is None else "look closely"
            cause = "a `converge()` or a bad batch"
            return f"was interrupted by {cause}, and no steps were left to {rest}"
        if NO_TIME in search.reason and search.found is not None:
            return (
                "had no time to look beyond what it tried, at whose end the best lies; give a "
                "learning rate that is nearer, more replicas or a larger `Scout(share=...)`"
            )
        if begin.why != NOTHING_FOUND:
            return ""
        found = "found no learning rate to prefer"
        return f"{found}; a `probe=` tells more than losses" if expedition.by == "losses" else found

    def start_again(self, second: SecondStart, reason: str, *, for_good: bool) -> None:
        """The run is stuck: scout from its first weights, and see whether its learning rate is the
        fault. With `for_good` there is nothing to come back to."""
        run = self._run
        scout = run.settings.scout
        assert scout is not None
        assert run.model is not None
        run.count_from(second.go_back(for_good=for_good))
        run.course.clear()
        run.signal.set_out()
        run.begin_anew(cut_short=True)
        run.write_record(
            guard_line(run.step, f"{reason}: scouting from the first weights", 0, None)
        )
        self._explore(scout, run.model, run.settings.total_steps, stuck=True)

    def _begin_or_return(self, expedition: Expedition, begin: Beginning) -> Beginning:
        """Where the given learning rate is to be kept: only what is far from it is a reason not to;
        before anything has gone wrong, only what is far lower."""
        if not expedition.keeps_the_given:
            return begin
        second, stuck = self.second_start, expedition.stuck
        exploded = expedition.search.explosion
        # What is merely worse than none in a few steps is no proof; what explodes is.
        is_sure = begin.why != NOTHING_FOUND or (exploded is not None and exploded < 1)
        is_fault = is_sure and is_far(begin.factor) and (stuck or begin.factor < 1)
        can_return = second is not None and second.can_return
        if is_fault or (stuck and not can_return):
            if not expedition.late:  # in mid-run the guard knows what is good
                self._run.seek_refuge()
            self.forget_first_weights()
            return begin
        if second is not None and can_return:
            self._run.count_from(second.return_())
            self.forget_first_weights()
        elif second is not None:
            second.has_just_looked = True
        return Beginning(1.0, f"{begin.factor:.3g} times it is no reason to change it")

    def forget_first_weights(self) -> None:
        if self.second_start is not None:
            self.second_start.close()
        self.second_start = None

    def _shares(self, expedition: Expedition) -> Shares:
        """Of what is left of the base schedule, in units of what the scout has looked around; of a
        constant one unless all processes agree, who may not all know it."""
        run = self._run
        known = run.base.shares(run.settings.total_steps)
        now = run.base.share_of_now() if expedition.late else 1.0
        mine = [math.nan] * 2 if known is None or not now else [share / now for share in known]
        rows = torch.tensor([mine] * len(run.replicas.local), dtype=torch.float64)
        everyone = run.replicas.gather(run.replicas.pool(rows).flatten(1)).unflatten(1, (-1, 2))
        shares = {Shares(*share) for share in everyone.flatten(0, 1).tolist()}
        first = shares.pop()
        return Shares(1.0, 1.0) if shares or math.isnan(first.mean) else first

    def _end_scout(self, expedition: Expedition) -> None:
        run = self._run
        expedition.close(shared=run.settings.gradients == "shared")
        run.expedition = None
        run.steering.fan_out()
