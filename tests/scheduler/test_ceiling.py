"""The ceiling, end to end: a learning rate that is far too high is found out and lowered."""

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, OneCycleLR

import hdet
from tests.processes import Processes
from tests.small_run import SmallRun, batch, loss_of

N, TOTAL, FAR_TOO_HIGH, GOOD = 3, 600, 300.0, 0.1


def mlp() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3)).double()


class Run(SmallRun):
    """A run with a guard and without a scout, by default with the cycles of the best preset."""

    def __init__(
        self,
        engine: str,
        rank: int = 0,
        lr: float = FAR_TOO_HIGH,
        model: nn.Module | None = None,
        constant: bool = False,
        **options: Any,
    ) -> None:
        model = model or mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

        def base(optimizer: Optimizer) -> LRScheduler:
            if constant:
                return ConstantLR(optimizer, factor=1.0)
            return OneCycleLR(optimizer, lr, total_steps=TOTAL)

        settings = {"preset": "best", "scout": None, "total_steps": TOTAL}
        super().__init__(engine, rank, N, model, optimizer, base, **{**settings, **options})
        self.rates: list[float] = []
        """The learning rate of each step."""

    def go(self, steps: int) -> "Run":
        for _ in range(steps):
            self.rates.append(self.scheduler.get_base_lr()[0])
            self.step()
        return self

    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.modules()[0].parameters()).detach().clone()

    def loss(self) -> float:
        with torch.no_grad():
            return float(loss_of(self.modules()[0], batch(10**6, 0)))


