"""HDET: a learning-rate schedule that finds and tracks the learning rate during the run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn
from torch.amp import GradScaler

from hdet._validation import number_of
from hdet.control.controller import Controller
from hdet.control.guard import Guard
from hdet.lr_search.scout import Scout
from hdet.records.events import NoteEvent, ResumeEvent
from hdet.records.sinks import Record
from hdet.replicas.protocol import Replicas
from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.defaults import complete_settings
from hdet.scheduler.given_schedule import Base, Schedule
from hdet.scheduler.joined_schedule import wrap_schedules
from hdet.scheduler.opening import OpenedRun
from hdet.scheduler.presets import Auto, GivenOptions, Restart
from hdet.scheduler.settings import Settings
from hdet.scheduler.start_warnings import StartWarnings
from hdet.signals.probe import Probe, as_probe
from hdet.weights.outer_optimizer import OptimizerFactory


class HDET(OpenedRun):
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
    - The *guard* restores the best weights of a run that fails, and caps its learning rate.
    - The *consensus* is the mean of the replicas' weights.

    By default the run has a scout and a guard, and does not explore. It explores if `spread`,
    `knobs` or a controller is given, or with `preset="paper"`. With one replica, `scout=None` and
    `guard=None`, `HDET` is exactly the base schedule.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> base = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        >>> scheduler = HDET(base, model=model, scout=None)
        >>> optimizer.step()
        >>> scheduler.step()
        >>> scheduler.get_last_lr()
        [0.05]

    Args:
        base: The schedule to wrap: a plain torch `LRScheduler`. Or the optimizer, with
            `schedule=`, or with a constant learning rate. Or a list with one of them for each
            optimizer of the run. Then one factor scales all learning rates, unless `knobs` is
            given.
        model: The model that trains, as the loop calls it: wrapped in DDP or FSDP2 if it is. The
            scout, the probe and local gradients need it. hdet averages its buffers too. Each of
            its trainable parameters must belong to an optimizer of the run. Where it is wrapped
            later, call `attach(model)` then.
        schedule: With an optimizer as `base`: a pure function of the step, counted from 0, that
            returns the learning rate of the first parameter group. The other groups keep their
            ratio to it. None keeps the learning rates of the optimizer constant.
        steps_per_epoch: Steps after which the schedule advances, for schedules that count epochs.
            None advances it every step.
        preset: The defaults of the options below. `"best"` starts with a scout and a guard and
            does not explore. `"paper"` explores as the paper does, without scout and guard.
        spread: Relative half-width of the learning rates that replicas explore, in [0, 1). None
            takes the preset's value.
        sync_every: Steps in a cycle. None takes the preset's value: a sixtieth of the run, at
            most 1000, or 1000 for the paper.
        knobs: The scalars to explore, such as `[hdet.lr(), hdet.weight_decay()]`. None explores
            the learning rate of each parameter group.
        probe: Scores the replicas on held-out data. A function of the model, or `hdet.Probe`.
            None compares replicas by their training losses.
        scout: The search at the start. `"auto"` searches where that can work, and otherwise
            warns. `"restart"` keeps the given learning rate unless it is far off. None turns the
            scout off. `hdet.Scout()` sets its options.
        guard: The protection against failures. `"auto"` takes the preset's guard, None turns it
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
        total_steps: Steps of the run. None takes the length that the base schedule is made for,
            such as `T_max` of `CosineAnnealingLR`, if it tells one.
        on_overrun: What happens after `total_steps`. `"hold"` keeps the learning rate, `"extend"`
            keeps it and explores on, and `"raise"` raises an error.
        record: The folder for the file `record.jsonl`, a sink, or a sequence of them. None
            writes no record.
        seed: Seed of the assignment of multipliers to replicas.
        lr_bounds: The lowest and the highest peak that the scout may choose for the first group.
        scaler: The `GradScaler` of the loop. Its loss scale is restored with the weights, and kept
            equal on all replicas. Save its state yourself.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a bad value, if options do not work together, or if the
            replicas have different settings or weights. It is raised on all replicas.
    """

    def __init__(
        self,
        base: Base | Sequence[Base],
        *,
        model: nn.Module | None = None,
        schedule: Schedule | None = None,
        steps_per_epoch: int | None = None,
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
        lr_bounds: tuple[float, float] | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        def prepare(
            replicas: Replicas, trained: nn.Module | None, warn: StartWarnings
        ) -> tuple[BaseSchedule, Settings]:
            wrapped = wrap_schedules(base, schedule, steps_per_epoch, total_steps, warn)
            given = GivenOptions(spread, sync_every, controller, scout, guard, knobs)
            settings = complete_settings(
                preset,
                given,
                wrapped,
                replicas,
                trained,
                warn=warn,
                gradients=gradients,
                optimizer_state=optimizer_state,
                outer=outer,
                overlap=overlap,
                compress=compress,
                total_steps=total_steps,
                on_overrun=on_overrun,
                seed=seed,
                probe=as_probe(probe),
                design=design,
                lr_bounds=lr_bounds,
                scaler=scaler,
            )
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
            RuntimeError: If it is called inside `consensus()`, or if the loop has set the learning
                rate of a parameter group.
            ReplicasLost: If no replica has finite weights, or if the guard is out of retries.
        """
        if self._visiting:
            self._refuse_while_visiting("step()")
        self._run.rates.written.check()
        if not self._loop.is_over:
            self._loop.check()
        if loss is not None:
            self._run.training_loss.add(loss, 1.0)
        self._phases.step()

    def converge(self) -> None:
        """Average weights, buffers and optimizer states now, so that all replicas are one model.

        Call it on all replicas before saving a checkpoint. It drops the losses of this cycle, so
        that the run continues exactly as one that resumes from the checkpoint.

        Raises:
            RuntimeError: If it is called inside `consensus()`.
        """
        self._refuse_while_visiting("converge()")
        self._consensus.make()

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
        self._refuse_while_visiting("consensus()")
        with self._consensus.shown() as is_shown:
            self._visiting = is_shown
            try:
                yield
            finally:
                self._visiting = False

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
        self._run.log.write(
            NoteEvent(step=self._run.progress.step, text=str(text), measures=values)
        )

    # State ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, to be saved beside the model and the optimizer.

        It warns if the replicas differ: call `converge()` on all replicas before saving.

        Returns:
            Plain data that is equal on all replicas and loads with `weights_only=True`. It does
            not depend on the number of replicas.
        """
        run, trial = self._run, self._run.progress.trial
        if run.replicas_differ() and not self._visiting:
            run.log.warn(
                "the state is saved in the middle of a cycle: the weights beside it are those of "
                "one replica. Call `converge()` on all replicas before saving."
            )
        if trial is None:
            return run.progress_state()
        return {**run.progress_state(), "search": trial.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state of hdet, or of the plain base schedule.

        Load the model and the optimizer too, in any order. The number of replicas and the length
        of the run may differ from those of the saved run.

        Args:
            state_dict: The result of `state_dict()`, or that of the base schedule.

        Raises:
            ValueError: If the state belongs to another schedule or to other knobs, or if a field
                has the wrong type or range. Nothing is changed then.
        """
        saved, was_scouting = self.check_state_dict(state_dict), self.is_scouting
        self._opened_at = None
        with self._run.collective_call("`load_state_dict()`"):
            self._run.load_progress(saved)
            self._phases.resume(saved)
        self._run.rates.write(everything=True)
        self._run.log.write(ResumeEvent(step=self._run.progress.step))
        if was_scouting and "hdet" not in state_dict and not self.is_scouting:
            self._run.log.warn(
                f"the state is that of a plain schedule at step {self._run.progress.step}, so the "
                "run goes on with the given learning rate. Call `scout_again()` to search for "
                "another one."
            )
