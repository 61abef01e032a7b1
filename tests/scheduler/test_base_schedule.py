"""Wrapped schedules: learning rates, resuming, ReduceLROnPlateau and the preview of a schedule."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedules
from torch.optim.lr_scheduler import LRScheduler

import hdet
from hdet.scheduler.base_schedule import BaseSchedule
from tests.processes import Processes

N, T, STEPS, LR, SPREAD = 2, 5, 40, 0.1, 0.5

Maker = Callable[[Optimizer], LRScheduler]
Form = Callable[[int], float]


def wsd(step: int) -> float:
    return min(1.0, (step + 1) / 8) if step < 30 else (40 - step) / 10


def warm_then_cosine(step: int) -> float:
    return 0.1 + 0.9 * step / 10 if step < 10 else (1 + math.cos(math.pi * (step - 10) / 30)) / 2


def restarts(step: int) -> float:
    start, period = 0, 10
    while step - start >= period:
        start, period = start + period, period * 2
    return (1 + math.cos(math.pi * (step - start) / period)) / 2


SCHEDULES: dict[str, tuple[Maker, Form]] = {
    "cosine": (
        lambda o: torch_schedules.CosineAnnealingLR(o, 40),
        lambda step: (1 + math.cos(math.pi * step / 40)) / 2,
    ),
    "exponential": (
        lambda o: torch_schedules.ExponentialLR(o, 0.9),
        lambda step: 0.9**step,
    ),
    "wsd": (lambda o: torch_schedules.LambdaLR(o, wsd), wsd),
    "sequential": (
        lambda o: torch_schedules.SequentialLR(
            o,
            [
                torch_schedules.LinearLR(o, 0.1, 1.0, 10),
                torch_schedules.CosineAnnealingLR(o, 30),
            ],
            [10],
        ),
        warm_then_cosine,
    ),
    "warm restarts": (
        lambda o: torch_schedules.CosineAnnealingWarmRestarts(o, 10, 2),
        restarts,
    ),
    "step": (lambda o: torch_schedules.StepLR(o, 15, 0.3), lambda step: 0.3 ** (step // 15)),
    "multiplicative": (
        lambda o: torch_schedules.MultiplicativeLR(o, lambda _: 0.95),
        lambda step: 0.95**step,
    ),
    "chained": (
        lambda o: torch_schedules.ChainedScheduler(
            [torch_schedules.ConstantLR(o, 0.5, 4), torch_schedules.ExponentialLR(o, 0.9)]
        ),
        lambda step: 0.9**step * (0.5 if step < 4 else 1.0),
    ),
}


def follow(rank: int, name: str) -> list[tuple[float, float]]:
    model = nn.Linear(2, 1, dtype=torch.float64)
    nn.init.constant_(model.weight, 1.0)
    nn.init.constant_(model.bias, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scheduler = hdet.HDET(
        SCHEDULES[name][0](optimizer), spread=SPREAD, sync_every=T, controller=None, preset="paper"
    )
    seen = []
    for _ in range(STEPS):
        seen.append((optimizer.param_groups[0]["lr"], scheduler.get_base_lr()[0]))
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_is_closed_form_of_the_schedule_times_multiplier(
    processes: Processes, name: str
) -> None:
    for replica, seen in enumerate(processes(N, follow, name)):
        multiplier = [1 - SPREAD, 1 + SPREAD][replica]
        for step, (lr, centre) in enumerate(seen):
            want = LR * SCHEDULES[name][1](step)
            assert centre == pytest.approx(want, rel=1e-9, abs=1e-15)
            assert lr == pytest.approx(want * multiplier, rel=1e-9, abs=1e-15)


def plateau(rank: int) -> list[float]:
    model = nn.Linear(2, 1, dtype=torch.float64)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    base = torch_schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    scheduler = hdet.HDET(base, spread=SPREAD, sync_every=T, controller=None, preset="paper")
    lrs = []
    for step in range(STEPS):
        optimizer.step()
        # The mean over the replicas is 1.0 from the second cycle on. Replica 1 alone improves.
        scheduler.step(
            torch.tensor(1.0 + (step < T) + (0.01 * step if rank == 0 else -0.01 * step))
        )
        lrs.append(optimizer.param_groups[0]["lr"])
    return lrs


def test_reduce_on_plateau_uses_the_mean_loss_of_all_replicas(processes: Processes) -> None:
    """The mean loss is 2.0 in cycle 1 and 1.0 later. Every second bad cycle halves the rate."""
    for replica, lrs in enumerate(processes(N, plateau)):
        multiplier = [1 - SPREAD, 1 + SPREAD][replica]
        halvings = [0, 0, 0, 1, 1, 2, 2, 3]  # after cycles 1 to 8, patience 1
        for cycle, halved in enumerate(halvings):
            end = (cycle + 1) * T - 1
            assert lrs[end] == pytest.approx(LR * 0.5**halved * multiplier)


def test_hdet_rejects_a_base_that_is_no_lr_scheduler() -> None:
    with pytest.raises(
        TypeError,
        match="`base` must be a plain torch LRScheduler or a torch optimizer, got 'cosine'",
    ):
        hdet.HDET("cosine", preset="paper")  # type: ignore[arg-type]


def state_after(steps: int, name: str) -> tuple[hdet.HDET, Any]:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=LR)
    scheduler = hdet.HDET(SCHEDULES[name][0](optimizer), sync_every=T, preset="paper")
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return scheduler, optimizer


@pytest.mark.parametrize("name", SCHEDULES)
def test_resumed_schedule_continues_with_the_same_learning_rates(name: str, tmp_path: Any) -> None:
    scheduler, optimizer = state_after(13, name)
    torch.save(scheduler.state_dict(), tmp_path / "state")
    resumed, fresh = state_after(0, name)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for _ in range(STEPS - 13):
        assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        for each in (optimizer, fresh):
            each.step()
        scheduler.step()
        resumed.step()


@pytest.mark.parametrize("name", SCHEDULES)
def test_base_schedule_previews_mean_and_highest_lr_without_changing_its_state(name: str) -> None:
    make, form = SCHEDULES[name]
    base = BaseSchedule(make(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=LR)))
    before = base.state_dict()
    results = base.shares(STEPS)
    assert base.state_dict() == before
    lrs = [LR * form(step) for step in range(STEPS)]
    assert results is not None
    assert results.mean == pytest.approx(sum(lrs) / STEPS / base.peaks[0])
    assert results.highest == pytest.approx(max(lrs) / base.peaks[0])


def test_base_schedule_previews_nothing_for_endless_or_metric_driven_schedules() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=LR)
    assert BaseSchedule(torch_schedules.ConstantLR(optimizer)).shares(None) is None
    assert BaseSchedule(torch_schedules.ReduceLROnPlateau(optimizer)).shares(STEPS) is None


def test_hdet_rejects_reduce_on_plateau_with_mode_max() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), LR)
    base = torch_schedules.ReduceLROnPlateau(optimizer, mode="max")
    with pytest.raises(ValueError, match="must be a ReduceLROnPlateau with mode='min'"):
        hdet.HDET(base)
