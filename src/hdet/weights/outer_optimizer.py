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

from hdet.tensors.buckets import flatten
from hdet.tensors.dtensor import local
from hdet.weights.inventory import ReplicaTensors

OptimizerFactory = Callable[[list[Tensor]], Optimizer]
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


class OuterOptimizer:
    """The weights of the last converge, and the optimizer that moves them."""

    def __init__(
        self, make: OptimizerFactory, optimizer: Optimizer, bodies: Sequence[ReplicaTensors]
    ) -> None:
        self._each = [body.movers() for body in bodies]
        self._slow: list[Tensor] = [nn.Parameter(p.detach().clone()) for p in self._each[0]]
        self.optimizer = make(self._slow)
        self._is_held = False
        self.has_moved = False
        """Whether a step was attempted since the last one of its own."""
        self.is_apart = False
        """Whether replicas began apart: then their first mean is where it sets out from."""
        weakly = weakref.ref(self)  # a hook must not outlive what it looks for

        def stepped(*_: Any) -> None:
            if (outer := weakly()) is not None:
                outer.hold()

        optimizer.register_step_pre_hook(stepped)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter of the first replica, and what stands for it here."""
        return list(zip(self._each[0], self._slow, strict=True))

    def begin(self) -> None:
        """All replicas stand together, wherever that is: the next step sets out from there."""
        self._is_held = self.has_moved = False

    @torch.no_grad()
    def hold(self) -> None:
        """Before the first step of a cycle: what it sets out from."""
        if not self._is_held:
            torch._foreach_copy_(_locals(self._slow), _locals(self._each[0]))
        self._is_held = True

    @torch.no_grad()
    def step(self) -> None:
        """All replicas have the mean: from where they set out, a step along what it has changed.

        Without a step in between there is nothing to follow.
        """
        if not self.has_moved or self.is_apart:
            self.is_apart = False
            self.begin()
            return
        for slow, mean in zip(self._slow, self._each[0], strict=True):
            if not mean.requires_grad:  # frozen meanwhile: it must not go on by its momentum
                local(slow).copy_(local(mean))
        both = zip(self._slow, self._each[0], strict=True)
        pairs = [(slow, mean) for slow, mean in both if mean.requires_grad]
        # What has changed is laid where the mean lies: there may be no room for another copy. Once,
        # where two parameters lie in one place.
        once = {local(mean).data_ptr(): (slow, mean) for slow, mean in pairs}
        if once:
            changes = _locals([mean for _, mean in once.values()])
            torch._foreach_neg_(changes)
            torch._foreach_add_(changes, _locals([slow for slow, _ in once.values()]))
        for slow, mean in pairs:
            slow.grad = mean.detach()
        self._advance()
        for movers in self._each:
            torch._foreach_copy_(_locals(movers), _locals(self._slow))
        self.begin()

    @torch.no_grad()
    def leads_to(self, flats: list[Tensor], means: list[Tensor]) -> list[Tensor]:
        """The mean of what replicas had some steps ago has come: a step along it, and where it
        leads. What they have learnt since is theirs, so the next one sets out from here.
        """
        slow = {local(p).data_ptr(): s for p, s in zip(self._each[0], self._slow, strict=True)}
        for mover, own in zip(self._each[0], self._slow, strict=True):
            own.grad = torch.zeros_like(own) if mover.requires_grad else None
        goals = []
        for flat, mean in zip(flats, means, strict=True):
            known = slow.get(flat.data_ptr())  # none for what did not train when it was made
            if known is not None and (self.is_apart or known.grad is None):
                flatten(local(known)).copy_(mean)
            elif known is not None and known.grad is not None:
                flatten(local(known.grad)).copy_(flatten(local(known)) - mean)
            goals.append(mean if known is None else flatten(local(known)))
        if not self.is_apart:
            self._advance()
        self.is_apart = False
        return goals

    def _advance(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _locals(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [local(tensor).detach() for tensor in tensors]
