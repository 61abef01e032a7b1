"""Process groups of hdet's own: they are made in the same order everywhere, and wait as long."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def new_group(ranks: Sequence[int], timeout: timedelta | None) -> dist.ProcessGroup:
    """A new group. For a part of the world only its members take part."""
    made: dist.ProcessGroup = dist.new_group(
        list(ranks),
        timeout=timeout,
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    return made


def timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """How long the collectives of a group wait; None where its backend does not say."""
    # Torch has no public way to ask. A new group would not inherit it: torch gives it its default.
    try:
        known = group or dist.distributed_c10d._get_default_group()
        backend: Any = known._get_backend(torch.device(device_types(known)[0]))
        found = backend.options._timeout
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, timedelta) else None


def device_types(group: dist.ProcessGroup) -> list[str]:
    """Device types whose tensors the group can send, such as ["cuda"] for NCCL."""
    return [entry.split(":")[0] for entry in str(dist.get_backend_config(group)).split(",")]


def equalise_group_counts(groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Bring all processes to the same number of groups, by groups of one process.

    Torch names a group that its members make alone by the number of groups they are in. Where these
    numbers differ, the members would wait for each other forever.
    """
    known = dist.distributed_c10d._world.pg_names
    most = len(known)
    for group in groups:
        counts = [0] * dist.get_world_size(group)
        dist.all_gather_object(counts, most, group=group)
        most = max(counts)
    while len(known) < most:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


def gather_through(groups: Sequence[dist.ProcessGroup], description: Any) -> list[Any]:
    """One picklable object from every process that a message reaches through these groups."""
    gathered = [description]
    for group in groups:
        rows: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(rows, gathered, group=group)
        gathered = [each for row in rows for each in row]
    return gathered
