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


def weights(run: SmallRun) -> torch.Tensor:
    return nn.utils.parameters_to_vector(run.bare.parameters()).detach().clone()


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
    before = weights(run)
    found_lr(run)
    assert run.scheduler.last_epoch <= hdet.Scout().share * TOTAL
    assert torch.equal(weights(run), before)
    assert not run.optimizer.state
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    points = [line for line in lines if line["event"] == "scout"][-1]["points"]
    assert len(points) >= SWEEP_POINTS


@pytest.mark.filterwarnings("ignore:the scout:UserWarning")
def test_probe_scores_a_single_replica_on_the_same_data_in_all_rounds(tmp_path: Path) -> None:
    run = run_at(GOOD, Unknown, probe=score, scout=hdet.Scout(decades=12), record=tmp_path)
    with torch.no_grad():
        start = float(score(run.bare))
    found_lr(run)
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["event"] == "scout"][-1]
    assert last["compared_by"] == "probe"
    lowest = last["points"][0]  # so low a learning rate does not change the score
    assert lowest["score"] == pytest.approx(start, rel=1e-6)


def test_checkpoint_in_a_search_holds_the_weights_of_its_start() -> None:
    run = run_at(GOOD)
    before = weights(run)
    for _ in range(6):
        run.step()
    assert not torch.equal(weights(run), before)
    run.scheduler.converge()
    assert torch.equal(weights(run), before)
    other = run_at(GOOD)
    other.scheduler.load_state_dict(run.scheduler.state_dict())
    assert found_lr(other) == found_lr(run)
    assert torch.equal(weights(other), before)


def test_evaluation_in_a_search_shows_the_weights_of_its_start() -> None:
    run = run_at(GOOD)
    before = weights(run)
    for _ in range(6):
        run.step()
    trained = weights(run)
    with run.scheduler.consensus():
        assert torch.equal(weights(run), before)
    assert torch.equal(weights(run), trained)


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
