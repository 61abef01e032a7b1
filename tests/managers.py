"""Torchft's managers for tests: a replica group of one process, under a lighthouse of the test."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

States = dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]]
"""How to load and save the state that a new replica is given."""
LIMIT = timedelta(minutes=5)
"""A busy machine is no failure. A replica that has left closes its connections at once."""


@contextmanager
def managed(rank: int, lighthouse: str, states: States) -> Iterator[Any]:
    warnings.simplefilter("ignore")  # torchft warns a lot
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        connect_timeout=LIMIT,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{rank}",
        hostname="localhost",
        init_sync=False,
    )
    for name, (load, save) in states.items():
        manager.register_state_dict_fn(name, load, save)
    try:
        yield manager
    finally:
        manager.shutdown()
        warnings.simplefilter("error")
