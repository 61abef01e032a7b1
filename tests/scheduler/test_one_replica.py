"""One replica, a plain model and a plain optimizer: the scout tries one rate after the other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.lr_search.constants import SWEEP_POINTS
from tests.small_run import SmallRun, batch, loss_of

TOTAL, GOOD = 1600, 0.02


class Unknown(torch.optim.AdamW):
    """An optimizer whose usual learning rate hdet does not know."""


def score(model: Any) -> torch.Tensor:
    return loss_of(model, batch(10**5, 0))


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def one_cycle(optimizer: Any, lr: float) -> OneCycleLR:
    return OneCycleLR(optimizer, lr, total_steps=TOTAL)


def run_at(lr: float, kind: Any = torch.optim.AdamW, **options: Any) -> SmallRun:
    model = net()
    settings = {"preset": "best", **options}
    return SmallRun(
        "one", 0, 1, model, kind(model.parameters(), lr=lr), lambda o: one_cycle(o, lr), **settings
    )


def train(run: SmallRun) -> SmallRun:
    while run.scheduler.last_epoch < TOTAL:
        run.step()
    return run


def loss(run: SmallRun) -> float:
    with torch.no_grad():
        return float(loss_of(run.bare, batch(10**6, 0)))


def found_lr(run: SmallRun) -> float:
    while run.scheduler.is_scouting:
        run.step()
    assert run.scheduler.found_lr is not None
    return run.scheduler.found_lr


@pytest.mark.parametrize("lr", [GOOD / 1000, 1000 * GOOD])
def test_single_replica_trains_well_from_a_learning_rate_that_is_far_off(lr: float) -> None:
    good, off = train(run_at(GOOD)), train(run_at(lr))
    assert off.scheduler.found_lr == pytest.approx(good.scheduler.found_lr, rel=1e-6)
    fixed = train(run_at(GOOD, scout=None))
    assert loss(off) < 2 * loss(fixed) + 0.01


@pytest.mark.parametrize("lr", [GOOD / 1000, 1000 * GOOD])
def test_single_replica_finds_nearly_the_same_rate_with_an_unknown_optimizer(lr: float) -> None:
    """Without a usual learning rate, sweeps start at the given one and go where the best may be."""
    good = found_lr(run_at(GOOD, Unknown, probe=score))
    assert good / 3 < found_lr(run_at(lr, Unknown, probe=score)) < 3 * good


def test_single_replica_tries_a_sweep_within_the_share_and_restores_its_weights(
    tmp_path: Path,
) -> None:
    run = run_at(GOOD, record=tmp_path)
    before = nn.utils.parameters_to_vector(run.bare.parameters()).detach().clone()
    found_lr(run)
    assert run.scheduler.last_epoch <= hdet.Scout().share * TOTAL
    assert torch.equal(nn.utils.parameters_to_vector(run.bare.parameters()), before)
    assert not run.optimizer.state
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    points = [line for line in lines if line["event"] == "scout"][-1]["points"]
    assert len(points) >= SWEEP_POINTS


def test_single_replica_without_scout_and_guard_equals_the_base_schedule_bit_for_bit() -> None:
    run = run_at(GOOD, scout=None, guard=None)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=GOOD)
    schedule = one_cycle(optimizer, GOOD)
    for step in range(TOTAL - 1):
        run.step()
        optimizer.zero_grad()
        loss_of(model, batch(step, 0)).backward()
        optimizer.step()
        schedule.step()
        assert run.scheduler.get_last_lr() == schedule.get_last_lr()
        assert run.optimizer.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]
    pairs = zip(run.bare.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
