"""How numbers are made smaller for the wire: bfloat16, or eight bits and a scale per block."""

from typing import Protocol

import torch
from torch import Tensor

BLOCK = 256
"""Numbers that share a scale: more would share that of their largest, fewer cost more scales."""
MAX_INT8 = 127


class Codec(Protocol):
    """Rows of numbers to rows of bytes and back; a row is a multiple of `BLOCK` long."""

    def encode(self, rows: Tensor) -> Tensor: ...

    def decode(self, coded: Tensor) -> Tensor: ...


class BF16:
    """Half of the bytes of a float32, with eight of its 24 bits."""

    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(torch.bfloat16).view(torch.uint8)

    def decode(self, coded: Tensor) -> Tensor:
        return coded.view(torch.bfloat16).float()


class Int8:
    """A quarter, and a scale for each block: what is small beside its largest is rounded off.

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
