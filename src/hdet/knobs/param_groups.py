"""The only writer of optimizer.param_groups: learning rates, momenta and settings with knobs.

`group["lr"]` is written by this module only (and by the stacked engine's shared step).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

SCHEDULE_KEYS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""What OneCycleLR and other schedules keep in parameter groups, apart from the learning rate."""


def group_names(optimizer: Optimizer) -> list[str]:
    """A name for every parameter group: its entry "name", or its index as in "group0".

    Raises:
        ValueError: Two groups have the same name.
    """
    names = [str(g.get("name", f"group{i}")) for i, g in enumerate(optimizer.param_groups)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"`param_groups` must have different names, got {twice[0]!r} twice.")
    return names


def use_plain_floats(base: LRScheduler) -> None:
    """Let a base schedule compute with Python floats, also where learning rates are tensors.

    Arithmetic on tensors would make the host wait for the device at every step.
    """
    for group in base.optimizer.param_groups:
        for key in SCHEDULE_KEYS:
            if isinstance(group.get(key), Tensor):
                group[key] = float(group[key])
    for attribute in ("base_lrs", "_last_lr"):
        if hasattr(base, attribute):
            setattr(base, attribute, [float(lr) for lr in getattr(base, attribute)])
    for inner in getattr(base, "_schedulers", []):
        use_plain_floats(inner)


Momenta = Sequence[float | None]
"""The momentum of each group that a base schedule cycles; None for the other groups."""

ReplacedEntries = list[tuple[dict[str, Any], Any, Any]]
"""Groups with tensors that `undo_fan_out` has replaced: the learning rate, and the entry "momentum"
or "betas" if its momentum is one."""


def undo_fan_out(
    optimizer: Optimizer, base_lrs: Sequence[float], momenta: Momenta | None
) -> ReplacedEntries:
    """Write the base schedule's own learning rates and momenta, as floats, before its next step.

    Most torch schedules compute the next value from group["lr"]. Without this, the multiplier of a
    replica would be applied again at every step. Inside of SequentialLR, a schedule that is not
    active leaves momenta as they are. Tensors return as the same objects with `restore_entries`,
    since a compiled optimizer step holds on to them.

    Args:
        optimizer: The optimizer of the base schedule.
        base_lrs: The learning rate of each group in the base schedule.
        momenta: The momentum of each group, if the base schedule cycles it.

    Returns:
        The replaced tensors, for `restore_entries`. The caller writes numbers anew.
    """
    groups = optimizer.param_groups
    if len(groups) != len(base_lrs):
        check_groups(optimizer, len(base_lrs))
    replaced: ReplacedEntries = []
    for index, group in enumerate(groups):
        entry, momentum = None, None if momenta is None else momenta[index]
        # A knob or a loop has changed it, or a tensor has it.
        if momentum is not None and _momentum(group) is not momentum:
            entry = _replace_momentum(group, momentum)
        if entry is not None or isinstance(group["lr"], Tensor):
            replaced.append((group, group["lr"], entry))
        group["lr"] = base_lrs[index]
    return replaced


def _replace_momentum(group: dict[str, Any], value: float) -> Any:
    """Write a momentum as a number; return the entry that held it if it was a tensor."""
    key = _momentum_key(group)
    entry = group[key[0]] if isinstance(_momentum(group), Tensor) else None
    _write_value(group, key, value)
    return entry


def restore_entries(replaced: ReplacedEntries) -> None:
    """Write the tensors back that `undo_fan_out` has replaced.

    The learning rate is the old one. A momentum that is a tensor takes the value of the schedule.
    """
    for group, lr, entry in replaced:
        group["lr"] = lr
        if entry is not None:
            key, scheduled = _momentum_key(group), _momentum(group)
            group[key[0]] = entry
            write_setting(group, key, scheduled)


