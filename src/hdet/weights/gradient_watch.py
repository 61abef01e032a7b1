"""GradientWatch: whether gradients have vanished since the first step. A dead model has none."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet.tensors.dtensor import local
from hdet.weights.inventory import ReplicaTensors

VANISHED_RATIO = 1e-4
"""A gradient has vanished if its norm is below this share of what it was in the first step."""


class GradientWatch:
    """Compares the gradients of the first replica of this process with those of the first step."""

    def __init__(self, local_tensors: Sequence[ReplicaTensors]) -> None:
        self._local = local_tensors
        self._first: dict[int, Tensor] = {}
        """Parameter (by its id) -> the norm of its gradient in the first step."""

        self.is_due = True
        """Whether the next step is the first one."""

    def start(self) -> None:
        """Keep the norms of the present gradients. A loop may have cleared them already."""
        self._first = self._norms()
        self.is_due = False

    def vanished(self) -> float | Tensor:
        """The share of tensors whose gradient has vanished; 0 where that is not known.

        A parameter without a gradient counts as known only if it has one now.
        """
        now = self._norms() if self._first else {}
        known = [key for key in self._first if key in now]
        if not known:
            return 0.0
        first = torch.stack([self._first[key] for key in known])
        present = torch.stack([now[key] for key in known])
        # A step that GradScaler skipped has infinite gradients, with which none can be compared.
        has_vanished = (present < VANISHED_RATIO * first) & (first > 0) & first.isfinite()
        return has_vanished.double().mean()

    @torch.no_grad()
    def _norms(self) -> dict[int, Tensor]:
        parameters = [p for p in self._local[0].optimized() if p.grad is not None]
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        if not gradients or any(g.is_sparse for g in gradients):
            return {}
        norms = torch._foreach_norm(gradients)
        device = norms[0].device
        return {id(p): norm.to(device).real for p, norm in zip(parameters, norms, strict=True)}
