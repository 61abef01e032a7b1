"""Many tensors in a few launches: one for each would hold up a device that is done sooner."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

AT_ONCE = 1 << 28
"""So many bytes of memory may be used for a moment, unless a single tensor has more."""


@torch.no_grad()
def copies(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None = None) -> list[Tensor]:
    """One of each, with the strides of a dense one; in other dtypes if these are given.

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
    """Each into its own; those of a kind at once, since torch takes mixed ones one by one."""
    kinds: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        mine, theirs = kinds.setdefault((source.device, source.dtype), ([], []))
        mine.append(target)
        theirs.append(source)
    for mine, theirs in kinds.values():
        torch._foreach_copy_(mine, theirs)


def are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether all elements of all of them are, on the device of the first.

    >>> are_finite([torch.ones(2), torch.tensor([1.0, float("nan")])]), are_finite([torch.ones(2)])
    (tensor(False), tensor(True))
    """
    own = [tensor.detach() for tensor in tensors if tensor.numel()]
    found = _largest([tensor for tensor in own if _is_usual(tensor)])
    found += [tensor.float().abs().amax() for tensor in own if _is_tiny(tensor)]
    if not found:
        return torch.ones((), dtype=torch.bool, device=tensors[0].device if tensors else None)
    return _together(found).isfinite().all()


@torch.no_grad()
def are_equal(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether each has the elements of its other; those that are not finite equal none.

    >>> are_equal([torch.ones(2), torch.arange(3)], [torch.ones(2), torch.arange(3)])
    True
    """
    pairs = list(zip(ones, others, strict=True))
    if any(one.shape != other.shape for one, other in pairs):
        return False
    rest = [pair for pair in pairs if not _is_usual(pair[0])]
    apart: list[Tensor] = []
    for part in _parts([pair for pair in pairs if _is_usual(pair[0]) and pair[0].numel()]):
        apart += _largest(torch._foreach_sub(*map(list, zip(*part, strict=True))))
    if apart and bool((_together(apart) != 0).any()):
        return False
    return all(torch.equal(_as_usual(a), _as_usual(b)) for a, b in rest)


def _parts(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Not all at once: their difference takes memory."""
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
    """The largest absolute value of each; not finite if one of its elements is not."""
    return list(torch._foreach_norm(list(tensors), float("inf"))) if tensors else []


def _together(numbers: list[Tensor]) -> Tensor:
    if len({(number.device, number.dtype) for number in numbers}) > 1:
        numbers = [number.to(numbers[0].device, torch.float64) for number in numbers]
    return torch.stack(numbers)


def _is_tiny(tensor: Tensor) -> bool:
    """Whether it is one of the kinds of eight bits, which torch computes nothing with."""
    return tensor.is_floating_point() and tensor.itemsize == 1


def _is_usual(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() and not _is_tiny(tensor)) or tensor.is_complex()


def _as_usual(tensor: Tensor) -> Tensor:
    return tensor.float() if _is_tiny(tensor) else tensor
