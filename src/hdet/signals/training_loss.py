"""What replicas are compared by: the mean loss of a cycle, kept on the device until it ends.

Its standard error comes from the jumps between one loss and the next, so that a loss that falls
steadily through the cycle does not look noisy. One that is not finite, with finite ones after it,
is left out: its step was skipped, or the weights will tell. A cycle that ends with one is lost.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet.tensors.dtensor import whole

TOGETHER = 64
"""So many losses are added up at once: one by one they would cost more calls than the schedule."""


class Totals(NamedTuple):
    """Of the finite losses of each local replica so far: their weighted sum, their weights, how
    many there are, the squares of the jumps from one to the next, and the last of them; and the
    last of all."""

    sums: Tensor
    weights: Tensor
    num: Tensor
    jumps: Tensor
    last: Tensor
    end: Tensor


class TrainingLoss:
    """Running weighted sum of the losses that each local replica saw in this cycle."""

    def __init__(self, num_local: int) -> None:
        self._num_local = num_local
        self._device: torch.device | None = None
        """That losses come from."""
        self._first: Tensor | None = None
        self.clear()

    def clear(self) -> None:
        self._totals: Totals | None = None
        self._waiting: list[Tensor] = []
        """Losses of weight `_waiting_weight` that are not in the sums yet."""
        self._waiting_weight = 1.0
        self.num_observed = 0

    def start(self) -> None:
        """All replicas stand where they once began: the next loss is a first one again."""
        self._first = None

    def add(self, loss: Any, weight: float) -> None:
        """One loss for each local replica. No value is read back: the device never waits."""
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"`weight` must be a finite number above 0, got {weight!r}.")
        if not isinstance(loss, (Tensor, int, float)):
            raise TypeError(f"`loss` must be a tensor or a number, got {loss!r}.")
        given = loss if isinstance(loss, Tensor) else torch.as_tensor(loss)
        if given.requires_grad:
            given = given.detach()
        # A copy: a captured graph writes every loss to the same place.
        values = whole(given).clone()
        if values.numel() != self._num_local:
            raise ValueError(
                f"`loss` must hold {self._num_local} number(s), one for each replica of this "
                f"process, got shape {tuple(values.shape)}."
            )
        if weight != self._waiting_weight:
            self._add_up()
            self._waiting_weight = weight
        self._waiting.append(values)
        if self._first is None:
            self._first, self._device = values, values.device
        self.num_observed += 1
        if len(self._waiting) == TOGETHER:
            self._add_up()

    def _add_up(self) -> None:
        """Those that wait into the sums."""
        self._totals, self._waiting = self._with_waiting(), []

    def _with_waiting(self) -> Totals | None:
        if not self._waiting:
            return self._totals
        rows = _exact(_rows(self._waiting))
        zeros = torch.zeros_like(rows[0])
        nothing = Totals(zeros, zeros, zeros, zeros, zeros + math.nan, zeros)
        known = [tensor.to(rows.device) for tensor in self._totals or nothing]
        sums, weights, num, jumps, last, _ = known
        fine, end = rows.isfinite(), rows[-1]
        # What is not finite counts as the one before it, from which nothing jumps.
        rows = _filled(torch.cat([last[None], rows]))
        jumped = rows.diff(dim=0).nan_to_num(0.0).square_().sum(0)
        here, weight = fine.sum(0), self._waiting_weight
        return Totals(
            sums + weight * torch.where(fine, rows[1:], 0.0).sum(0),
            weights + weight * here,
            num + here,
            jumps + jumped,
            rows[-1],
            end,
        )

    def last(self) -> Tensor | None:
        """The last loss of each local replica; none if there was none in this cycle."""
        if self._waiting:
            return _exact(self._waiting[-1].reshape(-1))
        return None if self._totals is None else self._totals.end

    def first(self) -> Tensor:
        """The first loss, for each local replica: that of the weights it has set out with."""
        if self._first is None:
            return torch.full((self._num_local,), math.nan, dtype=torch.float64)
        return _exact(self._first.reshape(-1))

    def rows(self) -> Tensor:
        """For each local replica: mean loss (0 if there was none, and the last if that is not
        finite), number of observations, and the standard error of the mean (not a number below two
        finite ones)."""
        totals = self._with_waiting()  # whoever asks in between leaves no trace
        if totals is None:
            return _exact(torch.zeros(self._num_local, 3, device=self._device))
        num, end = totals.num, totals.end
        means = torch.where(end.isfinite(), totals.sums / totals.weights, end)
        counts = torch.full_like(means, self.num_observed)
        scale = torch.where(num > 1, 2 * (num - 1) * num, math.nan)
        return torch.stack([means, counts, (totals.jumps / scale).sqrt()], dim=1)


def _filled(rows: Tensor) -> Tensor:
    """The last finite value so far, in every column."""
    places = torch.arange(len(rows), device=rows.device)[:, None].expand_as(rows)
    return rows.gather(0, torch.where(rows.isfinite(), places, 0).cummax(0).values)


def _rows(losses: list[Tensor]) -> Tensor:
    """One row for each: they may differ in type, shape and device, if the loop says so."""
    if len({(loss.shape, loss.dtype, loss.device) for loss in losses}) > 1:
        device = losses[-1].device
        losses = [_exact(loss.to(device).reshape(-1)) for loss in losses]
    return torch.stack(losses).view(len(losses), -1)


def _exact(values: Tensor) -> Tensor:
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)
