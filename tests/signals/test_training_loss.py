"""Losses stay on their device until a cycle ends."""

import math

import pytest
import torch
from torch import nn

import hdet
from hdet.signals.training_loss import TrainingLoss


def test_mean_loss_is_weighted_and_exact() -> None:
    signal = TrainingLoss(1)
    for _ in range(1000):
        signal.add(torch.tensor(0.1, dtype=torch.float32, requires_grad=True), 1.0)
    signal.add(5, 3.0)
    ((mean, count, _),) = signal.rows().tolist()
    tenth = float(torch.tensor(0.1, dtype=torch.float32))
    assert mean == pytest.approx((1000 * tenth + 15) / 1003, rel=1e-14)
    assert count == 1001


def test_clear_forgets_the_losses_of_the_last_cycle() -> None:
    signal = TrainingLoss(2)
    signal.add(torch.tensor([1.0, 2.0]), 1.0)
    signal.clear()
    assert signal.rows()[:, 1].tolist() == [0.0, 0.0]
    signal.add(torch.tensor([3.0, 4.0]), 1.0)
    assert signal.rows()[:, :2].tolist() == [[3.0, 1.0], [4.0, 1.0]]


def test_rows_changes_nothing_and_losses_are_copied() -> None:
    asked, quiet, place = TrainingLoss(2), TrainingLoss(2), torch.zeros(2)
    for step in range(150):
        place.copy_(torch.tensor([step % 7, 0.1 * step]))
        for signal in (asked, quiet):
            signal.add(place, 1.0 if step < 100 else 2.0)
        asked.rows()
    assert asked.rows().equal(quiet.rows())
    losses = torch.tensor([[step % 7, 0.1 * step] for step in range(150)]).double()
    weights = torch.tensor([1.0] * 100 + [2.0] * 50).double()
    want = (weights[:, None] * losses).sum(0) / weights.sum()
    torch.testing.assert_close(quiet.rows()[:, 0], want)
    jumps = (losses.diff(dim=0) ** 2).sum(0) / (2 * 149 * 150)
    torch.testing.assert_close(quiet.rows()[:, 2], jumps.sqrt())


def test_losses_may_differ_in_type_and_shape() -> None:
    signal = TrainingLoss(1)
    kinds = [torch.tensor([1.0]), torch.tensor(2.0, dtype=torch.float64), 3, torch.tensor([[4]])]
    for loss in kinds:
        signal.add(loss, 1.0)
    ((mean, count, error),) = signal.rows().tolist()
    assert (mean, count) == (2.5, 4)
    assert error == pytest.approx((3 / (2 * 3 * 4)) ** 0.5, rel=1e-14)  # three jumps of one


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_that_are_not_finite_are_left_out_unless_the_last_is(bad: float) -> None:
    """Also the first of all, and several in a row; but not one that the cycle ends with."""
    signal, other = TrainingLoss(2), TrainingLoss(2)
    for step in range(150):
        losses = torch.tensor([1.0 + step % 3, 0.1 * step])
        is_skipped = step % 50 in (0, 7, 8)
        if not is_skipped:
            other.add(losses, 1.0)
        signal.add(torch.tensor([bad, float(losses[1])]) if is_skipped else losses, 1.0)
    assert signal.rows()[0, 0] == pytest.approx(float(other.rows()[0, 0]), rel=1e-14)
    assert signal.rows()[0, 2] == pytest.approx(float(other.rows()[0, 2]), rel=1e-14)
    assert bool(signal.rows().isfinite().all())
    signal.add(torch.tensor([bad, 1.0]), 1.0)
    assert signal.rows()[:, 0].isfinite().tolist() == [False, True]


def test_steps_within_a_cycle_read_no_loss_from_the_device() -> None:
    """A tensor on the meta device has no value: reading it raises an error."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = hdet.OneCycleHDET(optimizer, 0.1, total_steps=100, sync_every=50)
    for _ in range(49):
        optimizer.step()
        scheduler.observe(torch.empty((), device="meta"), weight=2.0)
        scheduler.step(torch.empty((), device="meta"))
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        scheduler.step()


def test_standard_error_measures_noise_and_not_the_trend() -> None:
    signal = TrainingLoss(2)
    noise = torch.randn(4000, 2, dtype=torch.float64)
    trend = torch.linspace(50, 0, 4000, dtype=torch.float64)[:, None]
    for losses in noise + trend:
        signal.add(losses, 1.0)
    errors = signal.rows()[:, 2]
    torch.testing.assert_close(
        errors, torch.full((2,), 4000**-0.5, dtype=torch.float64), rtol=0.05, atol=0.0
    )


def test_standard_error_of_one_loss_is_nan() -> None:
    signal = TrainingLoss(1)
    signal.add(1.0, 1.0)
    assert signal.rows()[0, 2].isnan()
    signal.add(3.0, 1.0)
    torch.testing.assert_close(signal.rows()[0, 2].item(), 1.0)  # a jump of 2: sqrt(4 / 2 / 2)
    signal.clear()
    signal.add(9.0, 1.0)
    assert signal.rows()[0, 2].isnan()
