"""Waits until all processes make an engine: torch makes process groups without a word."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch.distributed as dist

from hdet import _messages
from hdet.replicas.whereabouts import NO_STORE, last_seen, publish, store_of_hdet

PLACE = "the construction of `ProcessReplicas`"
WAIT_SECONDS = 10.0
"""A process that waits for longer says for which others."""
MAX_NAMED = 8
"""The largest number of processes that a message names."""


def meet(ranks: Sequence[int], timeout: timedelta | None) -> None:
    """Return when all processes of a group to be made have called this equally often.

    Args:
        ranks: The processes.
        timeout: How long the collectives of the group will wait. None takes torch's default.

    Raises:
        RuntimeError: If a process has not come by then. It says which, and where it was seen last.
    """
    publish(f"in {PLACE}")
    store = store_of_hdet()
    if store is None or len(ranks) == 1:
        return
    limit = timeout or dist.distributed_c10d.default_pg_timeout
    meeting = _Meeting(store, ranks)
    patience = min(timedelta(seconds=WAIT_SECONDS), limit)
    if meeting.is_complete(patience):
        return
    meeting.say_who_is_missing(patience)
    if not meeting.is_complete(limit - patience):
        meeting.leave()
        raise RuntimeError(
            f"{PLACE} waited {limit.total_seconds():.0f} s for other processes, the timeout of the "
            "process group. Make `hdet.HDET` and `ProcessReplicas` on all processes, or pass a "
            f"longer `timeout` to init_process_group. Missing: {meeting.missing()}."
        )


class _Meeting:
    """One construction on all processes of a group, in a store.

    Each process counts its own constructions for these processes, so that the next one does not
    find what it left in the store.
    """

    def __init__(self, store: Any, ranks: Sequence[int]) -> None:
        self._store, self._ranks, self._here = store, ranks, dist.get_rank()
        group = crc32(str(sorted(ranks)).encode())
        self._counter = f"made {group} {self._here}"
        count = store.add(self._counter, 1)
        self._keys = {rank: f"met {group} {rank} {count}" for rank in ranks}
        store.set(self._keys[self._here], "")

    def is_complete(self, patience: timedelta) -> bool:
        """Wait for all processes, at most this long."""
        try:
            self._store.wait(list(self._keys.values()), patience)
        except NO_STORE:  # torch's error of a timeout is one of these
            return False
        return True

    def leave(self) -> None:
        """Let the next construction of this process be this one again."""
        self._store.add(self._counter, -1)

    def say_who_is_missing(self, waited: timedelta) -> None:
        absent = self._absent()
        if self._here == min(rank for rank in self._ranks if rank not in absent):  # one for all
            _messages.caution(
                f"process {self._here} has waited {waited.total_seconds():.0f} s in {PLACE}. "
                f"Missing: {self.missing()}."
            )

    def missing(self) -> str:
        """The processes that have not come, and where each was seen last."""
        named = [f"process {rank}, last seen {where}" for rank, where in self._absent().items()]
        more = [f"{len(named) - MAX_NAMED} more"] if len(named) > MAX_NAMED else []
        return "; ".join(named[:MAX_NAMED] + more)

    def _absent(self) -> dict[int, str]:
        seen = last_seen(self._ranks)
        return {
            rank: seen[rank] for rank, key in self._keys.items() if not self._store.check([key])
        }
