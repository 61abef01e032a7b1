"""A 64-bit hash of the bits of tensors that does not depend on hardware or order of execution."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hdet.tensors.buckets import flatten, packed

_GOLDEN = -7046029254386353131  # 2^64 / the golden ratio, odd, as a signed number
_MIXER = -4658895280553007687
_CARRY = 6364136223846793005
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """The hash of each tensor, on the device of the first. Small tensors are hashed together."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    device = tensors[0].device
    found: dict[int, Tensor] = {}
    for members in packed(tensors):
        if len(members) == 1:
            prints = fingerprint(tensors[members[0]])[None]
        else:
            prints = _together([flatten(tensors[member]) for member in members])
        found.update(zip(members, prints.to(device).unbind(), strict=True))
    return torch.stack([found[index] for index in range(len(tensors))])


def fingerprint(tensor: Tensor) -> Tensor:
    """The hash of a tensor. Different bits have the same hash with a probability of 2^-64.

    Sums of integers wrap around, so they do not depend on their order.
    """
    flat = flatten(tensor)
    bits = flat.view(_WORDS[flat.itemsize])
    # On the CPU a chunk that fits the cache, elsewhere one that is worth a launch.
    size = max(min(1 << 18 if flat.device.type == "cpu" else 1 << 22, flat.numel()), 1)
    places = torch.arange(1, size + 1, device=flat.device)
    total = torch.full((), flat.numel(), dtype=torch.int64, device=flat.device)
    for chunk in bits.split(size):
        total = total * _CARRY + _mixed(chunk, places[: chunk.numel()]).sum()
    return total


def _together(flats: Sequence[Tensor]) -> Tensor:
    """The hashes of small tensors of one dtype and device, without a launch for each."""
    sizes = [flat.numel() for flat in flats]
    bits = torch.cat(list(flats)).view(_WORDS[flats[0].itemsize])
    numbers = torch.arange(1, max(sizes) + 1, device=bits.device)
    words = _mixed(bits, torch.cat([numbers[:size] for size in sizes]))
    running = words.cumsum(0)
    ends = torch.stack([running[end - 1] for end in accumulate(sizes)])
    counts = torch.stack([numbers[size - 1] for size in sizes])
    return counts * _CARRY + ends.diff(prepend=ends.new_zeros(1))


def _mixed(bits: Tensor, places: Tensor) -> Tensor:
    """Mix each element with its place: a linear hash would miss pairs of flipped signs."""
    words = bits.long().bitwise_xor(places * _GOLDEN)
    return words.mul_(_MIXER).bitwise_xor_(words >> 29).mul_(_GOLDEN).bitwise_xor_(words >> 32)
