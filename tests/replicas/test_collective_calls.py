"""Calls that replicas do not make together: what each of them logs and raises."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import hdet
from hdet.replicas import collective_calls, rendezvous, whereabouts
from hdet.replicas.process_groups import timeout_of
from tests.processes import Processes

T = 4
REMEDY = (
    "Call `step()` equally often on all replicas, also for a step that GradScaler skipped. Call "
    "`converge()`, `consensus()` and `save_checkpoint()` on all of them."
)


class Loop:
    """Replicas with gradients of their own, so that nothing but hdet makes them wait."""

    def __init__(self, num_steps: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        base = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)
        settings: dict[str, Any] = {"scout": None, "gradients": "local", "sync_every": T}
        self.scheduler = hdet.HDET(base, model=self.model, total_steps=100, **(settings | options))
        self.step(num_steps)

    def step(self, num: int) -> None:
        for _ in range(num):
            self.optimizer.zero_grad()
            loss = self.model(torch.ones(3, 2)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step(loss)

    def save(self, folder: str) -> None:
        hdet.save_checkpoint(folder, **self.parts)

    def load(self, folder: str) -> None:
        hdet.load_checkpoint(hdet.latest_checkpoint(folder), **self.parts)

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    @property
    def group(self) -> Any:
        return self.scheduler._run.replicas._group  # type: ignore


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as error:
        call()
    return str(error.value)


# Different calls -----------------------------------------------------------------------------


def make_different_calls(rank: int) -> list[str]:
    steps = [Loop(6), Loop(5 + rank)]
    texts = [error_of(steps[1].scheduler.converge)]
    steps[0].scheduler.converge()  # another scheduler is not affected
    # A call that failed in its header sent nothing else, so the group can still be used.
    steps[1].step(2 - rank)
    steps[1].scheduler.converge()
    ahead = Loop(3)
    texts.append(error_of(ahead.scheduler.converge if rank else lambda: ahead.step(1)))
    return texts


def test_different_calls_fail_at_once_with_replica_call_and_step(processes: Processes) -> None:
    """A call at another step, and `converge()` against the end of a cycle, which gloo aborts."""
    for texts in processes(3, make_different_calls):
        assert texts == [
            "all replicas must make the same call at the same step, got `converge()` at step 5 on "
            "replica 0; `converge()` at step 6 on replica 1; `converge()` at step 7 on replica 2. "
            + REMEDY,
            "all replicas must make the same call at the same step, got the end of a cycle at step "
            "4 on replica 0; `converge()` at step 3 on replica 1, replica 2. " + REMEDY,
        ]


def show_the_best_weights_alone(rank: int) -> str:
    loop = Loop(T + 1, spread=0.1)

    def show_best() -> None:
        with loop.scheduler.best_weights_shown():
            pass

    return error_of(show_best if rank else loop.scheduler.converge)


def test_showing_the_best_weights_is_a_call_of_all_replicas(processes: Processes) -> None:
    for text in processes(2, show_the_best_weights_alone):
        assert "got `converge()` at step 5 on replica 0; `best_weights_shown()` at step 5" in text


def differ_inside_a_mesh(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    loop = Loop(3, replicas=hdet.ProcessReplicas(mesh["replicate"]))
    return error_of(loop.scheduler.converge if rank == 3 else lambda: loop.step(1))


def test_different_calls_inside_a_replica_of_a_mesh_fail_on_all_processes(
    processes: Processes,
) -> None:
    for text in processes(4, differ_inside_a_mesh):
        assert (
            "got the end of a cycle at step 4 on replica 0 (part 0), replica 0 (part 1), replica 1 "
            "(part 0); `converge()` at step 3 on replica 1 (part 1). "
        ) in text


# A process that waits alone ------------------------------------------------------------------


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


class Handler(logging.Handler):
    """Collects lines, and tells the other processes of each."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        store().set(f"line {len(self.lines)}", "")


