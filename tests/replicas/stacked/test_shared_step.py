"""One step for all replicas that share gradients: the same weights as N optimizers of their own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet
from hdet.replicas.stacked.shared_step import moves_in_proportion
from tests.torch_version import IS_OLDEST

Make = Callable[[Any], torch.optim.Optimizer]


class Somebodys(torch.optim.SGD):
    """Not torch's own: it may do anything after the last step of a trial."""


TOGETHER: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd with L2": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),  # w - lr (g + d w)
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, maximize=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
}
APART: dict[str, Make] = {
    "momentum with L2": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adam with L2": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=1e-6),
    "radam with L2": lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=1e-5),
    "adagrad with L2": lambda p: torch.optim.Adagrad(p, lr=0.01, weight_decay=1e-5),
    "of somebody": lambda p: Somebodys(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
}
# Adagrad of torch 2.6 has no state for parameters that its constructor does not get. So hdet cannot
# test it, and its replicas step one by one.
(APART if IS_OLDEST else TOGETHER)["adagrad"] = lambda p: torch.optim.Adagrad(
    p, lr=0.01, lr_decay=0.1
)


@pytest.mark.parametrize("name", sorted(TOGETHER | APART))
def test_moves_in_proportion_is_true_exactly_for_optimizers_that_one_step_serves(name: str) -> None:
    optimizer = (TOGETHER | APART)[name](nn.Linear(2, 2).parameters())
    before = str(optimizer.state_dict())
    assert moves_in_proportion(optimizer) == (name in TOGETHER)
    assert str(optimizer.state_dict()) == before  # the trial left nothing behind


def test_half_precision_weights_are_stepped_replica_by_replica() -> None:
    assert not moves_in_proportion(TOGETHER["adamw"](nn.Linear(2, 2).half().parameters()))


def test_optimizer_with_step_hooks_is_stepped_replica_by_replica() -> None:
    optimizer = TOGETHER["adamw"](nn.Linear(2, 2).parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    assert not moves_in_proportion(optimizer)


def loss_of(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x).square().mean()
    return loss


def trained(make: Make, rates: list[float], steps: int) -> hdet.StackedReplicas:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    ensemble = hdet.StackedReplicas(model, 3)
    optimizer = ensemble.optimizer(make(model.parameters()))
    optimizer.steered = {"lr"}
    for step in range(steps):
        for each, rate in zip(optimizer.each, rates, strict=True):
            each.param_groups[0]["lr"] = rate * (1 + step % 3)
        optimizer.zero_grad()
        ensemble.losses(loss_of, torch.randn(6, 3, dtype=torch.float64)).sum().backward()
        optimizer.step()
    return ensemble


@pytest.mark.parametrize("name", sorted(TOGETHER))
def test_shared_step_gives_the_weights_of_separate_optimizers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = [0.01, 0.02, 0.04]
    together = trained(TOGETHER[name], rates, steps=12)
    monkeypatch.setattr("hdet.replicas.stacked.optimizer.moves_in_proportion", lambda _: False)
    apart = trained(TOGETHER[name], rates, steps=12)
    for ours, theirs in zip(together.modules(None), apart.modules(None), strict=True):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if v.numel() > 1]


def test_replicas_share_one_optimizer_state_until_gradients_are_local() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    ensemble = hdet.StackedReplicas(model, 3)
    optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    def step() -> list[int]:
        optimizer.zero_grad()
        ensemble.losses(loss_of, torch.randn(6, 3)).sum().backward()
        optimizer.step()
        return [len({t.data_ptr() for each in optimizer.each for t in tensors(each)})]

    assert step() == [4]  # two moments of two parameters, for three replicas together
    ensemble.share_gradients(model, False)
    assert step() == [12]
    ensemble.share_gradients(model, True)
    assert step() == [4]


def test_optimizer_state_is_shared_again_after_a_load_or_reset() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    ensemble = hdet.StackedReplicas(model, 2)
    optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(3):
        optimizer.zero_grad()
        ensemble.losses(loss_of, torch.randn(4, 3)).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert [state["step"].item() for state in optimizer.each[1].state.values()] == [3.0, 3.0]
    for each in optimizer.each:
        each.state.clear()
    optimizer.step()
    assert [state["step"].item() for state in optimizer.each[1].state.values()] == [1.0, 1.0]


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.used(x)
        return hidden


def test_shared_step_keeps_a_weight_without_a_gradient() -> None:
    model = HalfUsed()
    ensemble = hdet.StackedReplicas(model, 2)
    optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    before = model.unused.weight.detach().clone()
    ensemble.losses(lambda m, x: m(x).mean(), torch.ones(2, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(model.unused.weight, before)


def test_shared_step_is_tested_again_only_when_a_setting_is_switched_on_or_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials = []

    def tried(optimizer: torch.optim.Optimizer) -> bool:
        trials.append(optimizer.param_groups[0]["weight_decay"])
        return moves_in_proportion(optimizer)

    monkeypatch.setattr("hdet.replicas.stacked.optimizer.moves_in_proportion", tried)
    model = nn.Linear(3, 3)
    ensemble = hdet.StackedReplicas(model, 2)
    optimizer = ensemble.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for step in range(6):
        optimizer.param_groups[0]["betas"] = (0.8 + 0.01 * step, 0.999)
        optimizer.param_groups[0]["weight_decay"] = 0.1 * (step > 3)
        optimizer.zero_grad()
        ensemble.losses(loss_of, torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert trials == [0.0, 0.1]
