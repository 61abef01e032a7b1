"""What a scheduler shows of its run: learning rates, knobs, sensitivities and times."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet.control.knob_state import Sensitivity
from hdet.knobs.param_groups import check_groups
from hdet.scheduler import state
from hdet.scheduler.run import Run
from hdet.tensors.dtensor import layout
from hdet.weights.inventory import ALL_KINDS, WEIGHTS


class RunReadings(LRScheduler):
    """The public readings of a run. `hdet.HDET` is the scheduler that makes the run."""

    _run: Run

    @property
    def last_epoch(self) -> int:
        """The number of attempted steps, under torch's name."""
        return self._run.progress.step

    @last_epoch.setter
    def last_epoch(self, step: int) -> None:
        self._run.progress.step, self._run.progress.quiet_until = step, 0

    @property
    def total_steps(self) -> int | None:
        """The number of steps of the run. None if it has no end."""
        return self._run.settings.total_steps

    @property
    def _step_count(self) -> int:  # type: ignore[override]  # torch writes it; hdet has none
        """Torch's private counter. A scheduler of hdet has none.

        Accelerate reads it before it steps a scheduler once for each process.
        """
        raise AttributeError(
            "a scheduler of hdet has no `_step_count`. Accelerate reads it to step a prepared "
            "scheduler once for each process, which is too often. Leave the scheduler out of "
            "`accelerator.prepare`, and make it with hdet.integrations.accelerate.prepare_hdet."
        )

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates of this replica.

        Returns:
            One learning rate for each parameter group. With several replicas in this process,
            those in the centre of the spread.
        """
        local = self._run.rates.local
        return list(local[0]) if len(local) == 1 else self.get_base_lr()

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
        return [self._run.rates.of(replica) for replica in range(self._run.replicas.size)]

    def get_knobs(self) -> dict[str, float]:
        """Return the centre of every knob.

        Returns:
            The knobs by name. For a learning rate (`lr/...`) the value is a factor of the base
            schedule. For every other knob it is the knob's value. For a knob with a schedule it
            is the value where the schedule is 1.
        """
        return self._run.knob_bank.scales()

    @contextmanager
    def collective_call(self, name: str) -> Iterator[None]:
        """Begin a call of hdet outside of the scheduler, which all replicas must make together.

        Args:
            name: What messages call it.

        Raises:
            RuntimeError: If replicas make different calls, or are at different steps.
        """
        replicas = self._run.replicas
        with self._run.collective_call(name):
            replicas.gather(torch.zeros(len(replicas.local), 1))  # the header goes before it
            yield

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer, None without one. Save and load it beside the inner one."""
        return self._run.weights.averager.outer

    def outer_parameters(self) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters that the outer optimizer follows.

        Returns:
            Pairs of a model parameter and the tensor that the outer optimizer moves for it.
        """
        return self._run.weights.averager.outer_parameters()

    def parameters_beside_model(self) -> dict[str, Tensor]:
        """Return the parameters of the optimizers that the model of the run lacks.

        A loss may have such parameters.

        Returns:
            The parameters by their position in the optimizers. Empty where the run has no model.
        """
        self._run.weights.refresh()  # a forward of FSDP2 leaves whole parameters in the model
        return {} if self._run.model is None else self._run.weights.beside_model()

    def unsaved_parameters(self) -> list[str]:
        """Return the parameters that a distributed checkpoint cannot save by itself.

        Each exists once in each process and is a plain tensor. A distributed checkpoint takes
        such tensors for copies of each other.

        Returns:
            The names of the parameters.
        """
        unsaved = dict.fromkeys(self._run.weights.unsaved())
        if self._run.replicas.parts > 1:  # the processes of a replica may have different ones
            beside = self.parameters_beside_model().items()
            unsaved |= dict.fromkeys(name for name, p in beside if layout(p) is None)
        return list(unsaved)

    def keep_random_state(self) -> None:
        """Let a search that a checkpoint goes on with start with the random numbers of now."""
        if self._run.progress.trial is not None:
            self._run.progress.trial.keep_random_state()

    @property
    def best_step(self) -> int | None:
        """The step of the weights that the guard would restore; None without a guard."""
        good_point = self._run.good_point
        return None if good_point is None else good_point.step

    @contextmanager
    def best_weights_shown(self) -> Iterator[int | None]:
        """Show what the guard would restore, to save it beside the present weights.

        Inside, model, optimizer and outer optimizer have the best weights and states of the run,
        averaged over the replicas. Afterwards everything is as before. All replicas must enter it.

        Yields:
            The step of the best weights. None if nothing is shown: without a guard, or where the
            present weights are the best ones.
        """
        run = self._run
        if run.good_point is None or run.good_point.step == run.progress.step:
            yield None
            return
        with run.good_point.shown():
            with run.collective_call("`best_weights_shown()`"):
                report, health = run.exchange_health(*ALL_KINDS)
                kinds = ALL_KINDS if report.optimizer_states_match else WEIGHTS
                averager = run.weights.averager
                averager.average_without_outer_step_(health.healthy, kinds, report.agreed)
            yield run.good_point.step

    @contextmanager
    def best_weights_loaded(self, step: int) -> Iterator[None]:
        """Give the guard the best weights of a saved run, after everything else was loaded.

        Inside, load them into model, optimizer and outer optimizer. Afterwards these have their own
        weights and states again.

        Args:
            step: The step of the best weights, as `best_weights_shown()` yields it.

        Yields:
            None.

        Raises:
            RuntimeError: If the run has no guard.
        """
        good_point = self._run.good_point
        if good_point is None:
            raise RuntimeError(
                "`best_weights_loaded()` needs a guard. Load nothing if `best_step` is None."
            )
        with good_point.loaded(step):
            yield
        self._run.rates.write(everything=True)  # a loaded optimizer has those of the best step

    @property
    def is_scouting(self) -> bool:
        """Whether the scout runs: each replica tries learning rates of its own."""
        return self._run.progress.trial is not None

    @property
    def found_lr(self) -> float | None:
        """The learning rate that the scout chose: the peak of the first parameter group.

        None before the scout has ended, and without one.
        """
        return self._run.progress.found_lr

    def sensitivity(self) -> dict[str, Sensitivity]:
        """Return how the score responds to every knob, from the last cycles.

        Returns:
            For each knob with evidence, the slope of the loss over the knob's position, with its
            standard error and its 95 % interval.
        """
        found = {knob.name: knob.sensitivity() for knob in self._run.knob_bank.knobs}
        return {name: sensitivity for name, sensitivity in found.items() if sensitivity is not None}

    def probe_share(self) -> float | None:
        """Return the share of the last cycle's time that the probe took.

        Returns:
            A number from 0 to 1. None without a probe, or while the device still computes.
        """
        timers = self._run.log.probe_timers
        if timers.probe is None or timers.training is None:
            return None
        probe, training = timers.probe.seconds(), timers.training.seconds()
        return None if probe is None or training is None else probe / (probe + training)

    def check_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Check that the run can continue from a state, and change nothing.

        Args:
            state_dict: The state, as for `load_state_dict()`.

        Returns:
            A copy in the form of hdet, also of the state of a plain base schedule.

        Raises:
            ValueError: If the state belongs to another schedule or to other knobs, or if a field
                has the wrong type or range.
        """
        run, saved = self._run, copy.deepcopy(state_dict)
        if not isinstance(saved, Mapping):
            raise ValueError(f"`state_dict` must be a dict, got a {type(saved).__name__}.")
        check_groups(run.optimizer, len(run.base.lrs))
        if "hdet" not in saved:
            fresh = run.new_knob_bank().state_dict()
            saved = state.adopted(saved, run.settings, run.base, fresh)
        state.check(saved, run.settings, run.base, [knob.info for knob in run.knob_bank.knobs])
        return saved
