"""The outer optimizer: a step on what the replicas have changed between two converges.

Where the mean of the replicas is one more gradient, any torch optimizer can follow it: SGD with
Nesterov momentum is DiLoCo. Every process makes the same step on the same mean, so nothing is sent.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.body import Body
from hdet.shards import local

Make = Callable[[list[Tensor]], Optimizer]
"""Parameters -> an optimizer, such as partial(torch.optim.SGD, lr=0.7, momentum=0.9)."""


def describe_outer(make: Any) -> dict[str, str]:
    """What replicas must have in common; whatever is no optimizer is refused."""
    if not callable(make):
        raise TypeError(
            "`outer` must make an optimizer of a list of parameters, such as "
            f"partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True), got {make!r}."
        )
    made = make([nn.Parameter(torch.zeros(1))])
    if not isinstance(made, Optimizer):
        raise TypeError(f"`outer` must make a torch optimizer, got a {type(made).__name__}.")
    return {"kind": type(made).__name__, **{k: repr(v) for k, v in made.defaults.items()}}


class Outer:
    """The weights of the last converge, and the optimizer that moves them."""

    def __init__(self, make: Make, optimizer: Optimizer, bodies: Sequence[Body]) -> None:
        self._each = [body.movers() for body in bodies]
        self._slow: list[Tensor] = [nn.Parameter(p.detach().clone()) for p in self._each[0]]
        describe_outer(make)
        self.optimizer = make(self._slow)
        self._is_held = self._has_moved = False
        weakly = weakref.ref(self)  # a hook must not outlive what it looks for

        def stepped(*_: Any) -> None:
            if (outer := weakly()) is not None:
                outer._before_step()

        optimizer.register_step_pre_hook(stepped)

    def begin(self) -> None:
        """All replicas stand together, wherever that is: the next step sets out from there."""
        self._is_held = self._has_moved = False

    @torch.no_grad()
    def _before_step(self) -> None:
        if not self._is_held:
            torch._foreach_copy_(_locals(self._slow), _locals(self._each[0]))
        self._is_held = self._has_moved = True

    @torch.no_grad()
    def step(self) -> None:
        """All replicas have the mean: from where they set out, a step along what it has changed.

        Without a step in between there is nothing to follow.
        """
        if not self._has_moved:
            return
        for slow, mean in zip(self._slow, self._each[0], strict=True):
            slow.grad = slow.detach() - mean.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for movers in self._each:
            torch._foreach_copy_(_locals(movers), _locals(self._slow))
        self.begin()


def _locals(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [local(tensor).detach() for tensor in tensors]
