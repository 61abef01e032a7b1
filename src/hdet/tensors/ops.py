"""Operations on many tensors in a few launches."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

AT_ONCE = 1 << 28
"""The bytes of temporary memory that an operation may use, unless a single tensor has more."""


@torch.no_grad()
def copies(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None = None) -> list[Tensor]:
    """A dense copy of each tensor with its strides, in other dtypes if these are given.

    >>> one, other = copies([torch.ones(2), torch.arange(3)])
    >>> one, other
    (tensor([1., 1.]), tensor([0, 1, 2]))
    """
    wanted = dtypes or [tensor.dtype for tensor in tensors]
    made = [torch.empty_like(t, dtype=dtype) for t, dtype in zip(tensors, wanted, strict=True)]
    copy_all(made, tensors)
    return made


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target.

    Tensors of one device and dtype are copied at once: torch copies mixed ones one by one.
    """
    kinds: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        mine, theirs = kinds.setdefault((source.device, source.dtype), ([], []))
        mine.append(target)
        theirs.append(source)
    for mine, theirs in kinds.values():
        torch._foreach_copy_(mine, theirs)


def are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether all elements of all tensors are finite, on the device of the first.

    >>> are_finite([torch.ones(2), torch.tensor([1.0, float("nan")])]), are_finite([torch.ones(2)])
    (tensor(False), tensor(True))
    """
    own = [tensor.detach() for tensor in tensors if tensor.numel()]
    found = _largest([tensor for tensor in own if _is_float(tensor)])
    found += [tensor.float().abs().amax() for tensor in own if _is_float8(tensor)]
    if not found:
        return torch.ones((), dtype=torch.bool, device=tensors[0].device if tensors else None)
    return _stacked(found).isfinite().all()


@torch.no_grad()
def are_equal(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors are equal pair by pair. Elements that are not finite equal none.

    >>> are_equal([torch.ones(2), torch.arange(3)], [torch.ones(2), torch.arange(3)])
    True
    """
    pairs = list(zip(ones, others, strict=True))
    if any(one.shape != other.shape for one, other in pairs):
        return False
    rest = [pair for pair in pairs if not _is_float(pair[0])]
    apart: list[Tensor] = []
    for part in _parts([pair for pair in pairs if _is_float(pair[0]) and pair[0].numel()]):
        apart += _largest(torch._foreach_sub(*map(list, zip(*part, strict=True))))
    if apart and bool((_stacked(apart) != 0).any()):
        return False
    return all(torch.equal(_with_arithmetic(a), _with_arithmetic(b)) for a, b in rest)


def _parts(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Pairs in groups of a limited size, because their differences take memory."""
    part: list[tuple[Tensor, Tensor]] = []
    size = 0
    for pair in pairs:
        if part and size + pair[0].nbytes > AT_ONCE:
            yield part
            part, size = [], 0
        part.append(pair)
        size += pair[0].nbytes
    if part:
        yield part


def _largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest absolute value of each tensor. It is not finite if an element is not."""
    return list(torch._foreach_norm(list(tensors), float("inf"))) if tensors else []


def _stacked(numbers: list[Tensor]) -> Tensor:
    """Numbers of any device and dtype as one tensor."""
    if len({(number.device, number.dtype) for number in numbers}) > 1:
        numbers = [number.to(numbers[0].device, torch.float64) for number in numbers]
    return torch.stack(numbers)


def _is_float8(tensor: Tensor) -> bool:
    """Whether a tensor has a float of eight bits, for which torch has no arithmetic."""
    return tensor.is_floating_point() and tensor.itemsize == 1


def _is_float(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() and not _is_float8(tensor)) or tensor.is_complex()


def _with_arithmetic(tensor: Tensor) -> Tensor:
    return tensor.float() if _is_float8(tensor) else tensor
