"""The only writer of optimizer.param_groups: learning rates, and the momenta a base cycles."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

# What OneCycleLR and others keep in the groups of an optimizer beside the learning rate.
SCHEDULE_KEYS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")


def group_names(optimizer: Optimizer) -> list[str]:
    """A name for every parameter group: its own `group["name"]`, or its place."""
    names = [str(g.get("name", f"group{i}")) for i, g in enumerate(optimizer.param_groups)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"`param_groups` must have different names, got {twice[0]!r} twice.")
    return names


def use_plain_floats(base: LRScheduler) -> None:
    """Let a base schedule compute in Python floats, also where learning rates are tensors.

    Arithmetic on a tensor learning rate would make the host wait for the device at every step.
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


@contextmanager
def fan_out_undone(optimizer: Optimizer, base_lrs: Sequence[float]) -> Iterator[None]:
    """Inside, the groups hold the base schedule's own learning rates, as plain floats.

    Most torch schedules compute the next value from group["lr"]: without this the multiplier
    would be multiplied in again at every step. A tensor learning rate is put aside and comes back
    as the same object, since a compiled optimizer step holds on to it.
    """
    aside = [group["lr"] for group in optimizer.param_groups]
    for group, lr in zip(optimizer.param_groups, base_lrs, strict=True):
        group["lr"] = lr
    try:
        yield
    finally:
        for group, lr in zip(optimizer.param_groups, aside, strict=True):
            group["lr"] = lr


def schedule_entries(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What a schedule has put into each group: its own settings, not those of a checkpoint."""
    return [{k: g[k] for k in SCHEDULE_KEYS if k in g} for g in optimizer.param_groups]


def write_schedule_entries(optimizer: Optimizer, entries: Sequence[dict[str, Any]]) -> None:
    _check_groups(optimizer, len(entries))
    for group, entry in zip(optimizer.param_groups, entries, strict=True):
        group.update(entry)


def write_learning_rates(optimizer: Optimizer, lrs: Sequence[float]) -> None:
    _check_groups(optimizer, len(lrs))
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def read_momenta(base: LRScheduler) -> list[float] | None:
    """The momentum of each group if this schedule cycles it, as it has just written it."""
    if not getattr(base, "cycle_momentum", False):
        return None
    return [float(_momentum(group)) for group in base.optimizer.param_groups]


def write_momenta(optimizer: Optimizer, momenta: Sequence[float] | None) -> None:
    for group, momentum in zip(optimizer.param_groups, momenta or [], strict=momenta is not None):
        if "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])
        else:
            group["momentum"] = momentum


def _check_groups(optimizer: Optimizer, num: int) -> None:
    if len(optimizer.param_groups) != num:
        raise ValueError(
            f"`optimizer` must keep its {num} parameter groups, "
            f"got {len(optimizer.param_groups)}: add groups before hdet."
        )


def _momentum(group: dict[str, Any]) -> Any:
    return group["betas"][0] if "betas" in group else group["momentum"]
