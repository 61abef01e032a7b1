"""Dial: a number in memory that a model reads while it runs, one value for each replica."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn


class _Running:
    """Which of the replicas of this process is being run; none if there is only one."""

    replica: Tensor | None = None
    shares_dials = False
    """Whether copies that are made now are replicas of one model."""


_current = _Running()


@contextmanager
def sharing_dials() -> Iterator[None]:
    """Copies of a model that are made inside read the dials of the original."""
    _current.shares_dials = True
    try:
        yield
    finally:
        _current.shares_dials = False


class running:  # noqa: N801 (a context, written like a function)
    """Inside, dials show the value of this replica: a tensor, since compiled code must not care."""

    def __init__(self, replica: Tensor) -> None:
        self._replica = replica

    def __enter__(self) -> None:
        _current.replica = self._replica

    def __exit__(self, *_: object) -> None:
        _current.replica = None


_copied_modules: WeakSet[nn.Module] = WeakSet()
"""Modules that others are copies of: what is put into them now, the copies do not have."""


def remember_copies(model: nn.Module) -> None:
    """All parts of a model have been copied for its replicas."""
    _copied_modules.update(model.modules())


def check_not_copied(module: nn.Module, what: str) -> None:
    if module in _copied_modules:
        raise ValueError(
            f"`{what}` must be put into a model before hdet.StackedReplicas copies it, got one "
            "that was stacked: the other replicas would not have it."
        )


class Dial:
    """A number inside a model or a loss that hdet may turn: `scale * dial()`.

    Replicas on one device share it, each with its own value; any other copy of a model has a dial
    of its own, at the centre.

    >>> temperature = Dial(2.0)
    >>> temperature() * torch.ones(2)
    tensor([2., 2.])
    """

    def __init__(self, value: float) -> None:
        self.values = torch.tensor([float(value)])
        self.alone = torch.tensor(float(value))
        """What is read where no replica is run in particular: the centre of the spread."""
        self.is_read = False
        self.is_tempering = False
        """Whether attention is being computed at it, so that nobody divides twice."""

    def __call__(self) -> Tensor:
        self.is_read = True
        if _current.replica is None:
            if len(self.values) > 1 and torch._C._current_graph_task_id() != -1:
                raise RuntimeError(
                    "a knob was read in the backward pass, by activation checkpointing: there "
                    "stacked replicas cannot tell whose value to read. Leave checkpointing out."
                )
            return self.alone
        return self.values.index_select(0, _current.replica.reshape(1)).reshape(())

    def get(self) -> float | Tensor:
        """The value, or one for each replica of this process."""
        return float(self.values) if len(self.values) == 1 else self.values

    def set(self, value: float | Tensor, centre: float | None = None) -> None:
        """Turn it: a number, or one for each replica of this process."""
        if isinstance(value, Tensor) and value.dim():
            self.values.copy_(value)
        else:
            self.values.fill_(value)
        if centre is None or len(self.values) == 1:
            self.alone.copy_(self.values.mean())
        else:
            self.alone.fill_(centre)

    def place(self, num: int, device: torch.device | None) -> None:
        """Make room for so many replicas, on their device."""
        if len(self.values) == num and self.values.device == torch.device(device or "cpu"):
            return  # what is compiled or captured reads it where it lies
        self.values = self.values.mean().to(device).repeat(num)
        self.alone = self.alone.to(device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Dial":
        if _current.shares_dials:
            return self
        other = Dial(0.0)
        other.alone, other.values = self.alone.clone(), self.alone.clone()[None]
        return other
