"""How tensors travel: large ones in slices of themselves, small ones packed, one bucket in all.

A converge must not need a second copy of the model, nor one message per tensor. So a tensor that
is large enough is reduced where it lies, slice by slice, and the small ones are packed into
scratch memory. The scratch is cut into `SLOTS` equal pieces, so that one can be on the wire while
the next is packed; together they are never more than `bucket_bytes`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SLOTS = 4
# Below this many bytes a message costs more than the two copies that packing costs.
IN_PLACE_BYTES = 1 << 20
# Below this many bytes a tensor is not worth the launches of a hash; so many are joined at most.
SMALL_BYTES = 1 << 17
JOINED_BYTES = 1 << 24


class Bucket(NamedTuple):
    """A run of elements that is sent at once."""

    wire: Tensor
    """What travels: a slice of a tensor itself, or a piece of the scratch."""
    sources: list[Tensor]
    """The tensors packed into `wire`; none if it is one of them."""
    views: list[Tensor]
    """Their places in `wire`."""
    joins: bool = False
    """Whether they lie on its device in its dtype."""

    def load(self) -> Tensor:
        if self.joins:
            torch.cat(self.sources, out=self.wire)  # in one call, where no number is converted
        elif self.sources:
            torch._foreach_copy_(self.views, self.sources)
        return self.wire

    def store(self) -> None:
        if self.sources:
            torch._foreach_copy_(self.sources, self.views)


class Plan:
    """The buckets of a list of tensors, and whether the scratch still holds all of them."""

    def __init__(self, tensors: Sequence[Tensor], buckets: list[Bucket]) -> None:
        self.tensors = tensors
        self.buckets = buckets
        self.fits = sum(bool(bucket.sources) for bucket in buckets) <= SLOTS
        self.is_loaded = False


class Buckets:
    """The plans of the lists it was last asked for; kept, since cutting them takes time.

    A list is known again by its identity: whoever hands one over does not change it, and makes a
    new one when a tensor has moved.
    """

    def __init__(self, bucket_bytes: int, device_types: Sequence[str] = ("cpu", "cuda")) -> None:
        self.bucket_bytes = bucket_bytes
        self._device_types = device_types  # of tensors that the wire takes where they are
        self._plans: dict[int, Plan] = {}
        self._in_use: set[int] = set()
        self._scratch: dict[torch.device, Tensor] = {}

    def of(self, tensors: Sequence[Tensor]) -> Plan:
        key = id(tensors)  # the plan holds the list, so nobody else can have its identity
        if key not in self._plans:
            # A plan keeps its tensors alive: forget those that nobody has asked for of late.
            self._plans = {k: plan for k, plan in self._plans.items() if k in self._in_use}
            self._in_use.clear()
            self._plans[key] = Plan(tensors, self._cut(tensors))
        for other in self._plans.values():
            other.is_loaded = other.is_loaded and other is self._plans[key]
        self._in_use.add(key)
        return self._plans[key]

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """A plan keeps its tensors alive: these are not needed any more."""
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
        """Adam keeps its step counts on the CPU, where NCCL cannot read them: they are packed."""
        taken = flat.device.type in self._device_types
        return flat.device if taken else torch.device(self._device_types[0])

    def _pack(
        self, groups: list[tuple[torch.device, torch.dtype, list[Tensor]]], piece_bytes: int
    ) -> list[Bucket]:
        buckets = []
        for index, (device, dtype, parts) in enumerate(groups):
            sizes = [part.numel() for part in parts]
            num_bytes = sum(sizes) * dtype.itemsize
            # A model of one small bucket pays for that; any other for all the slots.
            memory = self._memory(device, num_bytes if len(groups) == 1 else SLOTS * piece_bytes)
            start = index % SLOTS * piece_bytes
            wire = memory[start : start + num_bytes].view(dtype)
            joins = {(part.dtype, part.device) for part in parts} == {(dtype, device)}
            buckets.append(Bucket(wire, parts, list(wire.split(sizes)), joins))
        return buckets

    def _memory(self, device: torch.device, num_bytes: int) -> Tensor:
        held = self._scratch.get(device)
        if held is None or held.numel() < num_bytes:
            self._plans.clear()  # they hold on to the smaller scratch
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
    """Which tensors to join, by their index: small ones of a kind together, large ones alone."""
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
    """The elements of a dense tensor in the order of its memory, as a view; no copy.

    A channels-last weight is dense too: its dimensions, sorted by stride, are contiguous.
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
    """What a value is summed in: half precision in float32, odd integers in int64."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.float32 if dtype.itemsize < 4 else dtype
    return dtype if dtype in (torch.int32, torch.int64, torch.uint8) else torch.int64
