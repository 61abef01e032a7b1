"""Many tensors at once: the same as one by one, whatever they are."""

import math

import pytest
import torch
from torch import Tensor

from hdet.tensors.ops import are_equal, are_finite, copies, copy_all


def all_kinds() -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(3, 2),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, dtype=torch.float64),
        torch.randn(4).bfloat16(),
        torch.randn(2, dtype=torch.complex64),
        torch.arange(5),
        torch.tensor([True, False]),
        torch.zeros(0),
        torch.tensor(7.0),
        torch.randn(3, requires_grad=True),
    ]


def first(tensor: Tensor) -> Tensor:
    """Its first element, wherever it lies."""
    return tensor[(0,) * tensor.dim()]


def test_copies_equal_clones() -> None:
    own = all_kinds()
    for one, made in zip(own, copies(own), strict=True):
        assert torch.equal(one, made)
        assert made.stride() == one.stride()
        assert made.dtype == one.dtype
        assert not made.requires_grad
        assert made.data_ptr() != one.data_ptr() or not one.numel()
    assert copies([]) == []


def test_copies_in_another_dtype_are_converted() -> None:
    (made,) = copies([torch.tensor([1.5, 2.5]).bfloat16()], [torch.float32])
    assert made.dtype == torch.float32
    assert made.tolist() == [1.5, 2.5]


def test_copy_all_copies_each_source_to_its_target() -> None:
    own, kept = all_kinds(), copies(all_kinds())
    with torch.no_grad():
        for tensor in own:
            tensor.fill_(1)
    copy_all([tensor.detach() for tensor in own], kept)
    assert all(map(torch.equal, own, all_kinds()))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 8])
def test_are_finite_notices_a_single_bad_element(place: int, bad: float) -> None:
    own = all_kinds()
    assert bool(are_finite(own))
    first(own[place])[...] = bad
    assert not bool(are_finite(own))


def test_are_finite_is_true_for_empty_and_integer_tensors() -> None:
    assert bool(are_finite([]))
    assert bool(are_finite([torch.arange(3), torch.zeros(0)]))


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 5, 6, 8])
def test_are_equal_notices_a_single_different_element(place: int) -> None:
    own, other = all_kinds(), all_kinds()
    assert are_equal(own, other)
    one = first(other[place])
    one[...] = ~one if one.dtype == torch.bool else one + 1
    assert not are_equal(own, other)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_are_finite_and_are_equal_handle_float8(dtype: torch.dtype) -> None:
    one = torch.tensor([1.0, 2.0]).to(dtype)
    assert are_equal([one], copies([one]))
    assert not are_equal([one], [torch.tensor([1.0, 3.0]).to(dtype)])
    assert bool(are_finite([one]))
    assert not bool(are_finite([torch.tensor([1.0, math.nan]).to(dtype)]))


def test_are_equal_is_false_for_other_shapes() -> None:
    assert not are_equal([torch.ones(2, 2)], [torch.ones(2)])


def test_are_equal_is_false_for_elements_that_are_not_finite() -> None:
    assert not are_equal([torch.tensor([math.nan])], [torch.tensor([math.nan])])
    assert are_equal([], [])
