"""Calls that all processes make together: each begins with a header that says which call it is.

Two processes that make different calls would send tensors of different sizes, and torch would
abort or wait forever. Here they exchange a header of fixed width first, so both raise an error. A
process that waits alone says which replica is missing, and where that one was seen last.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist

from hdet import _messages
from hdet.replicas.process_groups import gather_through
from hdet.replicas.whereabouts import last_seen, publish

WAIT_SECONDS = 10.0
"""A process that waits for longer says for which others."""
POLL_SECONDS = 1e-4
"""The time between two looks at a header that is sent by a device."""
MAX_NAMED = 8
"""The largest number of processes that a message names."""
MAX_LETTERS = 200
"""The largest part of an error that other processes are told."""

Result = TypeVar("Result")


class Call(NamedTuple):
    """A call that all processes make together, at a step of the run."""

    name: str
    step: int

    def __str__(self) -> str:
        return f"{self.name} at step {self.step}"

    @property
    def header(self) -> list[int]:
        """Four numbers. Their maximum over all processes tells whether all made this call."""
        code = crc32(self.name.encode())
        return [code, -code, self.step, -self.step]


class CollectiveCalls:
    """The calls that the processes of one engine make together.

    Args:
        groups: The process groups through which a message reaches every process of the engine, one
            after another.
        device: Where the groups can send from.
        places: The rank of each process in the order of `gather_through`, and what messages call
            it.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        places: Mapping[int, str],
    ) -> None:
        self._groups, self._device, self._places = groups, device, places
        self._call: Call | None = None
        self._needs_header = False
        self._lacks_another = False
        """Whether this call has failed because of another process."""

    @contextmanager
    def call(self, name: str, step: int) -> Iterator[None]:
        """Inside, collectives belong to this call. A call inside of another one is a part of it.

        The header is sent before the first collective, so a call without one costs nothing.
        """
        if self._call is not None or len(self._places) == 1:
            yield
            return
        self._call = call = Call(name, step)
        self._needs_header, self._lacks_another = True, False
        publish(f"in {call}")
        try:
            yield
        except BaseException as error:
            if not self._lacks_another:  # what another one did is no news about this one
                words = " ".join(str(error).split())[:MAX_LETTERS]
                publish(f"where it failed in {call} ({type(error).__name__}: {words})")
            raise
        else:
            publish(f"after {call}")
        finally:
            self._call = None

    def run(self, collective: Callable[[], Result]) -> Result:
        """Make one collective of a call, after its header."""
        if self._call is not None and self._needs_header:
            self._needs_header = False
            self._exchange_header(self._call)
        return self._explaining(collective)

    def start(self, collective: Callable[[], Any]) -> "ExplainedWork":
        """Start a collective, after the header of its call."""
        return ExplainedWork(self.run(collective), self._explaining)

    def _exchange_header(self, call: Call) -> None:
        header = torch.tensor(call.header, device=self._device)
        for group in self._groups:
            self._explaining(partial(self._reduce, header, group, call))
        code, negative_code, step, negative_step = header.tolist()
        if code == -negative_code and step == -negative_step:
            return
        calls: dict[str, list[str]] = {}
        everyone = gather_through(self._groups, str(call))
        for place, theirs in zip(self._places.values(), everyone, strict=True):
            calls.setdefault(theirs, []).append(place)
        found = [f"{each} on {', '.join(_first(places))}" for each, places in calls.items()]
        raise RuntimeError(
            f"all replicas must make the same call at the same step, got {'; '.join(found)}. Call "
            "`step()` equally often on all replicas, also for a step that GradScaler skipped. Call "
            "`converge()`, `consensus()` and `save_checkpoint()` on all of them."
        )

    def _reduce(self, header: torch.Tensor, group: dist.ProcessGroup, call: Call) -> None:
        work = dist.all_reduce(header, op=dist.ReduceOp.MAX, group=group, async_op=True)
        if not _ends_within(work, WAIT_SECONDS, on_host=header.device.type == "cpu"):
            self._say_who_is_missing(call)
        work.wait()

    def _say_who_is_missing(self, call: Call) -> None:
        waiting, missing = self._split_by_presence(call)
        if dist.get_rank() == min(waiting, default=dist.get_rank()):  # one speaks for all
            _messages.caution(
                f"{self._places[dist.get_rank()]} has waited {WAIT_SECONDS:.0f} s in {call}. "
                f"Missing: {self._described(missing) or 'unknown'}."
            )

    def _split_by_presence(self, call: Call) -> tuple[list[int], dict[int, str]]:
        """The ranks that are in this call, and where the others were seen last."""
        seen = last_seen(self._places)
        waiting = [rank for rank, where in seen.items() if where == f"in {call}"]
        return waiting, {rank: seen[rank] for rank in seen if rank not in waiting}

    def _described(self, missing: Mapping[int, str]) -> str:
        named = [f"{self._places[rank]}, last seen {where}" for rank, where in missing.items()]
        return "; ".join(_first(named))

    def _explaining(self, collective: Callable[[], Result]) -> Result:
        """Run something that waits for others. An error says which call and who is missing."""
        if self._call is None:
            return collective()
        start = time.monotonic()
        try:
            return collective()
        except RuntimeError as error:
            if self._lacks_another or isinstance(error, torch.OutOfMemoryError):
                raise
            self._lacks_another = True
            missing = self._described(self._split_by_presence(self._call)[1])
            why = _why(self._call, str(error), time.monotonic() - start)
            raise RuntimeError(why + (f" Missing: {missing}." if missing else "")) from error


class ExplainedWork:
    """A collective under way. An error while waiting for it says which call failed."""

    def __init__(self, work: Any, explaining: Callable[[Callable[[], Any]], Any]) -> None:
        self._work, self._explaining = work, explaining

    def wait(self) -> None:
        self._explaining(self._work.wait)


def _ends_within(work: Any, seconds: float, *, on_host: bool) -> bool:
    """Wait for a collective, at most this long. The collective itself goes on."""
    if on_host:
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if work.is_completed():
                raise  # it has failed
            return False
        return True
    # NCCL would abort the group at the end of such a wait.
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _why(call: Call, words_of_torch: str, seconds: float) -> str:
    if "timed out" in words_of_torch.lower():
        return (
            f"{call} waited {seconds:.0f} s for other replicas, the timeout of the process group. "
            "Make this call on all replicas, or pass a longer `timeout` to init_process_group."
        )
    return f"{call} failed: the process of another replica has probably ended, or is out of reach."


def _first(names: Sequence[str]) -> list[str]:
    """The first names, and how many more there are."""
    if len(names) <= MAX_NAMED:
        return list(names)
    return [*names[:MAX_NAMED], f"{len(names) - MAX_NAMED} more"]
