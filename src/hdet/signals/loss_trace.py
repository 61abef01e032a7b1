"""How replicas fare in a round of a scout, loss by loss; on their device, until somebody asks."""

import math

import torch
from torch import Tensor

from hdet.lr_search.observations import LossSummary
from hdet.replicas.protocol import Replicas


class LossTrace:
    """The losses of the replicas of this process since they have set out."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None
        """One row of a Fate for each."""
        self._alive: Tensor | None = None

    def note(self, losses: Tensor | None) -> None:
        """One for each, as they come."""
        if losses is None:
            return
        if self._rows is None or self._alive is None:
            zeros = torch.zeros_like(losses)
            self._rows = torch.stack([zeros, losses, losses], 1)
            self._alive = torch.ones_like(losses, dtype=torch.bool)
        self._alive = self._alive & losses.isfinite()
        num, first, last = self._rows.unbind(1)
        self._rows = torch.stack(
            [num + self._alive, first, torch.where(self._alive, losses, last)], 1
        )

    def summaries(self, replicas: Replicas) -> list[LossSummary]:
        """Of all replicas. All processes must ask."""
        unknown = torch.full((len(replicas.local), 3), math.nan, dtype=torch.float64)
        rows = replicas.gather_parts(unknown if self._rows is None else self._rows)
        rows = torch.cat([_least(rows[..., :1]), rows[..., 1:].nanmean(1)], 1)
        return [LossSummary(*row) for row in replicas.gather(rows).tolist()]


def _least(values: Tensor) -> Tensor:
    """Over what a replica consists of; what has no losses of its own does not count."""
    return torch.where(values.isnan(), math.inf, values).amin(1)
