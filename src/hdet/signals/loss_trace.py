"""LossTrace: how the losses of a search round went, kept on the device until the round ends."""

import math

import torch
from torch import Tensor

from hdet.lr_search.observations import LossSummary
from hdet.replicas.protocol import Replicas


class LossTrace:
    """The losses of the replicas of this process since the start of a round.

    A replica counts its losses until the first one that is not finite.
    """

    def __init__(self) -> None:
        self._summaries: Tensor | None = None
        """One row for each replica, with the fields of a LossSummary as columns."""
        self._has_only_finite: Tensor | None = None

    def add(self, losses: Tensor | None) -> None:
        """Add one loss for each replica of this process; None adds nothing."""
        if losses is None:
            return
        if self._summaries is None or self._has_only_finite is None:
            zeros = torch.zeros_like(losses)
            self._summaries = torch.stack([zeros, losses, losses], 1)
            self._has_only_finite = torch.ones_like(losses, dtype=torch.bool)
        counts = self._has_only_finite = self._has_only_finite & losses.isfinite()
        num, first, last = self._summaries.unbind(1)
        self._summaries = torch.stack([num + counts, first, torch.where(counts, losses, last)], 1)

    def summaries(self, replicas: Replicas) -> list[LossSummary]:
        """One summary for each replica of the run. All processes must call this together."""
        unknown = torch.full((len(replicas.local), 3), math.nan, dtype=torch.float64)
        rows = replicas.gather_parts(unknown if self._summaries is None else self._summaries)
        rows = torch.cat([_least_known(rows[..., :1]), rows[..., 1:].nanmean(1)], 1)
        return [LossSummary(*row) for row in replicas.gather(rows).tolist()]


def _least_known(values: Tensor) -> Tensor:
    """The least value over the processes of a replica; processes without losses do not count."""
    return torch.where(values.isnan(), math.inf, values).amin(1)
