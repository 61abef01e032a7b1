"""What replicas are compared by: the mean loss of a cycle, kept on the device until it ends."""

import math
from typing import Any

import torch
from torch import Tensor


class LossSignal:
    """Running weighted sum of the losses that each local replica saw in this cycle."""

    def __init__(self, num_local: int) -> None:
        self._num_local = num_local
        self._sums: Tensor | None = None
        self.clear()

    def clear(self) -> None:
        if self._sums is not None:
            self._sums.zero_()
        self._weight = 0.0
        self.num_observed = 0

    def add(self, loss: Any, weight: float) -> None:
        """One loss for each local replica. No value is read back: the device never waits."""
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"`weight` must be a finite number above 0, got {weight!r}.")
        if not isinstance(loss, (Tensor, int, float)):
            raise TypeError(f"`loss` must be a tensor or a number, got {loss!r}.")
        values = torch.as_tensor(loss).detach()
        if values.numel() != self._num_local:
            raise ValueError(
                f"`loss` must hold {self._num_local} number(s), one for each replica of this "
                f"process, got shape {tuple(values.shape)}."
            )
        if self._sums is None or self._sums.device != values.device:
            exact = torch.float32 if values.device.type == "mps" else torch.float64
            earlier = self._sums
            self._sums = torch.zeros(self._num_local, dtype=exact, device=values.device)
            if earlier is not None:
                self._sums += earlier.to(values.device)
        self._sums.add_(values.reshape(-1), alpha=weight)
        self._weight += weight
        self.num_observed += 1

    def rows(self) -> Tensor:
        """Mean loss (0 if there was none) and number of observations, for each local replica."""
        if self._sums is None:
            return torch.zeros(self._num_local, 2, dtype=torch.float64)
        means = self._sums / self._weight if self._weight else self._sums
        counts = torch.full_like(means, self.num_observed)
        return torch.stack([means, counts], dim=1)
