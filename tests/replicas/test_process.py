"""Replicas as processes: the default group, a part of it, a mesh; never the user's own group."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from hdet.replicas.factory import default_replicas
from hdet.replicas.process import ProcessReplicas
from hdet.replicas.protocol import SingleReplica
from tests.processes import Processes


def contract(rank: int, kind: str) -> Any:
    if kind == "default":
        replicas = ProcessReplicas()
    elif kind == "mesh":
        replicas = ProcessReplicas(init_device_mesh("cpu", (4,)))
    else:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        replicas = ProcessReplicas(pairs[rank // 2])
    here = replicas.local[0]
    rows = replicas.gather(torch.tensor([[float(rank), 1.0]]))
    mean, most, copied = (
        torch.tensor([1.0 * rank]),
        torch.tensor([rank]),
        torch.tensor([1.0 * rank]),
    )
    sent = replicas.average_([[mean]], range(replicas.size))
    replicas.maximum_([[most]])
    replicas.copy_([[copied]], source=0, targets=[1])
    finite = [
        replicas.are_finite([[torch.ones(3), torch.tensor(value)]]).tolist()
        for value in (1.0, float("nan"), float("inf"))
    ]
    results = replicas.gather_objects({"here": here})
    return (
        replicas.size, here, rows[:, 0].tolist(), mean.item(), most.item(), copied.item(), sent,
        finite, results,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["default", "mesh", "pair"])
def test_process_replicas_of_every_group_follow_the_protocol(
    processes: Processes, kind: str
) -> None:
    for rank, result in enumerate(processes(4, contract, kind)):
        members = [0, 1, 2, 3] if kind != "pair" else [[0, 1], [2, 3]][rank // 2]
        here = members.index(rank)
        assert result[0] == len(members)
        assert result[1] == here
        assert result[2] == members
        assert result[3] == sum(members) / len(members)
        assert result[4] == max(members)
        assert result[5] == (members[0] if here == 1 else rank)
        assert result[6] == 4
        assert result[7] == [[True], [False], [False]]
        assert result[8] == [{"here": index} for index in range(len(members))]


def race(rank: int) -> bool:
    """A collective of the user's is under way on the default group while the replicas average."""
    replicas = ProcessReplicas(bucket_bytes=4096)
    own = torch.full((1000,), float(rank))
    theirs = torch.full((100_000,), 1.0)
    for _ in range(20):
        works = [dist.all_reduce(theirs, async_op=True)] if rank == 0 else []
        replicas.average_([[own]], range(2))
        works += [dist.all_reduce(theirs, async_op=True)] if rank == 1 else []
        for work in works:
            work.wait()
        theirs.div_(2)
    return bool((own == 0.5).all() and (theirs == 1).all())


def test_average_does_not_race_collectives_of_the_user(processes: Processes) -> None:
    assert processes(2, race) == [True, True]


def local_gradients(rank: int) -> tuple[float, float, float]:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    replicas = ProcessReplicas()
    seen = []
    for shared in (True, False, True):
        replicas.share_gradients(model, shared)
        model.zero_grad()
        model(torch.full((1, 1), 1.0 + rank)).sum().backward()
        seen.append(model.module.weight.grad.item())
    return seen[0], seen[1], seen[2]


def test_ddp_gradients_can_be_kept_local(processes: Processes) -> None:
    assert processes(2, local_gradients) == [(1.5, 1.0, 1.5), (1.5, 2.0, 1.5)]


def test_default_replicas_without_a_process_group_are_a_single_replica() -> None:
    assert isinstance(default_replicas(), SingleReplica)
    with pytest.raises(RuntimeError, match="`ProcessReplicas` needs a process group"):
        ProcessReplicas()


def refused(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1))
    group = dist.new_group([0])
    texts = []
    cases: list[tuple[Any, dict[str, Any]]] = [(mesh, {}), (None, {"bucket_bytes": 3})]
    for argument, options in cases:
        with pytest.raises(ValueError) as error:
            ProcessReplicas(argument, **options)
        texts.append(str(error.value))
    if rank == 1:
        with pytest.raises(ValueError) as error:
            ProcessReplicas(group)
        texts.append(str(error.value))
    return texts


def test_process_group_without_this_process_is_refused(processes: Processes) -> None:
    texts = processes(2, refused)[1]
    assert texts[0].startswith("`process_group` must be a mesh of one dimension")
    assert texts[1] == "`bucket_bytes` must be at least 1024, got 3."
    assert texts[2].startswith("`process_group` must contain this process")
