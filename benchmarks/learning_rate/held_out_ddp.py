"""What should compare replicas under DDP: losses, held-out batches, a probe? -> held_out_ddp.json

    HDET_DATA=FOLDER python -m benchmarks.learning_rate.held_out_ddp [--quick] [--only TASK]

Each run is a scout of real processes, which ends with the search. Its learning rate is looked up on
the stored curve of the task: how far a run with it ends behind the best of the grid, in percent of
what that one gains. By losses, nothing is added. Held out, every process keeps batches of its own
with `scheduler.hold_out(loss_of, *batch)`, the same number of samples in all as a probe has. What
becomes the default is decided on the tasks of the setting half; the others are only reported.
All runs start from 1/100 of the best learning rate: a scout finds the same from every start.
"""

import argparse
import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import hdet
from benchmarks.result_file import RESULTS, read_result, write_result
from benchmarks.zoo.runs import silence
from benchmarks.zoo.small.catalogue import REPORTING, SETTING, TASKS
from benchmarks.zoo.small.curve import best_lr, curve_rows, curves, finite, interpolated
from benchmarks.zoo.small.task import SmallTask, make_schedule
from benchmarks.zoo.zoo_headline import LOST_SHARE

PATH = RESULTS / "held_out_ddp.json"
FAMILIES = ("conv", "dense", "text", "tables", "generative", "finetuning")
WAYS = ("by losses", "held out", "probe")
START, SEEDS, PROCESSES = 0.01, (0, 1, 2, 3, 4), (2, 4)
NUM_BATCHES = 8
"""What replicas are compared on, in batches of one process."""

Row = dict[str, Any]


def chosen_tasks(names: Sequence[str]) -> list[str]:
    """The first task of each family."""
    firsts = ([n for n in names if TASKS[n].family == family] for family in FAMILIES)
    return [found[0] for found in firsts if found]


def work(rank: int, num: int, port: int, jobs: Sequence[Row], keep: Callable[[Row], None]) -> None:
    """One process: all runs, one after another."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num)
    try:
        for job in jobs:
            with silence():
                peak = scouted(rank, num, job)
            if rank == 0:
                keep(job | judged(job["task"], peak))
    finally:
        dist.destroy_process_group()


def scouted(rank: int, num: int, job: Row) -> float:
    """The learning rate that the scout of a run finds."""
    task, seed = TASKS[job["task"]], job["seed"]
    lr = best_lr(task.name) * START
    model = task.make_model(seed)
    model.train()
    parallel = DistributedDataParallel(model)
    optimizer = task.make_optimizer(model, lr)
    kept = [task.batches(1000 + seed)(place) for place in range(NUM_BATCHES)]
    scheduler = hdet.HDET(
        make_schedule(task, optimizer, lr),
        model=parallel,
        total_steps=task.steps,
        probe=probe_of(task, [part(b, 0, num) for b in kept]) if job["way"] == "probe" else None,
    )
    if job["way"] == "held out":
        for batch in kept[: NUM_BATCHES // num]:
            scheduler.hold_out(lambda net, *own: task.loss(net, *own), *part(batch, rank, num))
    batches, step = task.batches(seed), 0
    while scheduler.is_scouting:
        optimizer.zero_grad()
        loss = task.loss(parallel, *part(batches(step), rank, num))
        loss.backward()
        if task.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        scheduler.step(loss.detach())
        step += 1
    return scheduler.found_lr or lr


def probe_of(task: SmallTask, batches: Sequence[tuple[Tensor, ...]]) -> Callable[[Any], Tensor]:
    return lambda model: torch.stack([task.loss(model, *batch).detach() for batch in batches])


def part(batch: tuple[Tensor, ...], rank: int, num: int) -> tuple[Tensor, ...]:
    return tuple(tensor.chunk(num)[rank] for tensor in batch)


def judged(task: str, peak: float) -> Row:
    """A learning rate in units of the best, and what it costs in percent of the gain."""
    best = min(curves()[task].values())
    outset = fmean(finite(row["outset"]) for row in curve_rows(task))
    cost = (interpolated(curves()[task], peak) - best) / (outset - best)
    return {"chosen": peak / best_lr(task), "pct": 100 * min(cost, 1.0)}


# The file --------------------------------------------------------------------------------------


def headline(rows: Sequence[Mapping[str, Any]]) -> Row:
    """Of the reporting half; the numbers of the setting half begin with "setting"."""
    found: Row = {}
    for half, names in (("", REPORTING), ("setting ", SETTING)):
        found[f"{half}tasks"] = len({row["task"] for row in rows if row["task"] in names})
        for way in WAYS:
            costs = [row["pct"] for row in rows if row["way"] == way and row["task"] in names]
            if costs:
                chosen = [r["chosen"] for r in rows if r["way"] == way and r["task"] in names]
                found |= {
                    f"{half}{way} mean pct": fmean(costs),
                    f"{half}{way} median pct": median(costs),
                    f"{half}{way} worst pct": max(costs),
                    f"{half}{way} lost": sum(cost > LOST_SHARE for cost in costs),
                    f"{half}{way} runs": len(costs),
                    f"{half}{way} decades off": fmean(abs(math.log10(lr)) for lr in chosen),
                }
    return found


def keep(row: Row) -> None:
    """Add a row to the file."""
    earlier = read_result(PATH)
    rows = [*earlier.get("rows", []), row]
    settings = {"start": START, "processes": PROCESSES, "batches": NUM_BATCHES}
    write_result(
        PATH, headline=headline(rows), settings=settings, seeds=SEEDS, kept=earlier, rows=rows
    )
    print(row, flush=True)


def jobs_of(names: Sequence[str], seeds: Sequence[int]) -> list[Row]:
    """The runs of both numbers of processes that the file lacks."""
    known = read_result(PATH).get("rows", [])
    done = {tuple(row[key] for key in KEYS) for row in known}
    keys = product(PROCESSES, names, seeds, WAYS)
    return [dict(zip(KEYS, values, strict=True)) for values in keys if values not in done]


KEYS = ("processes", "task", "seed", "way")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--only", choices=[*SETTING, *REPORTING], action="append")
    options = parser.parse_args()
    names = options.only or [*chosen_tasks(SETTING), *chosen_tasks(REPORTING)]
    jobs = jobs_of(names, SEEDS[:1] if options.quick else SEEDS)
    for num in PROCESSES:
        own = [job for job in jobs if job["processes"] == num]
        print(f"{len(own)} runs of {num} processes", flush=True)
        if own:
            start_processes(work, (num, free_port(), own, keep), nprocs=num)


if __name__ == "__main__":
    main()
