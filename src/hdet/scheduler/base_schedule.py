"""BaseSchedule: the torch schedule that a run wraps.

The schedule must see its own learning rates. So each step undoes the fan-out, advances the
schedule, reads its learning rates, and restores the optimizer's entries.
"""

import copy
import warnings
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from hdet.control.one_cycle_bounds import OneCycleBounds
from hdet.knobs import param_groups
from hdet.scheduler.given_schedule import EpochSchedule, FunctionSchedule, length_of, step_of
from hdet.tensors.optimizers import unwrapped


class ScheduleShares(NamedTuple):
    """The rest of a schedule in units of its peak: its mean and its highest value."""

    mean: float
    highest: float


class BaseSchedule:
    """A torch schedule with the learning rates and momenta that it computed last.

    Args:
        schedule: The schedule to wrap.

    Raises:
        ValueError: If it is a `ReduceLROnPlateau` that maximises.
    """

    def __init__(self, schedule: LRScheduler) -> None:
        self.schedule = schedule
        self.optimizer: Optimizer = unwrapped(schedule.optimizer)
        self.names = param_groups.group_names(self.optimizer)
        param_groups.use_plain_floats(schedule)
        self.cycle: OneCycleBounds | None = None
        """The peak and the end of a OneCycleLR. None for other schedules."""
        if isinstance(schedule, OneCycleLR):
            entries = self.optimizer.param_groups
            self.cycle = OneCycleBounds(
                [float(group["max_lr"]) for group in entries],
                [float(group["min_lr"]) for group in entries],
            )
        if isinstance(schedule, ReduceLROnPlateau) and schedule.mode == "max":
            raise ValueError(
                "`base` must be a ReduceLROnPlateau with mode='min', got 'max'. hdet passes it "
                "the mean training loss of each cycle."
            )
        self.wants_metric = isinstance(schedule, ReduceLROnPlateau)
        """Whether the schedule steps once a cycle, with the mean loss over all replicas. Losses of
        single replicas would give them different schedules."""
        self._cycles_momentum = param_groups.cycles_momentum(schedule)
        self._entries = param_groups.schedule_entries(self.optimizer)
        self._simulated: tuple[tuple[Any, ...], ScheduleShares | None] | None = None
        """The inputs and the result of the last simulation."""
        self.momenta: list[float | None] | None = None
        """The momentum of each group that the schedule cycles; None if it cycles none."""
        self._read()
        self._first_lrs = self.lrs

    @property
    def total_steps(self) -> int | None:
        """The last step that the schedule allows. None if it has no end."""
        total = getattr(self.schedule, "total_steps", None)
        return total if isinstance(total, int) else None

    @property
    def length(self) -> int | None:
        """The steps that the schedule is made for. None if it does not tell."""
        return length_of(self.schedule)

    @property
    def kind(self) -> str:
        """What the schedule is. A state loads into a schedule of the same kind."""
        schedule = self.schedule
        return schedule.kind if isinstance(schedule, EpochSchedule) else type(schedule).__name__

    @property
    def peaks(self) -> list[float]:
        """The highest learning rate of each group: the one that the user gave."""
        highest = getattr(self.schedule, "max_lrs", None)  # as in CyclicLR
        if highest is not None:
            return [float(lr) for lr in highest]
        pairs = zip(self.optimizer.param_groups, self._first_lrs, strict=True)
        # An optimizer from a checkpoint may have more than its initial learning rate, and a
        # schedule that multiplies the last value goes on from there.
        return [max(float(g.get("max_lr", g.get("initial_lr", lr))), lr) for g, lr in pairs]

    def shares(self, total_steps: int | None) -> ScheduleShares | None:
        """Return the mean and the highest value of the rest of the schedule.

        A copy of the schedule runs to its end beside the optimizer.

        Args:
            total_steps: The length of the run, None if unknown.

        Returns:
            The shares of the peak. None if they cannot be known.
        """
        num_steps = 0 if total_steps is None or self.wants_metric else total_steps - self.step
        if num_steps <= 0:
            return None
        inputs = (self.step, total_steps, *self.peaks)
        if self._simulated is None or self._simulated[0] != inputs:  # a long schedule takes time
            self._simulated = inputs, self._simulate(num_steps)
        return self._simulated[1]

    def _simulate(self, num_steps: int) -> ScheduleShares | None:
        """Run a copy of the schedule for some steps beside the optimizer.

        Returns:
            The mean and the highest share; None if the schedule cannot be copied.
        """
        copied = self._stand_in()
        memo: dict[int, Any] = {id(owner): owner for owner in _owners(self.schedule)}
        memo |= {id(self.optimizer): copied, id(self.schedule.optimizer): copied}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns because the stand-in makes no step
            try:
                schedule: Any = copy.deepcopy(self.schedule, memo)
                return self._walk(schedule, copied.param_groups, num_steps)
            except Exception:  # a schedule of the user that cannot be copied or stepped
                return None

    def _stand_in(self) -> SimpleNamespace:
        """Return what a copied schedule writes to in the place of the optimizer."""
        pairs = zip(self.optimizer.param_groups, self.lrs, strict=True)
        groups = [{**g, "lr": lr, "initial_lr": g.get("initial_lr", lr)} for g, lr in pairs]
        return SimpleNamespace(param_groups=groups, step=lambda: None, _opt_called=True)

    def _walk(self, schedule: Any, groups: list[Any], num_steps: int) -> ScheduleShares | None:
        """Step a copied schedule and measure the learning rates it writes."""
        total = highest = 0.0
        for number in range(num_steps):
            shares = [
                float(group["lr"]) / peak
                for group, peak in zip(groups, self.peaks, strict=True)
                if peak
            ]
            total += sum(shares)
            highest = max([highest, *shares])
            if number < num_steps - 1:
                schedule.step()
        num_groups = sum(peak != 0 for peak in self.peaks)
        return ScheduleShares(total / num_steps / num_groups, highest) if num_groups else None

    def share_of(self, lrs: Sequence[float]) -> float:
        """Return learning rates in units of the peak, as a mean over the groups."""
        return sum(self.shares_of(lrs))

    def shares_of(self, lrs: Sequence[float]) -> list[float]:
        """Return what each group adds to the share of some learning rates."""
        peaks = self.peaks
        num = sum(peak != 0 for peak in peaks)
        return [lr / peak / num if peak else 0.0 for lr, peak in zip(lrs, peaks, strict=True)]

    @property
    def step(self) -> int:
        """The step of the schedule."""
        return 0 if self.wants_metric else step_of(self.schedule)

    def step_of_state(self, plain: Mapping[str, Any]) -> int:
        """Return the step of a saved state of the plain schedule, which may count epochs."""
        schedule, count = self.schedule, max(int(plain["last_epoch"]), 0)
        if self.wants_metric:
            return 0
        return count * schedule.steps_per_epoch if isinstance(schedule, EpochSchedule) else count

    def advance(self, metric: float | None = None) -> None:
        """Make one step of the schedule. The caller writes the learning rates afterwards.

        Args:
            metric: The mean loss of the cycle, for a schedule that waits for a metric.
        """
        replaced = param_groups.undo_fan_out(self.optimizer, self.lrs, self.momenta)
        try:
            if metric is None:
                self.schedule.step()
            else:
                self.schedule.step(metric)  # type: ignore[arg-type]
            self._read()
        finally:
            param_groups.restore_entries(replaced)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule as plain data."""
        return {
            "kind": self.kind,
            "schedule": copy.deepcopy(self.schedule.state_dict()),
            "momenta": self.momenta,
        }

    def adopted(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a plain torch schedule in the form of `state_dict`."""
        return {**self.state_dict(), "schedule": plain}

    def restore_entries(self) -> None:
        """Write the schedule's entries into the groups again, after a checkpoint replaced them."""
        param_groups.write_schedule_entries(self.optimizer, self._entries)

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Continue from a saved state of a run whose schedule is at `step`."""
        self.restore_entries()
        if isinstance(self.schedule, OneCycleLR):
            # The run keeps its own learning rates and length, and takes the step alone. One step
            # from the step before makes the closed form compute everything else.
            last = min(step, self.schedule.total_steps)
            self.schedule.last_epoch = last - 1
            # At a count of 1, torch checks whether the optimizer has made a step.
            self.schedule._step_count = 0
            self.advance()
            self.schedule._step_count = last + 1
            return
        self.schedule.load_state_dict(state["schedule"])
        param_groups.use_plain_floats(self.schedule)
        self.lrs = [float(lr) for lr in self.schedule.get_last_lr()]
        self.momenta = state["momenta"]

    def _read(self) -> None:
        """Read the learning rates and momenta that the schedule computed last."""
        self.lrs = list(map(float, self.schedule.get_last_lr()))
        if self.cycle is not None and min(self.lrs) <= 0:
            # A linear OneCycleLR extrapolates below zero one step after its last phase.
            pairs = zip(self.lrs, self.cycle.floors, strict=True)
            self.lrs = [lr if lr > 0 else floor for lr, floor in pairs]
        if self._cycles_momentum:
            self.momenta = param_groups.read_momenta(self.optimizer)


def _owners(schedule: Any) -> list[Any]:
    """Return the objects of the user that a schedule calls. They must not be copied."""
    functions = getattr(schedule, "lr_lambdas", [])
    found = [function.__self__ for function in functions if hasattr(function, "__self__")]
    if isinstance(schedule, FunctionSchedule):
        found += [schedule.function, getattr(schedule.function, "__self__", None)]
    for inner in getattr(schedule, "_schedulers", []):
        found += _owners(inner)
    return found
