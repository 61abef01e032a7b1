"""What replicas are compared by: the mean loss of a cycle, kept on the device until it ends.

Its standard error comes from the jumps between one loss and the next, so that a loss that falls
steadily through the cycle does not look noisy.
"""

import math
from typing import Any

import torch
from torch import Tensor

from hdet.shards import whole


class LossSignal:
    """Running weighted sum of the losses that each local replica saw in this cycle."""

    def __init__(self, num_local: int) -> None:
        self._num_local = num_local
        self._sums: Tensor | None = None
        self._jumps: Tensor | None = None
        self._first: Tensor | None = None
        self.clear()

    def clear(self) -> None:
        for kept in (self._sums, self._jumps):
            if kept is not None:
                kept.zero_()
        self._last: Tensor | None = None
        self._weight = 0.0
        self.num_observed = 0

    def set_out(self) -> None:
        """All replicas stand where they once began: the next loss is a first one again."""
        self._first = None

    def add(self, loss: Any, weight: float) -> None:
        """One loss for each local replica. No value is read back: the device never waits."""
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"`weight` must be a finite number above 0, got {weight!r}.")
        if not isinstance(loss, (Tensor, int, float)):
            raise TypeError(f"`loss` must be a tensor or a number, got {loss!r}.")
        values = whole(torch.as_tensor(loss).detach())
        if values.numel() != self._num_local:
            raise ValueError(
                f"`loss` must hold {self._num_local} number(s), one for each replica of this "
                f"process, got shape {tuple(values.shape)}."
            )
        exact = torch.float32 if values.device.type == "mps" else torch.float64
        values = values.reshape(-1).to(exact)
        self._first = values if self._first is None else self._first
        self._sums = _on(values.device, self._sums, values)
        self._jumps = _on(values.device, self._jumps, values)
        self._sums.add_(values, alpha=weight)
        if self._last is not None:
            self._jumps.addcmul_(*[values - self._last.to(values.device)] * 2)
        self._last = values
        self._weight += weight
        self.num_observed += 1

    def first(self) -> Tensor:
        """The first loss, for each local replica: that of the weights it has set out with."""
        if self._first is None:
            return torch.full((self._num_local,), math.nan, dtype=torch.float64)
        return self._first

    def rows(self) -> Tensor:
        """For each local replica: mean loss (0 if there was none), number of observations, and
        the standard error of the mean (not a number below two observations)."""
        if self._sums is None or self._jumps is None:
            return torch.zeros(self._num_local, 3, dtype=torch.float64)
        means = self._sums / self._weight if self._weight else self._sums
        num = self.num_observed
        counts = torch.full_like(means, num)
        scale = 2 * (num - 1) * num if num > 1 else math.nan
        return torch.stack([means, counts, (self._jumps / scale).sqrt()], dim=1)


def _on(device: torch.device, kept: Tensor | None, values: Tensor) -> Tensor:
    """A running sum, on the device that losses come from now."""
    if kept is None:
        return torch.zeros_like(values)
    return kept if kept.device == device else kept.to(device)