def schedule_entries(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings that a schedule keeps in each group."""
    return [{k: g[k] for k in SCHEDULE_KEYS if k in g} for g in optimizer.param_groups]


def write_schedule_entries(optimizer: Optimizer, entries: Sequence[dict[str, Any]]) -> None:
    """Write the settings of a schedule into the groups, over those of a loaded checkpoint."""
    check_groups(optimizer, len(entries))
    for group, entry in zip(optimizer.param_groups, entries, strict=True):
        group.update(entry)


def write_learning_rates(optimizer: Optimizer, lrs: Sequence[float]) -> None:
    """Write the learning rate of each group, into its tensor if it is one."""
    groups = optimizer.param_groups
    if len(groups) != len(lrs):
        check_groups(optimizer, len(lrs))
    for index, group in enumerate(groups):
        if isinstance(old := group["lr"], Tensor):
            old.fill_(lrs[index])
        else:
            group["lr"] = lrs[index]


def has_tensor_rates(optimizer: Optimizer) -> bool:
    """Whether the learning rate of a group is a tensor, as for a compiled optimizer step."""
    return any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)


Rows = Sequence[tuple[Optimizer, Sequence[float]]]
"""Optimizers, each with the learning rates of its groups."""


class WrittenRates:
    """What was written last to group["lr"], to see whether something else writes it.

    The host must not wait for a tensor on a device, so torch's count of the writes to it counts.
    """

    def __init__(self) -> None:
        self._rows: Rows = ()
        self._has_tensors = True
        self._versions: dict[int, int] = {}
        """Tensor (by its id) -> the number of writes to it."""

    def note(self, rows: Rows, *, everything: bool) -> None:
        """Remember learning rates, right after they were written.

        Args:
            rows: The learning rates of each optimizer.
            everything: Whether numbers may have become tensors. To look for them costs time.
        """
        self._rows = rows
        if everything or self._has_tensors:
            self._versions = {
                id(lr): _version(lr)
                for optimizer, _ in rows
                for group in optimizer.param_groups
                if isinstance(lr := group["lr"], Tensor)
            }
            self._has_tensors = bool(self._versions)

    def note_numbers(self, optimizer: Optimizer, lrs: list[float]) -> None:
        """Remember the learning rates of the only optimizer, none of them a tensor."""
        self._rows = ((optimizer, lrs),)

    def check(self) -> None:
        """Raise a RuntimeError if something else has written a learning rate since."""
        for optimizer, lrs in self._rows:
            found = [group["lr"] for group in optimizer.param_groups]
            if self._has_tensors or found != lrs:  # a tensor would make the host wait
                self._check_each(found, lrs)

    def _check_each(self, found: Sequence[Any], lrs: Sequence[float]) -> None:
        for place, (now, lr) in enumerate(zip(found, lrs, strict=False)):
            if now is not lr and not self._is_ours(now, lr):
                raise RuntimeError(
                    f"`param_groups[{place}]['lr']` must be set by hdet alone, which wrote "
                    f"{lr:.6g}, got {float(now):.6g}. Remove the line of the training loop that "
                    "sets param_group['lr'] or steps the base schedule. If that line is your "
                    "schedule, pass it to HDET as `schedule=`."
                )

    def _is_ours(self, now: Any, lr: float) -> bool:
        if isinstance(now, Tensor):
            return self._versions.get(id(now)) == _version(now)
        return bool(now == lr)


def _version(lr: Tensor) -> int:
    return 0 if lr.is_inference() else lr._version


Key = tuple[str, int | None]
"""An entry of a parameter group, and the index in it if it is a pair such as Adam's betas."""


def read_setting(group: dict[str, Any], key: Key) -> float:
    """Read a setting of a group as a float."""
    name, place = key
    return float(group[name] if place is None else group[name][place])


def write_setting(group: dict[str, Any], key: Key, value: float) -> None:
    """Write a setting of a group, into its tensor if it is one.

    So a compiled optimizer step is not compiled again.
    """
    name, place = key
    old = group[name] if place is None else group[name][place]
    if isinstance(old, Tensor):
        old.fill_(value)
    else:
        _write_value(group, key, value)


def use_tensor(group: dict[str, Any], key: Key) -> None:
    """Make a setting a tensor if the learning rate is one.

    A tensor as the learning rate means that the step is compiled. A number in its place would be
    compiled into the code.
    """
    lr, (name, place) = group["lr"], key
    value = group[name] if place is None else group[name][place]
    if isinstance(lr, Tensor) and not isinstance(value, Tensor):
        _write_value(group, key, torch.tensor(value, dtype=lr.dtype, device=lr.device))


def _write_value(group: dict[str, Any], key: Key, value: Any) -> None:
    name, place = key
    whole = group[name]
    group[name] = value if place is None else (*whole[:place], value, *whole[place + 1 :])


def read_momenta(optimizer: Optimizer) -> list[float | None]:
    """The momentum of each group."""
    return [float(_momentum(group)) for group in optimizer.param_groups]


def cycles_momentum(base: LRScheduler) -> bool:
    """Whether a schedule, or one inside of it as in SequentialLR, cycles the momentum."""
    inner = getattr(base, "_schedulers", [])
    return bool(getattr(base, "cycle_momentum", False)) or any(map(cycles_momentum, inner))


def write_momenta(optimizer: Optimizer, momenta: Momenta | None) -> None:
    """Write the momentum of each group; None writes nothing."""
    for group, momentum in zip(optimizer.param_groups, momenta or [], strict=momenta is not None):
        if momentum is not None:
            write_setting(group, _momentum_key(group), momentum)


def check_groups(optimizer: Optimizer, num: int) -> None:
    """Raise a ValueError if groups were added since the schedule was made."""
    if len(optimizer.param_groups) != num:
        raise ValueError(
            f"`optimizer` must keep its {num} parameter groups, got {len(optimizer.param_groups)}. "
            "Add parameter groups before you create the scheduler."
        )


def _momentum(group: dict[str, Any]) -> Any:
    return group["betas"][0] if "betas" in group else group["momentum"]


def _momentum_key(group: dict[str, Any]) -> Key:
    return ("betas", 0) if "betas" in group else ("momentum", None)
