"""A step within a cycle does little beside the schedule, and nothing that grows."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from torch.utils._python_dispatch import TorchDispatchMode

import hdet
from hdet.scheduler.cycle_phase import CyclePhase

PACKAGE = str(Path(hdet.__file__).parent)
LIMIT = 20
"""Functions of hdet that a step of the loop may call."""


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return call(*args, **(kwargs or {}))


def counts(step: Callable[[], object]) -> tuple[int, int]:
    """The functions of hdet and the operations of torch that a step calls."""
    num = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal num
        num += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    with Operations() as operations:
        step()
    return num, operations.num


class Loop:
    """A run whose loop counts its steps."""

    def __init__(self, num: int = 1, num_tensors: int = 2, num_steps: int = 10_000) -> None:
        model = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(num_tensors))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        replicas = None if num == 1 else hdet.StackedReplicas(model, num)
        if replicas is not None:
            optimizer = replicas.optimizer(optimizer)
        self.optimizer = optimizer
        self.base = OneCycleLR(optimizer, 0.1, total_steps=num_steps)
        self.scheduler = hdet.HDET(
            self.base, model=model, replicas=replicas, scout=None, sync_every=2000
        )
        self._loss = torch.ones(num) if num > 1 else torch.tensor(1.0, requires_grad=True)
        optimizer.step()

    def train(self) -> None:
        """Step the optimizer too, until hdet knows that the loop does."""
        for _ in range(3):  # one optimizer step came before the first call
            self.optimizer.step()
            self.step()

    def step(self, num: int = 1) -> None:
        for _ in range(num):
            self.scheduler.step(self._loss)


@pytest.mark.parametrize("num", [1, 8], ids=["one replica", "stacked"])
def test_step_within_a_cycle_calls_few_functions_at_any_step_of_any_model(num: int) -> None:
    loop, large = Loop(num), Loop(num, num_tensors=200)
    loop.train()
    loop.step(95)
    early = counts(loop.step)
    loop.step(900)
    assert counts(loop.step) == early
    large.train()
    large.step(95)
    assert counts(large.step) == early
    functions, operations = early
    assert functions <= LIMIT
    assert operations <= 2  # the loss is read, and no other tensor is touched


def test_number_as_the_loss_asks_torch_for_nothing() -> None:
    loop = Loop()
    loop.step(10)
    assert counts(lambda: loop.scheduler.step(0.5))[1] == 0


def test_replicas_with_equal_learning_rates_follow_the_optimizer_of_the_loop() -> None:
    """Within a cycle hdet writes the groups of the loop alone; all replicas step with them."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    replicas = hdet.StackedReplicas(model, 3)
    optimizer = replicas.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    base = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scheduler = hdet.HDET(base, model=model, replicas=replicas, scout=None, sync_every=100)
    x = torch.randn(6, 2)
    for step in range(4):
        optimizer.zero_grad()
        losses = replicas.losses(lambda net, part: net(part).square().mean(), x)
        losses.sum().backward()
        optimizer.step()
        used = [each.param_groups[0]["lr"] for each in optimizer.each]
        assert used == [0.1 / (1 + step)] * 3
        scheduler.step(losses)


def test_quiet_steps_see_every_event_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of cycles, also after a jump of the counter and after a converge on demand."""
    quiet: list[int] = []
    step_quietly = CyclePhase.step_quietly

    def noted(phase: CyclePhase) -> None:
        quiet.append(phase._run.progress.step + 1)
        step_quietly(phase)

    monkeypatch.setattr(CyclePhase, "step_quietly", noted)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    base: LRScheduler = LambdaLR(optimizer, lambda _: 1.0)
    optimizer.step()
    scheduler = hdet.HDET(base, scout=None, sync_every=5, total_steps=17)
    for step in range(1, 18):
        if step == 8:
            scheduler.converge()
        scheduler.step(1.0)
    assert quiet == [2, 3, 4, 7, 9, 12, 13, 14]


def test_loss_in_memory_that_is_written_again_is_copied() -> None:
    loop = Loop()
    place = torch.zeros(())
    for value in (1.0, 2.0, 3.0):
        place.fill_(value)
        loop.scheduler.step(place)
    means: Tensor = loop.scheduler._run.training_loss.rows()[:, 0]
    assert means.tolist() == [2.0]
