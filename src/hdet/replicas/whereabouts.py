"""Where each process was seen last, in the store through which the processes found each other."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

NO_STORE = (RuntimeError, ValueError)
"""What torch raises where the store is gone, or the process group itself."""


def publish(where: str) -> None:
    """Say where this process is. It costs a few microseconds and waits for nobody."""
    store = store_of_hdet()
    if store is not None:
        with suppress(*NO_STORE):
            store.set(str(dist.get_rank()), where)


def last_seen(ranks: Iterable[int]) -> dict[int, str]:
    """Where processes were seen last, as far as the store can be read."""
    seen: dict[int, str] = {}
    store = store_of_hdet()
    with suppress(*NO_STORE):
        for rank in ranks if store is not None else ():
            is_known = store.check([str(rank)])  # a store waits for a key that it does not have
            where = store.get(str(rank)) if is_known else b"before its first call"
            seen[rank] = where.decode(errors="replace")
    return seen


def store_of_hdet() -> Any:
    """The store of the default group, None without one.

    It is not kept: it would outlive the process group, and with it the port that it listens to.
    """
    with suppress(*NO_STORE):
        # Torch has no public way to it.
        found = dist.distributed_c10d._get_default_store()
        return found and dist.distributed_c10d.PrefixStore("hdet", found)
    return None
