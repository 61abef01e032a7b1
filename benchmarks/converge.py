"""How long does a converge take, beside a raw all-reduce of the same bytes? And in how much memory?

    python -m benchmarks.converge [--quick] [--processes 2] [--out FILE]

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
import gc
import json
import math
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, TCPStore
from torch.multiprocessing.spawn import spawn

from hdet import HDET, PaperController, ProcessReplicas
from hdet.weights.inventory import WEIGHTS
from hdet.weights.replica_weights import ReplicaWeights

Shapes = Sequence[tuple[int, ...]]
RESULTS = Path(__file__).parent / "results"
RAW, HEADLINE, WHOLE = "raw all-reduce", "hdet converge", "hdet, whole end of a cycle"
FOLLOWED = "hdet converge, outer optimizer"
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


class Settings(NamedTuple):
    """What a run is set to. Parameters are float32."""

    processes: int
    blocks: int
    """Transformer blocks of the model that is shaped like GPT-2; the real one has 12."""
    rounds: dict[str, int]
    bucket_bytes: int


FULL = Settings(
    processes=2, blocks=12, rounds={"gpt2": 15, "small_tensors": 101}, bucket_bytes=64 << 20
)
QUICK = FULL._replace(blocks=2, rounds={"gpt2": 5, "small_tensors": 25})


class Place(NamedTuple):
    """Where a row runs."""

    rank: int
    settings: Settings
    lighthouse: str | None
    """Address of torchft's server."""


class Row(NamedTuple):
    """A way to average, ready to be called."""

    call: Callable[[], Any]
    tensors: list[Tensor]
    """What holds the mean after the call; none if it is not a mean."""
    close: Callable[[], Any] = lambda: None
    way: float = 1.0
    """How far they go toward the mean at the first call; an outer optimizer goes beyond it."""


# What is averaged --------------------------------------------------------------------------


def gpt2_shapes(blocks: int) -> Shapes:
    """The parameters of GPT-2 small: 124 million with its 12 blocks."""
    norm = [(768,), (768,)]
    attention = [(768, 2304), (2304,), (768, 768), (768,)]
    mlp = [(768, 3072), (3072,), (3072, 768), (768,)]
    return [(50257, 768), (1024, 768), *(norm + attention + norm + mlp) * blocks, *norm]


def small_shapes() -> Shapes:
    """560 tensors of 1 to 16 kB."""
    return [(256 * (1 + index % 16),) for index in range(560)]


def shapes_of(settings: Settings) -> dict[str, Shapes]:
    return {"gpt2": gpt2_shapes(settings.blocks), "small_tensors": small_shapes()}


def num_bytes(shapes: Shapes) -> int:
    return 4 * sum(map(prod, shapes))


def model_of(shapes: Shapes) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)


def tensors_of(shapes: Shapes) -> list[Tensor]:
    return [torch.ones(shape) for shape in shapes]


# Ways to average ---------------------------------------------------------------------------


