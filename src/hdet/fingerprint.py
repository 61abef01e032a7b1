"""A 64-bit hash of the bits of tensors, the same whatever the hardware and its order of work."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet.buckets import flatten

_GOLDEN = -7046029254386353131  # 2^64 / the golden ratio, odd, as a signed number
_MIXER = -4658895280553007687
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """One number for each tensor; they stay on the device of the first."""
    device = tensors[0].device if tensors else torch.device("cpu")
    start = torch.zeros(1, dtype=torch.int64, device=device)
    return torch.cat([start, *(fingerprint(tensor).to(device)[None] for tensor in tensors)])[1:]


def fingerprint(tensor: Tensor) -> Tensor:
    """Two tensors share it if and only if their bits agree, but for a chance of 2^-64.

    Sums of integers wrap around, and do not depend on the order in which they are made.
    """
    flat = flatten(tensor)
    bits = flat.view(_WORDS[flat.itemsize])
    # On the CPU a chunk that fits the cache; elsewhere one that is worth a launch.
    size = max(min(1 << 18 if flat.device.type == "cpu" else 1 << 22, flat.numel()), 1)
    places = torch.arange(1, size + 1, dtype=torch.int64, device=flat.device).mul_(_GOLDEN)
    total = torch.full((), flat.numel(), dtype=torch.int64, device=flat.device)
    for chunk in bits.split(size):
        # Mixed with its place before the sum: a linear hash would miss pairs of flipped signs.
        words = chunk.long().bitwise_xor(places[: chunk.numel()])
        words.mul_(_MIXER).bitwise_xor_(words >> 29).mul_(_GOLDEN).bitwise_xor_(words >> 32)
        total = total * 6364136223846793005 + words.sum()
    return total
