"""Clipping of stacked replicas: each by its own norm, and torch's call only where it is right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet

N = 3


def loss_of(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x).square().sum()
    return loss


def stacked(*, shared: bool, mode: Any = "vmap") -> tuple[hdet.StackedReplicas, nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    ensemble = hdet.StackedReplicas(model, N, mode=mode)
    ensemble.share_gradients(model, shared)
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    return ensemble, model, optimizer


def backward(ensemble: hdet.StackedReplicas, times: int = 1) -> None:
    for _ in range(times):
        ensemble.losses(loss_of, torch.randn(2 * N, 2)).sum().backward()


def gradients(ensemble: hdet.StackedReplicas) -> list[list[Tensor]]:
    rows = [[p.grad for p in module.parameters()] for module in ensemble.modules(None)]
    return [[gradient.clone() for gradient in row if gradient is not None] for row in rows]


@pytest.mark.parametrize("shared", [True, False])
def test_each_replica_is_clipped_as_torch_clips_one(shared: bool) -> None:
    ensemble, _, _ = stacked(shared=shared)
    backward(ensemble)
    want = gradients(ensemble)[: 1 if shared else N]
    norms = []
    for row in want:
        alone = [nn.Parameter(gradient) for gradient in row]
        for parameter, gradient in zip(alone, row, strict=True):
            parameter.grad = gradient
        norms.append(nn.utils.clip_grad_norm_(alone, 0.5, norm_type=1.0))
        nn.utils.clip_grad_value_(alone, 0.02)
    found = ensemble.clip_grad_norm_(0.5, norm_type=1.0)
    ensemble.clip_grad_value_(0.02)
    torch.testing.assert_close(found, torch.stack(norms).expand(N))
    torch.testing.assert_close(gradients(ensemble)[: len(want)], want)
    assert len(set(found.tolist())) == (1 if shared else N)


def scale_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad / 2


WRONG: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "a norm that changes no value": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e9),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "one tensor": lambda model: next(model.parameters()).grad.mul_(0.5),  # type: ignore[union-attr]
    "by hand": scale_by_hand,
}


@pytest.mark.parametrize("mode", ["vmap", "loop"])
@pytest.mark.parametrize("way", sorted(WRONG))
def test_clipping_of_the_model_alone_is_refused_where_replicas_have_own_gradients(
    way: str, mode: Any
) -> None:
    ensemble, model, optimizer = stacked(shared=False, mode=mode)
    backward(ensemble, times=2)
    WRONG[way](model)
    with pytest.raises(RuntimeError, match=r"write `ensemble\.clip_grad_norm_\(max_norm\)`"):
        optimizer.step()


def unscale(ensemble: hdet.StackedReplicas, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


RIGHT: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda ensemble, optimizer: None,
    "all replicas": lambda ensemble, optimizer: ensemble.clip_grad_norm_(1.0),
    "all values": lambda ensemble, optimizer: ensemble.clip_grad_value_(1.0),
    "all, by the optimizer": lambda ensemble, optimizer: optimizer.clip_grad_norm_(1.0),
    "a scaler": unscale,
    "no gradients": lambda ensemble, optimizer: optimizer.zero_grad(),
    "zeros": lambda ensemble, optimizer: optimizer.zero_grad(set_to_none=False),
    "no gradients of the model": lambda e, optimizer: e.modules(None)[0].zero_grad(),
    "another backward": lambda ensemble, optimizer: backward(ensemble),
}


@pytest.mark.parametrize("mode", ["vmap", "loop"])
@pytest.mark.parametrize("way", sorted(RIGHT))
def test_changes_of_all_replicas_raise_no_false_alarm(way: str, mode: Any) -> None:
    ensemble, _, optimizer = stacked(shared=False, mode=mode)
    for _ in range(3):
        optimizer.zero_grad()
        backward(ensemble, times=2)
        RIGHT[way](ensemble, optimizer)
        optimizer.step()


CLEARED: dict[str, Callable[[nn.Module], Any]] = {
    "zero_grad": lambda model: model.zero_grad(set_to_none=False),
    "one tensor": lambda model: next(model.parameters()).grad.zero_(),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("mode", ["vmap", "loop"])
@pytest.mark.parametrize("way", sorted(CLEARED))
def test_zeros_in_the_gradients_of_the_model_alone_are_refused(way: str, mode: Any) -> None:
    """The gradients of the other replicas would add up from step to step."""
    ensemble, model, optimizer = stacked(shared=False, mode=mode)
    backward(ensemble)
    optimizer.step()
    CLEARED[way](model)
    with pytest.raises(RuntimeError, match=r"Write `optimizer\.zero_grad\(\)` in place of"):
        backward(ensemble)


class Routed(nn.Module):
    """Each replica may use another expert, so replicas accumulate other numbers of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.experts[int(x.sum() > 0)](x)
        return output


def test_replicas_that_use_other_parts_of_the_model_raise_no_false_alarm() -> None:
    model = Routed()
    ensemble = hdet.StackedReplicas(model, 2, mode="loop")
    ensemble.share_gradients(model, False)
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for signs in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
        for sign in signs:
            x = torch.tensor([[1.0, 1.0], [sign, sign]])
            ensemble.losses(loss_of, x).sum().backward()
        optimizer.step()


def test_a_run_that_clips_as_torch_does_is_refused_in_its_scout_and_right_after_it() -> None:
    """The first steps of a run belong to the scout, so the loop learns it at once."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    ensemble = hdet.StackedReplicas(model, 8)
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    base = OneCycleLR(optimizer, 0.1, total_steps=200)
    scheduler = hdet.HDET(base, model=model, replicas=ensemble)

    def step(clip: Callable[[], Any]) -> None:
        optimizer.zero_grad()
        losses = ensemble.losses(loss_of, torch.randn(16, 2))
        losses.sum().backward()
        clip()
        optimizer.step()
        scheduler.step(losses)

    with pytest.raises(RuntimeError, match="as in a scout"):
        step(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    while scheduler.is_scouting:
        step(lambda: ensemble.clip_grad_norm_(1.0))
    step(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
