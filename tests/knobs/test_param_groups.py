"""What is written into an optimizer: in place, undone for the base, whatever the load order."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR

import hdet
from hdet.knobs import param_groups


def optimizer_of(lr: Any = 0.1, num_groups: int = 2) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(num_groups)]
    return torch.optim.SGD([{"params": [p]} for p in parameters], lr=lr, momentum=0.9)


def test_group_names_are_own_names_or_indices() -> None:
    optimizer = optimizer_of()
    optimizer.param_groups[0]["name"] = "head"
    assert param_groups.group_names(optimizer) == ["head", "group1"]
    optimizer.param_groups[1]["name"] = "head"
    with pytest.raises(ValueError, match="different names, got 'head' twice"):
        param_groups.group_names(optimizer)


@pytest.mark.parametrize("kind", ["cosine", "lambda", "sequential", "one cycle"])
def test_a_tensor_learning_rate_stays_the_same_object(kind: str) -> None:
    optimizer = optimizer_of(torch.tensor(0.1, dtype=torch.float64))
    plain = optimizer_of(0.1)
    makers: dict[str, Any] = {
        "cosine": lambda o: CosineAnnealingLR(o, 20),
        "lambda": lambda o: LambdaLR(o, lambda step: 0.9**step),
        "sequential": lambda o: SequentialLR(
            o, [LambdaLR(o, lambda step: 0.9**step), CosineAnnealingLR(o, 20)], [5]
        ),
        "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=20),
    }
    base = makers[kind](optimizer)
    # SequentialLR of torch 2.6 replaces the tensors when it is made.
    tensors = [group["lr"] for group in optimizer.param_groups]
    scheduler = hdet.HDET(base, sync_every=4, preset="paper")
    other = makers[kind](plain)
    for _ in range(12):
        for either in (optimizer, plain):
            either.step()
        scheduler.step()
        other.step()
        for group, tensor in zip(optimizer.param_groups, tensors, strict=True):
            assert group["lr"] is tensor
        got = [float(group["lr"]) for group in optimizer.param_groups]
        assert got == pytest.approx(other.get_last_lr(), rel=1e-12)
        assert all(isinstance(lr, float) for lr in scheduler.get_last_lr())


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_loading_in_any_order_restores_learning_rates_and_momenta(optimizer_first: bool) -> None:
    optimizer = optimizer_of()
    scheduler = hdet.OneCycleHDET(optimizer, 0.1, total_steps=20, sync_every=4)
    for _ in range(7):
        optimizer.step()
        scheduler.step()
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    want = [(group["lr"], group["momentum"]) for group in optimizer.param_groups]
    for group in saved[0]["param_groups"]:
        group["lr"] = group["momentum"] = 0.123  # as another replica may have saved it
    fresh = optimizer_of()
    resumed = hdet.OneCycleHDET(fresh, 0.1, total_steps=20, sync_every=4)
    parts: list[Any] = [(fresh, saved[0]), (resumed, saved[1])]
    for part, state in parts if optimizer_first else reversed(parts):
        part.load_state_dict(state)
    assert [(group["lr"], group["momentum"]) for group in fresh.param_groups] == want


# torch itself uses what it deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_optimizer_step_is_not_recompiled() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=torch.tensor(0.1))
    plain_parameter = nn.Parameter(torch.ones(4))
    plain = torch.optim.SGD([plain_parameter], lr=0.1)
    scheduler = hdet.OneCycleHDET(
        optimizer, 0.1, total_steps=20, sync_every=4, cycle_momentum=False
    )
    other = OneCycleLR(plain, 0.1, total_steps=20, cycle_momentum=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @torch.compile(backend="eager")  # what recompiles is the front end
    def step() -> None:
        optimizer.step()

    for _ in range(12):
        for each in (parameter, plain_parameter):
            each.grad = torch.full((4,), 0.5)
        step()
        plain.step()
        scheduler.step()
        other.step()
    torch.testing.assert_close(parameter, plain_parameter)
    graphs_after_warm_up = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs_after_warm_up <= 2


@pytest.mark.parametrize("betas", [0.9, (), [0.9, 0.99], torch.tensor([0.9, 0.99])])
def test_betas_of_unusual_types_stay_as_they_are(betas: Any) -> None:
    class Own(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    optimizer = Own([nn.Parameter(torch.ones(1))], {"lr": 0.1, "betas": betas})
    scheduler = hdet.HDET(CosineAnnealingLR(optimizer, 10), scout=None, guard=None)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["betas"] is betas


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_a_learning_rate_that_something_else_writes_is_noticed(lr: Any) -> None:
    optimizer = optimizer_of(lr)
    written = param_groups.WrittenRates()
    rows = [(optimizer, [0.25, 0.5])]

    def write() -> None:
        if isinstance(lr, torch.Tensor):  # torch gives all groups the same tensor
            for group in optimizer.param_groups:
                group["lr"] = lr.clone()
        param_groups.write_learning_rates(optimizer, rows[0][1])
        written.note(rows, everything=True)

    write()
    written.check()
    optimizer.param_groups[1]["lr"] = 0.125
    with pytest.raises(RuntimeError, match=r"param_groups\[1\]\['lr'\]` .* wrote 0.5, got 0.125"):
        written.check()
    write()
    written.check()
    if isinstance(lr, torch.Tensor):
        optimizer.param_groups[0]["lr"].fill_(1.0)
        with pytest.raises(RuntimeError, match=r"param_groups\[0\]\['lr'\]` .* wrote 0.25, got 1"):
            written.check()


def test_a_number_that_is_written_again_changes_nothing() -> None:
    optimizer = optimizer_of(0.1, 1)
    written = param_groups.WrittenRates()
    param_groups.write_learning_rates(optimizer, [0.3])
    written.note([(optimizer, [0.3])], everything=True)
    optimizer.param_groups[0]["lr"] = float("0.3")
    written.check()
