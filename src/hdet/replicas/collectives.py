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
    """One replica in each process, and a wire between them, on which tensors travel in buckets."""

    size: int
    local: range

    def __init__(self, bucket_bytes: int, device_types: Sequence[str]) -> None:
        self._devices = device_types
        self._buckets = Buckets(bucket_bytes, device_types)

    @abstractmethod
    def begin_reduce(self, wire: Tensor, op: Any) -> Any:
        """Start to reduce a tensor over all replicas, in place; what to `wait()` for."""

    def are_finite(self, rows: Rows) -> Tensor:
        # No sum with a nan or an infinity is finite, and it is the cheapest pass over memory there
        # is. Weights so large that their sum overflows count as not finite: they are lost anyway.
        plan = self._buckets.of(rows[0])
        sums = [bucket.load().sum() for bucket in plan.buckets]
        plan.is_loaded = plan.fits  # the average that follows need not pack again
        if not sums:
            return torch.ones(1, dtype=torch.bool)
        totals = [total.to(device=sums[0].device, dtype=torch.float64) for total in sums]
        return torch.stack(totals).isfinite().all()[None]

    def average_(self, rows: Rows, fit: Sequence[int], *, once: bool = False) -> int:
        included = self.local[0] in fit
        plan = self._buckets.of(rows[0])
        loads, plan.is_loaded = not plan.is_loaded, False

        def fill(bucket: Bucket) -> None:
            if loads:
                bucket.load()
            if not included:
                bucket.wire.zero_()  # not times zero: nan * 0 is nan

        def empty(bucket: Bucket) -> None:
            bucket.wire.div_(len(fit))
            bucket.store()

        sent = self._reduce(plan, dist.ReduceOp.SUM, fill, empty)
        if once:
            self._buckets.forget(rows[0])
        return sent

    def begin_average(self, rows: Rows) -> Means:
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, flat in enumerate(rows[0]):
            kinds.setdefault((flat.device, wire_dtype(flat.dtype)), []).append(place)
        under_way = []
        for (device, dtype), places in kinds.items():
            home = self._home(device)
            wire = torch.cat([rows[0][place].to(home, dtype) for place in places])
            work = self.begin_reduce(wire, dist.ReduceOp.SUM)
            under_way.append((work, wire, places))

        def wait() -> list[Tensor]:
            means: dict[int, Tensor] = {}
            for work, wire, places in under_way:
                work.wait()
                parts = wire.div_(self.size).split([rows[0][place].numel() for place in places])
                means.update(zip(places, parts, strict=True))
            return [means[place].to(flat.device) for place, flat in enumerate(rows[0])]

        return wait

    def maximum_(self, rows: Rows) -> int:
        plan = self._buckets.of(rows[0])
        return self._reduce(plan, dist.ReduceOp.MAX, Bucket.load, Bucket.store)

    def _reduce(self, plan: Plan, op: Any, fill: Any, empty: Any) -> int:
        """All-reduce bucket by bucket: while one is on the wire, others are filled and emptied."""
        on_the_wire: deque[tuple[Any, Bucket]] = deque()

        def land() -> None:
            work, bucket = on_the_wire.popleft()
            work.wait()
            empty(bucket)

        sent = 0
        for bucket in plan.buckets:
            if len(on_the_wire) == SLOTS:
                land()
            fill(bucket)
            work = self.begin_reduce(bucket.wire, op)
            on_the_wire.append((work, bucket))
            sent += bucket.wire.nbytes
        while on_the_wire:
            land()
        return sent

    def _home(self, device: torch.device) -> torch.device:
        """Where the wire takes what lies on a device."""
        return device if device.type in self._devices else torch.device(self._devices[0])
