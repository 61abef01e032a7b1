"""The demo with one process for each replica."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

from hdet.cli.demo_acts import DemoSettings
from hdet.cli.demo_runs import train_all
from hdet.cli.progress import Display, Status
from hdet.replicas.factory import gloo_group


def train(
    settings: DemoSettings, folder: Path, resume: bool, shown: Display, stopped: Callable[[], bool]
) -> bool:
    """Start one process for each replica, and show their progress until they end.

    Args:
        settings: The options of the demo.
        folder: The folder of the demo.
        resume: Whether to continue from the checkpoint in that folder.
        shown: Shows the progress of the first process.
        stopped: Whether to stop at the end of the present cycle.

    Returns:
        Whether the runs were stopped.

    Raises:
        RuntimeError: A process failed.
    """
    context = torch.multiprocessing.get_context("spawn")
    messages, stop = context.SimpleQueue(), context.Event()
    with tempfile.TemporaryDirectory() as shared:
        arguments = (settings, folder, resume, shared, messages, stop)
        with _ctrl_c_ignored():  # it reaches all processes; this one alone passes it on
            workers = spawn(_train_one_replica, arguments, settings.replicas, join=False)
        answer: bool | None = None
        try:
            while not workers.join(timeout=0.1) or not messages.empty():
                if stopped():
                    stop.set()
                while not messages.empty():
                    kind, content = messages.get()
                    if kind == "status":
                        shown.show(content[0], milestone=content[1])
                    else:
                        answer = content
        except ProcessRaisedException as error:
            raise RuntimeError(str(error).strip().splitlines()[-1]) from None
        finally:
            for process in workers.processes:
                process.terminate()  # no effect on a process that has ended
    assert answer is not None
    return answer


def _train_one_replica(
    rank: int,
    settings: DemoSettings,
    folder: Path,
    resume: bool,
    shared: str,
    messages: Any,
    stop: Any,
) -> None:
    torch.set_num_threads(max((os.cpu_count() or 1) // settings.replicas, 1))
    with gloo_group(f"file://{shared}/store", rank, settings.replicas) as agree:

        def show(status: Status, *, milestone: bool) -> None:
            if rank == 0:
                messages.put(("status", (status, milestone)))

        device = torch.device("cpu")
        answer = train_all(
            settings, folder, device, show, lambda: agree(stop.is_set()), resume=resume
        )
        if rank == 0:
            messages.put(("answer", answer))


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """Processes that are started inside ignore Ctrl-C from their first moment on."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
