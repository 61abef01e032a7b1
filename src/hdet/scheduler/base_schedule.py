"""The wrapped schedule: advanced with the fan-out undone, read through its own report."""

import copy
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from hdet.control.one_cycle_bounds import OneCycleBounds
from hdet.knobs import param_groups


class ScheduleShares(NamedTuple):
    """What is left of a schedule, in units of the learning rate that was given."""

    mean: float
    highest: float


class BaseSchedule:
    """A torch schedule, and the learning rates and momenta it has last computed."""

    def __init__(self, schedule: LRScheduler) -> None:
        if not isinstance(schedule, LRScheduler) or hasattr(schedule, "consensus"):
            raise TypeError(f"`base` must be a plain torch LRScheduler, got {schedule!r}.")
        self.schedule = schedule
        self.optimizer = schedule.optimizer
        self.names = param_groups.group_names(self.optimizer)
        param_groups.use_plain_floats(schedule)
        self.cycle: OneCycleBounds | None = None
        """Where OneCycleLR peaks and ends; none for other schedules."""
        if isinstance(schedule, OneCycleLR):
            entries = self.optimizer.param_groups
            self.cycle = OneCycleBounds(
                [float(group["max_lr"]) for group in entries],
                [float(group["min_lr"]) for group in entries],
            )
        if isinstance(schedule, ReduceLROnPlateau) and schedule.mode == "max":
            raise ValueError(
                "`base` must be a ReduceLROnPlateau with mode='min', got 'max': it follows the "
                "mean training loss of every cycle."
            )
        self.wants_metric = isinstance(schedule, ReduceLROnPlateau)
        """It is stepped once a cycle, with the mean loss of the cycle: that number is equal on all
        replicas; their own losses would take them apart."""
        self._entries = param_groups.schedule_entries(self.optimizer)
        self._played: tuple[tuple[Any, ...], ScheduleShares | None] | None = None
        """What was last asked of the rest of the schedule, and the answer."""
        self._read()

    @property
    def total_steps(self) -> int | None:
        total = getattr(self.schedule, "total_steps", None)
        return total if isinstance(total, int) else None

    @property
    def peaks(self) -> list[float]:
        """The learning rates that the user gave: where the schedule is highest."""
        highest = getattr(self.schedule, "max_lrs", None)  # CyclicLR's
        if highest is not None:
            return [float(lr) for lr in highest]
        entries = self.optimizer.param_groups
        return [float(one.get("max_lr", one.get("initial_lr", one["lr"]))) for one in entries]

    def shares(self, total_steps: int | None) -> ScheduleShares | None:
        """The mean of what is left of the schedule and its highest; none if nobody knows.

        A copy of it is played to its end, beside the optimizer.
        """
        num = 0 if total_steps is None or self.wants_metric else total_steps - self.step
        if num <= 0:
            return None
        asked = (self.step, total_steps, *self.peaks)
        if self._played is None or self._played[0] != asked:  # it takes its time
            self._played = asked, self._play(num)
        return self._played[1]

    def _play(self, num: int) -> ScheduleShares | None:
        """Of the next so many steps."""
        pairs = zip(self.optimizer.param_groups, self.lrs, strict=True)
        groups = [{**g, "lr": lr, "initial_lr": g.get("initial_lr", lr)} for g, lr in pairs]
        stand_in = SimpleNamespace(param_groups=groups, step=lambda: None, _opt_called=True)
        total = highest = 0.0
        # Whatever a method of the user's own belongs to is not for us to copy.
        callables = getattr(self.schedule, "lr_lambdas", [])
        owners = [f.__self__ for f in callables if hasattr(f, "__self__")]
        kept = {id(owner): owner for owner in owners} | {id(self.optimizer): stand_in}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nobody steps the stand-in
            try:
                played: Any = copy.deepcopy(self.schedule, kept)
                for number in range(num):
                    heights = [
                        float(group["lr"]) / peak
                        for group, peak in zip(groups, self.peaks, strict=True)
                        if peak
                    ]
                    total += sum(heights)
                    highest = max([highest, *heights])
                    if number < num - 1:
                        played.step()
            except Exception:  # a schedule of the user's own that cannot be copied
                return None
        moving = sum(peak != 0 for peak in self.peaks)
        return ScheduleShares(total / num / moving, highest) if moving else None

    def share_of_now(self) -> float:
        """How high the schedule is, in units of its peak."""
        shares = [lr / peak for lr, peak in zip(self.lrs, self.peaks, strict=True) if peak]
        return sum(shares) / len(shares) if shares else 0.0

    @property
    def step(self) -> int:
        """The step of the run this schedule is at."""
        return 0 if self.wants_metric else max(getattr(self.schedule, "last_epoch", 0), 0)

    def advance(self, metric: float | None = None) -> None:
        aside = param_groups.undo_fan_out(self.optimizer, self.lrs, self.momenta)
        try:
            if metric is None:
                self.schedule.step()
            else:
                self.schedule.step(metric)  # type: ignore[arg-type]
            self._read()
        finally:
            param_groups.restore_entries(self.optimizer, aside)

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": type(self.schedule).__name__,
            "schedule": copy.deepcopy(self.schedule.state_dict()),
            "momenta": self.momenta,
        }

    def restore_entries(self) -> None:
        """What the schedule keeps in the optimizer's groups, after a checkpoint replaced them."""
        param_groups.write_schedule_entries(self.optimizer, self._entries)

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Go on from a saved state; the run is at `step`."""
        self.restore_entries()
        if isinstance(self.schedule, OneCycleLR):
            # Only the clock is taken over: rates and length are what the run is set to now. One
            # step from the step before has the closed form compute everything else.
            last = min(step, self.schedule.total_steps)
            self.schedule.last_epoch = last - 1
            # A count of 1 would make torch look for an optimizer step that was made long ago.
            self.schedule._step_count = 0
            self.advance()
            self.schedule._step_count = last + 1
            return
        self.schedule.load_state_dict(state["schedule"])
        param_groups.use_plain_floats(self.schedule)
        self.lrs = [float(lr) for lr in self.schedule.get_last_lr()]
        self.momenta = state["momenta"]

    def _read(self) -> None:
        self.lrs = [float(lr) for lr in self.schedule.get_last_lr()]
        if self.cycle is not None:
            # One step past its last phase a linear OneCycleLR is extrapolated below zero.
            pairs = zip(self.lrs, self.cycle.floors, strict=True)
            self.lrs = [lr if lr > 0 else floor for lr, floor in pairs]
        self.momenta = param_groups.read_momenta(self.schedule)
