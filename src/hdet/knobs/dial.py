"""Dial: a number in memory that a model reads while it runs, with a value for each replica."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn


class _Running:
    """The state of this process that dials depend on."""

    replica: Tensor | None = None
    """The index of the replica that runs; None outside of `running`."""
    shares_dials = False
    """Whether a copy of a model that is made now shares its dials."""


_current = _Running()


@contextmanager
def sharing_dials() -> Iterator[None]:
    """Copies of a model that are made inside read the dials of the original."""
    _current.shares_dials = True
    try:
        yield
    finally:
        _current.shares_dials = False


class running:  # noqa: N801 (a context manager, named like a function)
    """Inside, dials have the value of one replica.

    Args:
        replica: The index of the replica, as a tensor: compiled code then fits all replicas.
    """

    def __init__(self, replica: Tensor) -> None:
        self._replica = replica

    def __enter__(self) -> None:
        _current.replica = self._replica

    def __exit__(self, *_: object) -> None:
        _current.replica = None


_copied_modules: WeakSet[nn.Module] = WeakSet()
"""Modules that have been copied: a dial that is put into them now is missing in the copies."""


def remember_copies(model: nn.Module) -> None:
    """Note that a model and all its submodules have been copied for its replicas."""
    _copied_modules.update(model.modules())


def check_not_copied(module: nn.Module, what: str) -> None:
    """Raise a ValueError if a dial for knob `what` would come too late."""
    if module in _copied_modules:
        raise ValueError(
            f"`{what}` must be created before hdet.StackedReplicas copies the model, got a model "
            "that is already stacked."
        )


class Dial:
    """A number inside of a model or a loss that hdet can change while it trains.

    Call the dial where the number is needed, as in `scale * dial()`. The call returns a tensor, so
    that a new value compiles nothing. Pass `dial.get` and `dial.set` to `hdet.Knob`.

    Replicas on one device share a dial, and each has its own value. Any other copy of a model gets
    its own dial, at the centre of the values.

    Args:
        value: The start value.

    Attributes:
        values: One value for each replica of this process.
        centre: The value outside of any replica: the centre of the spread.
        is_read: Whether code has read the dial.

    Example:
        >>> temperature = Dial(2.0)
        >>> temperature() * torch.ones(2)
        tensor([2., 2.])
        >>> temperature.set(3.0)
        >>> temperature.get()
        3.0
    """

    def __init__(self, value: float) -> None:
        self.values = torch.tensor([float(value)])
        self.centre = torch.tensor(float(value))
        self.is_read = False
        self.is_applied = False
        """Whether attention runs at this temperature now, so that scores are divided once."""

    def __call__(self) -> Tensor:
        """The value of the replica that runs, or the centre.

        Raises:
            RuntimeError: Activation checkpointing reads the dial of stacked replicas in the
                backward pass, where the replica is unknown.
        """
        self.is_read = True
        if _current.replica is None:
            if len(self.values) > 1 and torch._C._current_graph_task_id() != -1:
                raise RuntimeError(
                    "a knob was read in the backward pass by activation checkpointing, where "
                    "stacked replicas cannot be told apart. Turn activation checkpointing off."
                )
            return self.centre
        return self.values.index_select(0, _current.replica.reshape(1)).reshape(())

    def get(self) -> float | Tensor:
        """Read the value.

        Returns:
            A number, or a tensor with one value for each replica of this process.
        """
        return float(self.values) if len(self.values) == 1 else self.values

    def set(self, value: float | Tensor, centre: float | None = None) -> None:
        """Write the value.

        Args:
            value: A number for all replicas, or a tensor with one value for each replica of this
                process.
            centre: The value outside of any replica; by default the mean of the values.
        """
        if isinstance(value, Tensor) and value.dim():
            self.values.copy_(value)
        else:
            self.values.fill_(value)
        if centre is None or len(self.values) == 1:
            self.centre.copy_(self.values.mean())
        else:
            self.centre.fill_(centre)

    def place(self, num: int, device: torch.device | None) -> None:
        """Hold one value for each of `num` replicas, on their device.

        Args:
            num: The number of replicas of this process.
            device: Their device; None is the host.
        """
        if len(self.values) == num and self.values.device == torch.device(device or "cpu"):
            return  # compiled and captured code reads the tensors where they are
        self.values = self.values.mean().to(device).repeat(num)
        self.centre = self.centre.to(device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Dial":
        if _current.shares_dials:
            return self
        other = Dial(0.0)
        other.centre, other.values = self.centre.clone(), self.centre.clone()[None]
        return other
