"""What do a converge and its memory cost, beside a raw all-reduce? -> converge.json

    python -m benchmarks.systems.converge [--quick] [--processes 2] [--out FILE]

All ways to average are timed in the same processes, each turn by turn with a raw all-reduce. A
round is as long as its slowest process; "over raw" is the median over the rounds of a row's time
over that of the raw all-reduce beside it. Rows are compared with those that do the same: Local SGD
with a converge, DiLoCo with a converge that an outer optimizer follows (the same one, Nesterov's).
What torch's PostLocalSGDOptimizer calls is its PeriodicModelAverager.

Memory is measured in processes of its own for each row, which make one converge of the model that
is shaped like GPT-2, their first: the kernel's high-water mark of resident memory (or the largest
of many samples, where it cannot be reset), less what was resident before the row was made, less
the model. What a row still holds after the converge, such as a copy of the weights and the momentum
of an outer optimizer, is given apart; it is part of the peak. So is the copy that a guard keeps of
the last good weights: hdet has one by default, in the row of the whole end of a cycle.
"""

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

from benchmarks.result_file import RESULTS, write_result
from benchmarks.systems.averaging import HEADLINE, LIKE, RAW, ROWS, WHOLE, raw
from benchmarks.systems.memory import measure_memory
from benchmarks.systems.readiness import agreed, ready
from benchmarks.systems.tensor_sets import (
    FULL,
    QUICK,
    Place,
    Row,
    Settings,
    Shapes,
    num_bytes,
    shapes_of,
)

BESIDE_PEERS = {"converge_over_best_peer": "time", "memory_over_best_peer": "memory"}


# Time --------------------------------------------------------------------------------------


def time_rows(name: str, shapes: Shapes, place: Place) -> dict[str, Any]:
    """Row -> how long it took beside a raw all-reduce, or why it did not run."""
    floor = ready(raw, shapes, place)
    answer: dict[str, Any] = {}
    for label, prepare in ROWS.items():
        row, error = agreed(partial(ready, prepare, shapes, place))
        if row is None or error is not None:
            answer[label] = {"error": str(error)}
        else:
            answer[label] = time_row(row, floor, place.settings.rounds[name])
            row.close()
        say(place, f"{name}: {label}: {error or 'done'}")
    return answer


def time_row(row: Row, floor: Row, num_rounds: int) -> dict[str, Any]:
    """Turn by turn with the raw all-reduce, so that whatever the machine does hits both alike.

    No other row is alive meanwhile: torchft keeps threads of its own at work.
    """
    times: list[list[float]] = [[], []]
    for number in range(num_rounds):
        for index in Random(number).sample([0, 1], 2):
            times[index].append(seconds((row, floor)[index].call))
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    own, raw_times = slowest.tolist()
    return {
        "seconds": median(own),
        "quartiles": [quantiles(own)[0], quantiles(own)[2]],
        "raw_seconds": median(raw_times),
        "over_raw": median(a / b for a, b in zip(own, raw_times, strict=True)),
        "ratio_of_medians": median(own) / median(raw_times),
    }


