"""From what users give as a schedule to a torch schedule that advances once every step.

Users give a torch schedule that is stepped by step or by epoch, or an optimizer with a function of
the step, or an optimizer alone. `length_of_schedule` says how many steps a schedule is made for.
"""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from hdet._messages import Warn
from hdet._validation import check_integer

Schedule = Callable[[int], float]
"""A pure function of the step, counted from 0, that returns the learning rate."""
Base = LRScheduler | Optimizer
"""What a user gives as the schedule of one optimizer."""


def as_base(
    base: Any,
    schedule: Schedule | None,
    steps_per_epoch: int | None,
    total_steps: int | None,
    warn: Warn,
) -> LRScheduler:
    """Return the torch schedule that a run wraps. It advances once every step.

    Args:
        base: A torch schedule or an optimizer.
        schedule: A function of the step, or of the epoch. None with an optimizer: constant.
        steps_per_epoch: Steps after which the schedule advances. None advances it every step.
        total_steps: Steps of the run, None if unknown.
        warn: Raises a warning; silent on all processes but the first.

    Raises:
        TypeError: If an argument has the wrong type, or the function returns no number.
        ValueError: If arguments do not fit together, or the function returns a bad value.
    """
    for name, number in (("steps_per_epoch", steps_per_epoch), ("total_steps", total_steps)):
        if number is not None:
            check_integer(name, number, at_least=1)
    if isinstance(base, Optimizer):
        base = _of_optimizer(base, schedule, steps_per_epoch, total_steps, warn)
    elif not isinstance(base, LRScheduler) or hasattr(base, "consensus"):
        raise TypeError(
            f"`base` must be a plain torch LRScheduler or a torch optimizer, got {base!r}."
        )
    elif schedule is not None:
        raise ValueError(
            f"`schedule` must be None beside a {type(base).__name__}, got {schedule!r}. Pass the "
            "optimizer in the place of the schedule."
        )
    return base if steps_per_epoch is None else EpochSchedule(base, steps_per_epoch)


def _of_optimizer(
    optimizer: Optimizer,
    schedule: Schedule | None,
    steps_per_epoch: int | None,
    total_steps: int | None,
    warn: Warn,
) -> LRScheduler:
    if schedule is None:
        return ConstantSchedule(optimizer)
    if not callable(schedule):
        raise TypeError(
            "`schedule` must be a function of the step that returns the learning rate, or None, "
            f"got {schedule!r}."
        )
    num_values = None if total_steps is None else math.ceil(total_steps / (steps_per_epoch or 1))
    given = FunctionSchedule(optimizer, schedule, num_values)
    lr = float(given.base_lrs[0])
    if given.highest == 1.0 and lr != 1.0:
        warn(
            "`schedule` must return learning rates, and its highest value is 1 where the optimizer "
            f"has {lr:g}. If it returns factors, pass LambdaLR(optimizer, schedule) in the place "
            "of the optimizer."
        )
    return given


def step_of(schedule: LRScheduler) -> int:
    """Return the step of a schedule. A ChainedScheduler has that of the schedules inside."""
    inner = getattr(schedule, "_schedulers", None)
    if inner and not hasattr(schedule, "last_epoch"):
        return step_of(inner[0])
    return max(getattr(schedule, "last_epoch", 0), 0)


def length_of(schedule: Any) -> int | None:
    """Return how many steps a schedule is made for. None if it does not tell.

    A warm-up tells nothing about the run, and restarts have no end.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    >>> warmup, cosine = LinearLR(optimizer, total_iters=5), CosineAnnealingLR(optimizer, 20)
    >>> length_of(warmup), length_of(SequentialLR(optimizer, [warmup, cosine], [5]))
    (None, 25)
    """
    if isinstance(schedule, EpochSchedule):
        epochs = length_of(schedule.by_epoch)
        return None if epochs is None else epochs * schedule.steps_per_epoch
    if isinstance(schedule, SequentialLR):
        last = length_of(schedule._schedulers[-1])
        return None if last is None else sum(schedule._milestones[-1:]) + last
    if isinstance(schedule, ChainedScheduler):
        return max(filter(None, map(length_of, schedule._schedulers)), default=None)
    if isinstance(schedule, CosineAnnealingLR):
        return int(schedule.T_max)
    falls = isinstance(schedule, LinearLR) and schedule.end_factor < schedule.start_factor
    if falls or isinstance(schedule, PolynomialLR):
        return int(schedule.total_iters)
    total = getattr(schedule, "total_steps", None)
    return total if isinstance(total, int) else None


class ConstantSchedule(LRScheduler):
    """Keeps the learning rates that the optimizer has."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.max_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        """The learning rates, under the name for the highest ones."""
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return list(self.max_lrs)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the step of a saved state, with its learning rates."""
        self.last_epoch = state_dict["last_epoch"]
        self.max_lrs = [float(lr) for lr in state_dict["_last_lr"]]
        self._last_lr = self.get_lr()


