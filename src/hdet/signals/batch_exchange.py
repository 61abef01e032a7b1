"""Batches of several processes, exchanged so that every replica has all of them.

A batch is made of tensors in tuples, lists and dicts. Tensors are sent as bytes, so they may have
any dtype, and other sizes on other processes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from hdet.replicas.protocol import Replicas

PLAIN = (bool, int, float, str, type(None))
"""Values that may stand in a batch beside tensors."""


class TensorNote(NamedTuple):
    """What a tensor is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class BatchNote(NamedTuple):
    """What a batch is like: its structure, and for each leaf a `TensorNote` or the value."""

    structure: str
    leaves: list[Any]

    @property
    def kind(self) -> str:
        """What must be equal on all processes."""
        kinds = [getattr(leaf, "dtype", type(leaf).__name__) for leaf in self.leaves]
        return f"{self.structure} with {', '.join(map(str, kinds))}"


def check_batch(batch: Any) -> None:
    """Raise a TypeError if a batch cannot be sent."""
    leaves = tree_leaves(batch)
    for leaf in leaves:
        if not isinstance(leaf, PLAIN) and not _is_dense(leaf):
            raise TypeError(
                "`batch` of `hold_out()` must be made of dense tensors in tuples, lists and "
                f"dicts, got a {type(leaf).__name__}."
            )
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise TypeError("`batch` of `hold_out()` must hold a tensor, got none.")


def _is_dense(leaf: Any) -> bool:
    is_shard = hasattr(leaf, "_local_tensor")
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not is_shard


def copy_of(batch: Any) -> Any:
    """A copy: a loop may reuse the memory of its batch, and a loss may write into it."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    return tree_map(copied, batch)


def with_leaves(batch: Any, leaves: Sequence[Any]) -> Any:
    """A batch of the same structure with other leaves, tensors on the devices of the own ones.

    Raises:
        ValueError: The leaves are of other kinds.

    >>> with_leaves({"x": torch.ones(2), "scale": 1.0}, [torch.zeros(3), 2.0])
    {'x': tensor([0., 0., 0.]), 'scale': 2.0}
    """
    own, structure = tree_flatten(batch)
    wanted, found = [_kind(leaf) for leaf in own], [_kind(leaf) for leaf in leaves]
    if wanted != found:
        raise ValueError(
            "`hold_out()` must get batches like those of the checkpoint, which have "
            f"{', '.join(map(str, found))}, got {', '.join(map(str, wanted))}."
        )
    pairs = zip(own, leaves, strict=True)
    moved = [new.to(old.device) if isinstance(old, Tensor) else new for old, new in pairs]
    return tree_unflatten(moved, structure)


def _kind(leaf: Any) -> Any:
    return leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__


def num_samples(batch: Any) -> int:
    """The number of samples; 1 if the first dimensions of the tensors differ.

    >>> num_samples([torch.ones(4, 2), torch.ones(4), 0.5]), num_samples(torch.ones(()))
    (4, 1)
    """
    lengths = {len(leaf) for leaf in _split_leaves(batch)}
    return lengths.pop() if len(lengths) == 1 else 1


def split(batch: Any, num: int) -> list[Any]:
    """Split a batch into parts of nearly equal size. Scalars go to all parts.

    >>> split({"x": torch.arange(3), "scale": 2.0}, 2)
    [{'x': tensor([0, 1]), 'scale': 2.0}, {'x': tensor([2]), 'scale': 2.0}]
    """
    leaves, structure = tree_flatten(batch)
    columns = [
        leaf.tensor_split(num) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * num
        for leaf in leaves
    ]
    return [tree_unflatten(list(part), structure) for part in zip(*columns, strict=True)]


def _split_leaves(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]


def exchange_batches(replicas: Replicas, own: Sequence[Any]) -> list[list[Any]]:
    """Give every replica the batches of all. All processes must call this together.

    Where a replica has several parts, each part gets the batches of the same part of the others.

    Args:
        replicas: The engine that gathers.
        own: The batches of this process.

    Returns:
        For each batch of this process those of all replicas at its place, in their order, on the
        devices of the own one.

    Raises:
        RuntimeError: Processes have different numbers of batches.
        ValueError: The batches at one place differ in structure or dtypes.
    """
    notes = replicas.gather_objects([_note(batch) for batch in own])
    counts = [len(of_process) for of_process in notes]
    if len(set(counts)) > 1:
        raise RuntimeError(
            "`hold_out()` must be called equally often on all processes, got "
            f"{counts} calls in their order. Call it on every process, each with its own batch."
        )
    for place, column in enumerate(zip(*notes, strict=True)):
        kinds = [note.kind for note in column]
        if len(set(kinds)) > 1:
            other = next(kind for kind in kinds if kind != kinds[0])
            raise ValueError(
                "`batch` of `hold_out()` must have the same structure and dtypes on all "
                f"processes, got {kinds[0]} and {other} in call {place + 1}."
            )
    same_part = notes[replicas.part :: replicas.parts]
    return [
        _gather_batch(replicas, batch, [of_process[place] for of_process in same_part])
        for place, batch in enumerate(own)
    ]


def _note(batch: Any) -> BatchNote:
    leaves, structure = tree_flatten(batch)
    notes = [
        TensorNote(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    ]
    return BatchNote(str(structure), notes)


def _gather_batch(replicas: Replicas, own: Any, notes: Sequence[BatchNote]) -> list[Any]:
    """The batches of all replicas that a list of notes describes."""
    leaves, structure = tree_flatten(own)
    columns = []
    for place, leaf in enumerate(leaves):
        described = [note.leaves[place] for note in notes]
        is_tensor = isinstance(leaf, Tensor)
        columns.append(_gather_tensor(replicas, leaf, described) if is_tensor else described)
    return [tree_unflatten(list(row), structure) for row in zip(*columns, strict=True)]


@torch.no_grad()
def _gather_tensor(replicas: Replicas, own: Tensor, notes: Sequence[TensorNote]) -> list[Tensor]:
    """One tensor from each process, sent as bytes that are padded to the longest."""
    flat = own.detach().contiguous().reshape(-1).view(torch.uint8)
    row = flat.new_zeros(max(1, *(note.num_bytes for note in notes)))
    row[: len(flat)] = flat
    num_local = len(replicas.local)
    gathered = replicas.gather(row.expand(num_local, -1))[::num_local].to(own.device)
    return [
        # A clone: the bytes of a row need not be aligned.
        line[: note.num_bytes]
        .clone()
        .view(note.dtype)
        .view(note.shape)
        .requires_grad_(note.requires_grad)
        for line, note in zip(gathered, notes, strict=True)
    ]
