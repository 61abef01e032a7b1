"""The replicas of a run that names none: those of the default process group."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hdet.replicas.process import ProcessReplicas
from hdet.replicas.protocol import Replicas, SingleReplica


@contextmanager
def gloo_group(init_method: str, rank: int, size: int) -> Iterator[Callable[[bool], bool]]:
    """Join a default process group on the CPU, and leave it at the end.

    Yields a function of one boolean: whether it is true in any process.
    """
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size)

    def any_process(value: bool) -> bool:
        votes = torch.tensor(float(value))
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes)

    try:
        yield any_process
    finally:
        dist.destroy_process_group()


def default_replicas() -> Replicas:
    """The processes of the default group. Without a group, a single replica."""
    return ProcessReplicas() if local_replicas() is not SingleReplica.local else SingleReplica()


def local_replicas() -> range:
    """The replicas of this process in `default_replicas()`, without any communication."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return range(dist.get_rank(), dist.get_rank() + 1)
    return SingleReplica.local
