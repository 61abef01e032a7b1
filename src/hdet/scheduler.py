"""When: the clock of a run. Wires losses, probe, roll call, guard, steering and hands together.

One cycle: losses -> loss_signal, probe -> roll_call -> guard -> controller -> scale x spread ->
hands, and parameters.converge_ -> replicas. It computes nothing itself, and nothing flows back:
group["lr"] is written, never read.
"""

import copy
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet import groups, state
from hdet.base import Base
from hdet.body import PARTS
from hdet.clock import Clock
from hdet.controller import Controller
from hdet.course import Course
from hdet.door import (
    Settings,
    agree,
    check_knobs,
    check_together,
    describe,
    plain,
    refuse,
    without_a_useless_scout,
)
from hdet.elastic import Interrupted, Members, TorchftReplicas
from hdet.expedition import Expedition, scout_line
from hdet.growth import peak_of
from hdet.guard import RELIEF, Guard, ReplicasLost, Triage, triage
from hdet.handles import Bench, Hands
from hdet.knobs import LearningRate, bind, explored_rates, flattened
from hdet.loss_signal import LossSignal
from hdet.outer import Make
from hdet.parameters import Parameters
from hdet.preset import (
    Auto,
    Given,
    Restart,
    choose,
    on_its_own,
    unfit_for_scouts,
)
from hdet.probe import Probe, as_probe, score_replicas
from hdet.record import Recorder, Stopwatch, converge_line, cycle_line
from hdet.refuge import Refuge
from hdet.replicas import Replicas, default_replicas
from hdet.roll_call import RollCall, roll_call
from hdet.scout import NOTHING_FOUND, Beginning, Scout, check_room
from hdet.second_start import SecondStart
from hdet.steering import Cycle, Knob, Sensitivity, Steering
from hdet.stuck import is_far, is_late
from hdet.validation import number_of