@contextmanager
def logged_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The lines of hdet that this process logs, where it waits for a moment only."""
    handler, logger = Handler(), logging.getLogger("hdet")
    for module in (collective_calls, rendezvous):
        monkeypatch.setattr(module, "WAIT_SECONDS", 0.01)
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def wait_alone(rank: int, folder: str) -> tuple[list[str], Tensor]:
    loop = Loop(T + 1)
    calls = [loop.scheduler.converge, show(loop)]
    calls += [lambda: loop.save(folder), lambda: loop.load(folder)]
    if rank:
        for number, call in enumerate(calls, start=1):
            store().set(f"ready {number}", "")
            store().wait([f"line {number}"])
            call()
        return [], loop.model.weight
    with pytest.MonkeyPatch.context() as monkeypatch, logged_lines(monkeypatch) as lines:
        for number, call in enumerate(calls, start=1):
            store().wait([f"ready {number}"])
            call()
    return lines, loop.model.weight


def show(loop: Loop) -> Callable[[], None]:
    def consensus() -> None:
        with loop.scheduler.consensus():
            pass

    return consensus


def test_process_that_waits_alone_logs_who_is_missing_and_goes_on_when_it_comes(
    processes: Processes, tmp_path: Path
) -> None:
    (lines, weight), (_, other) = processes(2, wait_alone, str(tmp_path))
    waited = "replica 0 has waited 0 s in {} at step 5. Missing: replica 1, last seen after {}."
    assert lines == [
        waited.format("`converge()`", "the end of a cycle at step 4"),
        waited.format("`consensus()`", "`converge()` at step 5"),
        waited.format("`save_checkpoint()`", "`consensus()` at step 5"),
        waited.format("`load_checkpoint()`", "`save_checkpoint()` at step 5"),
    ]
    assert torch.equal(weight, other)


def reach_the_timeout(rank: int, path: str) -> tuple[Any, ...]:
    store().set(f"connected {rank}", "")
    store().wait(["connected 0", "connected 1"])  # the other one may still be connecting
    dist.destroy_process_group()
    seconds = timedelta(seconds=1234)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=seconds
    )
    loop = Loop(T + 1)
    inherited = timeout_of(loop.group), timeout_of(None)
    if rank:
        store().set("ready", "")
        store().wait(["raised"])
        return inherited
    store().wait(["ready"])
    dist.distributed_c10d._set_pg_timeout(timedelta(milliseconds=900), loop.group)
    with pytest.raises(RuntimeError) as error:
        loop.scheduler.converge()
    store().set("raised", "")
    return (*inherited, str(error.value), str(error.value.__cause__))


def test_process_that_waits_alone_raises_at_the_timeout_of_the_user(
    processes: Processes, tmp_path: Path
) -> None:
    first, second = processes(2, reach_the_timeout, str(tmp_path / "store"))
    assert first[:2] == second == (timedelta(seconds=1234),) * 2
    assert first[2] == (
        "`converge()` at step 5 waited 1 s for other replicas, the timeout of the process group. "
        "Make this call on all replicas, or pass a longer `timeout` to init_process_group. "
        "Missing: replica 1, last seen after the end of a cycle at step 4."
    )
    assert "Timed out" in first[3]


def construct_late(rank: int) -> tuple[list[str], str]:
    if rank:
        for line in ("line 1", "line 2"):
            store().wait([line])
        Loop(1)
        store().set("constructed", "")
        Loop(1)
        return [], ""
    dist.distributed_c10d._set_pg_timeout(timedelta(milliseconds=900), dist.group.WORLD)
    with pytest.MonkeyPatch.context() as monkeypatch, logged_lines(monkeypatch) as lines:
        text = error_of(lambda: Loop(1))
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=60), dist.group.WORLD)
        Loop(1)  # a second try meets the first one of the other process
    store().wait(["constructed"])
    Loop(1)
    return lines, text


def test_process_that_constructs_alone_logs_who_is_missing_and_raises(
    processes: Processes,
) -> None:
    lines, text = processes(2, construct_late)[0]
    missing = "Missing: process 1, last seen before its first call."
    place = "the construction of `ProcessReplicas`"
    assert lines == [f"process 0 has waited 0 s in {place}. {missing}"] * 2
    assert text == (
        f"{place} waited 1 s for other processes, the timeout of the process group. Make "
        "`hdet.HDET` and `ProcessReplicas` on all processes, or pass a longer `timeout` to "
        f"init_process_group. {missing}"
    )


def lose_a_process(rank: int) -> tuple[list[str], str, str]:
    def probe(model: nn.Module) -> Tensor:
        if rank == 1:
            raise KeyError("no file")
        scores: Tensor = model(torch.ones(3, 2)).square()[:, 0]
        return scores

    loop = Loop(T - 1, probe=probe, spread=0.1)
    if rank == 1:
        with pytest.raises(KeyError):
            loop.step(1)
        store().set("failed", "")
        store().wait(["line 1"])  # the other process has noticed
        del loop
        gc.collect()
        dist.destroy_process_group()  # closes the connections, as the end of a process does
        return [], "", ""
    store().wait(["failed"])
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        logged_lines(monkeypatch) as lines,
        pytest.raises(RuntimeError) as error,
    ):
        loop.step(1)
    return lines, str(error.value), str(error.value.__cause__)


def test_process_that_raised_and_ended_is_named_with_its_error(processes: Processes) -> None:
    lines, text, cause = processes(2, lose_a_process)[0]
    missing = (
        "Missing: replica 1, last seen where it failed in the end of a cycle at step 4 (KeyError: "
        "'no file')."
    )
    assert lines == [f"replica 0 has waited 0 s in the end of a cycle at step 4. {missing}"]
    assert text == (
        "the end of a cycle at step 4 failed: the process of another replica has probably ended, "
        f"or is out of reach. {missing}"
    )
    assert "Connection" in cause


# Its parts -----------------------------------------------------------------------------------


def wait_without_blocking(rank: int) -> list[bool]:
    """As for a header that lies on a device, where a wait with a limit would end the group."""
    if rank:
        store().wait(["too late"])
    work = dist.all_reduce(torch.ones(1), async_op=True)
    ended = [collective_calls._ends_within(work, 0.001, on_host=False)] if rank == 0 else []
    store().set("too late", "")
    return [*ended, collective_calls._ends_within(work, 1e6, on_host=False)]


def test_wait_on_a_device_leaves_the_collective_under_way(processes: Processes) -> None:
    assert processes(2, wait_without_blocking) == [[False, True], [True]]


def test_message_names_at_most_eight_processes() -> None:
    names = [f"replica {replica}" for replica in range(11)]
    assert collective_calls._first(names) == [*names[:8], "3 more"]
    assert collective_calls._first(names[:8]) == names[:8]


def test_whereabouts_without_a_process_group_are_unknown() -> None:
    whereabouts.publish("here")
    assert whereabouts.last_seen([0, 1]) == {}
