"""Batches of several processes: every replica gets all of them, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import hdet
from hdet.replicas.protocol import SingleReplica
from hdet.signals.batch_exchange import check_batch, exchange_batches, num_samples, split
from tests.processes import Processes


def batch_of(rank: int) -> Any:
    draw = torch.Generator().manual_seed(rank)
    num = 3 + rank
    x = torch.randn(num, 2, generator=draw)
    tokens = torch.randint(100, (num, 5), generator=draw)
    more = {"tokens": tokens, "mask": tokens > 50, "half": x.bfloat16().t()}
    return (
        x,
        [more, torch.tensor(0.5, dtype=torch.float64)],
        torch.empty(0, 2),
        f"name {rank}",
        None,
    )


def equal(one: Any, other: Any) -> bool:
    pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=True))
    return all(
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b
        for a, b in pairs
    )


def exchanged(rank: int) -> bool:
    replicas = hdet.ProcessReplicas()
    tracked = torch.full((2,), float(rank), requires_grad=True)
    first, second = exchange_batches(replicas, [batch_of(rank), [tracked]])
    same = all(equal(found, batch_of(r)) for r, found in enumerate(first))
    return same and [t.requires_grad for (t,) in second] == [True] * 3


def test_batches_of_all_kinds_and_sizes_arrive_on_every_process(processes: Processes) -> None:
    assert processes(3, exchanged) == [True] * 3


def test_one_replica_gets_its_own_batches_back() -> None:
    (row,) = exchange_batches(SingleReplica(), [batch_of(1)])
    assert len(row) == 1
    assert equal(row[0], batch_of(1))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((), "must hold a tensor"),
        (([1, 2.0],), "must hold a tensor"),
        ((torch.ones(2, 2).to_sparse(),), "got a Tensor"),
        (({"x": object()},), "got a object"),
    ],
)
def test_values_that_cannot_be_sent_are_refused(batch: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        check_batch(batch)


def test_batch_is_split_only_where_the_first_dimensions_agree() -> None:
    x, y = torch.arange(12).view(6, 2), torch.arange(6)
    assert num_samples((x, {"y": y}, 3)) == 6
    assert num_samples((x, torch.ones(2))) == 1
    parts = split((x, {"y": y}, 3), 4)
    assert [len(part[0]) for part in parts] == [2, 2, 1, 1]
    assert torch.equal(torch.cat([part[1]["y"] for part in parts]), y)
