"""Optimizers beside torch's: their methods, what they write into groups, equal replicas."""

import copy
from collections.abc import Callable
from typing import Any

import prodigyopt
import pytest
import schedulefree
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import hdet

N = 4
Make = Callable[[Any], Any]


def loss_of(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x.sin()).square().mean()
    return loss


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(step: int, num: int = 4 * N) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(num, 3, generator=generator, dtype=torch.float64)


class InItsGradient(torch.optim.Optimizer):
    """Computes its update in the memory of the gradient, as Muon and Schedule-Free do."""

    num_computed = 0

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "num_steps": 0})
        self.power = 1.0
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        InItsGradient.num_computed += 1
        for group in self.param_groups:
            group["num_steps"] += 1
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.grad.lerp_(mean, 0.5).mul_(self.power / group["num_steps"])
                mean.copy_(p.grad)
                p.add_(p.grad, alpha=-group["lr"])

    def scale(self, factor: float) -> float:
        for group in self.param_groups:
            group["lr"] *= factor
        return float(self.param_groups[0]["lr"])


MAKES: dict[str, Make] = {
    "in its gradient": lambda p: InItsGradient(p, lr=0.1),
    "schedule-free": lambda p: schedulefree.AdamWScheduleFree(p, lr=0.02, warmup_steps=3),
    "prodigy": lambda p: prodigyopt.Prodigy(p, weight_decay=0.1),
    "adam with L2": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
}


def alone(make: Make, rate: float, steps: int) -> nn.Module:
    """The plain model, trained on the whole batches with one of the learning rates."""
    model = network()
    optimizer = make(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] *= rate
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
    return model


def each_weight(ensemble: hdet.StackedReplicas) -> list[list[Tensor]]:
    return [[p.detach() for p in module.parameters()] for module in ensemble.modules(None)]


def assert_all_equal(ensemble: hdet.StackedReplicas) -> None:
    first, *others = each_weight(ensemble)
    assert all(torch.equal(a, b) for row in others for a, b in zip(first, row, strict=True))


