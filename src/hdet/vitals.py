"""How replicas fare in a round of a scout: does a learning rate kill one, or a bad batch?

A learning rate that is too high makes losses rise before they are not finite any more. A batch that
has no finite loss comes out of the blue. The values stay on their device until somebody asks.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hdet.replicas import Replicas


class Fate(NamedTuple):
    """Of one replica."""

    num: float
    """Losses that were finite, before the first that was not."""
    first: float
    last: float
    """Of these."""


class Vitals:
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

    def struck(self, replicas: Replicas, num_steps: int, factors: Sequence[float]) -> list[bool]:
        """Who had good losses until one was not finite, of all replicas. All processes must ask.

        One step is enough for what is far too high: after that it counts only if somebody with a
        higher learning rate has outlived it.
        """
        unknown = torch.full((len(replicas.local), 3), math.nan, dtype=torch.float64)
        rows = replicas.pool(unknown if self._rows is None else self._rows).flatten(2)
        rows = torch.cat([_least(rows[..., :1]), rows[..., 1:].nanmean(1)], 1)
        fates = [Fate(*row) for row in replicas.gather(rows).tolist()]
        good = _highest([fate.first for fate in fates])
        above = max((f for f, fate in zip(factors, fates, strict=True) if fate.num > 1), default=0)
        return [
            fate.num < num_steps
            and (fate.num != 1 or factor < above)
            and (fate.num == 0 or fate.last <= good)
            for factor, fate in zip(factors, fates, strict=True)
        ]


def _least(values: Tensor) -> Tensor:
    """Over what a replica consists of; what has no losses of its own does not count."""
    return torch.where(values.isnan(), math.inf, values).amin(1)


def _highest(firsts: Sequence[float]) -> float:
    """What losses are like before anybody has moved."""
    return max((loss for loss in firsts if math.isfinite(loss)), default=-math.inf)
