"""What do a wire, a step, a stack and a decision take? The points that scale.py fits.

Processes send over gloo on one machine. A raw all-reduce and hdet's converge of the same bytes are
timed by turns, and so are steps of a small GPT with DDP and without its all-reduce. Replicas that
are stacked on a GPU converge and end cycles. A round is as long as its slowest process; a point is
the lower quartile over its rounds: what a machine does beside it only ever adds.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks.systems.decisions import decision
from benchmarks.systems.loops import seconds
from benchmarks.systems.tensor_sets import Shapes, model_of, num_bytes
from benchmarks.zoo.models import GPT, Size, gpt_loss
from hdet.weights.inventory import WEIGHTS
from hdet.weights.replica_weights import ReplicaWeights

Point = dict[str, float]
TENSOR = 1_000_000
"""Parameters of a tensor of the models that are sent."""
STACKED_TENSORS = 64
CONTEXT, WIDTH = 64, 192


class Settings(NamedTuple):
    processes: Sequence[int]
    """Each number of them is started anew."""
    sizes: Sequence[int]
    """Parameters that are sent."""
    layers: Sequence[int]
    batches: Sequence[int]
    trainers: Sequence[int]
    """Those that also train: each wants a core for itself and one for the wire."""
    rounds: int
    """Of the smallest; the largest have a quarter."""
    stacks: Sequence[int]
    """Replicas that are stacked, with `stacked_size` parameters."""
    stacked_size: int
    stacked_sizes: Sequence[int]
    """Parameters of two replicas that are stacked."""
    decisions: Sequence[int]
    """Replicas that are compared, with one knob."""


FULL = Settings(
    processes=(2, 3, 4, 6, 8),
    sizes=(10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7, 3 * 10**7, 10**8),
    layers=(2, 4, 8),
    batches=(4, 8),
    trainers=(2, 4, 6),
    rounds=24,
    stacks=(2, 4, 8, 16, 32, 64),
    stacked_size=30_000_000,
    stacked_sizes=(10**5, 10**6, 10**7, 10**8, 10**9),
    decisions=(2, 8, 64, 512, 4096),
)
QUICK = Settings(
    processes=(2,),
    sizes=(100_000, 1_000_000),
    layers=(1, 2),
    batches=(2,),
    trainers=(2,),
    rounds=6,
    stacks=(2, 4),
    stacked_size=100_000,
    stacked_sizes=(100_000, 1_000_000),
    decisions=(2, 8),
)


def lower(times: Sequence[float]) -> float:
    return quantiles(times, n=4)[0]


def say(text: str) -> None:
    print(text, flush=True)


# Processes -----------------------------------------------------------------------------------


def in_processes(num: int, settings: Settings) -> dict[str, list[Point]]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (num, settings, folder), num)
        return json.loads((Path(folder) / "points.json").read_text())


def work(rank: int, num: int, settings: Settings, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num)
    found = {
        "wire": [wire(size, settings.rounds) for size in settings.sizes],
        "step": steps(settings) if num in settings.trainers else [],
    }
    if rank == 0:
        (Path(folder) / "points.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def by_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Each as long as its slowest process, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            taken = seconds(call)
            if number:
                times[name].append(taken)
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {name: lower(row.tolist()) for name, row in zip(calls, slowest, strict=True)}


def shapes_for(size: int) -> Shapes:
    whole, rest = divmod(size, TENSOR)
    return [(TENSOR,)] * whole + ([(rest,)] if rest else [])


def wire(size: int, rounds: int) -> Point:
    """A raw all-reduce, and a converge of as many parameters."""
    shapes = shapes_for(size)
    flat = torch.full((num_bytes(shapes) // 4,), 1e-37)  # it grows at every call
    model = model_of(shapes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = ReplicaWeights(optimizer, model, hdet.ProcessReplicas())
    everyone = range(dist.get_world_size())

    def converge() -> None:
        parameters.refresh()
        parameters.averager.average_(everyone, WEIGHTS, {})

    share = 1 if size < 10 * TENSOR else 4
    calls = {"all_reduce": lambda: dist.all_reduce(flat), "converge": converge}
    taken = by_turns(calls, rounds // share)
    return {"processes": len(everyone), "parameters": size, **taken}


def steps(settings: Settings) -> list[Point]:
    """Of DDP, and of the same model when gradients stay where they are."""
    found = []
    for layers in settings.layers:
        model = DistributedDataParallel(GPT(Size(256, CONTEXT, layers, 4, WIDTH)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        size = sum(p.numel() for p in model.parameters())
        for batch in settings.batches:
            taken = by_turns(ways_to_step(model, optimizer, batch), settings.rounds // 3)
            tokens = batch * CONTEXT
            places = {"processes": dist.get_world_size(), "parameters": size}
            found.append({**places, "tokens": tokens, **taken})
    return found


def ways_to_step(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, batch: int
) -> dict[str, Callable[[], Any]]:
    def step(local: bool) -> None:
        tokens = torch.randint(256, (batch, CONTEXT + 1))
        optimizer.zero_grad()
        with model.no_sync() if local else nullcontext():
            gpt_loss(model, tokens).backward()
        optimizer.step()

    return {"local": lambda: step(True), "shared": lambda: step(False)}


# Replicas on one device ----------------------------------------------------------------------


def stacks(settings: Settings) -> list[Point]:
    wanted = [(num, settings.stacked_size) for num in settings.stacks]
    wanted += [(2, size) for size in settings.stacked_sizes]
    found = []
    for num, size in wanted:
        found.append(stack(num, size, settings.rounds))
        say(f"{num} replicas of {size:.0e} parameters: {found[-1]}")
    return found


def stack(num: int, size: int, rounds: int) -> Point:
    """What an average takes, the whole end of a cycle, and its decision."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [(size // STACKED_TENSORS,)] * STACKED_TENSORS
    model = model_of(shapes).to(device)
    ensemble = hdet.StackedReplicas(model, num)
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    base = OneCycleLR(optimizer, 0.1, total_steps=100_000)
    optimizer.step()  # torch warns of schedules that are stepped before; no gradient, no change
    scheduler = hdet.HDET(
        base,
        model=model,
        replicas=ensemble,
        preset="paper",
        controller=hdet.PaperController(),
        sync_every=1,
    )
    losses = torch.linspace(2, 3, num, device=device)
    taken: dict[str, list[float]] = {"converge": [], "end": []}
    for number in range(rounds + 3):
        times = {
            "converge": seconds(ensemble.converge_),
            "end": seconds(lambda: scheduler.step(losses)),
        }
        for name, one in times.items():
            if number > 2:
                taken[name].append(one)
    return {
        "replicas": num,
        "parameters": STACKED_TENSORS * (size // STACKED_TENSORS),
        **{name: lower(times) for name, times in taken.items()},
        "decision": decision(num, 1, 50),
    }


# Decisions -----------------------------------------------------------------------------------


def decisions(settings: Settings) -> list[Point]:
    wanted = [(64, 16), *((num, 1) for num in settings.decisions)]
    return [
        {"replicas": num, "knobs": knobs, "seconds": decision(num, knobs, 200 if num < 512 else 9)}
        for num, knobs in wanted
    ]


# All of it -----------------------------------------------------------------------------------


def measure(settings: Settings, keep: Callable[[dict[str, Any]], None]) -> None:
    """What is known after each part is kept: a machine may be taken away."""
    begin = time.perf_counter()
    with torch.no_grad():
        results: dict[str, Any] = {"stack": stacks(settings)}
    results["decision"] = decisions(settings)
    keep(results)
    for num in settings.processes:
        for kind, points in in_processes(num, settings).items():
            results.setdefault(kind, []).extend(points)
        keep(results)
        say(f"{num} processes: done after {time.perf_counter() - begin:.0f} s")
