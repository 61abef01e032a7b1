"""Buckets: how lists of tensors are sent without a copy of the model or a message per tensor.

A large tensor is reduced in place, slice by slice. Small tensors are packed into scratch memory.
The scratch is cut into `SLOTS` equal pieces, so that one is sent while the next is packed. Together
the pieces take at most `bucket_bytes`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SLOTS = 4
# Below this many bytes a message of its own costs more than the two copies of packing.
IN_PLACE_BYTES = 1 << 20
# Tensors below SMALL_BYTES are hashed together, because launches would dominate the time. At most
# JOINED_BYTES are joined at once.
SMALL_BYTES = 1 << 17
JOINED_BYTES = 1 << 24


class Bucket(NamedTuple):
    """Elements that are sent at once."""

    wire: Tensor
    """The memory that is sent: a slice of a tensor, or a piece of the scratch."""
    sources: list[Tensor]
    """The tensors that are packed into `wire`. Empty where `wire` is a slice of a tensor."""
    views: list[Tensor]
    """The views of `wire` that hold the sources."""
    joins: bool = False
    """Whether all sources have the device and dtype of `wire`."""

    def load(self) -> Tensor:
        """Copy the sources to the wire, and return it."""
        if self.joins:
            torch.cat(self.sources, out=self.wire)  # one call, where no element is converted
        elif self.sources:
            torch._foreach_copy_(self.views, self.sources)
        return self.wire

    def store(self) -> None:
        """Copy the wire back to the sources."""
        if self.sources:
            torch._foreach_copy_(self.sources, self.views)


class Plan:
    """The buckets of a list of tensors.

    `fits` says whether the scratch holds all of them at once, `is_loaded` whether it does now.
    """

    def __init__(self, tensors: Sequence[Tensor], buckets: list[Bucket]) -> None:
        self.tensors = tensors
        self.buckets = buckets
        self.fits = sum(bool(bucket.sources) for bucket in buckets) <= SLOTS
        self.is_loaded = False


class Buckets:
    """Makes the plans of lists of tensors, and caches those that were used last.

    A list is identified by its identity. Callers do not change a list, and make a new one when one
    of its tensors has new memory.

    Args:
        bucket_bytes: The size of the scratch memory on each device.
        device_types: The types of devices whose tensors can be sent.
    """

    def __init__(self, bucket_bytes: int, device_types: Sequence[str] = ("cpu", "cuda")) -> None:
        self.bucket_bytes = bucket_bytes
        self._device_types = device_types
        self._plans: dict[int, Plan] = {}
        self._in_use: set[int] = set()
        self._scratch: dict[torch.device, Tensor] = {}

    def of(self, tensors: Sequence[Tensor]) -> Plan:
        """The plan of a list of tensors."""
        key = id(tensors)  # the plan holds the list, so no other list gets this identity
        if key not in self._plans:
            # A plan keeps its tensors alive: drop the plans that were not used lately.
            self._plans = {k: plan for k, plan in self._plans.items() if k in self._in_use}
            self._in_use.clear()
            self._plans[key] = Plan(tensors, self._cut(tensors))
        for other in self._plans.values():
            other.is_loaded = other.is_loaded and other is self._plans[key]
        self._in_use.add(key)
        return self._plans[key]

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Drop the plan of a list, which keeps its tensors alive."""
        self._plans.pop(id(tensors), None)
        self._in_use.discard(id(tensors))

    def _cut(self, tensors: Sequence[Tensor]) -> list[Bucket]:
        piece_bytes = self.bucket_bytes // SLOTS // 16 * 16  # aligned for every dtype
        in_place: list[Bucket] = []
        small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for flat in map(flatten, tensors):
            place, wire = self._place(flat), wire_dtype(flat.dtype)
            parts = flat.split(piece_bytes // wire.itemsize)
            fits_the_wire = (place, wire) == (flat.device, flat.dtype)
            if fits_the_wire and flat.nbytes >= min(IN_PLACE_BYTES, piece_bytes):
                in_place.extend(Bucket(part, [], []) for part in parts)
            else:
                small.setdefault((place, wire), []).extend(parts)
        groups = [
            (place, wire, group)
            for (place, wire), parts in small.items()
            for group in fill(parts, piece_bytes // wire.itemsize)
        ]
        return in_place + self._pack(groups, piece_bytes)

    def _place(self, flat: Tensor) -> torch.device:
        """The device that a tensor is sent from.

        Adam keeps its step counts on the CPU, where NCCL cannot read them.
        """
        can_send = flat.device.type in self._device_types
        return flat.device if can_send else torch.device(self._device_types[0])

    def _pack(
        self, groups: list[tuple[torch.device, torch.dtype, list[Tensor]]], piece_bytes: int
    ) -> list[Bucket]:
        buckets = []
        for index, (device, dtype, parts) in enumerate(groups):
            sizes = [part.numel() for part in parts]
            num_bytes = sum(sizes) * dtype.itemsize
            # A model of one small bucket needs that memory alone, any other all slots.
            memory = self._memory(device, num_bytes if len(groups) == 1 else SLOTS * piece_bytes)
            start = index % SLOTS * piece_bytes
            wire = memory[start : start + num_bytes].view(dtype)
            joins = {(part.dtype, part.device) for part in parts} == {(dtype, device)}
            buckets.append(Bucket(wire, parts, list(wire.split(sizes)), joins))
        return buckets

    def _memory(self, device: torch.device, num_bytes: int) -> Tensor:
        held = self._scratch.get(device)
        if held is None or held.numel() < num_bytes:
            self._plans.clear()  # they hold the smaller scratch
            held = self._scratch[device] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return held


def fill(parts: list[Tensor], capacity: int) -> Iterator[list[Tensor]]:
    """Parts in order, in groups of at most `capacity` elements."""
    group: list[Tensor] = []
    room = capacity
    for part in parts:
        if part.numel() > room:
            yield group
            group, room = [], capacity
        group.append(part)
        room -= part.numel()
    if group:
        yield group


def packed(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Groups of indices: small tensors of one device and dtype together, large ones alone."""
    small: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    room: dict[tuple[torch.device, torch.dtype], int] = {}
    for index, tensor in enumerate(tensors):
        kind = (tensor.device, tensor.dtype)
        if not 0 < tensor.nbytes < SMALL_BYTES:
            yield [index]
            continue
        if tensor.nbytes > room.get(kind, 0):
            yield from filter(None, [small.pop(kind, [])])
            room[kind] = JOINED_BYTES
        small.setdefault(kind, []).append(index)
        room[kind] -= tensor.nbytes
    yield from small.values()


def flatten(tensor: Tensor) -> Tensor:
    """A flat view of a dense tensor, in the order of its memory.

    A channels-last weight is dense too: its dimensions are contiguous when sorted by stride.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_contiguous():
        tensor = tensor.permute(
            sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
        )
    return tensor.view(-1)


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are made in: half precision in float32, unusual integers in int64."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.float32 if dtype.itemsize < 4 else dtype
    return dtype if dtype in (torch.int32, torch.int64, torch.uint8) else torch.int64
