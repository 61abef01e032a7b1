"""The outer optimizer: a step along the change of the weights between two averages.

It treats this change as a gradient, so that any torch optimizer can follow it. SGD with Nesterov
momentum is DiLoCo. Every process makes the same step on the same mean, so nothing is sent.
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
    """The settings of an outer optimizer, which must be equal on all replicas.

    Raises:
        TypeError: `make` is no function, or does not return an optimizer.
    """
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
    """The weights at the start of a cycle, and the optimizer that moves them."""

    def __init__(
        self, make: OptimizerFactory, optimizer: Optimizer, local_tensors: Sequence[ReplicaTensors]
    ) -> None:
        self._parameters = [tensors.trainable_parameters() for tensors in local_tensors]
        """The trainable parameters of each replica of this process."""
        self._start: list[Tensor] = [nn.Parameter(p.detach().clone()) for p in self._parameters[0]]
        """The same at the start of the cycle: the parameters of the outer optimizer."""
        self.optimizer = make(self._start)
        self._has_start = False
        self.has_trained = False
        """Whether the replicas attempted a step since the last outer step."""
        self.starts_apart = False
        """Whether replicas start from different weights: then their first mean is the start."""
        this = weakref.ref(self)  # a hook must not keep the outer optimizer alive

        def before_step(*_: Any) -> None:
            if (outer := this()) is not None:
                outer.remember_start()

        optimizer.register_step_pre_hook(before_step)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs of the first replica's parameters and the outer optimizer's copies."""
        return list(zip(self._parameters[0], self._start, strict=True))

    def start_cycle(self) -> None:
        """All replicas are equal: the next outer step starts from their weights."""
        self._has_start = self.has_trained = False

    @torch.no_grad()
    def remember_start(self) -> None:
        """Copy the weights before the first step of a cycle."""
        if not self._has_start:
            torch._foreach_copy_(_locals(self._start), _locals(self._parameters[0]))
        self._has_start = True

    @torch.no_grad()
    def step(self) -> None:
        """Step from the start along its difference to the mean, which all replicas have.

        Without a training step in between there is no change to follow.
        """
        if not self.has_trained or self.starts_apart:
            self.starts_apart = False
            self.start_cycle()
            return
        for start, mean in self._pairs(trainable=False):
            # It was frozen in the meantime: momentum must not move it.
            local(start).copy_(local(mean))
        pairs = self._pairs(trainable=True)
        # The difference overwrites the mean, since memory may not hold another copy. Two parameters
        # may share memory: then it is written once.
        once = {local(mean).data_ptr(): (start, mean) for start, mean in pairs}
        if once:
            changes = _locals([mean for _, mean in once.values()])
            torch._foreach_neg_(changes)
            torch._foreach_add_(changes, _locals([start for start, _ in once.values()]))
        for start, mean in pairs:
            start.grad = mean.detach()
        self._advance()
        for parameters in self._parameters:
            torch._foreach_copy_(_locals(parameters), _locals(self._start))
        self.start_cycle()

    @torch.no_grad()
    def step_towards(self, flats: list[Tensor], means: list[Tensor]) -> list[Tensor]:
        """Step along a mean that arrives some steps late; return the weights after it.

        Replicas keep the progress that they made in between. The next outer step starts from the
        returned weights.

        Args:
            flats: Flat tensors of the first replica.
            means: The mean of all replicas for each of them.
        """
        starts = {local(p).data_ptr(): start for p, start in self.pairs()}
        for parameter, start in self.pairs():
            start.grad = torch.zeros_like(start) if parameter.requires_grad else None
        targets = []
        for flat, mean in zip(flats, means, strict=True):
            # None for a parameter that was frozen when the outer optimizer was made.
            own = starts.get(flat.data_ptr())
            if own is not None and (self.starts_apart or own.grad is None):
                flatten(local(own)).copy_(mean)
            elif own is not None and own.grad is not None:
                flatten(local(own.grad)).copy_(flatten(local(own)) - mean)
            targets.append(mean if own is None else flatten(local(own)))
        if not self.starts_apart:
            self._advance()
        self.starts_apart = False
        return targets

    def _pairs(self, *, trainable: bool) -> list[tuple[Tensor, Tensor]]:
        """(weights at the start, weights now) of the parameters that are trainable now, or not."""
        both = zip(self._start, self._parameters[0], strict=True)
        return [(start, now) for start, now in both if now.requires_grad == trainable]

    def _advance(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _locals(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [local(tensor).detach() for tensor in tensors]
