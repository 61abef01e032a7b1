"""Compressed converges, and what every replica still owes the mean.

What is sent are changes since the weights that all replicas have in mind, coded. What the code
loses is not lost: it is added to what is sent the next time (error feedback). A replica sends each
other one its part of all changes, each takes the mean of what it gets and sends it to all, coded
again: twice the bytes of the code, as in an all-reduce, and the same bits for everyone.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hdet.replicas.protocol import Means
from hdet.replicas.quantization import BLOCK, Codec
from hdet.tensors.buckets import fill, flatten, wire_dtype

CHUNK = 1 << 22
"""So many numbers are coded at once."""

Places = list[tuple[int, int]]
"""Of weights among all parameters, with the number of their elements."""


@runtime_checkable
class AllToAll(Protocol):
    """Replicas with a wire between them."""

    size: int

    def all_to_all(self, rows: Tensor) -> Callable[[], Tensor]:
        """One row for each replica -> one row from each, for whoever waits."""


class CompressedChunk:
    """What belongs to some of the numbers of a replica."""

    def __init__(self, parts: Sequence[Tensor], replicas: AllToAll, codec: Codec) -> None:
        self._replicas, self._codec = replicas, codec
        self._sizes = [part.numel() for part in parts]
        self._num = sum(self._sizes)
        padded = -(-self._num // (replicas.size * BLOCK)) * BLOCK * replicas.size
        kind = wire_dtype(parts[0].dtype)
        self._known = torch.zeros(padded, device=parts[0].device, dtype=kind)
        """The weights that all replicas have in mind."""
        self._owed = torch.zeros_like(self._known)
        """What this replica could not say yet of its own changes ..."""
        self._owed_mean = torch.zeros_like(self._known[: padded // replicas.size])
        """... and of the mean of its part."""
        self._arrives: Callable[[], Tensor] | None = None
        """What the others say of this replica's part ..."""
        self._returns: Callable[[], Tensor] | None = None
        """... and the means of all parts."""

    def remember(self, parts: Sequence[Tensor]) -> None:
        """All replicas have these in mind now."""
        torch._foreach_copy_(self._split(self._known), list(parts))

    def send(self, parts: Sequence[Tensor]) -> int:
        """Tell the others what has changed; nobody waits. The bytes of the code."""
        change = self._owed
        torch._foreach_add_(self._split(change), list(parts))
        change -= self._known
        coded = self._codec.encode(change.view(self._replicas.size, -1))
        change -= self._codec.decode(coded).view(-1)
        self._arrives = self._replicas.all_to_all(coded)
        return coded.nbytes

    def forward_partial(self) -> None:
        """Wait for what the others say, and tell them its mean; nobody waits for that."""
        arrives, self._arrives = self._arrives, None  # what was sent is not needed any more
        if arrives is None:
            return  # nothing was sent
        mine = self._owed_mean
        mine += self._codec.decode(arrives()).to(mine.dtype).mean(0)
        coded = self._codec.encode(mine[None])
        mine -= self._codec.decode(coded)[0]
        self._returns = self._replicas.all_to_all(coded.repeat(self._replicas.size, 1))

    def receive(self) -> list[Tensor]:
        """The mean of all replicas, for each part."""
        self.forward_partial()  # unless that was done half-way
        returns, self._returns = self._returns, None
        assert returns is not None
        self._known += self._codec.decode(returns()).view(-1)
        return self._split(self._known)

    def _split(self, vector: Tensor) -> list[Tensor]:
        return list(vector[: self._num].split(self._sizes))


class CompressedAverage:
    """The chunks of the weights that train, as long as all replicas have the same ones in mind.

    Weights are known by their places among all, which are the same on every replica: whether they
    have moved in its memory is nobody else's business.
    """

    def __init__(self, replicas: AllToAll, codec: Codec) -> None:
        self._replicas, self._codec = replicas, codec
        self.forget()

    def forget(self) -> None:
        """Replicas were moved by other means: the next converge is exact, and begins anew."""
        self._chunks: list[CompressedChunk] = []
        self._places: Places = []

    def knows(self, places: Places) -> bool:
        return bool(places) and self._places == places

    @torch.no_grad()
    def remember(
        self, places: Places, tensors: Sequence[Tensor], values: Sequence[Tensor] | None = None
    ) -> None:
        """All replicas have these weights; or have these values in mind for them."""
        if not self.knows(places):
            self._places = list(places)
            self._chunks = [
                CompressedChunk(g, self._replicas, self._codec) for g in _groups(tensors)
            ]
        for chunk, parts in zip(self._chunks, _groups(tensors, values), strict=True):
            chunk.remember(parts)

    def average_(self, tensors: Sequence[Tensor]) -> int:
        """All replicas take the mean; the bytes of the code."""
        num_bytes = self._send(tensors)
        self._receive(tensors, tensors)
        return num_bytes

    def begin_average(self, tensors: Sequence[Tensor]) -> tuple[Means, int]:
        """Start to make the mean, and the bytes of the code. Half of them are sent at once; the
        other half, the means of the parts, by `pass_on`, or when it is asked for."""
        num_bytes = self._send(tensors)

        def wait() -> list[Tensor]:
            means = [torch.empty_like(flatten(tensor)) for tensor in tensors]
            self._receive(tensors, means)
            return means

        return wait, num_bytes

    @torch.no_grad()
    def forward_partial(self) -> None:
        """Send the means of the parts, as soon as what they are made of is there."""
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
    """Their elements in order, at most so many of a kind in a chunk; or those of `values`, cut as
    the tensors would be."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor, value in zip(tensors, tensors if values is None else values, strict=True):
        kinds.setdefault((tensor.device, tensor.dtype), []).extend(flatten(value).split(CHUNK))
    return [group for parts in kinds.values() for group in fill(parts, CHUNK)]
