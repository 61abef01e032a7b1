"""Schedule-Free optimizers: a constant learning rate, and modes for training and evaluation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn

import hdet

STEPS, EPOCH, LR = 700, 50, 1e-5


def loss_of(model: nn.Module, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 3, generator=draw, dtype=torch.float64)
    loss: Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return loss


class Training:
    """A loop as users of Schedule-Free write it, with hdet or at a given learning rate."""

    def __init__(self, lr: float, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.optimizer = AdamWScheduleFree(self.model.parameters(), lr=lr, warmup_steps=20)
        self.scheduler: Any = None
        if options:
            self.scheduler = hdet.HDET(self.optimizer, model=self.model, **options)

    def go(self, start: int, end: int, *, bad: int | None = None) -> None:
        self.optimizer.train()
        for step in range(start, end):
            self.optimizer.zero_grad()
            loss = loss_of(self.model, step) * (float("nan") if step == bad else 1.0)
            loss.backward()
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step(loss)
            if (step + 1) % EPOCH == 0:
                self.optimizer.eval()
                with torch.no_grad():
                    loss_of(self.model, 10**6)
                self.optimizer.train()
        self.optimizer.eval()

    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def group(self) -> dict[str, Any]:
        return {k: v for k, v in self.optimizer.param_groups[0].items() if k != "params"}


@pytest.mark.filterwarnings("ignore:the scout:UserWarning")
def test_run_after_a_scout_equals_a_plain_run_at_the_found_learning_rate() -> None:
    """The optimizer counts its steps and its highest learning rate in its groups."""
    ours = Training(LR, total_steps=STEPS, guard=None)
    start = 0
    while ours.scheduler.is_scouting:
        ours.go(start, start + 1)
        start += 1
    assert start > 0
    ours.go(start, STEPS)
    plain = Training(ours.scheduler.found_lr)
    plain.go(start, STEPS)
    assert torch.equal(ours.weights(), plain.weights())
    assert ours.group()["k"] == STEPS - start
    assert ours.group()["lr_max"] == ours.scheduler.found_lr


def test_guard_restores_the_average_and_the_mode_after_a_bad_batch() -> None:
    ours = Training(0.01, total_steps=STEPS, scout=None)
    ours.go(0, STEPS, bad=400)
    ours.optimizer.eval()
    assert loss_of(ours.model, 10**6) < 0.1
    assert ours.group()["k"] < STEPS  # steps were taken back
    assert not ours.group()["train_mode"]


def test_run_saved_in_evaluation_mode_resumes_bit_for_bit(tmp_path: Path) -> None:
    first = Training(0.01, total_steps=STEPS, scout=None)
    first.go(0, 2 * EPOCH)
    first.scheduler.converge()
    parts: tuple[Any, ...] = (first.model, first.optimizer, first.scheduler)
    torch.save([part.state_dict() for part in parts], tmp_path / "state")
    first.go(2 * EPOCH, 4 * EPOCH)
    second = Training(0.01, total_steps=STEPS, scout=None)
    parts = (second.model, second.optimizer, second.scheduler)
    for part, state in zip(parts, torch.load(tmp_path / "state", weights_only=True), strict=True):
        part.load_state_dict(state)
    second.go(2 * EPOCH, 4 * EPOCH)
    assert torch.equal(first.weights(), second.weights())
    assert first.group() == second.group()