def raw(shapes: Shapes, place: Place) -> Row:
    """The floor: one message, no copy, no division."""
    flat = torch.full((num_bytes(shapes) // 4,), 1e-37)  # it doubles at every call
    return Row(lambda: dist.all_reduce(flat), [])


def flat_copy(shapes: Shapes, place: Place) -> Row:
    """The plain way: copy into one tensor, reduce, divide, copy back."""
    tensors = tensors_of(shapes)
    sizes = [tensor.numel() for tensor in tensors]

    def call() -> None:
        flat = torch.cat([tensor.view(-1) for tensor in tensors])
        dist.all_reduce(flat)
        flat.div_(place.settings.processes)
        for tensor, part in zip(tensors, torch.split(flat, sizes), strict=True):
            tensor.copy_(part.view_as(tensor))

    return Row(call, tensors)


def per_parameter(shapes: Shapes, place: Place) -> Row:
    tensors = tensors_of(shapes)

    def call() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor.div_(place.settings.processes)

    return Row(call, tensors)


def torch_averager(shapes: Shapes, place: Place) -> Row:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = model_of(shapes)
    for parameter in model:
        parameter.grad = torch.zeros(()).expand_as(parameter)  # it skips those without gradient
    averager = PeriodicModelAverager(period=1)
    return Row(lambda: averager.average_parameters(model.parameters()), list(model))


def accelerate_local_sgd(shapes: Shapes, place: Place) -> Row:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    model = model_of(shapes)
    local_sgd = LocalSGD(Accelerator(cpu=True), model, local_sgd_steps=1)
    if not local_sgd.enabled:
        raise RuntimeError("Accelerate did not find the process group.")
    return Row(local_sgd.step, list(model))


def torchft_local_sgd(shapes: Shapes, place: Place) -> Row:
    """Quorum, all-reduce of a copy, vote and copy back, as LocalSGD does at a sync."""
    from torchft.local_sgd import LocalSGD

    model = model_of(shapes)
    manager = torchft_manager(model, place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local_sgd = LocalSGD(manager, model, optimizer, sync_every=1)
    return Row(local_sgd.sync, list(model), manager.shutdown)


def torchft_diloco(shapes: Shapes, place: Place) -> Row:
    """The same for what has changed since the last sync, and a step of the outer optimizer."""
    from torchft.local_sgd import DiLoCo

    model = model_of(shapes)
    manager = torchft_manager(model, place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without gradients it does nothing
    diloco = DiLoCo(manager, [model], optimizer, OUTER(list(model)), sync_every=1)
    diloco.__enter__()

    def close() -> None:
        diloco.__exit__(None, None, None)
        manager.shutdown()

    return Row(optimizer.step, list(model), close, outer_way())


def outer_way() -> float:
    """The first step of Nesterov's momentum, in units of what has changed."""
    settings = OUTER.keywords
    return float(settings["lr"] * (1 + settings["momentum"]))


def torchft_manager(model: nn.Module, place: Place) -> Any:
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    if place.lighthouse is None:
        raise RuntimeError("torchft's lighthouse did not start.")
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=place.settings.processes,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=place.lighthouse,
        replica_id=f"replica_{place.rank}",
        hostname="localhost",
        init_sync=False,
    )
    manager.hdet_store = store  # the server ends with its last reference
    return manager


def hdet_converge(shapes: Shapes, place: Place) -> Row:
    """What the rows of Local SGD do too: the weights of a model, averaged."""
    model = model_of(shapes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replicas = ProcessReplicas(bucket_bytes=place.settings.bucket_bytes)
    parameters = ReplicaWeights(optimizer, model, replicas)
    everyone = range(place.settings.processes)

    def call() -> None:
        parameters.refresh()
        parameters.averager.average_(everyone, WEIGHTS, {})

    return Row(call, list(model))


def hdet_outer(shapes: Shapes, place: Place) -> Row:
    """What DiLoCo does: the same, a step of the outer optimizer, and a copy to set out from."""
    model = model_of(shapes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replicas = ProcessReplicas(bucket_bytes=place.settings.bucket_bytes)
    parameters = ReplicaWeights(optimizer, model, replicas, OUTER)
    everyone = range(place.settings.processes)
    optimizer.step()  # the first of a cycle copies what it sets out from; no gradient, no change

    def call() -> None:
        parameters.averager.note_step()
        parameters.refresh()
        parameters.averager.average_(everyone, WEIGHTS, {})
        optimizer.step()

    return Row(call, list(model), way=outer_way())


def hdet_cycle_end(shapes: Shapes, place: Place) -> Row:
    """And what they do not: losses exchanged, all weights checked, learning rates moved."""
    model = model_of(shapes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    base = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    optimizer.step()  # torch warns of schedules that are stepped before; no gradient, no change
    scheduler = HDET(
        base,
        model=model,
        spread=0.1,
        sync_every=1,
        controller=PaperController(),
        gradients="local",
        replicas=ProcessReplicas(bucket_bytes=place.settings.bucket_bytes),
    )
    loss = torch.tensor(2.0 + place.rank)
    return Row(lambda: scheduler.step(loss), list(model))


ROWS: dict[str, Callable[[Shapes, Place], Row]] = {
    RAW: raw,
    HEADLINE: hdet_converge,
    WHOLE: hdet_cycle_end,
    "flat copy": flat_copy,
    "one all-reduce per parameter": per_parameter,
    "torch PeriodicModelAverager": torch_averager,
    "Accelerate LocalSGD": accelerate_local_sgd,
    "torchft LocalSGD": torchft_local_sgd,
    FOLLOWED: hdet_outer,
    "torchft DiLoCo": torchft_diloco,
}

LIKE: dict[str, tuple[str, tuple[str, ...]]] = {
    "Local SGD": (
        HEADLINE,
        ("torch PeriodicModelAverager", "Accelerate LocalSGD", "torchft LocalSGD"),
    ),
    "DiLoCo": (FOLLOWED, ("torchft DiLoCo",)),
}
"""hdet's row -> those of other libraries that do the same."""
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


def ready(prepare: Callable[[Shapes, Place], Row], shapes: Shapes, place: Place) -> Row:
    """A row that has run twice, and that was seen to average."""
    row = prepare(shapes, place)
    with torch.no_grad():
        for tensor in row.tensors:
            tensor.add_(place.rank)
    row.call()
    mean = 1 + row.way * (place.settings.processes - 1) / 2
    if any(bool((tensor - mean).abs().max() > 1e-6) for tensor in row.tensors):
        raise RuntimeError("the result is not the mean.")
    row.call()
    return row


def agreed(prepare: Callable[[], Row]) -> tuple[Row | None, str | None]:
    """A row, or what went wrong in the first process where something did."""
    row = mine = None
    try:
        row = prepare()
    except Exception as error:
        mine = f"{type(error).__name__}: {error}"
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return row, next((error for error in everyone if error), None)


def seconds(call: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# Memory ------------------------------------------------------------------------------------


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
        "versions": versions(),
        "device": f"cpu, {os.cpu_count()} cores, gloo over loopback",
        "settings": {
            **settings._asdict(),
            "sets": {
                name: {"tensors": len(shapes), "bytes": num_bytes(shapes)}
                for name, shapes in shapes_of(settings).items()
            },
        },
        "memory": answer["memory"],
        "rows": rows,
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("hdet", "torch", "accelerate", "torchft-nightly"):
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
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
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
