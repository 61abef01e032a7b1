"""hdet without exploration equals DDP with OneCycleLR bit for bit; one replica changes nothing."""

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from tests import toy
from tests.processes import Processes

STEPS = 300
ONE_CYCLE: dict[str, Any] = {"max_lr": [0.03, 0.01, 0.02, 0.05], "total_steps": STEPS}


def train(rank: int, name: str, micro_batches: int, dtype: torch.dtype, ours: bool) -> Any:
    network = toy.toy(dtype)
    network.register_buffer("table", 1 / torch.arange(1, 65, dtype=dtype))
    model = DistributedDataParallel(network)
    optimizer = toy.OPTIMIZERS[name](model)
    scheduler: Any
    if ours:
        scheduler = hdet.OneCycleHDET(
            optimizer,
            **ONE_CYCLE,
            spread=0.0,
            auto_lr=False,
            sync_every=7,
            model=model,
            optimizer_state="keep" if micro_batches == 1 else "average",
        )
    else:
        scheduler = OneCycleLR(optimizer, **ONE_CYCLE)
    lrs = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            loss = toy.loss_of(model, step * micro_batches + micro, rank) / micro_batches
            if micro < micro_batches - 1:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        scheduler.step()
        momenta = [g.get("momentum") or g["betas"][0] for g in optimizer.param_groups]
        lrs.append((scheduler.get_last_lr(), [g["lr"] for g in optimizer.param_groups], momenta))
    return [t.detach() for t in (*model.parameters(), *model.buffers())], lrs


@pytest.mark.parametrize(
    ("num", "name", "micro_batches", "dtype"),
    [
        (3, "adamw", 1, torch.float32),
        (4, "sgd", 1, torch.float32),
        (3, "adam", 2, torch.float64),
    ],
)
def test_hdet_without_spread_and_auto_lr_equals_ddp_with_one_cycle_lr(
    processes: Processes, num: int, name: str, micro_batches: int, dtype: torch.dtype
) -> None:
    ours = processes(num, train, name, micro_batches, dtype, True)
    plain = processes(num, train, name, micro_batches, dtype, False)
    for (our_weights, our_lrs), (weights, lrs) in zip(ours, plain, strict=True):
        assert our_lrs == lrs
        for got, want in zip(our_weights, weights, strict=True):
            assert torch.equal(got, want)


def test_float32_mean_of_three_equal_numbers_can_differ_from_the_number() -> None:
    """The reason why equal replicas are not averaged: with N = 3 the mean rounds."""
    values = torch.rand(1000, dtype=torch.float32)
    assert not torch.equal((values + values + values) / 3, values)


@pytest.mark.parametrize("arguments", [{}, {"three_phase": True}, {"anneal_strategy": "linear"}])
def test_hdet_with_one_replica_equals_one_cycle_lr(arguments: dict[str, Any]) -> None:
    optimizers = [toy.OPTIMIZERS["adamw"](toy.toy()) for _ in range(2)]
    ours = hdet.OneCycleHDET(
        optimizers[0], 0.1, epochs=3, steps_per_epoch=20, sync_every=10, **arguments
    )
    plain = OneCycleLR(optimizers[1], 0.1, epochs=3, steps_per_epoch=20, **arguments)
    for _ in range(59):
        for optimizer in optimizers:
            optimizer.step()
        ours.step()
        plain.step()
        assert ours.get_last_lr() == plain.get_last_lr() == ours.get_base_lr()
        for mine, theirs in zip(*(o.param_groups for o in optimizers), strict=True):
            assert (mine["lr"], mine["betas"]) == (theirs["lr"], theirs["betas"])


def test_single_replica_computes_no_weight_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single replica has nothing to compare at a cycle end or in an evaluation."""
    optimizer = toy.OPTIMIZERS["adamw"](toy.toy())
    scheduler = hdet.OneCycleHDET(optimizer, 0.1, total_steps=4, sync_every=2)
    monkeypatch.setattr("hdet.weights.checks.fingerprints", lambda _: pytest.fail("looked"))
    for _ in range(4):
        optimizer.step()
        scheduler.step(1.0)
        with scheduler.consensus():
            pass
    assert scheduler.last_epoch == 4