@pytest.mark.parametrize("name", sorted(MAKES))
def test_equal_replicas_are_stepped_once_and_like_the_plain_model(name: str) -> None:
    """Equal to the last bit, with the counters that the optimizer keeps in its groups."""
    model, steps = network(), 6
    ensemble = hdet.StackedReplicas(model, N)
    optimizer = ensemble.optimizer(MAKES[name](model.parameters()))
    if name == "schedule-free":
        optimizer.train()
    for step in range(steps):
        optimizer.zero_grad()
        ensemble.losses(loss_of, batch(step)).sum().backward()
        optimizer.step()
        assert_all_equal(ensemble)
    want = alone(MAKES[name], 1.0, steps)
    for ours, theirs in zip(model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    counters = {"schedule-free": "k", "prodigy": "k", "in its gradient": "num_steps"}
    if name in counters:
        assert [g[counters[name]] for o in optimizer.each for g in o.param_groups] == [steps] * N
        assert optimizer.param_groups[0][counters[name]] == steps
    tensors = [next(iter(o.state.values())) for o in optimizer.each]
    assert all(state is tensors[0] for state in tensors)  # the memory of one state


@pytest.mark.parametrize("name", ["in its gradient", "schedule-free", "adam with L2"])
def test_replicas_with_own_learning_rates_get_the_same_shared_gradient(name: str) -> None:
    """A replica must not step with what the one before it has left in the gradient."""
    model, rates = network(), [1.0, 0.5, 2.0, 1.5]
    ensemble = hdet.StackedReplicas(model, N)
    optimizer = ensemble.optimizer(MAKES[name](model.parameters()))
    optimizer.steered = {"lr"}
    for one, rate in zip(optimizer.each, rates, strict=True):
        one.param_groups[0]["lr"] *= rate
    if name == "schedule-free":
        optimizer.train()
    optimizer.zero_grad()
    ensemble.losses(loss_of, batch(0)).sum().backward()
    optimizer.step()
    for row, rate in zip(each_weight(ensemble), rates, strict=True):
        want = [p.detach() for p in alone(MAKES[name], rate, 1).parameters()]
        torch.testing.assert_close(row, want, rtol=1e-9, atol=1e-11)


def test_replicas_are_stepped_once_only_while_they_are_equal() -> None:
    model = network()
    ensemble = hdet.StackedReplicas(model, N)
    optimizer: Any = ensemble.optimizer(lambda m: InItsGradient(m.parameters(), lr=0.1))

    def num_steps() -> int:
        """The number of optimizers that compute a step; the others get its result."""
        InItsGradient.num_computed = 0
        optimizer.zero_grad()
        ensemble.losses(loss_of, batch(0)).sum().backward()
        optimizer.step()
        assert len({one.calls for one in optimizer.each}) == 1
        return InItsGradient.num_computed

    assert num_steps() == 1
    optimizer.steered = {"lr"}
    optimizer.each[1].param_groups[0]["lr"] = 0.2
    assert num_steps() == N
    optimizer.each[1].param_groups[0]["lr"] = 0.1
    assert num_steps() == N  # the weights differ now
    ensemble.converge_()
    assert num_steps() == 1
    ensemble.share_gradients(model, False)
    assert num_steps() == N
    ensemble.share_gradients(model, True)
    assert num_steps() == N
    ensemble.converge_()
    assert num_steps() == N  # the weights are equal again, but not the states
    ensemble.select_(2)
    assert num_steps() == 1
    optimizer.each[2].power = 0.5
    assert num_steps() == N
    ensemble.select_(0)
    optimizer.power = 1.0
    optimizer.each[0].register_step_pre_hook(lambda *_: None)
    assert num_steps() == N


def test_methods_and_attributes_of_an_optimizer_reach_all_replicas() -> None:
    model = network()
    ensemble = hdet.StackedReplicas(model, N)
    optimizer: Any = ensemble.optimizer(InItsGradient(model.parameters(), lr=0.1))
    assert optimizer.power == 1.0
    optimizer.power = 0.25
    assert [one.power for one in optimizer.each] == [0.25] * N
    assert optimizer.scale(0.5) == 0.05
    assert [one.param_groups[0]["lr"] for one in optimizer.each] == [0.05] * N
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not hasattr(optimizer, "train")
    assert not hasattr(optimizer, "_private")
    assert not hasattr(copy.copy(optimizer), "power")  # torch copies groups and state alone
    optimizer.param_groups[0]["num_steps"] = 10  # the loop may set what the optimizer counts
    ensemble.losses(loss_of, batch(0)).sum().backward()
    optimizer.step()
    assert [one.param_groups[0]["num_steps"] for one in optimizer.each] == [11] * N


@pytest.mark.filterwarnings("ignore:the scout saw too little difference")
@pytest.mark.parametrize("scout", [True, False])
def test_schedule_free_runs_stacked_with_train_and_eval(scout: bool) -> None:
    """Without a scout it is the plain run, to rounding; evaluation sees the average of weights."""
    total = 200
    results = []
    for is_stacked in (True, False):
        model = network()
        one = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-4 if scout else 0.02)
        ensemble = hdet.StackedReplicas(model, N) if is_stacked else None
        optimizer = ensemble.optimizer(one) if ensemble else one
        scheduler: Any = LambdaLR(optimizer, lambda _: 1.0)
        if ensemble:
            chosen: dict[str, Any] = {} if scout else {"scout": None}
            scheduler = hdet.HDET(
                scheduler, model=model, replicas=ensemble, total_steps=total, sync_every=7, **chosen
            )
            assert scheduler.is_scouting == scout
        counted, seen = 0, []
        for step in range(24):
            optimizer.train()
            is_scouting = ensemble and scheduler.is_scouting
            optimizer.zero_grad()
            if ensemble:
                losses = ensemble.losses(loss_of, batch(step))
            else:
                losses = loss_of(model, batch(step))
            losses.sum().backward()
            optimizer.step()
            scheduler.step(*([losses] if ensemble else []))
            counted = 0 if is_scouting else counted + 1
            if step % 8 == 7 and not (ensemble and scheduler.is_scouting):
                optimizer.eval()
                judged = ensemble.consensus() if ensemble else model
                with torch.no_grad():
                    seen.append(loss_of(judged, batch(99)).item())
        assert optimizer.param_groups[0]["k"] == counted
        if ensemble:
            assert_all_equal(ensemble)
            optimizer.train()
            assert {one.param_groups[0]["train_mode"] for one in optimizer.each} == {True}
        results.append(seen)
        if scout:
            assert seen[-1] < seen[0]
            return
    assert results[0] == pytest.approx(results[1], rel=1e-9)
