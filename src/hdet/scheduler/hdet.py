"""When: the clock of a run. It says whose turn it is at a step, and computes nothing itself."""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet._validation import number_of
from hdet.control.controller import Controller
from hdet.control.knob_state import Sensitivity
from hdet.control.one_cycle_bounds import OneCycleBounds
from hdet.control.spike_guard import Guard
from hdet.knobs.param_groups import check_groups
from hdet.knobs.specs import LearningRate, flatten_knobs
from hdet.lr_search.scout import Scout
from hdet.records.events import converge_event
from hdet.replicas.factory import default_replicas
from hdet.replicas.protocol import Replicas
from hdet.replicas.torchft import Interrupted, TorchftReplicas
from hdet.scheduler import state
from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.compatibility import drop_impossible_scout
from hdet.scheduler.cycle_end import CycleEnd
from hdet.scheduler.elastic_sync import ElasticSync
from hdet.scheduler.presets import Auto, GivenOptions, Restart, choose_options, without_scout
from hdet.scheduler.run import Prepare, Run
from hdet.scheduler.search_phase import SearchPhase
from hdet.scheduler.settings import Settings
from hdet.signals.probe import Probe, as_probe
from hdet.tensors.timing import Stopwatch
from hdet.weights.inventory import ALL_KINDS, WEIGHTS
from hdet.weights.outer_optimizer import OptimizerFactory


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
        outer: OptimizerFactory | None = None,
        overlap: int = 0,
        compress: Literal["bf16", "int8"] | None = None,
        replicas: Replicas | None = None,
        total_steps: int | None = None,
        on_overrun: Literal["hold", "extend", "raise"] = "hold",
        record: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        def prepare(replicas: Replicas) -> tuple[BaseSchedule, Settings]:
            wrapped = BaseSchedule(base)
            total = wrapped.total_steps if total_steps is None else total_steps
            named = None if knobs is None else tuple(flatten_knobs(knobs))
            # Snapshots of a guard would be another one's for whoever joins.
            elastic = isinstance(replicas, TorchftReplicas)
            guards = None if guard == "auto" and elastic else guard
            given = GivenOptions(spread, sync_every, controller, scout, guards, named)
            settings = Settings(
                **choose_options(
                    preset, given, total_steps=total, num_replicas=replicas.size
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
                settings = drop_impossible_scout(settings, wrapped, replicas, model)
            if controller == "auto" and settings.scout is None and wrapped.step == 0:
                settings = replace(settings, controller=without_scout(settings.controller))
            return wrapped, settings

        self._open(prepare, model, replicas, record)

    # The loop ------------------------------------------------------------------------------

    def observe(self, loss: Any, *, weight: float = 1.0) -> None:
        """Note a training loss of this replica; with accumulation, one for each micro-batch.

        The mean over the cycle is weighted by `weight`, for example the number of tokens. The
        value stays on its device.
        """
        self._run.training_loss.add(loss, weight)

    def step(self, loss: Any = None) -> None:
        """Once for every attempted optimizer step, also for one that GradScaler skipped."""
        run = self._run
        if self._visiting:
            self._refuse_while_visiting("step()")
        if loss is not None:
            run.training_loss.add(loss, 1.0)
        if run.recorder is not None:
            run.recorder.flush()
        if run.trial is not None:
            self._search_phase.step(run.trial)
            return
        left = run.steps_left(run.step + 1)
        ran_with = run.knob_bank.base_lrs(run.base.lrs) if left == 0 else []
        if run.recorder is not None:
            run.lr_trace.add(run.step, run.centre, run.base.momenta)
        due = run.clock.due(run.step + 1)
        if run.is_over():
            self._overrun()
        elif not run.base.wants_metric:
            for _ in range(due):
                run.base.advance()
        run.step += 1
        if run.settings.outer is not None:
            run.parameters.averager.note_step()
        run.diverged = run.diverged or run.can_diverge()
        if run.step == run.average_due_at:
            run.parameters.averager.finish_average_()
        elif run.step == run.forward_due_at:
            run.parameters.averager.forward_partial_means_()
        if left < run.tail_steps and run.knob_bank.is_spread():
            run.parameters.tail.add()
        # One that has yet to meet the others is in nobody's spread: not for longer than a step.
        ends = left == 0 or (run.elastic is not None and run.elastic.must_sync(run.step))
        if ends and self._elastic_sync is not None:
            self._elastic_sync.meet(ran_with)
        elif ends:
            self._cycle_end.close(ran_with)
        run.write(everything=ends)

    def converge(self) -> None:
        """Average now, weights and optimizer state alike: what is saved after it is one model.

        The losses seen so far in this cycle are dropped, so that the run goes on exactly as one
        that is resumed from here (but for a scout that has held batches out, which nobody saves).
        All replicas must call it.
        """
        run = self._run
        self._refuse_while_visiting("converge()")
        if self._elastic_sync is not None:
            self._elastic_sync.meet(None)
            run.write(everything=True)
            return
        if run.replicas.size == 1:
            self._cycle_end.note_first_loss(run.exchange())
            run.start_cycle(is_partial=True)
            return
        if run.trial is not None:
            self._search_phase.interrupt(run.trial)  # a checkpoint holds what it set out from
        stopwatch = Stopwatch(run.device())
        run.parameters.averager.finish_average_()
        call, verdict = run.exchange_health(*ALL_KINDS)
        self._cycle_end.note_first_loss(call)  # a state that is saved now has it, too
        kinds = ALL_KINDS if call.optimizer_states_match else WEIGHTS
        num_bytes = run.parameters.averager.average_(verdict.fit, kinds, call.agreed)
        if verdict.excluded and not call.optimizer_states_match:
            num_bytes += run.reseed(verdict)
        stopwatch.mark()
        run.start_cycle(is_partial=True)
        line = converge_event(run.step, verdict, num_bytes)
        run.write_record(line, {"converge": stopwatch}, wait=True)

    def scout_again(self, scout: Scout | None = None) -> None:
        """Look for another learning rate from here on, as after a change of the data.

        In the next steps the replicas scout around the learning rate of now, then the run goes on
        from the weights of now. All replicas must call it. In mid-run what is better at once is
        mostly too low (docs/scout.md): it is for a learning rate that is off by much.
        """
        self._refuse_while_visiting("scout_again()")
        asked = scout or self._run.settings.scout or Scout()
        model, left = self._search_phase.check_can_search(asked)
        self.converge()
        self._search_phase.again(asked, model, left)
        self._run.write(everything=True)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model is the mean of the replicas: to evaluate it, or to keep a copy.

        After it every replica has its own weights again, and the run goes on as if nothing had
        happened. Right after a converge there is nothing to do. To save a checkpoint from which a
        run resumes bit for bit, call `converge()` instead. All replicas must enter it.
        """
        run = self._run
        self._refuse_while_visiting("consensus()")
        have_begun = run.elastic is None or run.elastic.have_synced or run.elastic.has_healed
        if run.replicas.size == 1 or not have_begun:
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
                run.bound_knobs.at_centre(run.other_knobs(), run.step, run.base.momenta)
            )
            torch.clear_autocast_cache()  # casts of other weights, if a loop evaluates inside it
            inside.callback(torch.clear_autocast_cache)
            self._visiting = True
            try:
                yield
            finally:
                self._visiting = False

    def _at_consensus(self) -> AbstractContextManager[None]:
        run = self._run
        if run.trial is not None:  # replicas that scout have nothing in common but this
            return run.parameters.at_snapshot(run.trial.start)
        if run.elastic is not None and not run.elastic.are_members_unchanged:
            raise Interrupted("there are others than at the last meeting")
        call, verdict = run.exchange_health(*WEIGHTS)
        return run.parameters.averager.at_average(verdict.fit, WEIGHTS, call.agreed)

    def note(self, text: str = "", **measures: float) -> None:
        """Write a line of your own into the record: what you did, or what you measured.

        The report plots the measures over the steps; `loss` is the loss of the consensus on data
        that it was not trained on. Without a record it does nothing.
        """
        values = {name: number_of(name, value) for name, value in measures.items()}
        line = {"event": "note", "step": self._run.step, "text": str(text), "measures": values}
        self._run.write_record(line)

    # What it is set to ---------------------------------------------------------------------

    @property
    def last_epoch(self) -> int:
        """The steps that were attempted, as torch calls them."""
        return self._run.step

    @last_epoch.setter
    def last_epoch(self, step: int) -> None:
        self._run.step = step

    def get_last_lr(self) -> list[Any]:
        """The learning rates of this replica, one for each group.

        Where several replicas live in this process, those in the centre of their spread.
        """
        return list(self._run.lrs[0]) if len(self._run.lrs) == 1 else self.get_base_lr()

    def get_lr(self) -> list[Any]:
        return self.get_last_lr()

    def get_base_lr(self) -> list[float]:
        """The learning rates in the centre of the spread: those of the consensus."""
        return self._run.knob_bank.lrs(self._run.base.lrs)

    def get_replica_lrs(self) -> list[list[float]]:
        """The learning rates of every replica, in their order, one for each group."""
        return [self._run.lrs_of(replica) for replica in range(self._run.replicas.size)]

    def get_knobs(self) -> dict[str, float]:
        """The centre of every knob: a factor of the base schedule for learning rates (`lr/...`),
        the value itself for all others; of one with a schedule what it is where that is 1."""
        return self._run.knob_bank.scales()

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer, to be saved and loaded beside the inner one."""
        return self._run.parameters.averager.outer

    def outer_parameters(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters of the model, each with what the outer optimizer moves for it."""
        return self._run.parameters.averager.outer_parameters()

    def unsaved_parameters(self) -> list[str]:
        """Those that exist once for all replicas, as plain tensors: a distributed checkpoint takes
        them for copies of each other."""
        return self._run.parameters.unsaved()

    @property
    def is_scouting(self) -> bool:
        """Whether the replicas still try learning rates, each on its own."""
        return self._run.trial is not None

    def sensitivity(self) -> dict[str, Sensitivity]:
        """How the signal answers to every knob: d loss / d position in the knob's space, with its
        standard error and interval, from the last cycles. A knob without evidence is not listed."""
        recent_slope = {knob.name: knob.sensitivity() for knob in self._run.knob_bank.knobs}
        return {name: sensed for name, sensed in recent_slope.items() if sensed is not None}

    def probe_share(self) -> float | None:
        """The share of the last cycle's time that its probe took; none without one, or as long
        as the device is still busy with it."""
        spent = {name: watch.seconds() for name, watch in self._run.probe_watches.items()}
        probe, training = spent.get("probe"), spent.get("training")
        return None if probe is None or training is None else probe / (probe + training)

    # State ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data, equal on all replicas, without a replica's index or their number."""
        run = self._run
        if run.diverged and not self._visiting:
            warnings.warn(
                "saved in the middle of a cycle: the weights beside this state are those of one "
                "replica. Call `converge()` on all replicas before saving.",
                stacklevel=2,
            )
        if run.trial is None:
            return run.progress_state()
        return {**run.progress_state(), "search": run.trial.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state of hdet, or of the plain base schedule."""
        run, told = self._run, self.check_state_dict(state_dict)
        run.parameters.averager.cancel_average()
        run.step = told["step"]
        run.restore_progress(told)
        if any(told[key] != value for key, value in state.length_of(run.settings).items()):
            run.knob_bank.closed = False
            run.knob_bank.set_decays(run.step)
        if run.is_over():
            run.knob_bank.end(close=run.settings.on_overrun == "hold")
        run.start_cycle(is_partial=True)
        run.lr_trace.clear()
        run.knob_bank.fan_out()
        self._search_phase.start(told.get("search"))
        if "search" in told and run.trial is None and not run.clock.has_scouted:
            run.clock.scouted(run.step)  # its steps are spent all the same
        if self._elastic_sync is not None:
            self._elastic_sync.begin()
        run.write(everything=True)
        run.write_record({"event": "resume", "step": run.step})

    def check_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Refuse a state that this run cannot go on from; what it will go on with."""
        run, told = self._run, copy.deepcopy(state_dict)
        check_groups(run.optimizer, len(run.base.lrs))
        if "hdet" not in told:
            fresh = run.new_knob_bank().state_dict()
            told = state.adopted(told, run.settings, run.base, fresh)
        state.check(told, run.settings, run.base, [knob.name for knob in run.knob_bank.knobs])
        return told

    # Set-up --------------------------------------------------------------------------------

    def _open(
        self,
        prepare: Prepare,
        model: nn.Module | None,
        replicas: Replicas | None,
        record: str | Path | None,
    ) -> None:
        run = self._run = Run(
            prepare, model, replicas or default_replicas(), record, self._taken_over
        )
        self.optimizer: Optimizer = run.optimizer
        self._visiting = False
        self._search_phase = SearchPhase(run)
        self._cycle_end = CycleEnd(run, self._search_phase)
        self._elastic_sync: ElasticSync | None = None
        self._search_phase.start()
        run.renew_good_point()
        if run.elastic is not None:
            # Be ready to meet the others, and to be given the state of one of them.
            self._elastic_sync = ElasticSync(run, run.elastic, self._cycle_end)
            run.elastic.register(self.load_state_dict, run.progress_state)
        run.write(everything=True)
        self._guard_loading()
        run.start_record()

    def _taken_over(self, base: BaseSchedule) -> OneCycleBounds | None:
        """The schedule whose decay the controller takes over; in scale form none."""
        return None

    def _guard_loading(self) -> None:
        """Whichever is loaded last, optimizer or scheduler: the learning rates are ours."""
        weakly = weakref.ref(self)  # a hook must not outlive the scheduler it writes for

        def write_again(_: Optimizer) -> None:
            scheduler = weakly()
            if scheduler is not None:
                scheduler._run.base.restore_entries()
                scheduler._run.write(everything=True)

        self.optimizer.register_load_state_dict_post_hook(write_again)

    # What is refused -----------------------------------------------------------------------

    def _overrun(self) -> None:
        run = self._run
        total, choice = run.settings.total_steps, run.settings.on_overrun
        if choice == "raise":
            raise ValueError(
                f"`step()` must be called at most `total_steps` ({total}) times, "
                f"got call {run.step + 1}."
            )
        run.warn_once(
            "overrun",
            f"step {run.step + 1} of a run of {total}: the base schedule has ended and "
            f"keeps its last value (on_overrun={choice!r}).",
        )

    def _refuse_while_visiting(self, call: str) -> None:
        if self._visiting:
            raise RuntimeError(f"`{call}` inside `consensus()` would be undone: leave it first.")
