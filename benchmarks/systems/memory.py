"""How much memory a way to average takes."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.systems.averaging import ROWS
from benchmarks.systems.readiness import agreed
from benchmarks.systems.tensor_sets import Place, Shapes, num_bytes


class Footprint(NamedTuple):
    """Bytes beside the model, of the process that took most."""

    peak_bytes: int
    """While it converges."""
    kept_bytes: int
    """After it: what a row holds from one converge to the next."""
    call_bytes: int
    """How much the process grows in the call itself."""


def measure_memory(label: str, shapes: Shapes, place: Place) -> dict[str, int] | str:
    """The first converge of a model in this process; or why there was none."""
    tiny, error = agreed(partial(ROWS[label], [(8,)], place))
    if tiny is None or error is not None:
        return str(error)
    tiny.call()  # code that is loaded and connections that are made are no part of a converge
    tiny.close()
    del tiny
    gc.collect()
    before = resident("VmRSS") + num_bytes(shapes)
    row = ROWS[label](shapes, place)
    ready_at = resident("VmRSS")
    dist.barrier()
    with peak() as read:
        row.call()
        most = read()
    gc.collect()
    found = [most - before, resident("VmRSS") - before, most - ready_at]
    everyone = torch.tensor(found, dtype=torch.float64).clamp(min=0)
    dist.all_reduce(everyone, op=dist.ReduceOp.MAX)
    row.close()
    return Footprint(*map(int, everyone.tolist()))._asdict()


@contextmanager
def peak() -> Iterator[Callable[[], int]]:
    """The kernel's own high-water mark; where it cannot be reset, the largest of many samples."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        yield lambda: resident("VmHWM")
        return
    except OSError:
        pass
    seen = [resident("VmRSS")]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            seen.append(max(seen.pop(), resident("VmRSS")))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: max([*seen, resident("VmRSS")])
    finally:
        over.set()
        watcher.join()


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field))
    return int(line.split()[1]) * 1024
