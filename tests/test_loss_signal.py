"""Losses stay on their device until a cycle ends."""

import pytest
import torch
from torch import nn

import hdet
from hdet.loss_signal import LossSignal


def test_the_mean_is_weighted_and_exact() -> None:
    signal = LossSignal(1)
    for _ in range(1000):
        signal.add(torch.tensor(0.1, dtype=torch.float32, requires_grad=True), 1.0)
    signal.add(5, 3.0)
    ((mean, count),) = signal.rows().tolist()
    tenth = float(torch.tensor(0.1, dtype=torch.float32))
    assert mean == pytest.approx((1000 * tenth + 15) / 1003, rel=1e-14)
    assert count == 1001


def test_it_starts_again_after_a_cycle() -> None:
    signal = LossSignal(2)
    signal.add(torch.tensor([1.0, 2.0]), 1.0)
    signal.clear()
    assert signal.rows()[:, 1].tolist() == [0.0, 0.0]
    signal.add(torch.tensor([3.0, 4.0]), 1.0)
    assert signal.rows().tolist() == [[3.0, 1.0], [4.0, 1.0]]


def test_no_step_within_a_cycle_reads_a_value_back() -> None:
    """A tensor on the meta device has no value: whoever asks for it raises an error."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = hdet.OneCycleHDET(optimizer, 0.1, total_steps=100, sync_every=50)
    for _ in range(49):
        optimizer.step()
        scheduler.observe(torch.empty((), device="meta"), weight=2.0)
        scheduler.step(torch.empty((), device="meta"))
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        scheduler.step()
