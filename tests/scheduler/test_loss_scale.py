"""`HDET(scaler=...)`: the loss scale is restored with the weights, and equal on all replicas."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.processes import Processes

SCALE, T, TOTAL = 2.0**10, 4, 400
SCOUT = hdet.Scout(steps=4, share=0.2)


class Loop:
    """A loop in mixed precision. Its data overflow at some steps, so GradScaler skips them."""

    def __init__(self, rank: int, *, given: bool = True, stacked: int = 0, **options: Any) -> None:
        torch.manual_seed(0)
        self.rank, self.model = rank, nn.Linear(3, 3, dtype=torch.float64)
        module: nn.Module = self.model
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.ensemble = hdet.StackedReplicas(self.model, stacked) if stacked else None
        if self.ensemble is not None:
            self.optimizer = self.ensemble.optimizer(self.optimizer)
        elif torch.distributed.is_initialized():
            module = DistributedDataParallel(self.model)
        self.module = module
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        base = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)
        settings: dict[str, Any] = {"total_steps": TOTAL, "sync_every": T, "guard": None}
        self.scheduler = hdet.HDET(
            base,
            model=module,
            replicas=self.ensemble,
            scaler=self.scaler if given else None,
            **(settings | options),
        )

    def step(self, *, overflows: bool = False) -> None:
        step = self.scheduler.last_epoch
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
        x = x * math.inf if overflows else x
        self.optimizer.zero_grad()
        if self.ensemble is None:
            losses = loss_of(self.module, x)
        else:
            losses = self.ensemble.losses(loss_of, x)
        self.scaler.scale(losses.sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step(losses.detach())

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def search(self, overflows_at: int) -> "Loop":
        while self.scheduler.is_scouting:
            self.step(overflows=self.scheduler.last_epoch == overflows_at)
        return self


def loss_of(model: Any, x: Tensor) -> Tensor:
    return (model(x) - x.flip(1)).square().mean()


def search_with_a_skip(rank: int, given: bool) -> tuple[int, float, float, Tensor]:
    loop = Loop(rank, given=given, scout=SCOUT)
    loop.search(overflows_at=1 if rank == 1 else -1)  # in the first round of the search
    end, scale = loop.scheduler.last_epoch, loop.scale
    for _ in range(2):  # with the mean gradient
        loop.step()
    return end, loop.scheduler.found_lr or 0.0, scale, loop.model.weight.detach()


def test_skip_on_one_process_leaves_equal_scales_and_weights_after_a_scout(
    processes: Processes,
) -> None:
    """Without `scaler=`, DDP would take the mean of gradients that are scaled differently."""
    first, second = processes(2, search_with_a_skip, False)
    assert [first[2], second[2]] == [SCALE, SCALE / 2]
    assert not torch.allclose(first[3], second[3])
    first, second = processes(2, search_with_a_skip, True)
    assert [first[2], second[2]] == [SCALE, SCALE]
    assert torch.equal(first[3], second[3])
    assert first[:2] == second[:2]  # the search has ended at the same step with the same result


def train_apart(rank: int) -> tuple[list[float], Tensor]:
    loop, scales = Loop(rank, gradients="local", scout=None), []
    for step in range(3 * T):
        if step == T + 1 and rank == 1:
            with torch.no_grad():
                loop.model.weight.fill_(math.nan)
        loop.step(overflows=step == 1 and rank == 1)
        scales.append(loop.scale)
    loop.step(overflows=rank == 0)
    loop.scheduler.converge()
    return [*scales, loop.scale], loop.model.weight.detach()


def test_averages_give_all_replicas_the_lowest_scale_of_healthy_ones(processes: Processes) -> None:
    """Replica 1 skips step 1. Its weights are not finite in the next cycle, at 3 steps."""
    (first, weight), (second, other) = processes(2, train_apart)
    half = SCALE / 2
    assert first == [SCALE] * 3 + [half] * 9 + [half / 2]
    assert second == [SCALE] + [half] * 4 + [half / 2, half / 4] + [half] * 5 + [half / 2]
    assert torch.equal(weight, other)


def leave_out_the_scaler(rank: int) -> str:
    with pytest.raises(ValueError) as error:
        Loop(rank, given=rank == 0, scout=None)
    return str(error.value)


def test_scaler_that_one_process_lacks_is_refused_on_all(processes: Processes) -> None:
    for text in processes(2, leave_out_the_scaler):
        assert text.startswith("replicas must be alike: `scaler` is {'scale': 1024.0, ")
        assert text.endswith("on replica 0 and None on replica 1.")


def test_scout_of_stacked_replicas_restores_the_scale() -> None:
    loop = Loop(0, stacked=4, scout=SCOUT)
    held_out = 2  # steps
    for _ in range(held_out + 1):
        loop.step()
    loop.step(overflows=True)
    assert loop.scale == SCALE / 2
    assert loop.search(overflows_at=-1).scale == SCALE


def test_guard_restores_the_scale_of_the_best_weights() -> None:
    loop = Loop(0, scout=None, guard=hdet.Guard())
    for _ in range(T):
        loop.step()
    for step in range(T):
        assert loop.scale == SCALE / 2**step
        loop.step(overflows=True)
    assert loop.scale == SCALE


def test_scaler_that_is_disabled_changes_nothing() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model = nn.Linear(1, 1)
    base = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters(), 0.1), 1.0)
    scheduler = hdet.HDET(base, model=model, scout=None, total_steps=9, scaler=scaler)
    scheduler.converge()
    assert scaler.state_dict() == {}


def test_other_object_than_a_scaler_is_refused() -> None:
    model = nn.Linear(1, 1)
    base = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters(), 0.1), 1.0)
    with pytest.raises(TypeError) as error:
        hdet.HDET(base, model=model, scout=None, total_steps=9, scaler="fp16")  # type: ignore
    assert str(error.value) == "`scaler` must be a torch.amp.GradScaler or None, got 'fp16'."
