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


class Bucket(NamedTuple):
    """A run of elements that is sent at once."""

    wire: Tensor
    """What travels: a slice of a tensor itself, or a piece of the scratch."""
    sources: list[Tensor]
    """The tensors packed into `wire`; none if it is one of them."""
    views: list[Tensor]
    """Their places in `wire`."""

    def load(self) -> Tensor:
        if self.sources:
            torch._foreach_copy_(self.views, self.sources)
        return self.wire

    def store(self) -> None:
        if self.sources:
            torch._foreach_copy_(self.sources, self.views)


class Buckets:
    """The buckets of the tensors it was last asked for; kept, since cutting them takes time."""

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self._plans: dict[tuple[tuple[int, int], ...], list[Bucket]] = {}
        self._in_use: set[tuple[tuple[int, int], ...]] = set()
        self._scratch: dict[torch.device, Tensor] = {}

    def of(self, tensors: Sequence[Tensor], device: torch.device | None = None) -> list[Bucket]:
        """The buckets of `tensors`, on `device` if the wire cannot take them where they are."""
        # Addresses, not identities: `parameter.data = ...` moves a tensor under its name.
        key = tuple((tensor.data_ptr(), tensor.numel()) for tensor in tensors)
        if key not in self._plans:
            # A plan keeps its tensors alive: forget those that nobody has asked for of late.
            self._plans = {k: plan for k, plan in self._plans.items() if k in self._in_use}
            self._in_use.clear()
            self._plans[key] = self._cut(tensors, device)
        self._in_use.add(key)
        return self._plans[key]

    def _cut(self, tensors: Sequence[Tensor], device: torch.device | None) -> list[Bucket]:
        piece_bytes = self.bucket_bytes // SLOTS // 16 * 16  # aligned for every dtype
        in_place: list[Bucket] = []
        small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for flat in map(flatten, tensors):
            place, wire = device or flat.device, wire_dtype(flat.dtype)
            parts = flat.split(piece_bytes // wire.itemsize)
            fits_the_wire = (place, wire) == (flat.device, flat.dtype)
            if fits_the_wire and flat.nbytes >= min(IN_PLACE_BYTES, piece_bytes):
                in_place.extend(Bucket(part, [], []) for part in parts)
            else:
                small.setdefault((place, wire), []).extend(parts)
        groups = [
            (place, wire, group)
            for (place, wire), parts in small.items()
            for group in _fill(parts, piece_bytes // wire.itemsize)
        ]
        return in_place + self._pack(groups, piece_bytes)

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
            buckets.append(Bucket(wire, parts, list(wire.split(sizes))))
        return buckets

    def _memory(self, device: torch.device, num_bytes: int) -> Tensor:
        held = self._scratch.get(device)
        if held is None or held.numel() < num_bytes:
            self._plans.clear()  # they hold on to the smaller scratch
            held = self._scratch[device] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return held


def _fill(parts: list[Tensor], capacity: int) -> Iterator[list[Tensor]]:
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
    if dtype.is_floating_point:
        return torch.float32 if dtype.itemsize < 4 else dtype
    return dtype if dtype in (torch.int32, torch.int64, torch.uint8) else torch.int64
