"""Whether gradients have vanished since the first step."""

import torch
from torch import nn

from hdet.weights.gradient_watch import GradientWatch
from hdet.weights.inventory import ReplicaTensors


def watch_of(*gradients: float) -> tuple[GradientWatch, list[nn.Parameter]]:
    """A watch that saw these gradients in the first step."""
    parameters = [nn.Parameter(torch.ones(3)) for _ in gradients]
    for parameter, value in zip(parameters, gradients, strict=True):
        parameter.grad = torch.full((3,), value)
    watch = GradientWatch([ReplicaTensors(torch.optim.SGD(parameters, lr=0.1), None)])
    watch.start()
    return watch, parameters


def test_share_of_vanished_gradients_is_that_of_tensors() -> None:
    watch, (first, _) = watch_of(1.0, 1.0)
    assert not watch.is_due
    assert float(watch.vanished()) == 0.0
    first.grad = torch.full((3,), 1e-6)
    assert float(watch.vanished()) == 0.5


def test_gradients_that_were_infinite_in_the_first_step_have_not_vanished() -> None:
    """`GradScaler` skips such a step, and its first one often is."""
    watch, (first, _) = watch_of(float("inf"), 1.0)
    first.grad = torch.ones(3)
    assert float(watch.vanished()) == 0.0


def test_gradients_that_the_loop_cleared_are_unknown() -> None:
    watch, (parameter,) = watch_of(1.0)
    parameter.grad = None
    watch.start()
    parameter.grad = torch.zeros(3)
    assert watch.vanished() == 0.0
