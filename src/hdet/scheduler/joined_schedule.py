"""JoinedSchedule: the schedules of several optimizers, as one base schedule of a run."""

from collections.abc import Sequence
from typing import Any

from hdet._messages import Warn, warn
from hdet.knobs import param_groups
from hdet.scheduler.base_schedule import BaseSchedule, ScheduleShares
from hdet.scheduler.given_schedule import Schedule, as_base
from hdet.tensors.joined_optimizer import JoinedOptimizer


class JoinedSchedule(BaseSchedule):
    """Steps several schedules together. Its groups are those of all optimizers, in order.

    Args:
        members: The schedule of each optimizer.

    Raises:
        ValueError: If there is none, if two have one optimizer or one parameter, or if they are
            at different steps or have different lengths.
    """

    def __init__(self, members: Sequence[BaseSchedule]) -> None:
        _check_members(members)
        self.members = list(members)
        self.optimizer = JoinedOptimizer([member.optimizer for member in members])
        self.names = param_groups.group_names(self.optimizer)
        self.cycle = None
        self.wants_metric = members[0].wants_metric
        self._read()

    @property
    def kind(self) -> str:
        return " + ".join(member.kind for member in self.members)

    @property
    def total_steps(self) -> int | None:
        return next((m.total_steps for m in self.members if m.total_steps is not None), None)

    @property
    def length(self) -> int | None:
        return max(filter(None, (member.length for member in self.members)), default=None)

    @property
    def peaks(self) -> list[float]:
        return [peak for member in self.members for peak in member.peaks]

    @property
    def step(self) -> int:
        return self.members[0].step

    def shares(self, total_steps: int | None) -> ScheduleShares | None:
        """Return the mean over all groups, and the highest value of any."""
        moving = [member for member in self.members if any(member.peaks)]
        known = [member.shares(total_steps) for member in moving]
        found = [share for share in known if share is not None]
        if not found or len(found) < len(moving):
            return None
        nums = [sum(peak != 0 for peak in member.peaks) for member in moving]
        means = [num * share.mean for num, share in zip(nums, found, strict=True)]
        return ScheduleShares(sum(means) / sum(nums), max(share.highest for share in found))

    def advance(self, metric: float | None = None) -> None:
        for member in self.members:
            member.advance(metric)
        self._read()

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "members": [member.state_dict() for member in self.members]}

    def step_of_state(self, plain: Any) -> int:
        return self.members[0].step_of_state(plain)

    def adopted(self, plain: Any) -> dict[str, Any]:
        raise ValueError(
            "`state_dict` must come from hdet for a run with several optimizers, got that of a "
            "single schedule."
        )

    def restore_entries(self) -> None:
        for member in self.members:
            member.restore_entries()

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        for member, saved in zip(self.members, state["members"], strict=True):
            member.load_state_dict(saved, step)
        self._read()

    def _read(self) -> None:
        self.lrs = [lr for member in self.members for lr in member.lrs]
        self.momenta = None
        if any(member.momenta is not None for member in self.members):
            rows = [member.momenta or [None] * len(member.lrs) for member in self.members]
            self.momenta = [momentum for row in rows for momentum in row]


def wrap_schedules(
    base: Any,
    schedule: Schedule | None = None,
    steps_per_epoch: int | None = None,
    total_steps: int | None = None,
    warn: Warn = warn,
) -> BaseSchedule:
    """Wrap what the user gives as the schedule of a run, or a list with that of each optimizer.

    Raises:
        TypeError: If an argument has the wrong type, or the function returns no number.
        ValueError: If arguments do not fit together, or the function returns a bad value.
    """
    if not isinstance(base, list | tuple):
        return BaseSchedule(as_base(base, schedule, steps_per_epoch, total_steps, warn))
    if schedule is not None:
        raise ValueError(
            f"`schedule` must be None beside a list, got {schedule!r}: optimizers of different "
            "kinds need different learning rates. Put a LambdaLR for each optimizer in the list."
        )
    given = [as_base(one, None, steps_per_epoch, total_steps, warn) for one in base]
    return JoinedSchedule([BaseSchedule(one) for one in given])


def _check_members(members: Sequence[BaseSchedule]) -> None:
    if not members:
        raise ValueError("`base` must hold the schedule of each optimizer, got an empty list.")
    optimizers = [member.optimizer for member in members]
    owners: dict[int, Any] = {}
    for place, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        if any(optimizer is other for other in optimizers[:place]):
            raise ValueError(
                f"`base` must hold one schedule for each optimizer, got two for one {kind}. Join "
                "them in a SequentialLR or a ChainedScheduler."
            )
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            other = owners.setdefault(id(parameter), optimizer)
            if other is not optimizer:
                raise ValueError(
                    "`base` must hold schedules of optimizers with different parameters, got one "
                    f"of shape {tuple(parameter.shape)} in {type(other).__name__} and {kind}."
                )
    _check_alike("be at the same step", [member.step for member in members])
    lengths = [member.total_steps for member in members if member.total_steps is not None]
    _check_alike("have the same length", lengths)
    _check_alike("be ReduceLROnPlateau all or none", [member.wants_metric for member in members])


def _check_alike(rule: str, values: Sequence[Any]) -> None:
    if len(set(values)) > 1:
        raise ValueError(f"`base` must hold schedules that {rule}, got {list(values)}.")
