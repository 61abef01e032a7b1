"""HDET: a learning-rate schedule that finds and tracks the learning rate during the run."""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
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
from hdet.records.events import (
    ConvergeCost,
    ConvergeEvent,
    ExcludedReplica,
    NoteEvent,
    ResumeEvent,
)
from hdet.records.sinks import Record
from hdet.records.writer import Timers
from hdet.replicas.factory import default_replicas
from hdet.replicas.protocol import Interrupted, Replicas
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
    """Wraps a torch schedule, and finds and tracks the learning rate inside the run.

    Each *replica* is one copy of the model. The learning rate of replica r is

        base(step) x scale x multiplier_r

    - The *base* is the schedule that `HDET` wraps.
    - A *cycle* is the `sync_every` steps between two averages of the weights.
    - The *multiplier* is the position of a replica in the spread, between 1 - spread and
      1 + spread. It is 1 for all replicas unless the run explores.
    - The *scale* is the centre of the spread. The controller moves it at the end of a cycle.
    - A *knob* is a scalar that the run explores: a learning rate, a weight decay, a dropout.
    - The *scout* searches for the scale in the first steps of the run.
    - The *guard* restores the last good weights when the loss spikes.
    - The *consensus* is the mean of the replicas' weights.

    By default the run has a scout and a guard, and does not explore. It explores if `spread`,
    `knobs` or a controller is given, or with `preset="paper"`. With one replica and no guard,
    `HDET` is exactly the base schedule.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> base = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        >>> scheduler = HDET(base, model=model, scout=None)
        >>> optimizer.step()
        >>> scheduler.step()
        >>> scheduler.get_last_lr()
        [0.05]

    Args:
        base: The schedule to wrap. It must be a plain torch `LRScheduler`.
        model: The model that trains, as the loop calls it: wrapped in DDP or FSDP2 if it is. The
            scout, the probe and local gradients need it. hdet averages its buffers too.
        preset: The defaults of the options below. `"best"` starts with a scout and a guard and
            does not explore. `"paper"` explores as the paper does, without scout and guard.
        spread: Relative half-width of the learning rates that replicas explore, in [0, 1). None
            takes the preset's value.
        sync_every: Steps in a cycle. None takes the preset's value: a thirtieth of the run, at
            most 1000, or 1000 for the paper.
        knobs: The scalars to explore, such as `[hdet.lr(), hdet.weight_decay()]`. None explores
            the learning rate of each parameter group.
        probe: Scores the replicas on held-out data. A function of the model, or `hdet.Probe`.
            None compares replicas by their training losses.
        scout: The search at the start. `"auto"` searches where that can work, and otherwise
            warns. `"restart"` keeps the given learning rate unless it is far off. None turns the
            scout off. `hdet.Scout()` sets its options.
        guard: The protection against spikes. `"auto"` takes the preset's guard, None turns it
            off, and `hdet.Guard()` sets its options.
        controller: Moves the scale at the end of a cycle. `"auto"` takes the preset's
            controller, and None moves nothing. `hdet.Tracker()` and `hdet.PaperController()` are
            controllers.
        design: How multipliers are assigned to replicas in each cycle. `"orthogonal"` keeps knobs
            uncorrelated, `"latin"` gives each replica a level of its own, and `"permutation"` is
            the paper's design. None takes the design that fits the controller.
        gradients: `"shared"` if all replicas step with the mean gradient, as under DDP.
            `"local"` if each replica steps with its own.
        optimizer_state: What happens to optimizer states when weights are averaged: `"keep"`,
            `"average"` or `"reset"`.
        outer: Makes an outer optimizer from a list of parameters, as DiLoCo uses one. It treats
            the change of the mean weights over a cycle as a gradient.
        overlap: Steps that training continues while the average is computed. 0 waits for it.
        compress: Quantizes the weights that replicas send to `"bf16"` or `"int8"`. None sends
            them as they are.
        replicas: The engine that holds the replicas. None takes the processes of the default
            process group, or a single replica without one.
        total_steps: Steps of the run. None takes the length of the base schedule if it has one.
        on_overrun: What happens after `total_steps`. `"hold"` keeps the learning rate, `"extend"`
            keeps it and explores on, and `"raise"` raises an error.
        record: The folder for the file `record.jsonl`. None writes no record.
        seed: Seed of the assignment of multipliers to replicas.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a bad value, if options do not work together, or if the
            replicas have different settings or weights. It is raised on all replicas.
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
        record: Record | None = None,
        seed: int = 0,
    ) -> None:
        def prepare(replicas: Replicas) -> tuple[BaseSchedule, Settings]:
            wrapped = BaseSchedule(base)
            total = wrapped.total_steps if total_steps is None else total_steps
            named = None if knobs is None else tuple(flatten_knobs(knobs))
            # Snapshots of a guard would be another one's for whoever joins.
            elastic = replicas.capabilities.is_elastic
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
        """Add a training loss of this replica to the mean of the cycle.

        With gradient accumulation, call it once for each micro-batch and `step()` without a loss.
        The value stays on its device.

        Args:
            loss: The loss: a number or a tensor. With several replicas in this process, a tensor
                with one loss for each.
            weight: The weight of this loss in the mean, for example its number of tokens.
        """
        self._run.training_loss.add(loss, weight)

    def step(self, loss: Any = None) -> None:
        """Advance the run by one step.

        Call it once after every attempted optimizer step, also after one that `GradScaler`
        skipped. At the end of a cycle it compares the replicas and averages their weights, so all
        replicas must call it equally often.

        Args:
            loss: The training loss of this step, as for `observe()`. None adds no loss.

        Raises:
            ValueError: If the run is over and `on_overrun` is `"raise"`.
            RuntimeError: If it is called inside `consensus()`.
            ReplicasLost: If too few replicas are fit to go on.
        """
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
        """Average weights, buffers and optimizer states now, so that all replicas are one model.

        Call it on all replicas before saving a checkpoint. It drops the losses of this cycle, so
        that the run continues exactly as one that resumes from the checkpoint. The exception is
        a scout with held-out batches: a checkpoint does not contain them.

        Raises:
            RuntimeError: If it is called inside `consensus()`.
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
        event = ConvergeEvent(
            step=run.step,
            excluded=ExcludedReplica.from_reasons(verdict.excluded),
            converge=ConvergeCost(bytes=num_bytes),
        )
        run.write_record(event, Timers(converge=stopwatch), wait=True)

    def scout_again(self, scout: Scout | None = None) -> None:
        """Search for another learning rate from the next step on, for example for new data.

        The replicas try learning rates around the present one. Then the run continues from the
        present weights. All replicas must call it. In mid-run, short trials favour learning rates
        that are too low: use it if the learning rate is far off.

        Args:
            scout: The options of the search. None takes those of the run.

        Raises:
            RuntimeError: If no scout can run here, or if one is running.
        """
        self._refuse_while_visiting("scout_again()")
        asked = scout or self._run.settings.scout or Scout()
        model, left = self._search_phase.check_can_search(asked)
        self.converge()
        self._search_phase.again(asked, model, left)
        self._run.write(everything=True)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Show the mean of the replicas in the model, to evaluate it or to copy its weights.

        After the block every replica has its own weights again, and the run continues unchanged.
        All replicas must enter the block. For a checkpoint from which a run resumes bit for bit,
        call `converge()` instead.

        Yields:
            None.

        Raises:
            RuntimeError: If it is entered twice.
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
        """Write a line of your own into the record. Without a record it does nothing.

        Args:
            text: What happened.
            **measures: Numbers that the report plots over the steps. `loss` is the loss of the
                consensus on data that it was not trained on.

        Raises:
            TypeError: If a measure is not a number.
        """
        values = {name: number_of(name, value) for name, value in measures.items()}
        self._run.write_record(NoteEvent(step=self._run.step, text=str(text), measures=values))

    # What it is set to ---------------------------------------------------------------------

    @property
    def last_epoch(self) -> int:
        """The number of attempted steps, under torch's name."""
        return self._run.step

    @last_epoch.setter
    def last_epoch(self, step: int) -> None:
        self._run.step = step

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates of this replica.

        Returns:
            One learning rate for each parameter group. With several replicas in this process,
            those in the centre of the spread.
        """
        return list(self._run.lrs[0]) if len(self._run.lrs) == 1 else self.get_base_lr()

    def get_lr(self) -> list[Any]:
        """Return the same as `get_last_lr()`, under torch's other name."""
        return self.get_last_lr()

    def get_base_lr(self) -> list[float]:
        """Return the learning rates of the consensus: those in the centre of the spread.

        Returns:
            One learning rate for each parameter group.
        """
        return self._run.knob_bank.lrs(self._run.base.lrs)

    def get_replica_lrs(self) -> list[list[float]]:
        """Return the learning rates of every replica.

        Returns:
            For each replica, in order, one learning rate for each parameter group.
        """
        return [self._run.lrs_of(replica) for replica in range(self._run.replicas.size)]

    def get_knobs(self) -> dict[str, float]:
        """Return the centre of every knob.

        Returns:
            The knobs by name. For a learning rate (`lr/...`) the value is a factor of the base
            schedule. For every other knob it is the knob's value. For a knob with a schedule it
            is the value where the schedule is 1.
        """
        return self._run.knob_bank.scales()

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer, None without one. Save and load it beside the inner one."""
        return self._run.parameters.averager.outer

    def outer_parameters(self) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters that the outer optimizer follows.

        Returns:
            Pairs of a model parameter and the tensor that the outer optimizer moves for it.
        """
        return self._run.parameters.averager.outer_parameters()

    def unsaved_parameters(self) -> list[str]:
        """Return the parameters that a distributed checkpoint cannot save by itself.

        Each exists once for all replicas and is a plain tensor. A distributed checkpoint takes
        such tensors for copies of each other.

        Returns:
            The names of the parameters.
        """
        return self._run.parameters.unsaved()

    @property
    def is_scouting(self) -> bool:
        """Whether the scout runs: each replica tries a learning rate of its own."""
        return self._run.trial is not None

    def sensitivity(self) -> dict[str, Sensitivity]:
        """Return how the score responds to every knob, from the last cycles.

        Returns:
            For each knob with evidence, the slope of the loss over the knob's position, with its
            standard error and its 95 % interval.
        """
        recent_slope = {knob.name: knob.sensitivity() for knob in self._run.knob_bank.knobs}
        return {name: sensed for name, sensed in recent_slope.items() if sensed is not None}

    def probe_share(self) -> float | None:
        """Return the share of the last cycle's time that the probe took.

        Returns:
            A number from 0 to 1. None without a probe, or while the device still computes.
        """
        spent = {name: watch.seconds() for name, watch in self._run.probe_watches.items()}
        probe, training = spent.get("probe"), spent.get("training")
        return None if probe is None or training is None else probe / (probe + training)

    # State ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, to be saved beside the model and the optimizer.

        It warns if the replicas differ: call `converge()` on all replicas before saving.

        Returns:
            Plain data that is equal on all replicas and loads with `weights_only=True`. It does
            not depend on the number of replicas.
        """
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
        """Continue from a saved state of hdet, or of the plain base schedule.

        Load the model and the optimizer too, in any order. The number of replicas and the length
        of the run may differ from those of the saved run.

        Args:
            state_dict: The result of `state_dict()`, or that of the base schedule.

        Raises:
            ValueError: If the state belongs to another schedule or to other knobs.
        """
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
        run.write_record(ResumeEvent(step=run.step))

    def check_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Check that the run can continue from a state, and change nothing.

        Args:
            state_dict: The state, as for `load_state_dict()`.

        Returns:
            A copy in the form of hdet, also of the state of a plain base schedule.

        Raises:
            ValueError: If the state belongs to another schedule or to other knobs.
        """
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
        record: Record | None,
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
