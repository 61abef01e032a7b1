"""The columns of the table that replicas exchange: what each is called, and how it is packed.

All values travel as one matrix of float64 with one row for each replica.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from hdet.tensors.score_rows import NUM_BATCH_WORDS

Value = TypeVar("Value", Tensor, float)


class Status(NamedTuple, Generic[Value]):
    """What a replica, or one process of it, says of itself: numbers, or tensors of them."""

    loss: Value
    """Mean training loss since the last average; 0 without an observation."""
    num_observed: Value
    """Number of losses."""
    loss_error: Value
    """Standard error of the mean loss; nan below two observations."""
    step: Value
    is_finite: Value
    """1 if all parameters are finite, else 0."""
    num_bad_buffers: Value
    """Number of elements of the buffers that are not finite."""
    state_numel: Value
    """Size of the optimizer state."""
    first_loss: Value
    """The loss of the first step; nan without one."""
    vanished: Value
    """Share of tensors whose gradients have vanished since the first step."""


def pack_status(status: Status[Tensor]) -> Tensor:
    """Stack the fields as the last dimension of one tensor."""
    return torch.stack(list(status), dim=-1)


def unpack_status(packed: Tensor) -> Status[Tensor]:
    """Split the last dimension into the fields of `Status`."""
    return Status(*packed.unbind(-1))


def status_rows(packed: Tensor) -> list[Status[float]]:
    """One `Status` of numbers for each row of a matrix."""
    return [Status(*row) for row in packed.tolist()]


class Columns(NamedTuple):
    """Named blocks of columns that travel together in one matrix.

    >>> columns = Columns({"status": 2, "sample": 1})
    >>> packed = columns.pack({"status": torch.zeros(3, 2), "sample": torch.ones(3, 1)})
    >>> columns.unpack(packed)["sample"].flatten()
    tensor([1., 1., 1.])
    """

    widths: Mapping[str, int]

    @classmethod
    def of(cls, blocks: Mapping[str, Tensor]) -> "Columns":
        """The layout of some blocks, each a matrix with one row for each replica."""
        return cls({name: block.shape[1] for name, block in blocks.items()})

    def pack(self, blocks: Mapping[str, Tensor]) -> Tensor:
        """Put the blocks side by side."""
        return torch.column_stack([blocks[name] for name in self.widths])

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """Split a packed matrix into its blocks."""
        blocks = packed.split(list(self.widths.values()), dim=1)
        return dict(zip(self.widths, blocks, strict=True))


def pack_fingerprints(values: Tensor) -> Tensor:
    """Fingerprints as float64, which holds 53 bits: the 64 bits travel as two columns."""
    return torch.cat([values >> 32, values & 0xFFFFFFFF], dim=1)


def equal_fingerprints(packed: Tensor) -> list[bool]:
    """For each tensor whether all rows of packed fingerprints are equal."""
    equal = (packed == packed[:1]).all(0)
    high, low = equal.split(len(equal) // 2) if len(equal) else (equal, equal)
    return (high & low).tolist()


def merge_parts(pooled: Tensor) -> Tensor:
    """Merge what the processes of a replica say of themselves: [replicas, parts, columns].

    Processes with batches of their own know the loss better together. Processes that compute one
    loss together have all seen the same.

    Returns:
        One packed `Status` for each replica.
    """
    if pooled.shape[1] == 1:
        return pooled[:, 0]
    parts = unpack_status(pooled)
    total = (parts.loss * parts.num_observed).sum(1)
    steps = parts.step
    return pack_status(
        Status(
            loss=total / parts.num_observed.sum(1).clamp(min=1),
            num_observed=parts.num_observed.amax(1),
            loss_error=_merged_error(parts),
            step=torch.where((steps == steps[:, :1]).all(1), steps[:, 0], -1.0),
            is_finite=parts.is_finite.amin(1),
            num_bad_buffers=parts.num_bad_buffers.sum(1),
            state_numel=parts.state_numel.sum(1),
            first_loss=parts.first_loss.nanmean(1),
            vanished=parts.vanished.amin(1),
        )
    )


def _merged_error(parts: Status[Tensor]) -> Tensor:
    """The standard error of a replica's loss: of the mean, unless all parts have one loss."""
    observed = parts.num_observed > 0  # in a pipeline only the last stage has losses
    least = parts.loss.masked_fill(~observed, math.inf).amin(1)
    most = parts.loss.masked_fill(~observed, -math.inf).amax(1)
    errors = parts.loss_error.masked_fill(~observed, 0)
    of_mean = errors.square().sum(1).sqrt() / observed.sum(1).clamp(min=1)
    return torch.where(least == most, errors.amax(1), of_mean)


def merge_scores(pooled: Tensor) -> Tensor:
    """Merge score rows of the processes of a replica: [replicas, parts, columns].

    Returns:
        For each replica the mean scores, and words that say which batches all processes saw.
    """
    if pooled.shape[1] == 1:
        return pooled[:, 0]
    scores, words = pooled[:, :, :-NUM_BATCH_WORDS], pooled[:, :, -NUM_BATCH_WORDS:]
    # Each 32-bit word times the number of its process: exact in float64 up to 2^20 processes.
    places = torch.arange(1, pooled.shape[1] + 1, device=pooled.device, dtype=pooled.dtype)
    return torch.cat([scores.mean(1), (words * places[:, None]).sum(1)], dim=1)


def unpack_scores(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """The scores of each replica; [inf] for one that is lost.

    Raises:
        ValueError: Replicas scored different batches, or returned different numbers of scores.
    """
    words = {
        replica: row[-NUM_BATCH_WORDS:]
        for replica, row in enumerate(rows)
        if math.isfinite(row[-NUM_BATCH_WORDS])
    }
    first = min(words, default=0)
    for replica, seen in words.items():
        if seen != words[first]:
            raise ValueError(
                "`probe` must score the same batches on all replicas, got different ones on "
                f"replicas {first} and {replica}: fix the order of its loader, or keep the batches "
                "in a list."
            )
    scores = [[score for score in row[:-NUM_BATCH_WORDS] if not math.isnan(score)] for row in rows]
    lengths = [len(scores[replica]) for replica in words]
    if len(set(lengths)) > 1:
        raise ValueError(
            "`score` of the probe must return equally many numbers on all replicas, got "
            f"{lengths} in their order."
        )
    return [each if replica in words else [math.inf] for replica, each in enumerate(scores)]
