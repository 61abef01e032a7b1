"""The collectives of replicas that all live in this process."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hdet.replicas.protocol import Means, Rows
from hdet.replicas.stacked.rows import copy_rows_, maximum_of_rows, mean_of_rows
from hdet.tensors.ops import are_finite


class LocalReplicas:
    """N complete replicas in this process: collectives are operations on rows of tensors.

    Nothing is sent, so the number of bytes is always 0.
    """

    parts, part = 1, 0

    def __init__(self, num: int) -> None:
        self.size = num
        self.local = range(num)

    def collective_call(self, name: str, step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def unreplicated(self, named: Mapping[str, Tensor]) -> Collection[str]:
        return ()

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def gather_parts(self, rows: Tensor) -> Tensor:
        return rows[:, None]

    def gather_objects(self, description: Any) -> list[Any]:
        return [description]

    def are_finite(self, rows: Rows) -> Tensor:
        return torch.stack([are_finite(row) for row in rows])

    @torch.no_grad()
    def average_(self, rows: Rows, fit: Sequence[int], *, once: bool = False) -> int:
        copy_rows_(rows, mean_of_rows(rows, fit))
        return 0

    @torch.no_grad()
    def begin_average(self, rows: Rows) -> Means:
        means = [mean.clone() for mean in mean_of_rows(rows, range(self.size))]
        return lambda: means

    @torch.no_grad()
    def maximum_(self, rows: Rows) -> int:
        copy_rows_(rows, maximum_of_rows(rows))
        return 0

    @torch.no_grad()
    def copy_(self, rows: Rows, source: int, targets: Sequence[int]) -> int:
        copy_rows_([rows[target] for target in targets], rows[source])
        return 0