def rollbacks(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "record.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == "guard"]


def rescued(rank: int, engine: str, folder: Path) -> tuple[float, list[float], Tensor]:
    run = Run(engine, rank, record=folder).go(TOTAL)
    return run.loss(), run.rates, run.weights()


@pytest.mark.parametrize("engine", ["one", "stacked", "processes"])
def test_run_with_a_far_too_high_lr_is_rescued_below_a_quarter_of_what_failed(
    engine: str, processes: Processes, tmp_path: Path
) -> None:
    good = Run("one" if engine == "one" else "stacked", lr=GOOD).go(TOTAL).loss()
    arguments = (engine, tmp_path)
    answers = processes(N, rescued, *arguments) if engine == "processes" else None
    for loss, rates, weights in answers or [rescued(0, *arguments)]:
        assert loss < max(3 * good, 0.02)
        assert weights.isfinite().all()
        lines, cycle = rollbacks(tmp_path), TOTAL // 60
        assert lines
        for line in lines:
            if line["factor"] >= 1:
                continue  # raised again, or spared
            step = line["step"]
            failed = max(rates[step - cycle : step])
            # Good cycles may raise it again, step by step, until it fails.
            assert max(rates[step : step + 5 * cycle]) <= failed / 4 * (1 + 1e-9)
        assert answers is None or rates == answers[0][1]


def test_ceiling_survives_a_resume() -> None:
    run = Run("one").go(TOTAL // 3)
    assert run.scheduler._run.good_point is not None
    ceiling = run.scheduler._run.good_point.monitor.ceiling
    assert ceiling < 1 / 16
    state = copy.deepcopy(run.scheduler.state_dict())
    other = Run("one")
    other.bare.load_state_dict(run.bare.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    other.scheduler.load_state_dict(state)
    assert other.scheduler._run.good_point is not None
    assert other.scheduler._run.good_point.monitor.ceiling == ceiling
    assert other.scheduler.get_knobs() == run.scheduler.get_knobs()
    for each in (run, other):
        each.go(TOTAL - TOTAL // 3)
    assert torch.equal(run.weights(), other.weights())
    assert max(other.rates) <= ceiling * FAR_TOO_HIGH * (1 + 1e-9)


# What a loss does not show ----------------------------------------------------------------------


def deep_relu_net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers: list[nn.Module] = [nn.Linear(3, 8), nn.ReLU()]
        for _ in range(4):
            layers += [nn.Linear(8, 8), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(8, 3)).double()


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_dead_relu_net_is_found_by_its_vanished_gradients_and_rescued(
    engine: str, tmp_path: Path
) -> None:
    """A dead net answers with its last bias: its loss is close to that of the first weights."""
    losses = []
    for guard in (None, hdet.Guard()):
        model = deep_relu_net()
        run = SmallRun(
            engine,
            0,
            N,
            model,
            torch.optim.Adam(model.parameters(), lr=3.0),
            lambda optimizer: ConstantLR(optimizer, factor=1.0),
            preset="best",
            scout=None,
            total_steps=TOTAL,
            guard=guard,
            record=None if guard is None else tmp_path,
        )
        first = float(loss_of(model, batch(10**6, 0)).detach())
        for _ in range(TOTAL):
            run.step()
        losses.append(float(loss_of(run.modules()[0], batch(10**6, 0)).detach()))
    assert losses[0] > 0.7 * first
    assert losses[1] < 0.1 * first
    reasons = [line["reason"] for line in rollbacks(tmp_path)]
    assert re.fullmatch(r"the gradients of \d\d% of the tensors have vanished", reasons[0])


class Normed(nn.Module):
    """A net with BatchNorm and with a mask that is infinite by design."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("mask", torch.full((2,), -math.inf))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(torch.tanh(self.norm(self.up(x))))
        return output


def with_bad_buffers(rank: int, engine: str, value: float, folder: Path) -> tuple[bool, float]:
    """Damage the statistics of all replicas: no loss in training shows it."""
    torch.manual_seed(3)
    run = Run(engine, rank, GOOD, Normed().double(), constant=True, record=folder, sync_every=10)
    run.go(30)
    for module in run.modules():
        module.get_buffer("norm.running_var").fill_(value)
    run.go(10)
    known = {k: v for k, v in run.modules()[0].state_dict().items() if k != "mask"}
    are_finite = all(bool(tensor.isfinite().all()) for tensor in known.values())
    return are_finite, run.scheduler.get_knobs()["lr/group0"]


@pytest.mark.parametrize("engine", ["one", "stacked", "processes"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_batch_norm_buffers_that_are_not_finite_on_any_replica_are_a_failure(
    engine: str, value: float, processes: Processes, tmp_path: Path
) -> None:
    arguments = (engine, value, tmp_path)
    answers = processes(N, with_bad_buffers, *arguments) if engine == "processes" else None
    assert set(answers or [with_bad_buffers(0, *arguments)]) == {(True, 1.0)}  # spared once
    (line,) = rollbacks(tmp_path)
    assert (line["reason"], line["step"]) == ("buffers are not finite", 40)


def test_buffers_that_are_infinite_by_design_are_no_failure(tmp_path: Path) -> None:
    torch.manual_seed(3)
    Run("stacked", 0, GOOD, Normed().double(), record=tmp_path).go(TOTAL // 4)
    assert rollbacks(tmp_path) == []


# Runs that need no guard ------------------------------------------------------------------------


def healthy(rank: int, engine: str, guard: hdet.Guard | None) -> list[Tensor]:
    run = Run(engine, rank, GOOD, guard=guard).go(TOTAL // 2)
    return [tensor.clone() for tensor in run.modules()[0].state_dict().values()]


@pytest.mark.parametrize("engine", ["one", "stacked", "processes"])
def test_healthy_run_has_the_same_weights_with_and_without_a_guard(
    engine: str, processes: Processes
) -> None:
    if engine == "processes":
        guarded, plain = (
            processes(N, healthy, engine, hdet.Guard())[0],
            processes(N, healthy, engine, None)[0],
        )
    else:
        guarded, plain = healthy(0, engine, hdet.Guard()), healthy(0, engine, None)
    assert all(map(torch.equal, guarded, plain))


@pytest.mark.parametrize("preset", ["best", "paper"])
def test_one_replica_without_scout_and_guard_has_exactly_the_rates_of_its_schedule(
    preset: str,
) -> None:
    run = Run("one", lr=GOOD, guard=None, preset=preset).go(TOTAL)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=GOOD, momentum=0.9)
    schedule, rates = OneCycleLR(optimizer, GOOD, total_steps=TOTAL), []
    for step in range(TOTAL):
        rates.append(float(schedule.get_last_lr()[0]))
        optimizer.zero_grad()
        loss_of(model, batch(step, 0)).backward()
        optimizer.step()
        schedule.step()
    assert run.rates == rates
    assert torch.equal(run.weights(), nn.utils.parameters_to_vector(model.parameters()))