class HDET(LRScheduler):
    """Wraps any torch schedule in scale form: the learning rate of replica r is

        base(step) x scale x multiplier_r

    By default a `scout` finds the scale in the first steps, a `guard` takes the run back when its
    loss spikes, and all multipliers are 1. With a `spread`, or with `preset="paper"`, they lie
    evenly in [1 - spread, 1 + spread]: every `sync_every` steps the weights are averaged, and the
    controller moves the scale toward what worked. Other `knobs` are explored beside it, and a
    `probe` compares the replicas fairly. An `outer` optimizer follows what the mean of the replicas
    changes; with an `overlap` the mean comes so many steps after the end of a cycle, and nobody
    waits for it; with `compress` fewer bytes are sent. With one replica and no guard it is the base
    schedule.
    """

    _diverged: bool
    """Whether replicas may be apart."""

    def __init__(
        self,
        base: LRScheduler,
        *,
        model: nn.Module | None = None,
        preset: Literal["best", "paper"] = "best",
        spread: float | None = None,
        sync_every: int | None = None,
        knobs: Sequence[Any] | None = None,
        probe: Probe | Callable[[Any], Any] | None = None,
        scout: Scout | Auto | Restart | None = "auto",
        guard: Guard | Auto | None = "auto",
        controller: Controller | Auto | None = "auto",
        design: Literal["orthogonal", "latin", "permutation"] | None = None,
        gradients: Literal["shared", "local"] = "shared",
        optimizer_state: Literal["keep", "average", "reset"] = "keep",
        outer: Make | None = None,
        overlap: int = 0,
        compress: Literal["bf16", "int8"] | None = None,
        replicas: Replicas | None = None,
        total_steps: int | None = None,
        on_overrun: Literal["hold", "extend", "raise"] = "hold",
        record: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        def prepare() -> tuple[Base, Settings]:
            wrapped = Base(base)
            total = wrapped.total_steps if total_steps is None else total_steps
            named = None if knobs is None else tuple(flattened(knobs))
            # Snapshots of a guard would be another one's for whoever joins.
            guards = None if guard == "auto" and self._elastic is not None else guard
            given = Given(spread, sync_every, controller, scout, guards, named)
            settings = Settings(
                **choose(
                    preset, given, total_steps=total, num_replicas=self._replicas.size
                )._asdict(),
                gradients=gradients,
                optimizer_state=optimizer_state,
                outer=outer,
                overlap=overlap,
                compress=compress,
                total_steps=total,
                on_overrun=on_overrun,
                seed=seed,
                knobs=(LearningRate(),) if named is None else named,
                probe=as_probe(probe),
                design=design,
            )
            if scout == "auto":
                settings = without_a_useless_scout(settings, wrapped, self._replicas, model)
            if controller == "auto" and settings.scout is None and wrapped.step == 0:
                settings = replace(settings, controller=on_its_own(settings.controller))
            return wrapped, settings

        self._open(prepare, model, replicas, record)

    # The loop ------------------------------------------------------------------------------

    def observe(self, loss: Any, *, weight: float = 1.0) -> None:
        """Note a training loss of this replica; with accumulation, one for each micro-batch.

        The mean over the cycle is weighted by `weight`, for example the number of tokens. The
        value stays on its device.
        """
        self._signal.add(loss, weight)

    def step(self, loss: Any = None) -> None:
        """Once for every attempted optimizer step, also for one that GradScaler skipped."""
        if self._visiting:
            self._refuse_while_visiting("step()")
        if loss is not None:
            self._signal.add(loss, 1.0)
        if self._recorder is not None:
            self._recorder.flush()
        if self._expedition is not None:
            self._scout_step(self._expedition)
            return
        left = self._steps_left(self.last_epoch + 1)
        ran_with = self._steering.base_lrs(self._base.lrs) if left == 0 else []
        if self._recorder is not None:
            self._course.add(self.last_epoch, self._centre, self._base.momenta)
        due = self._clock.due(self.last_epoch + 1)
        if self._is_over():
            self._overrun()
        elif not self._base.wants_metric:
            for _ in range(due):
                self._base.advance()
        self.last_epoch += 1
        if self._settings.outer is not None:
            self._parameters.note_step()
        self._diverged = self._diverged or self._can_diverge()
        if self.last_epoch == self._lands_at:
            self._parameters.land_()
        if left < self._tail_steps and self._steering.is_spread():
            self._parameters.add_iterate()
        # One that has yet to meet the others is in nobody's spread: not for longer than a step.
        ends = left == 0 or (self._elastic is not None and not self._elastic.have_met)
        if ends:
            self._end_cycle(ran_with)
        self._write(everything=ends)

    def converge(self) -> None:
        """Average now, weights and optimizer state alike: what is saved after it is one model.

        The losses seen so far in this cycle are dropped, so that the run goes on exactly as one
        that is resumed from here. All replicas must call it.
        """
        self._refuse_while_visiting("converge()")
        if self._elastic is not None:
            self._meet(self._elastic, None)
            self._write(everything=True)
            return
        if self._replicas.size == 1:
            return
        if self._expedition is not None:
            self._expedition.interrupt()  # a checkpoint holds what it set out from
            self._begin_anew(cut_short=True)
            if self._expedition.search.is_over:
                self._conclude(self._expedition)
            self._write(everything=True)
        stopwatch = Stopwatch(self._device())
        self._parameters.land_()
        call, verdict = self._call_up(*PARTS)
        parts = PARTS if call.states_match else PARTS[:-1]
        num_bytes = self._parameters.converge_(verdict.fit, parts, call.agreed)
        if verdict.excluded and not call.states_match:
            num_bytes += self._reseed(verdict)
        stopwatch.mark()
        self._begin_anew(cut_short=True)
        line = converge_line(self.last_epoch, verdict, num_bytes)
        self._write_record(line, {"converge": stopwatch}, wait=True)

    def scout_again(self, scout: Scout | None = None) -> None:
        """Look for another learning rate from here on, as after a change of the data.

        In the next steps the replicas scout around the learning rate of now, then the run goes on
        from the weights of now. All replicas must call it. In mid-run what is better at once is
        mostly too low (docs/scout.md): it is for a learning rate that is off by much.
        """
        self._refuse_while_visiting("scout_again()")
        asked = scout or self._settings.scout or Scout()
        model, left = self._fit_to_scout(asked)
        self.converge()
        self._forget_first_weights()
        self._signal.set_out()
        self._explore(asked, model, left, late=True)
        self._write(everything=True)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model is the mean of the replicas: to evaluate it, or to keep a copy.

        After it every replica has its own weights again, and the run goes on as if nothing had
        happened. Right after a converge there is nothing to do. To save a checkpoint from which a
        run resumes bit for bit, call `converge()` instead. All replicas must enter it.
        """
        self._refuse_while_visiting("consensus()")
        has_met = self._elastic is None or self._elastic.have_met
        if self._replicas.size == 1 or not has_met:
            yield
            return
        with ExitStack() as inside:
            try:
                inside.enter_context(self._at_consensus())
            except Interrupted as reason:
                warnings.warn(
                    f"{reason}. These are the weights of this replica alone.", stacklevel=3
                )
            inside.enter_context(
                self._hands.at_centre(self._other_knobs(), self.last_epoch, self._base.momenta)
            )
            self._visiting = True
            try:
                yield
            finally:
                self._visiting = False

    def _at_consensus(self) -> AbstractContextManager[None]:
        if self._expedition is not None:  # replicas that scout have nothing in common but this
            return self._parameters.visit_snapshot(self._expedition.camp)
        weights = PARTS[:-1]
        call, verdict = self._call_up(*weights)
        return self._parameters.visit(verdict.fit, weights, call.agreed)

    def note(self, text: str = "", **measures: float) -> None:
        """Write a line of your own into the record: what you did, or what you measured.

        The report plots the measures over the steps; `loss` is the loss of the consensus on data
        that it was not trained on. Without a record it does nothing.
        """
        values = {name: number_of(name, value) for name, value in measures.items()}
        line = {"event": "note", "step": self.last_epoch, "text": str(text), "measures": values}
        self._write_record(line)

    # What it is set to ---------------------------------------------------------------------

    def get_last_lr(self) -> list[Any]:
        """The learning rates of this replica, one for each group.

        Where several replicas live in this process, those in the centre of their spread.
        """
        return list(self._lrs[0]) if len(self._lrs) == 1 else self.get_base_lr()

    def get_lr(self) -> list[Any]:
        return self.get_last_lr()

    def get_base_lr(self) -> list[float]:
        """The learning rates in the centre of the spread: those of the consensus."""
        return self._steering.lrs(self._base.lrs)

    def get_replica_lrs(self) -> list[list[float]]:
        """The learning rates of every replica, in their order, one for each group."""
        return [self._lrs_of(replica) for replica in range(self._replicas.size)]

    def get_knobs(self) -> dict[str, float]:
        """The centre of every knob: a factor of the base schedule for learning rates (`lr/...`),
        the value itself for all others."""
        return {knob.name: knob.state.scale for knob in self._steering.knobs}

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer, to be saved and loaded beside the inner one."""
        return self._parameters.outer

    def outer_parameters(self) -> dict[str, Tensor]:
        """What the outer optimizer moves, under the names of the model's parameters."""
        return self._parameters.outer_parameters()

    def unsaved_parameters(self) -> list[str]:
        """Those that exist once for all replicas, as plain tensors: a distributed checkpoint takes
        them for copies of each other."""
        return self._parameters.unsaved()

    @property
    def is_scouting(self) -> bool:
        """Whether the replicas still try learning rates, each on its own."""
        return self._expedition is not None

    def sensitivity(self) -> dict[str, Sensitivity]:
        """How the signal answers to every knob: d loss / d position in the knob's space, with its
        standard error and interval, from the last cycles. A knob without evidence is not listed."""
        felt = {knob.name: knob.sensitivity() for knob in self._steering.knobs}
        return {name: sensed for name, sensed in felt.items() if sensed is not None}

    def probe_share(self) -> float | None:
        """The share of the last cycle's time that its probe took; none without one, or as long
        as the device is still busy with it."""
        spent = {name: watch.seconds() for name, watch in self._probe_watches.items()}
        probe, training = spent.get("probe"), spent.get("training")
        return None if probe is None or training is None else probe / (probe + training)

    # State ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data, equal on all replicas, without a replica's index or their number."""
        if self._diverged and not self._visiting:
            warnings.warn(
                "saved in the middle of a cycle: the weights beside this state are those of one "
                "replica. Call `converge()` on all replicas before saving.",
                stacklevel=2,
            )
        if self._expedition is None:
            return self._counted()
        return {**self._counted(), "search": self._expedition.state_dict()}

    def _counted(self) -> dict[str, Any]:
        """Whatever is counted outside a scout."""
        steering = {**self._steering.state_dict(), **self._clock.state_dict()}
        if self._refuge is not None:
            steering["guard"] = self._refuge.watch.state_dict()
        return state.saved(self.last_epoch, self._settings, self._base, steering)

    def _count_from(self, told: dict[str, Any]) -> None:
        """The same as it was then, but for the step: the run goes on."""
        self._clock.load_state_dict(told)
        self._base.load_state_dict(told["base"], self._clock.base_step)
        self._steering.load_state_dict(told)
        self._seek_refuge(told.get("guard"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state of hdet, or of the plain base schedule."""
        told = copy.deepcopy(state_dict)
        if "hdet" not in told:
            fresh = self._new_steering().state_dict()
            told = state.adopted(told, self._settings, self._base, fresh)
        names = [knob.name for knob in self._steering.knobs]
        state.check(told, self._settings, self._base, names)
        self._parameters.abandon()
        self.last_epoch = told["step"]
        self._count_from(told)
        if any(told[key] != value for key, value in state.length_of(self._settings).items()):
            self._steering.closed = False
            self._steering.set_decays(self.last_epoch)
        if self._is_over():
            self._steering.end(close=self._settings.on_overrun == "hold")
        self._begin_anew(cut_short=True)
        self._course.clear()
        self._steering.fan_out()
        self._set_out(told.get("search"))
        if "search" in told and self._expedition is None and not self._clock.has_scouted:
            self._clock.scouted(self.last_epoch)  # its steps are spent all the same
        self._write(everything=True)
        self._write_record({"event": "resume", "step": self.last_epoch})

    # Set-up --------------------------------------------------------------------------------

    def _open(
        self,
        prepare: Callable[[], tuple[Base, Settings]],
        model: nn.Module | None,
        replicas: Replicas | None,
        record: str | Path | None,
    ) -> None:
        """Check everything on all replicas at once, then take the first values."""
        self._replicas = replicas or default_replicas()
        self._elastic = self._replicas if isinstance(self._replicas, TorchftReplicas) else None
        """Where replicas come and go."""
        try:
            self._base, self._settings = prepare()
            self.optimizer: Optimizer = self._base.optimizer
            check_together(self._settings, self._base, self._replicas, model)
            self._parameters = Parameters(
                self.optimizer,
                model,
                self._replicas,
                self._settings.outer,
                self._settings.compress,
            )
            self._hands = self._bind_knobs()
            leads = self._replicas.part == 0 and 0 in self._replicas.local  # or nobody knows yet
            writes = record is not None and leads
            self._recorder = Recorder(record) if writes and record is not None else None
            mine = describe(self._settings, self._schedule(), self._parameters)
            self._take_first_values()
        except Exception as problem:
            refuse(self._replicas, problem)
        self._diverged = agree(self._replicas, mine)
        if self._diverged:
            self._parameters.start_apart()
        self._model = model
        if model is not None:
            self._replicas.share_gradients(model, self._settings.gradients == "shared")
        self._modules = self._replicas.modules(model)
        self._course: Course = Course()
        self._signal = LossSignal(len(self._replicas.local))
        self._cycle_watch = Stopwatch(self._device())
        self._probe_watches: dict[str, Stopwatch] = {}
        self._visiting = self._cut_short = False
        self._set_out()
        self._seek_refuge()
        if self._elastic is not None:
            self._join(self._elastic)
        self._write(everything=True)
        self._guard_loading()
        if self._recorder is not None:
            self._recorder.start(
                {**plain(self._settings), **self._schedule()},
                {"kind": type(self._replicas).__name__, "size": self._replicas.size},
                str(self._device()),
            )

    def _bind_knobs(self) -> Hands:
        bench = Bench(
            self._replicas.optimizers(self.optimizer),
            self._base.names,
            self._device(),
            self._base.momenta,
        )
        replicas = self._replicas  # not by way of this: a run must end with its last reference
        hands = Hands(bind(self._settings.knobs, bench), lambda: replicas.local)
        steers = {"lr", *hands.settings()}
        self._optimizers = self._replicas.optimizers(self.optimizer, steers)
        return hands

    def _take_first_values(self) -> None:
        self._warned: set[str] = set()
        self._held_back: list[tuple[dict[str, Any], Mapping[str, Stopwatch] | None, bool]] | None
        self._held_back = None
        """Lines of a meeting that may yet be undone."""
        self._lands_at: int | None = None
        """The step at which a converge that is under way is applied."""
        self._expedition: Expedition | None = None
        self._refuge: Refuge | None = None
        self._second_start: SecondStart | None = None
        self._clock = Clock(self._base.step, self._settings.total_steps)
        self._steering = self._new_steering()
        probe = self._settings.probe
        self._tail_steps = 0 if probe is None else probe.tail_steps(self._settings.sync_every)
        self.last_epoch = self._base.step
        self._steering.start_if_due(self.last_epoch, self._base.lrs)
        self._steering.fan_out()
        self._write(everything=True)
        check_knobs(self._settings, self._steering, self._base.names, self._replicas.size)

    def _taken_over(self) -> Cycle | None:
        """The schedule whose decay the controller takes over; in scale form none."""
        return None

    def _guard_loading(self) -> None:
        """Whichever is loaded last, optimizer or scheduler: the learning rates are ours."""
        weakly = weakref.ref(self)  # a hook must not outlive the scheduler it writes for

        def write_again(_: Optimizer) -> None:
            scheduler = weakly()
            if scheduler is not None:
                scheduler._base.restore_entries()
                scheduler._write(everything=True)

        self.optimizer.register_load_state_dict_post_hook(write_again)

    def _new_steering(self) -> Steering:
        settings = self._settings
        rates = explored_rates(settings.knobs, self._base.names, settings.spread)
        assert settings.design is not None
        return Steering(
            [*rates, *self._hands.explored()],
            num_replicas=self._replicas.size,
            design=settings.design,
            sync_every=self._settings.sync_every,
            seed=self._settings.seed,
            controller=self._settings.controller,
            total_steps=self._settings.total_steps,
            takes_over=self._taken_over(),
        )

    def _schedule(self) -> dict[str, Any]:
        """What replicas must have in common beside the settings."""
        return {
            # The user's optimizer may stand for several: what it is made of counts.
            "optimizer": type(self._replicas.optimizers(self.optimizer)[0]).__name__,
            "learning_rates": dict(zip(self._base.names, self._base.lrs, strict=True)),
            "groups": self._parameters.describe_groups(self._hands.settings()),
            "base": self._base.state_dict(),
        }

    # Scouting ------------------------------------------------------------------------------

    def _set_out(self, told: Mapping[str, Any] | None = None) -> None:
        """Start to scout, or go on with a search that a checkpoint has told of."""
        late = None if told is None else told.get("late")
        scout = self._settings.scout if late is None else Scout(**late["scout"])
        if self._expedition is not None:
            self._end_scout(self._expedition)
        self._forget_first_weights()
        if scout is None or self._model is None or (self.last_epoch > 0 and told is None):
            return
        if self._replicas.size == 1:
            self._warn_once("scout", "`scout` needs several replicas: the learning rate is kept.")
            return
        total = self._settings.total_steps if late is None else late["total_steps"]
        if scout.restart and told is None:
            check_room(scout, num_replicas=self._replicas.size, total_steps=total)
            self._second_start = SecondStart(
                self.optimizer, self._model, self._parameters, self._counted
            )
        expedition = self._explore(
            scout,
            self._model,
            total,
            late=late is not None,
            brief=scout.restart and told is None,
            stuck=told is not None and told.get("stuck", False),
        )
        if told is not None:
            expedition.search.load_state_dict(told)
            if expedition.search.is_over:
                self._conclude(expedition)

    def _fit_to_scout(self, scout: Scout) -> tuple[nn.Module, int | None]:
        """The model and the steps that are left, if a scout can be made in mid-run."""
        problem = unfit_for_scouts(self._base, self._model)
        if self._taken_over() is not None:
            problem = (
                "`scout_again()` is for hdet.HDET: the paper's controller has its own schedule"
            )
        elif self._expedition is not None:
            problem = "`scout_again()` must wait until the replicas have scouted"
        elif self._replicas.size == 1:
            problem = "`scout_again()` needs several replicas, got one"
        if problem is not None or self._model is None:
            raise RuntimeError(f"{problem}.")
        total = self._settings.total_steps
        left = None if total is None else max(total - self.last_epoch, 0)
        check_room(scout, num_replicas=self._replicas.size, total_steps=left)
        return self._model, left

    def _explore(
        self,
        scout: Scout,
        model: nn.Module,
        total_steps: int | None,
        *,
        late: bool = False,
        brief: bool = False,
        stuck: bool = False,
    ) -> Expedition:
        """Around what was given; or, in mid-run, around the learning rates of now."""
        rates = self._steering.lrs(self._base.lrs) if late else self._base.peaks
        self._expedition = Expedition(
            scout,
            self.optimizer,
            model,
            self._parameters,
            self._replicas,
            total_steps,
            rates=rates,
            kind=type(self._optimizers[0]).__name__,
            shared=self._settings.gradients == "shared",
            late=late,
            brief=brief,
            stuck=stuck,
        )
        self._steering.rest()
        return self._expedition

    def _scout_step(self, expedition: Expedition) -> None:
        self.last_epoch += 1
        self._diverged = True
        search, probe = expedition.search, self._settings.probe
        left = expedition.steps_left() - 1
        if probe is not None and left < probe.tail_steps(search.num_steps):
            self._parameters.add_iterate()
        if probe is None and left == search.num_steps // 2:
            self._signal.clear()  # judged by the second half of a round
        if expedition.advance():
            self._end_round(expedition)
        self._write(everything=True)

    def _end_round(self, expedition: Expedition) -> None:
        search = expedition.search
        try:
            call = self._score_round(search.num_steps)
            if call.scores is None:
                call.require_losses(self.last_epoch)
            expedition.judge(call, self._score_outset(expedition, call))
        except Exception:  # what there was before is not lost
            self._parameters.restore_(expedition.camp)
            if self._second_start is not None and self._second_start.can_return:
                self._count_from(self._second_start.return_())
            self._forget_first_weights()
            self._begin_anew(cut_short=True)
            self._end_scout(expedition)
            raise
        expedition.come_back()
        self._signal.set_out()
        self._begin_anew(cut_short=True)
        self._conclude(expedition)

    def _score_round(self, num_steps: int) -> RollCall:
        # The same batches in all rounds.
        return self._roll_call(probed=self._probe(cycle=0, sync_every=num_steps, fresh=True))

    def _score_outset(self, expedition: Expedition, call: RollCall) -> RollCall | None:
        """By the same batches, once."""
        if call.scores is None or expedition.search.outset is not None:
            return None
        self._parameters.forget_iterates()
        with self._parameters.visit_snapshot(expedition.camp):
            return self._score_round(expedition.search.num_steps)

    def _conclude(self, expedition: Expedition) -> None:
        """If the search is over, begin the run with what was found."""
        search, begin = expedition.search, None
        peaks = dict(zip(self._base.names, expedition.rates, strict=True))
        if search.is_over:
            begin = search.begin_with(peak=peak_of(self._mean_share(expedition)))
            begin = self._begin_or_return(expedition, begin)
            if begin.why == NOTHING_FOUND:
                self._warn_once(
                    "scout",
                    f"the scout found no learning rate to prefer ({search.reason}): it begins with "
                    f"{begin.factor:.3g} times the given one. A `probe=` tells more than losses.",
                )
            self._steering.rescale(begin.factor)
            self._clock.scouted(self.last_epoch)
            self._end_scout(expedition)
        self._write_record(scout_line(self.last_epoch, search, peaks, begin))

    def _start_again(self, second: SecondStart, reason: str, *, for_good: bool) -> None:
        """The run is stuck: scout from its first weights, and see whether its learning rate is the
        fault. With `for_good` there is nothing to come back to."""
        scout = self._settings.scout
        assert scout is not None
        assert self._model is not None
        self._count_from(second.go_back(for_good=for_good))
        self._course.clear()
        self._signal.set_out()
        self._begin_anew(cut_short=True)
        self._write_record(self._guard_line(f"{reason}: scouting from the first weights", 0, None))
        self._explore(scout, self._model, self._settings.total_steps, stuck=True)

    def _begin_or_return(self, expedition: Expedition, begin: Beginning) -> Beginning:
        """Where the given learning rate is to be kept: only what is far from it is a reason not to;
        before anything has gone wrong, only what is far lower."""
        if not expedition.scout.restart or expedition.late:
            return begin
        second, stuck = self._second_start, expedition.stuck
        is_fault = is_far(begin.factor) and (stuck or begin.factor < 1)
        can_return = second is not None and second.can_return
        if (is_fault and begin.why != NOTHING_FOUND) or (stuck and not can_return):
            self._seek_refuge()
            self._forget_first_weights()
            return begin
        if second is not None and can_return:
            self._count_from(second.return_())
            self._forget_first_weights()
        elif second is not None:
            second.has_just_looked = True
        return Beginning(1.0, f"{begin.factor:.3g} is no reason to start again")

    def _forget_first_weights(self) -> None:
        if self._second_start is not None:
            self._second_start.close()
        self._second_start = None

    def _mean_share(self, expedition: Expedition) -> float | None:
        """Of what is left of the base schedule, in units of what the scout has looked around; none
        unless all processes agree, who may not all know it."""
        share = self._base.mean_share(self._settings.total_steps)
        now = self._base.share_of_now() if expedition.late else 1.0
        share = share / now if share is not None and now else None
        rows = [[math.nan if share is None else share]] * len(self._replicas.local)
        pooled = self._replicas.pool(torch.tensor(rows, dtype=torch.float64)).flatten(1)
        shares = self._replicas.gather(pooled).flatten().tolist()
        return shares[0] if all(other == shares[0] for other in shares) else None

    def _end_scout(self, expedition: Expedition) -> None:
        expedition.close(shared=self._settings.gradients == "shared")
        self._expedition = None
        self._steering.fan_out()

    # The end of a cycle --------------------------------------------------------------------

    def _end_cycle(self, ran_with: list[float]) -> None:
        if self._elastic is not None:
            self._meet(self._elastic, ran_with)
        else:
            self._close_cycle(ran_with)

    def _close_cycle(self, ran_with: list[float]) -> None:
        self._parameters.land_()  # in a last cycle that is shorter than the delay
        probed = None
        if self._steering.is_spread():
            probed = self._probe(self._steering.cycle, self._settings.sync_every)
        stopwatch = Stopwatch(self._device())
        call = self._hear_all(probed)
        if self._goes_back(call):
            return
        verdict, num_bytes = self._converge(call)
        stopwatch.mark()
        line = {
            **converge_line(self.last_epoch, verdict, num_bytes),
            **self._steer(call, verdict, ran_with),
        }
        relief = 1.0 if self._refuge is None else self._refuge.watch.relief
        if relief != 1.0:
            self._steering.rescale(relief)
        self._next_cycle()
        if self._refuge is not None:
            self._refuge.keep(self.last_epoch)
        watches = self._probe_watches if probed is not None else {}
        self._write_record(line, {"converge": stopwatch, **watches}, wait=self._is_over())
        if relief != 1.0:
            self._write_record(self._guard_line(RELIEF, self.last_epoch, relief))

    def _hear_all(self, probed: Tensor | None) -> RollCall:
        # Under a spread the parameters that train differ: no need to look.
        moving = () if self._steering.is_spread() else ("moving",)
        moments = ("state",) if self._settings.optimizer_state == "average" else ()
        several = self._replicas.size > 1
        compare = (*moving, "still", "buffers", *moments) if several else ()
        call = self._roll_call(*compare, measures=several, probed=probed)
        self._check_losses(call)
        self._check_scores(call)
        if self._steering.cycle == 0:
            self._hands.check_read(self.last_epoch)
        return call

    def _goes_back(self, call: RollCall) -> bool:
        """Whether the cycle was not good enough to go on from: then the run was taken back."""
        if self._refuge is not None:
            self._refuge.watch.begin(call.first_loss, call.first_error)
        if self._second_start is not None and self._starts_again(self._second_start, call):
            return True
        if self._refuge is not None and (reason := self._spike(self._refuge, call)):
            self._go_back(self._refuge, reason)
            return True
        return False

    def _starts_again(self, second: SecondStart, call: RollCall) -> bool:
        """Whether the run is stuck, and was taken back to its first weights."""
        if is_late(self._steering.cycle, self.last_epoch, self._settings.total_steps):
            self._forget_first_weights()
            return False
        loss, error = self._mean_loss(call)
        second.stuck.begin(call.first_loss, call.first_error)
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
        self._start_again(second, reason, for_good=for_good)
        return True

    def _steer(self, call: RollCall, verdict: Triage, ran_with: list[float]) -> dict[str, Any]:
        """Move knobs and a schedule that waits for losses; what the record says of it."""
        used = [(knob.state.scale, knob.factors()) for knob in self._steering.knobs]
        steered = self._steering.steer(call.losses, verdict.sound, call.errors, call.scores)
        losses = [loss for r in verdict.fit if (loss := call.losses[r]) is not None]
        if self._base.wants_metric and losses:
            self._base.advance(fmean(losses))
        return cycle_line(
            self._steering.cycle,
            self._base.names,
            call.losses,
            call.errors,
            call.distances,
            call.scores,
            steered,
            ran_with,
            self._steering.knobs,
            used,
            {} if self._recorder is None else self._course.points(),
        )

    def _next_cycle(self) -> None:
        self._course.clear()
        self._steering.cycle += 1
        self._steering.start_if_due(self.last_epoch, self._base.lrs, self._clock.base_step)
        if self._is_over():
            self._steering.end(close=self._settings.on_overrun == "hold")
        self._begin_anew(cut_short=False)
        self._steering.fan_out()

    def _probe(self, cycle: int, sync_every: int, *, fresh: bool = False) -> Tensor | None:
        """What every local replica scores, if they are compared by a probe."""
        probe = self._settings.probe
        if probe is None or self._replicas.size == 1:
            return None
        modules = [module for module in self._modules if module is not None]
        self._cycle_watch.mark()
        watch = Stopwatch(self._device())
        with self._parameters.at_tail(), self._hands.at_rest():
            rows = score_replicas(
                probe,
                modules,
                self._replicas.pool,
                together=self._parameters.have_lonely,
                sync_every=sync_every,
                cycle=cycle,
                seed=self._settings.seed,
                fresh=fresh,
            )
        watch.mark()
        self._probe_watches = {"training": self._cycle_watch, "probe": watch}
        return rows

    def _roll_call(
        self, *compare: str, measures: bool = False, probed: Tensor | None = None
    ) -> RollCall:
        return roll_call(
            self._replicas,
            self._parameters,
            self._signal,
            step=self.last_epoch,
            compare=compare,
            measures=measures,
            probed=probed,
        )

    def _call_up(self, *compare: str) -> tuple[RollCall, Triage]:
        """Whoever has finite weights, in mid-cycle: losses say nothing yet."""
        call = self._roll_call(*compare)
        nobody = [None] * self._replicas.size
        return call, triage(nobody, call.finite, step=self.last_epoch)

    def _check_losses(self, call: RollCall) -> None:
        compares = self._steering.needs_losses and self._settings.probe is None
        needed = self._base.wants_metric or compares
        if needed and not self._cut_short:
            call.require_losses(self.last_epoch)
        if len(set(call.num_observed)) > 1:
            self._warn_once(
                "observed",
                f"replicas observed {call.num_observed} losses in the cycle that ends at step "
                f"{self.last_epoch}. Call `step()` once for every attempted optimizer step, also "
                "for one that GradScaler skipped: otherwise the replicas drift apart in time.",
            )

    def _check_scores(self, call: RollCall) -> None:
        lost = [
            replica
            for replica, scores in enumerate(call.scores or [])
            if not all(map(math.isfinite, scores))
        ]
        if lost:
            self._warn_once(
                "scores",
                f"the probe of replica(s) {lost} is not finite at step {self.last_epoch}: they are "
                "left out of the comparison.",
            )

    def _converge(self, call: RollCall, *, waits: bool = False) -> tuple[Triage, int]:
        if self._replicas.size == 1:
            return Triage((0,), {}, (0,)), 0
        verdict = self._triage(call)
        # One that is lost must not train on, nor a run that ends here.
        waits = waits or bool(verdict.excluded) or self._is_over()
        if self._settings.overlap and not waits:
            self._lands_at = self.last_epoch + self._settings.overlap
            return verdict, self._parameters.start_converge_(call.agreed)
        policy = self._settings.optimizer_state
        averages_state = policy == "average" and call.states_match
        parts = PARTS if averages_state else PARTS[:-1]
        exact = bool(verdict.excluded)  # one that is lost has nothing to say in short
        num_bytes = self._parameters.converge_(verdict.fit, parts, call.agreed, exact=exact)
        if policy == "reset":
            self._parameters.reset_state_()
        elif verdict.excluded and not averages_state:
            num_bytes += self._reseed(verdict)
        return verdict, num_bytes

    def _triage(self, call: RollCall) -> Triage:
        """Who is averaged; outliers are not, where weights can be apart and a guard looks."""
        verdict = triage(call.losses, call.finite, step=self.last_epoch)
        if self._refuge is None or not self._can_diverge():
            return verdict
        losses = [loss if r in verdict.fit else None for r, loss in enumerate(call.losses)]
        return verdict.without(self._refuge.watch.outliers(losses, call.errors))

    def _reseed(self, verdict: Triage) -> int:
        return self._parameters.reseed_state_(verdict.fit[0], tuple(verdict.excluded))

    def _begin_anew(self, *, cut_short: bool) -> None:
        """No evidence yet, and one model on all replicas."""
        self._signal.clear()
        self._parameters.begin_anew()
        self._cycle_watch = Stopwatch(self._device())
        self._diverged, self._cut_short = self._parameters.are_under_way, cut_short

    def _can_diverge(self) -> bool:
        """Whether a step takes the replicas apart."""
        apart = self._steering.is_spread() or self._settings.gradients == "local"
        return apart and self._replicas.size > 1

    # Replicas that come and go -------------------------------------------------------------------

    def _join(self, replicas: TorchftReplicas) -> None:
        """Be ready to meet the others, and to be given the state of one of them."""
        replicas.register(self.load_state_dict, self._counted)
        self._steering.rest()

    def _meet(self, replicas: TorchftReplicas, ran_with: list[float] | None) -> None:
        """Whoever is there ends the cycle together, or only converges where it is no end; if one
        leaves meanwhile, it never was."""
        replicas.convene()
        undo, counted, self._held_back = self._parameters.keep(), self._counted(), []
        reason = "this replica was not to go on"
        try:
            members = replicas.call()
            if members.have_changed or ran_with is None:
                self._take_in(members)
            else:
                self._close_cycle(ran_with)
        except Interrupted as error:
            reason = str(error)
        finally:
            lines, self._held_back = self._held_back, None
        if replicas.commit():
            for line, watches, wait in lines:
                self._write_record(line, watches, wait=wait)
            return
        undo()
        self._count_from(counted)
        self._steering.resize(replicas.size)
        self._begin_anew(cut_short=True)
        self._course.clear()
        self._diverged = True
        self._say_who(f"the converge was undone: {reason}")
        if self._is_over() and ran_with is not None:
            self._meet(replicas, None)  # there is no next cycle to do it in

    def _take_in(self, members: Members) -> None:
        """The mean of those who have trained together; and where there are others than before, a
        new spread for all. What they have seen in this cycle was seen in another one, and is
        dropped.
        """
        stopwatch = Stopwatch(self._device())
        weights = PARTS[:-1]
        call, verdict = self._call_up(*weights)
        lost = tuple(verdict.excluded)
        verdict = verdict.without(dict.fromkeys(members.newcomers, "has just joined"))
        num_bytes = self._parameters.converge_(verdict.fit, weights, call.agreed)
        if lost:
            num_bytes += self._parameters.reseed_state_(verdict.fit[0], lost)
        stopwatch.mark()
        line = converge_line(self.last_epoch, verdict, num_bytes)
        self._write_record(line, {"converge": stopwatch}, wait=True)
        if not members.have_changed:
            self._begin_anew(cut_short=True)
            return
        self._steering.steer([None] * self._replicas.size, ())  # what decays goes on to decay
        losses = [loss for r in verdict.fit if (loss := call.losses[r]) is not None]
        if self._base.wants_metric and losses:
            self._base.advance(fmean(losses))
        self._steering.resize(self._replicas.size)
        self._next_cycle()
        self._say_who(f"{self._replicas.size} replicas take part")

    def _say_who(self, text: str) -> None:
        line = {"event": "note", "step": self.last_epoch, "text": text}
        self._write_record({**line, "measures": {"replicas": self._replicas.size}})

    # Guarding --------------------------------------------------------------------------------

    def _seek_refuge(self, told: Mapping[str, Any] | None = None) -> None:
        guard = self._settings.guard
        if self._refuge is not None:
            self._refuge.close()
        self._refuge = None
        if guard is not None:
            self._refuge = Refuge(
                guard, self.optimizer, self._model, self._parameters, self.last_epoch
            )
            if told is not None:
                self._refuge.watch.load_state_dict(told)

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
        watch = refuge.watch
        refuge.go_back()
        if self._settings.overlap:  # what was kept is what each had before the mean came
            self._come_together()
        if watch.gives_up:
            num = watch.in_a_row - 1
            self._steering.rescale(watch.surrender())
            self._begin_anew(cut_short=True)
            line = self._guard_line(f"stopped: {reason}", refuge.step, None)
            self._write_record(line, wait=True)
            raise ReplicasLost(
                f"the run was taken back {num} times in a row, and spikes again at "
                f"step {self.last_epoch} ({reason}). All replicas have the weights of step "
                f"{refuge.step}: save them, and resume with a lower learning rate."
            )
        self._steering.rescale(watch.factor())
        self._next_cycle()
        line = self._guard_line(reason, refuge.step, watch.factor())
        self._write_record({**line, "scales": self.get_knobs()})

    def _come_together(self) -> None:
        """All replicas take the mean of their weights, and nothing else happens."""
        weights = PARTS[:-1]
        call, verdict = self._call_up(*weights)
        self._parameters.meet_(verdict.fit, weights, call.agreed)

    def _guard_line(self, reason: str, back_to: int, factor: float | None) -> dict[str, Any]:
        return {
            "event": "guard",
            "step": self.last_epoch,
            "reason": reason,
            "back_to": back_to,
            "factor": factor,
        }

    # The end of the run --------------------------------------------------------------------

    def _steps_left(self, step: int) -> int:
        """Until the end of the cycle; the last one may be short."""
        left = -step % self._settings.sync_every
        total = self._settings.total_steps
        return left if total is None or total < step else min(left, total - step)

    def _is_over(self) -> bool:
        total = self._settings.total_steps
        return total is not None and self.last_epoch >= total

    def _overrun(self) -> None:
        total, choice = self._settings.total_steps, self._settings.on_overrun
        if choice == "raise":
            raise ValueError(
                f"`step()` must be called at most `total_steps` ({total}) times, "
                f"got call {self.last_epoch + 1}."
            )
        self._warn_once(
            "overrun",
            f"step {self.last_epoch + 1} of a run of {total}: the base schedule has ended and "
            f"keeps its last value (on_overrun={choice!r}).",
        )

    # Hands ---------------------------------------------------------------------------------

    def _other_knobs(self) -> list[Knob]:
        """Those beside the learning rates."""
        return [knob for knob in self._steering.knobs if not knob.about.members]

    def _write(self, *, everything: bool = False) -> None:
        """Learning rates at every step; other knobs where they are scheduled, or all of them."""
        if everything:  # within a cycle only the base schedule moves
            num = len(self._base.lrs)
            places = [None, *self._replicas.local]
            self._factors = [self._steering.factors_of_groups(place, num) for place in places]
        base = self._steering.base_lrs(self._base.lrs)
        self._centre, *self._lrs = [
            [lr * factor for lr, factor in zip(base, factors, strict=True)]
            for factors in self._factors
        ]
        if self._expedition is not None:
            self._lrs = [self._lrs_of(replica) for replica in self._replicas.local]
        groups.write_learning_rates(
            self.optimizer, self._lrs[0] if len(self._lrs) == 1 else self._centre
        )
        groups.write_momenta(self.optimizer, self._base.momenta)
        for optimizer, lrs in zip(self._optimizers, self._lrs, strict=True):
            if optimizer is not self.optimizer:
                groups.write_learning_rates(optimizer, lrs)
                groups.write_momenta(optimizer, self._base.momenta)
        if everything or self._hands.are_scheduled:
            self._hands.turn(
                self._other_knobs(), self.last_epoch, self._base.momenta, everything=everything
            )

    def _lrs_of(self, replica: int) -> list[float]:
        if self._expedition is None:
            return self._steering.lrs(self._base.lrs, replica)
        explored = {group for knob in self._steering.knobs for group in knob.about.members}
        return [
            self._expedition.lr(group, replica) if group in explored else lr
            for group, lr in enumerate(self._base.lrs)
        ]

    def _write_record(
        self,
        line: dict[str, Any],
        watches: Mapping[str, Stopwatch] | None = None,
        *,
        wait: bool = False,
    ) -> None:
        if self._recorder is not None and self._held_back is not None:
            self._held_back.append((line, watches, wait))
        elif self._recorder is not None:
            self._recorder.write(line, watches, wait=wait)

    def _device(self) -> torch.device:
        groups = self.optimizer.param_groups
        device: torch.device = next(p.device for group in groups for p in group["params"])
        return device

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(text, stacklevel=4)

    def _refuse_while_visiting(self, call: str) -> None:
        if self._visiting:
            raise RuntimeError(f"`{call}` inside `consensus()` would be undone: leave it first.")
