"""Averages of compressed weights with error feedback.

Replicas send the difference between their weights and the reference weights that all of them know,
quantized. What quantization loses is the residual: it is added to what is sent the next time.

Each replica is responsible for one part of the weights. It gets that part from all others, averages
it, and sends the mean to all, quantized again. As in an all-reduce, everything is sent twice, and
all replicas get the same bits.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hdet.replicas.protocol import AllToAllReplicas, Means
from hdet.replicas.quantization import BLOCK, Codec
from hdet.tensors.buckets import fill, flatten, wire_dtype

CHUNK = 1 << 22
"""The number of elements that are quantized at once."""

Places = list[tuple[int, int]]
"""For each weight its index among all parameters, and the number of its elements."""


class CompressedChunk:
    """The reference, residuals and pending messages of some elements of a replica's weights."""

    def __init__(self, parts: Sequence[Tensor], replicas: AllToAllReplicas, codec: Codec) -> None:
        self._replicas, self._codec = replicas, codec
        self._sizes = [part.numel() for part in parts]
        self._num = sum(self._sizes)
        padded = -(-self._num // (replicas.size * BLOCK)) * BLOCK * replicas.size
        kind = wire_dtype(parts[0].dtype)
        self._reference = torch.zeros(padded, device=parts[0].device, dtype=kind)
        """The weights that all replicas know, bit for bit."""
        self._residual = torch.zeros_like(self._reference)
        """What quantization lost of this replica's own differences."""
        self._mean_residual = torch.zeros_like(self._reference[: padded // replicas.size])
        """What quantization lost of the mean of this replica's part."""
        self._incoming: Callable[[], Tensor] | None = None
        """Waits for the others' differences of this replica's part."""
        self._means: Callable[[], Tensor] | None = None
        """Waits for the means of all parts."""

    def remember(self, parts: Sequence[Tensor]) -> None:
        """Set the reference to weights that all replicas have."""
        torch._foreach_copy_(self._split(self._reference), list(parts))

    def send(self, parts: Sequence[Tensor]) -> int:
        """Start to send the differences. Returns the number of bytes."""
        change = self._residual
        torch._foreach_add_(self._split(change), list(parts))
        change -= self._reference
        coded = self._codec.encode(change.view(self._replicas.size, -1))
        change -= self._codec.decode(coded).view(-1)
        self._incoming = self._replicas.all_to_all(coded)
        return coded.nbytes

    def forward_partial(self) -> None:
        """Wait for the differences of this replica's part, and start to send their mean."""
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            return  # it was done before
        mine = self._mean_residual
        mine += self._codec.decode(incoming()).to(mine.dtype).mean(0)
        coded = self._codec.encode(mine[None])
        mine -= self._codec.decode(coded)[0]
        self._means = self._replicas.all_to_all(coded.repeat(self._replicas.size, 1))

    def receive(self) -> list[Tensor]:
        """Wait for the means, and return the mean of all replicas for each tensor."""
        self.forward_partial()
        means, self._means = self._means, None
        assert means is not None
        self._reference += self._codec.decode(means()).view(-1)
        return self._split(self._reference)

    def _split(self, vector: Tensor) -> list[Tensor]:
        return list(vector[: self._num].split(self._sizes))


class CompressedAverage:
    """Averages the trainable weights of all replicas in compressed chunks.

    Weights are identified by their indices among all parameters, which are equal on all replicas.
    Their memory may differ and change.

    Args:
        replicas: Replicas that can send each other different data.
        codec: How elements are quantized.
    """

    def __init__(self, replicas: AllToAllReplicas, codec: Codec) -> None:
        self._replicas, self._codec = replicas, codec
        self.forget()

    def forget(self) -> None:
        """Drop the reference after weights changed in another way. The next average is exact."""
        self._chunks: list[CompressedChunk] = []
        self._places: Places = []

    def knows(self, places: Places) -> bool:
        """Whether there is a reference for exactly these weights."""
        return bool(places) and self._places == places

    @torch.no_grad()
    def remember(
        self, places: Places, tensors: Sequence[Tensor], values: Sequence[Tensor] | None = None
    ) -> None:
        """Set the reference.

        Args:
            places: The weights.
            tensors: Their tensors.
            values: The reference, or None for the tensors themselves. All replicas must have the
                same.
        """
        if not self.knows(places):
            self._places = list(places)
            self._chunks = [
                CompressedChunk(g, self._replicas, self._codec) for g in _groups(tensors)
            ]
        for chunk, parts in zip(self._chunks, _groups(tensors, values), strict=True):
            chunk.remember(parts)

    def average_(self, tensors: Sequence[Tensor]) -> int:
        """Give all replicas the mean. Returns the number of bytes that were sent."""
        num_bytes = self._send(tensors)
        self._receive(tensors, tensors)
        return num_bytes

    def begin_average(self, tensors: Sequence[Tensor]) -> tuple[Means, int]:
        """Start the mean. Returns it with the number of bytes of the first half.

        The second half, the means of the parts, is sent by `forward_partial`, or when the result is
        asked for.
        """
        num_bytes = self._send(tensors)

        def wait() -> list[Tensor]:
            means = [torch.empty_like(flatten(tensor)) for tensor in tensors]
            self._receive(tensors, means)
            return means

        return wait, num_bytes

    @torch.no_grad()
    def forward_partial(self) -> None:
        """Wait for the first half of an average, and start to send the second."""
        for chunk in self._chunks:
            chunk.forward_partial()

    @torch.no_grad()
    def _send(self, tensors: Sequence[Tensor]) -> int:
        groups = zip(self._chunks, _groups(tensors), strict=True)
        return sum(chunk.send(parts) for chunk, parts in groups)

    @torch.no_grad()
    def _receive(self, tensors: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        for chunk, parts in zip(self._chunks, _groups(tensors, into), strict=True):
            torch._foreach_copy_(parts, chunk.receive())


def _groups(
    tensors: Sequence[Tensor], values: Sequence[Tensor] | None = None
) -> list[list[Tensor]]:
    """The elements of tensors in order, in groups of one dtype and device with a limited size.

    With `values`, the elements of these instead, cut as the tensors would be.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor, value in zip(tensors, tensors if values is None else values, strict=True):
        kinds.setdefault((tensor.device, tensor.dtype), []).extend(flatten(value).split(CHUNK))
    return [group for parts in kinds.values() for group in fill(parts, CHUNK)]