def seconds(call: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# Processes ---------------------------------------------------------------------------------


def run(settings: Settings) -> dict[str, Any]:
    """Times in one set of processes, then memory in one of its own for each row."""
    memory = {}
    rows = in_processes(settings, None)
    for label in ROWS:
        memory[label] = in_processes(settings, label)
        print(f"memory: {label}: {memory[label]}", flush=True)
    return {"rows": rows, "memory": memory}


def in_processes(settings: Settings, label: str | None) -> Any:
    """Start the processes, and bring home what they measured."""
    with tempfile.TemporaryDirectory() as folder, standard_error_to(Path(folder) / "log"):
        lighthouse = start_lighthouse(settings.processes)
        address = None if lighthouse is None else lighthouse.address()
        spawn(work, (settings, address, folder, label), settings.processes)
        answer = json.loads((Path(folder) / "answer.json").read_text())
        if lighthouse is not None:
            lighthouse.shutdown()
    return answer


@contextmanager
def standard_error_to(path: Path) -> Iterator[None]:
    """Of all processes, also of code that is not Python: torchft writes many lines at every sync.

    An exception in a process still comes out, through the one that started it.
    """
    kept = os.dup(2)
    with path.open("w") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def start_lighthouse(processes: int) -> Any:
    """The server that torchft's managers meet at; none without torchft."""
    try:
        from torchft.coordination import LighthouseServer
    except ImportError:
        return None
    return LighthouseServer(bind="[::]:0", min_replicas=processes)


def work(
    rank: int, settings: Settings, lighthouse: str | None, folder: str, label: str | None
) -> None:
    """The memory of one row, or without one the time of all."""
    torch.set_num_threads(1)
    count = str(settings.processes)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    # Accelerate reads these although the group is there.
    os.environ.update(RANK=str(rank), WORLD_SIZE=count)
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=count)
    store = FileStore(str(Path(folder) / "store"), settings.processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.processes)
    place = Place(rank, settings, lighthouse)
    sets = shapes_of(settings)
    answer: Any
    if label is None:
        answer = {name: time_rows(name, shapes, place) for name, shapes in sets.items()}
    else:
        answer = measure_memory(label, sets["gpt2"], place)
    if rank == 0:
        (Path(folder) / "answer.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def say(place: Place, text: str) -> None:
    if place.rank == 0:
        print(text, flush=True)


# Report ------------------------------------------------------------------------------------


def against_peers(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """hdet over the best of those that do the same: in time by set, in memory for the large one."""
    times = {
        name: {label: row["over_raw"] for label, row in rows.items() if "over_raw" in row}
        for name, rows in answer["rows"].items()
    }
    peaks = {
        label: found["peak_bytes"]
        for label, found in answer["memory"].items()
        if not isinstance(found, str)
    }
    tables = {**{f"time, {name}": table for name, table in times.items()}, "memory, gpt2": peaks}
    return [
        {"what": what, "kind": kind, **against(table, *LIKE[kind])}
        for what, table in tables.items()
        for kind in LIKE
    ]


def against(table: dict[str, float], own: str, peers: Sequence[str]) -> dict[str, Any]:
    there = [peer for peer in peers if peer in table]
    if own not in table or not there:
        return {"hdet": table.get(own), "best_peer": None, "ratio": None}
    best = min(there, key=table.__getitem__)
    return {"hdet": table[own], "best_peer": best, "ratio": table[own] / table[best]}


def worst(answer: dict[str, Any], what: str) -> float:
    """Over all rows of which a peer was there; without any it is not a number."""
    ratios = [r["ratio"] for r in against_peers(answer) if r["what"].startswith(what)]
    return max((ratio for ratio in ratios if ratio is not None), default=math.nan)


def extra_bytes(memory: dict[str, Any]) -> float:
    """What the whole end of a cycle takes beside what the all-reduce itself needs."""
    return max(memory[WHOLE]["call_bytes"] - memory[RAW]["call_bytes"], 0)


def report(settings: Settings, answer: dict[str, Any]) -> dict[str, Any]:
    rows = answer["rows"]
    return {
        "headline": {
            "gpt2_over_raw": rows["gpt2"][HEADLINE]["over_raw"],
            "small_tensors_over_raw": rows["small_tensors"][HEADLINE]["over_raw"],
            "extra_bytes_over_bucket": extra_bytes(answer["memory"]) / settings.bucket_bytes,
            "gpt2_whole_cycle_end_over_raw": rows["gpt2"][WHOLE]["over_raw"],
            "small_tensors_whole_cycle_end_over_raw": rows["small_tensors"][WHOLE]["over_raw"],
            **{key: worst(answer, what) for key, what in BESIDE_PEERS.items()},
        },
        "against_peers": against_peers(answer),
        "settings": {
            **settings._asdict(),
            "cores": os.cpu_count(),
            "backend": "gloo over loopback",
            "peers": versions(),
            "sets": {
                name: {"tensors": len(shapes), "bytes": num_bytes(shapes)}
                for name, shapes in shapes_of(settings).items()
            },
        },
        "memory": answer["memory"],
        "rows": rows,
    }


def versions() -> dict[str, str]:
    found = {}
    for package in ("accelerate", "torchft-nightly"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def table(result: dict[str, Any]) -> str:
    sets = result["settings"]["sets"]
    heads = "".join(f"{name + ', ms':>18}{'over raw':>10}" for name in sets)
    lines = [f"{'':30}{heads}{'peak MiB':>12}{'kept':>8}"]
    for label in ROWS:
        cells = [result["rows"][name][label] for name in sets]
        found = result["memory"][label]
        sizes = [] if isinstance(found, str) else [found["peak_bytes"], found["kept_bytes"]]
        ends = "".join(f"{size / 2**20:10.1f}" for size in sizes)
        lines.append(f"{label:30}" + "".join(map(cell, cells)) + ends)
    lines += [f"{key} = {value:.3f}" for key, value in result["headline"].items()]
    return "\n".join(lines)


def cell(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{'did not run':>18}{'':>10}"
    return f"{1000 * row['seconds']:18.2f}{row['over_raw']:10.2f}"


def measure(settings: Settings) -> dict[str, Any]:
    return report(settings, run(settings))


def default_path(*, quick: bool) -> Path:
    return RESULTS / ("converge.quick.json" if quick else "converge.json")


def save(result: dict[str, Any], out: Path) -> None:
    write_result(out, **result, seeds=[])
    print(table(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 blocks, few rounds")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    chosen = parser.parse_args()
    settings = QUICK if chosen.quick else FULL
    result = measure(settings._replace(processes=chosen.processes))
    save(result, chosen.out or default_path(quick=chosen.quick))


if __name__ == "__main__":
    main()
