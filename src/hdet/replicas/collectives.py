"""Averages over processes in buckets, for every engine whose replicas are processes."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hdet.replicas.protocol import Means, Rows, SingleLocalReplica
from hdet.tensors.buckets import SLOTS, Bucket, Buckets, Plan, wire_dtype


class CollectiveReplicas(SingleLocalReplica, ABC):
    """One replica in each process. Tensors are reduced over the processes bucket by bucket."""

    size: int
    local: range

    def __init__(self, bucket_bytes: int, device_types: Sequence[str]) -> None:
        self._device_types = device_types
        self._buckets = Buckets(bucket_bytes, device_types)

    @abstractmethod
    def begin_reduce(self, wire: Tensor, op: Any) -> Any:
        """Start to reduce a tensor over all replicas, in place. Returns a work to `wait()` for."""

    def are_finite(self, rows: Rows) -> Tensor:
        # A sum with a nan or an infinity is not finite, and a sum is the cheapest pass over memory.
        # Weights so large that their sum overflows count as not finite: training has diverged.
        plan = self._buckets.of(rows[0])
        sums = [bucket.load().sum() for bucket in plan.buckets]
        plan.is_loaded = plan.fits  # the average that follows need not pack again
        if not sums:
            return torch.ones(1, dtype=torch.bool)
        totals = [total.to(device=sums[0].device, dtype=torch.float64) for total in sums]
        return torch.stack(totals).isfinite().all()[None]

    def average_(self, rows: Rows, fit: Sequence[int], *, once: bool = False) -> int:
        is_included = self.local[0] in fit
        plan = self._buckets.of(rows[0])
        must_load, plan.is_loaded = not plan.is_loaded, False

        def fill(bucket: Bucket) -> None:
            if must_load:
                bucket.load()
            if not is_included:
                bucket.wire.zero_()  # not times zero: nan * 0 is nan

        def empty(bucket: Bucket) -> None:
            bucket.wire.div_(len(fit))
            bucket.store()

        num_bytes = self._reduce(plan, dist.ReduceOp.SUM, fill, empty)
        if once:
            self._buckets.forget(rows[0])
        return num_bytes

    def begin_average(self, rows: Rows) -> Means:
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, flat in enumerate(rows[0]):
            kinds.setdefault((flat.device, wire_dtype(flat.dtype)), []).append(index)
        pending = []
        for (device, dtype), indices in kinds.items():
            target = self._wire_device(device)
            wire = torch.cat([rows[0][index].to(target, dtype) for index in indices])
            work = self.begin_reduce(wire, dist.ReduceOp.SUM)
            pending.append((work, wire, indices))

        def wait() -> list[Tensor]:
            means: dict[int, Tensor] = {}
            for work, wire, indices in pending:
                work.wait()
                pieces = wire.div_(self.size).split([rows[0][index].numel() for index in indices])
                means.update(zip(indices, pieces, strict=True))
            return [means[index].to(flat.device) for index, flat in enumerate(rows[0])]

        return wait

    def maximum_(self, rows: Rows) -> int:
        plan = self._buckets.of(rows[0])
        return self._reduce(plan, dist.ReduceOp.MAX, Bucket.load, Bucket.store)

    def _reduce(self, plan: Plan, op: Any, fill: Any, empty: Any) -> int:
        """All-reduce bucket by bucket. While some are sent, others are filled and emptied."""
        pending: deque[tuple[Any, Bucket]] = deque()

        def finish_first() -> None:
            work, bucket = pending.popleft()
            work.wait()
            empty(bucket)

        num_bytes = 0
        for bucket in plan.buckets:
            if len(pending) == SLOTS:
                finish_first()
            fill(bucket)
            work = self.begin_reduce(bucket.wire, op)
            pending.append((work, bucket))
            num_bytes += bucket.wire.nbytes
        while pending:
            finish_first()
        return num_bytes

    def _wire_device(self, device: torch.device) -> torch.device:
        """The device from which the process group sends tensors that lie on `device`."""
        if device.type in self._device_types:
            return device
        return torch.device(self._device_types[0])
