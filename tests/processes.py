"""Real processes for tests: a pool that runs a function in N of them, joined by gloo on loopback.

Starting an interpreter with torch takes seconds, so the processes stay between tests. Each test
gets a fresh process group. A process that hangs or dies fails its test, and the pool starts again.

No test has a time limit: on a busy machine everything takes longer. A process counts as hanging
only if it uses no CPU time for `IDLE_SECONDS`.
"""

import multiprocessing
import os
import subprocess
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

POLL_SECONDS = 5
"""The time between two looks at the CPU time of processes."""
IDLE_SECONDS = 300
"""Processes hang if they use less than `WORK_SECONDS` of CPU time for this long."""
WORK_SECONDS = 1.0
"""Threads that only send heartbeats use less than this in `IDLE_SECONDS`."""

TORCH_2_6_WARNINGS = (
    r"The epoch parameter in `scheduler\.step",  # SequentialLR, about its own call
    "DTensor random operators may not have complete support on cpu",  # by distribute_tensor
)
"""What torch 2.6 says about itself. The filters of pytest do not reach the processes."""


class RemoteError(AssertionError):
    """What went wrong in the processes: one traceback, or None, for each of them."""

    def __init__(self, tracebacks: list[str | None]) -> None:
        self.tracebacks = tracebacks
        shown = [f"--- process {i} ---\n{text}" for i, text in enumerate(tracebacks) if text]
        super().__init__("\n".join(shown))


def warns_on_first(rank: int, words: str) -> AbstractContextManager[Any]:
    """Expect a warning on the first process. On the others a warning is an error."""
    return pytest.warns(UserWarning, match=words) if rank == 0 else nullcontext()


class Progress:
    """Whether processes and their descendants still work, judged by their CPU time."""

    def __init__(self, process_ids: Collection[int]) -> None:
        self._process_ids = process_ids
        self._used, self._since = cpu_seconds(process_ids), time.monotonic()

    def has_stalled(self) -> bool:
        """Whether they have used almost no CPU time for a long time."""
        used = cpu_seconds(self._process_ids)
        if abs(used - self._used) >= WORK_SECONDS:  # less, if a descendant has gone
            self._used, self._since = used, time.monotonic()
        return time.monotonic() - self._since > IDLE_SECONDS


def cpu_seconds(process_ids: Collection[int]) -> float:
    """The CPU time of processes and their descendants.

    Where the system has no /proc, processes count as working all the time.
    """
    if not Path("/proc/self/stat").exists():
        return time.monotonic()
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        process_id = int(path.parent.name)
        ticks[process_id] = sum(map(int, fields[11:15]))  # its own, and that of dead children
        children.setdefault(int(fields[1]), []).append(process_id)
    total, left = 0, list(process_ids)
    while left:
        process_id = left.pop()
        total += ticks.get(process_id, 0)
        left += children.get(process_id, [])
    return total / os.sysconf("SC_CLK_TCK")


def communicate(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """The output of a program and its errors, when it has ended. A program that hangs is killed."""
    progress = Progress([process.pid])
    while True:
        try:
            return process.communicate(timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if progress.has_stalled():
                process.kill()
                raise


def run_program(*command: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end, without a time limit as long as it works."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options) as process:
        output, errors = communicate(process)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


class Processes:
    """`pool(4, function, *arguments)` -> what `function(rank, *arguments)` returned in each."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._workers: list[tuple[Any, Connection]] = []

    def __call__(self, num: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if not self._workers:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(self._workers[:num]):
                pipe.send((function, rank, num, str(Path(folder) / "store"), arguments))
            answers = self._receive(num)
            self._release(num)
        if any(error for _, error in answers):
            raise RemoteError([error for _, error in answers])
        return [value for value, _ in answers]

    def _release(self, num: int) -> None:
        """Let the processes leave the group, after all have answered.

        A process that left while another one still joined would look like a crash to it.
        """
        for _, pipe in self._workers[:num]:
            pipe.send("leave")

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.terminate()
            process.join()
        self._workers = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for _ in range(self._most):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))

    def _receive(self, num: int) -> list[tuple[Any, str | None]]:
        """The answers of all processes. If one dies or all hang, the pool is closed."""
        answers: dict[int, tuple[Any, str | None]] = {}
        ranks = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:num])}
        progress = Progress([process.pid for process, _ in self._workers[:num]])
        failed_at: float | None = None
        problem = None
        while ranks and problem is None:
            for pipe in wait(list(ranks), POLL_SECONDS):
                assert isinstance(pipe, Connection)
                try:
                    answers[ranks[pipe]] = answer = pipe.recv()
                except (EOFError, ConnectionError):
                    answers[ranks[pipe]] = None, "the process died"
                    problem = "stopped, because another process died"
                else:
                    if answer[1] is not None and failed_at is None:
                        failed_at = time.monotonic()
                del ranks[pipe]
            if not ranks or problem is not None:
                break
            if progress.has_stalled():
                problem = f"no answer, and no work for {IDLE_SECONDS} s"
            # Processes may wait for a failed one in a loop that uses CPU time.
            if failed_at is not None and time.monotonic() - failed_at > IDLE_SECONDS:
                problem = f"no answer {IDLE_SECONDS} s after another process failed"
        if problem is not None:
            self.close()
        return [answers.get(rank, (None, problem)) for rank in range(num)]


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for message in TORCH_2_6_WARNINGS:
        warnings.filterwarnings("ignore", message, UserWarning)
    _complete_cpu_streams()
    while True:
        try:
            function, rank, num, store, arguments = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=num
            )
            answer: tuple[Any, str | None] = (function(rank, *arguments), None)
        except BaseException:
            answer = (None, traceback.format_exc())
        pipe.send(answer)
        pipe.recv()
        if dist.is_initialized():
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # whose layouts name the destroyed groups


def _complete_cpu_streams() -> None:
    """Let FSDP2 of torch 2.6 run on a CPU: the streams of a CPU lack two methods there."""
    if not hasattr(torch.cpu.Stream, "record_event"):
        torch.cpu.Stream.record_event = lambda _: torch.cpu.Event()  # type: ignore
        torch.cpu.Stream.wait_event = lambda *_: None  # type: ignore
