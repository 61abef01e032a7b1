"""Clipping the gradients of stacked replicas, and a check that a loop clips those of all."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

State = list[tuple[int, int] | None]
"""For each parameter the place and the version of its gradient; None without one."""


class GradientCheck:
    """Notices gradients that a loop changes on the user's model alone.

    While replicas have their own gradients, `torch.nn.utils.clip_grad_norm_(model.parameters(), c)`
    reaches those of the first replica only. The check compares the versions of gradients after a
    backward with those before the step, and those after the step with those before the next
    backward. What changes all replicas, as a `GradScaler` does, passes. It waits for no device.

    Args:
        modules: The module of each replica.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._rows = [list(module.parameters()) for module in modules[:2]]
        self._states: list[State] | None = None
        """The notes of the last backward."""
        self._stepped: list[State] | None = None
        """Those of the last check, before a step."""

    def watch(self, losses: Tensor) -> None:
        """Note the gradients after every backward of these losses."""
        if losses.requires_grad:
            losses.register_hook(self._queue)

    def check(self) -> None:
        """Raise a RuntimeError if only the gradients of the first replica have changed.

        Gradients that were cleared, or that another backward has made, do not count.
        """
        states, self._states = self._states, None
        self._stepped = self._read() if states is not None else None
        if states is not None and self._has_changed_alone(states):
            raise RuntimeError(
                "gradients of `model` were changed, but not those of the other replicas: each "
                "replica has its own now, as in a scout. To clip, write "
                "`ensemble.clip_grad_norm_(max_norm)` or `ensemble.clip_grad_value_(value)` in "
                "place of torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)."
            )

    def _has_changed_alone(self, states: list[State]) -> bool:
        """Whether the first replica's gradients have changed since, and not those of the others."""
        if len(states) == 1:
            return False
        changes = [
            [
                old is not None and new is not None and old != new
                for old, new in zip(*pair, strict=True)
            ]
            for pair in zip(states, self._read(), strict=True)
        ]
        return any(mine and not other for mine, other in zip(*changes, strict=True))

    def _queue(self, gradient: Tensor) -> None:
        """Check how gradients were cleared, and let the notes be made at the end of this backward.

        Raises:
            RuntimeError: If only the gradients of the first replica were set to zero.
        """
        stepped, self._stepped = self._stepped, None
        if stepped is not None and self._has_changed_alone(stepped):
            raise RuntimeError(
                "gradients of `model` were set to zero, but not those of the other replicas, which "
                "would add up. Write `optimizer.zero_grad()` in place of "
                "`model.zero_grad(set_to_none=False)`."
            )
        torch.autograd.Variable._execution_engine.queue_callback(self._note)

    def _note(self) -> None:
        self._states = self._read()

    def _read(self) -> list[State]:
        return [
            [None if (g := p.grad) is None else (g.data_ptr(), g._version) for p in row]
            for row in self._rows
        ]


def clip_each(
    rows: Iterable[Sequence[Tensor]], clip: Callable[..., Any], *arguments: Any, **named: Any
) -> list[Any]:
    """Call a function of torch that clips gradients for the parameters of each replica."""
    with torch.no_grad():
        return [clip(row, *arguments, **named) for row in rows]
