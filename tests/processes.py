"""Real processes for tests: a pool that runs a function in N of them, joined by gloo on loopback.

Starting an interpreter with torch takes seconds, so the processes stay between tests; each test
gets a fresh process group. A process that hangs or dies fails its test, and the pool starts anew.
"""

import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 120


class RemoteError(AssertionError):
    """What went wrong in the processes: one traceback, or None, for each of them."""

    def __init__(self, tracebacks: list[str | None]) -> None:
        self.tracebacks = tracebacks
        shown = [f"--- process {i} ---\n{text}" for i, text in enumerate(tracebacks) if text]
        super().__init__("\n".join(shown))


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
            answers = [self._receive(rank) for rank in range(num)]
            self._release(num)
        if any(error for _, error in answers):
            raise RemoteError([error for _, error in answers])
        return [value for value, _ in answers]

    def _release(self, num: int) -> None:
        """Only now may they leave the group: one that left while another still joined would
        look to it like a crash, and functions need not meet in any collective."""
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

    def _receive(self, rank: int) -> tuple[Any, str | None]:
        pipe = self._workers[rank][1] if self._workers else None
        if pipe is None or not pipe.poll(TIMEOUT_SECONDS):
            self.close()
            return None, f"no answer within {TIMEOUT_SECONDS} s"
        try:
            answer: tuple[Any, str | None] = pipe.recv()
            return answer
        except EOFError:
            self.close()
            return None, "the process died"


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
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
