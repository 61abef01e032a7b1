"""TrainingLoss: the mean loss of a cycle and its standard error, without waiting for the device.

The standard error comes from the differences between successive losses. So a loss that falls
steadily through the cycle does not look noisy. A loss that is not finite is left out if finite ones
follow it: either its step was skipped, or the check of the weights finds the damage. A cycle that
ends with such a loss is lost.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet.tensors.dtensor import whole

BATCH_SIZE = 1024
"""Losses are added in batches of this size: one by one, they would cost too many calls."""

Observed = float | list[float] | Tensor
"""A loss for each replica of this process: numbers that the host knows, or a tensor elsewhere."""


class Totals(NamedTuple):
    """Sums over the losses so far, one entry for each replica of this process."""

    sums: Tensor
    """Weighted sum of the finite losses."""
    weights: Tensor
    """Sum of their weights."""
    num: Tensor
    """Number of finite losses."""
    squared_differences: Tensor
    """Sum of the squared differences between successive finite losses."""
    last_finite: Tensor
    last: Tensor

    def plus(self, later: "Totals") -> "Totals":
        """The totals of both; the last losses are the later ones."""
        return Totals(
            self.sums + later.sums,
            self.weights + later.weights,
            self.num + later.num,
            self.squared_differences + later.squared_differences,
            later.last_finite,
            later.last,
        )


class TrainingLoss:
    """The losses that each replica of this process observed in the current cycle."""

    def __init__(self, num_local: int) -> None:
        self._num_local = num_local
        self._device: torch.device | None = None
        """The device of the losses."""
        self._first: Observed | None = None
        self.clear()

    def clear(self) -> None:
        """Start a new cycle."""
        self._totals: Totals | None = None
        self._waiting: list[Observed] = []
        """Losses of weight `_waiting_weight` that are not in the totals yet."""
        self._waiting_weight = 1.0
        self.num_observed = 0

    def clear_first(self) -> None:
        """Forget the first loss: replicas were restored, and the next loss is their first."""
        self._first = None

    def add(self, loss: Any, weight: float) -> None:
        """Copy one loss for each replica of this process. The host never waits for the device.

        A captured graph writes every loss into the same memory, and a loss holds on to its graph.

        Args:
            loss: A tensor with one number for each replica of this process, or a number.
            weight: The weight of this loss in the mean.

        Raises:
            TypeError: `loss` is neither a tensor nor a number.
            ValueError: `weight` is not above 0, or `loss` has another number of elements.
        """
        if not 0 < weight < math.inf:
            raise ValueError(f"`weight` must be a finite number above 0, got {weight!r}.")
        values = self._copied(loss)
        if weight != self._waiting_weight:
            self._add_waiting()
            self._waiting_weight = weight
        self._waiting.append(values)
        if self._first is None:
            self._first = values
            self._device = values.device if isinstance(values, Tensor) else None
        self.num_observed += 1
        if len(self._waiting) == BATCH_SIZE:
            self._add_waiting()

    def _copied(self, loss: Any) -> Observed:
        """The values of a loss: numbers if it lies in host memory, where reading does not wait."""
        if not isinstance(loss, Tensor):
            # NumPy's numbers are Real; asking for that is slow.
            if not isinstance(loss, (float, int)) and not isinstance(loss, Real):
                raise TypeError(f"`loss` must be a tensor or a number, got {loss!r}.")
            self._check_num(1, ())
            return float(loss)
        values = whole(loss)
        if values.numel() != self._num_local:
            self._check_num(values.numel(), values.shape)
        if not values.is_cpu:
            return values.detach().clone()
        if self._num_local == 1:
            return float(values.item())
        numbers: list[float] = (values if values.dim() == 1 else values.detach().flatten()).tolist()
        return numbers

    def _check_num(self, num: int, shape: Sequence[int]) -> None:
        if num != self._num_local:
            raise ValueError(
                f"`loss` must hold {self._num_local} number(s), one for each replica of this "
                f"process, got shape {tuple(shape)}."
            )

    def _add_waiting(self) -> None:
        self._totals, self._waiting = self._with_waiting(), []

    def _with_waiting(self) -> Totals | None:
        """The totals with the waiting losses; the totals themselves stay as they are."""
        if not self._waiting:
            return self._totals
        losses = _exact(_rows(self._waiting))
        known, weight = self._totals, self._waiting_weight
        finite = losses.isfinite()
        filled = torch.where(finite, losses, math.nan)
        if known is not None:
            known = Totals(*(tensor.to(losses.device) for tensor in known))
            filled = torch.cat([known.last_finite[None], filled])
        # A loss that is not finite takes the value before it: the difference is 0.
        filled = _fill_forward(filled)
        squares = (filled[1:] - filled[:-1]).nan_to_num_(0.0).square_().sum(0)
        num = finite.sum(0)
        sums = weight * torch.where(finite, filled[-len(losses) :], 0.0).sum(0)
        added = Totals(sums, weight * num, num, squares, filled[-1], losses[-1])
        return added if known is None else known.plus(added)

    def last(self) -> Tensor | None:
        """The last loss of each replica of this process; None without a loss in this cycle."""
        if self._waiting:
            return _row(self._waiting[-1])
        return None if self._totals is None else self._totals.last

    def first(self) -> Tensor:
        """The first loss of each replica of this process, at the weights that it started with."""
        if self._first is None:
            return torch.full((self._num_local,), math.nan, dtype=torch.float64)
        return _row(self._first)

    def rows(self) -> Tensor:
        """One row for each replica of this process, with three columns.

        Returns:
            The mean loss (0 without a loss; the last loss if that is not finite), the number of
            losses, and the standard error of the mean (nan below two finite losses).
        """
        totals = self._with_waiting()
        if totals is None:
            return _exact(torch.zeros(self._num_local, 3, device=self._device))
        num, last = totals.num, totals.last
        means = torch.where(last.isfinite(), totals.sums / totals.weights, last)
        counts = torch.full_like(means, self.num_observed)
        scale = torch.where(num > 1, 2 * (num - 1) * num, math.nan)
        return torch.stack([means, counts, (totals.squared_differences / scale).sqrt()], dim=1)


def _fill_forward(rows: Tensor) -> Tensor:
    """Replace what is not finite by the last finite value before it, in every column."""
    places = torch.arange(len(rows), device=rows.device)[:, None].expand_as(rows)
    return rows.gather(0, torch.where(rows.isfinite(), places, 0).cummax(0).values)


def _rows(losses: list[Observed]) -> Tensor:
    """One row for each loss; their types, shapes and devices may differ."""
    tensors = [loss for loss in losses if isinstance(loss, Tensor)]
    if not tensors:
        return torch.tensor(losses, dtype=torch.float64).view(len(losses), -1)
    if len({(loss.shape, loss.dtype, loss.device) for loss in tensors}) > 1 or len(tensors) < len(
        losses
    ):
        tensors = [_row(loss).to(tensors[-1].device) for loss in losses]
    return torch.stack(tensors).view(len(losses), -1)


def _row(loss: Observed) -> Tensor:
    if isinstance(loss, Tensor):
        return _exact(loss.reshape(-1))
    return torch.tensor(loss, dtype=torch.float64).reshape(-1)


def _exact(values: Tensor) -> Tensor:
    """In float64, where the device has it."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)
