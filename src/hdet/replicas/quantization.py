"""Codecs for compressed averages: bfloat16, or eight bits with a scale for each block."""

from typing import Protocol

import torch
from torch import Tensor

BLOCK = 256
"""The elements that share a scale. Larger blocks round more, smaller ones send more scales."""
MAX_INT8 = 127


class Codec(Protocol):
    """Turns rows of numbers into rows of bytes and back. Rows are multiples of `BLOCK` long."""

    def encode(self, rows: Tensor) -> Tensor: ...

    def decode(self, coded: Tensor) -> Tensor: ...


class BF16:
    """Half of the bytes of a float32: bfloat16 keeps 8 of the 24 bits of its significand."""

    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(torch.bfloat16).view(torch.uint8)

    def decode(self, coded: Tensor) -> Tensor:
        return coded.view(torch.bfloat16).float()


class Int8:
    """A quarter of the bytes of a float32: eight bits, and one scale for each block.

    Elements that are small compared to the largest of their block are rounded.

    >>> codec = Int8()
    >>> rows = torch.linspace(-1, 1, 2 * BLOCK).view(2, BLOCK)
    >>> bool((codec.decode(codec.encode(rows)) - rows).abs().max() <= 0.5 / MAX_INT8)
    True
    """

    def encode(self, rows: Tensor) -> Tensor:
        blocks = rows.float().unflatten(1, (-1, BLOCK))
        scales = blocks.abs().amax(2) / MAX_INT8
        whole = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, :, None]).round()
        return torch.cat([whole.to(torch.int8).flatten(1).view(torch.uint8), _bytes(scales)], 1)

    def decode(self, coded: Tensor) -> Tensor:
        num = coded.shape[1] // (BLOCK + 4)
        whole, scales = coded.split([num * BLOCK, num * 4], dim=1)
        blocks = whole.view(torch.int8).float().unflatten(1, (num, BLOCK))
        rows: Tensor = (blocks * scales.contiguous().view(torch.float32)[:, :, None]).flatten(1)
        return rows


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


CODECS: dict[str, Codec] = {"bf16": BF16(), "int8": Int8()}
