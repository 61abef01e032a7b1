"""Buckets: every element once, within the memory they were given, in place where it pays."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet.tensors.buckets import IN_PLACE_BYTES, SLOTS, Buckets, flatten, wire_dtype

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 700), st.sampled_from(DTYPES)), max_size=12),
    st.integers(1024, 8192),
)
def test_buckets_hold_every_element_once(
    shapes: list[tuple[int, torch.dtype]], num_bytes: int
) -> None:
    tensors = [torch.zeros(size, dtype=dtype) for size, dtype in shapes]
    buckets = Buckets(num_bytes)
    plan = buckets.of(tensors).buckets
    assert sum(bucket.wire.numel() for bucket in plan) == sum(t.numel() for t in tensors)
    for bucket in plan:
        assert bucket.wire.nbytes <= num_bytes // SLOTS
        bucket.load().fill_(1)
        bucket.store()
    assert all(bool((tensor == 1).all()) for tensor in tensors)
    assert sum(memory.nbytes for memory in buckets._scratch.values()) <= num_bytes


def test_buckets_that_are_sent_together_do_not_share_memory() -> None:
    plan = (
        Buckets(4096)
        .of([torch.zeros(200) for _ in range(5)] + [torch.zeros(9, dtype=torch.half)])
        .buckets
    )
    assert len(plan) > SLOTS
    for first in range(len(plan) - SLOTS + 1):
        spans = [
            (bucket.wire.data_ptr(), bucket.wire.data_ptr() + bucket.wire.nbytes)
            for bucket in plan[first : first + SLOTS]
        ]
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_large_tensor_is_sent_in_place() -> None:
    large = torch.zeros(IN_PLACE_BYTES // 4)
    buckets = Buckets(64 << 20)
    (bucket,) = buckets.of([large]).buckets
    assert bucket.wire.data_ptr() == large.data_ptr()
    assert not buckets._scratch


def test_plan_follows_a_tensor_with_new_memory() -> None:
    parameter = torch.nn.Parameter(torch.zeros(8))
    buckets = Buckets(4096)
    buckets.of([parameter])
    parameter.data = torch.ones(8)
    (bucket,) = buckets.of([parameter]).buckets
    assert bucket.load().tolist() == [1.0] * 8


def test_flatten_views_channels_last_weights_without_a_copy() -> None:
    weight = torch.rand(4, 3, 5, 5).to(memory_format=torch.channels_last)
    flat = flatten(weight)
    assert flat.data_ptr() == weight.data_ptr()
    assert flat.numel() == weight.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wire_dtype_of_half_precision_is_float32(dtype: torch.dtype) -> None:
    assert wire_dtype(dtype) == torch.float32


def test_plans_of_unused_lists_are_dropped() -> None:
    buckets = Buckets(4096)
    lasting = [torch.zeros(8)]
    for _ in range(20):
        buckets.of(lasting)
        buckets.of([torch.zeros(8)])
    assert len(buckets._plans) <= 3


def test_forget_drops_the_plan_of_a_list() -> None:
    buckets, once, kept = Buckets(4096), [torch.zeros(9)], [torch.zeros(9)]
    buckets.of(kept)
    buckets.of(once)
    buckets.forget(once)
    assert [plan.tensors for plan in buckets._plans.values()] == [kept]
