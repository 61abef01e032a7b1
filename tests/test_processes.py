"""The pool of processes that tests use: it waits for work, and notices dead and idle processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests import processes as pools
from tests.processes import Processes, Progress, RemoteError, communicate, run_program


@pytest.fixture
def pool() -> Iterator[Processes]:
    made = Processes(2)
    yield made
    made.close()


def die(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    while True:  # its partner never answers
        os.sched_yield()


def rank_of(rank: int) -> int:
    return rank


def test_process_that_dies_fails_the_call_at_once_and_the_pool_starts_again(
    pool: Processes,
) -> None:
    with pytest.raises(RemoteError) as error:
        pool(2, die)
    assert error.value.tracebacks[1] == "the process died"
    assert "another process died" in (error.value.tracebacks[0] or "")
    assert pool(2, rank_of) == [0, 1]


def test_idle_process_counts_as_stalled_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as idle:
        progress = Progress([idle.pid])
        assert not progress.has_stalled()
        monkeypatch.setattr(pools, "IDLE_SECONDS", 0)
        assert progress.has_stalled()
        idle.communicate(b"\n")


def test_working_process_never_counts_as_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    used, now = iter(range(0, 100, 2)), iter(range(0, 100_000, 1000))
    monkeypatch.setattr(pools, "cpu_seconds", lambda _: next(used))
    monkeypatch.setattr(pools, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(pools, "IDLE_SECONDS", 1500)  # a look takes two times of 1000 s
    progress = Progress([os.getpid()])
    assert not any(progress.has_stalled() for _ in range(10))


def test_hanging_program_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(pools, "IDLE_SECONDS", -1)
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as hanging:
        with pytest.raises(subprocess.TimeoutExpired):
            communicate(hanging)
        assert hanging.wait() != 0


def test_output_and_status_of_a_program_are_returned() -> None:
    done = run_program(sys.executable, "-c", "import sys; print('out'); sys.exit('error')")
    assert (done.returncode, done.stdout, done.stderr) == (1, "out\n", "error\n")