class FunctionSchedule(LRScheduler):
    """Takes the learning rate from a function of the step.

    The first parameter group gets the value of the function. The others keep their ratio to the
    first one.

    Args:
        optimizer: The optimizer.
        function: A pure function of the step that returns a learning rate.
        num_steps: Steps for which the function is defined: all are checked. The last value holds
            after them. None if unknown.

    Raises:
        TypeError: If the function returns no number.
        ValueError: If it returns a bad number, or if the ratio of the groups is not defined.
    """

    def __init__(self, optimizer: Optimizer, function: Schedule, num_steps: int | None) -> None:
        self.function, self._num_steps = function, num_steps
        groups = optimizer.param_groups
        lrs = [float(group.get("initial_lr", group["lr"])) for group in groups]
        self._ratios = _ratios(lrs)
        self.highest = max(self._value_at(step) for step in range(num_steps or 1))
        """The highest value of the function in these steps."""
        self.max_lrs = self._lrs(self.highest)
        """The highest learning rate of each group."""
        if num_steps is None:  # the optimizer has what the user takes for the highest one
            self.max_lrs = list(map(max, self.max_lrs, lrs))
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        last = self.last_epoch if self._num_steps is None else self._num_steps - 1
        return self._lrs(self._value_at(min(self.last_epoch, last)))

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the highest learning rates. The function is not part of it."""
        return {"last_epoch": self.last_epoch, "max_lrs": self.max_lrs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the step of a saved state, with the function of this run."""
        self.last_epoch = state_dict["last_epoch"]
        self._last_lr = self.get_lr()

    def _lrs(self, value: float) -> list[float]:
        return [value * ratio for ratio in self._ratios]

    def _value_at(self, step: int) -> float:
        value: Any = self.function(step)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"`schedule` must return a number, got {value!r} for step {step}.")
        number = float(value)
        if not 0 <= number < math.inf:
            raise ValueError(
                "`schedule` must return a finite number that is at least 0, got "
                f"{value!r} for step {step}."
            )
        return number


def _ratios(lrs: list[float]) -> list[float]:
    first = lrs[0]
    if all(lr == first for lr in lrs):
        return [1.0] * len(lrs)
    if not first:
        raise ValueError(
            "`schedule` is the learning rate of the first parameter group, and the others keep "
            f"their ratio to it: it must be above 0, got {lrs}."
        )
    return [lr / first for lr in lrs]


class EpochSchedule(LRScheduler):
    """Advances a schedule that counts epochs, once every `steps_per_epoch` steps."""

    def __init__(self, schedule: LRScheduler, steps_per_epoch: int) -> None:
        if isinstance(schedule, ReduceLROnPlateau):
            raise ValueError(
                "`steps_per_epoch` must be None for ReduceLROnPlateau, which steps once a cycle, "
                f"got {steps_per_epoch}. Pass sync_every={steps_per_epoch} instead."
            )
        # Without LRScheduler.__init__, which would write learning rates: the schedule inside has
        # done that.
        self.optimizer = schedule.optimizer
        self.steps_per_epoch = steps_per_epoch
        self.last_epoch = step_of(schedule) * steps_per_epoch
        self._schedulers = [schedule]  # torch's name for schedules inside of others

    @property
    def by_epoch(self) -> LRScheduler:
        """The schedule that counts epochs."""
        return self._schedulers[0]

    @property
    def kind(self) -> str:
        """What it is, for the check of a loaded state."""
        return f"{type(self.by_epoch).__name__} by epoch"

    @property
    def max_lrs(self) -> list[Any] | None:
        """The highest learning rates, if the schedule knows them."""
        return getattr(self.by_epoch, "max_lrs", None)

    @property
    def total_steps(self) -> int | None:
        """The last step, if the schedule ends."""
        total = getattr(self.by_epoch, "total_steps", None)
        return total * self.steps_per_epoch if isinstance(total, int) else None

    def step(self, epoch: int | None = None) -> None:
        """Count a step, and advance the schedule at the end of an epoch."""
        self.last_epoch += 1
        if self.last_epoch % self.steps_per_epoch == 0:
            self.by_epoch.step()

    def get_last_lr(self) -> list[Any]:
        return self.by_epoch.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the state of the schedule."""
        return {
            "last_epoch": self.last_epoch,
            "steps_per_epoch": self.steps_per_epoch,
            "by_epoch": self.by_epoch.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, or from that of the plain schedule after an epoch."""
        if "by_epoch" not in state_dict:
            self.by_epoch.load_state_dict(state_dict)
            self.last_epoch = max(state_dict["last_epoch"], 0) * self.steps_per_epoch
            return
        self.by_epoch.load_state_dict(state_dict["by_epoch"])
        # An epoch may have another number of steps now, as with another number of processes.
        epochs, steps = divmod(state_dict["last_epoch"], state_dict["steps_per_epoch"])
        within = steps * self.steps_per_epoch // state_dict["steps_per_epoch"]
        self.last_epoch = epochs * self.steps_per_epoch + within
