"""Four processes under DDP, on tasks nobody tuned on -> zoo_ddp.json

    HDET_DATA=FOLDER python -m benchmarks.zoo.zoo_ddp [--processes 4] [--only TASK]

The first task of four families of the reporting half, from learning rates 1/100 to 100 times the
best. Every process trains on its part of each batch. Nothing is set; then the same once more with
`scheduler.hold_out(loss_of, *batch)`, one line that keeps batches for the scout.
"""

import argparse
import math
import os
import socket
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import hdet
from benchmarks.result_file import RESULTS, write_result
from benchmarks.zoo.runs import Events, silence
from benchmarks.zoo.small.catalogue import REPORTING, TASKS
from benchmarks.zoo.small.curve import best_lr
from benchmarks.zoo.small.task import SmallTask, make_schedule
from benchmarks.zoo.zoo_headline import LOST_SHARE, regrets

PATH = RESULTS / "zoo_ddp.json"
FAMILIES = ("conv", "text", "tables", "generative")
STARTS = (0.01, 1.0, 100.0)
HELD_OUT_BATCHES = 4


def chosen_tasks() -> list[str]:
    return [next(n for n in REPORTING if TASKS[n].family == family) for family in FAMILIES]


def train(rank: int, num: int, port: int, name: str, start: float, held_out: bool, to: Any) -> None:
    """One process of a run."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num)
    try:
        with silence():
            row = _run(rank, num, TASKS[name], best_lr(name) * start, held_out)
        if rank == 0:
            row |= {"task": name, "start": start, "seed": 0, "held_out": held_out}
            to.put(row | {"chosen": row["peak"] / best_lr(name)})
    finally:
        dist.destroy_process_group()


def _run(rank: int, num: int, task: SmallTask, lr: float, held_out: bool) -> dict[str, Any]:
    events, batches = Events(), task.batches(0)
    model = task.make_model(0)
    outset = task.validate(model)["loss"]
    model.train()
    parallel = DistributedDataParallel(model)
    optimizer = task.make_optimizer(model, lr)
    schedule = make_schedule(task, optimizer, lr)
    scheduler = hdet.HDET(schedule, model=parallel, total_steps=task.steps, record=events)
    kept = task.batches(1)
    for number in range(HELD_OUT_BATCHES if held_out else 0):
        batch = _part(kept(number), rank, num)
        scheduler.hold_out(lambda net, *part: task.loss(net, *part), *batch)
    for step in range(task.steps):
        optimizer.zero_grad()
        loss = task.loss(parallel, *_part(batches(step), rank, num))
        loss.backward()
        if task.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        scheduler.step(loss.detach())
    with scheduler.consensus():
        end = task.validate(model)["loss"]
    return {
        "loss": end if math.isfinite(end) else math.nan,
        "outset": outset,
        "peak": scheduler.found_lr or lr,
        "scout_steps": max((line["step"] for line in events.of("scout")), default=0),
        "steps": task.steps,
    }


def _part(batch: tuple[Tensor, ...], rank: int, num: int) -> tuple[Tensor, ...]:
    return tuple(tensor.chunk(num)[rank] for tensor in batch)


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, held_out in (("by_losses", False), ("held_out", True)):
        pairs = [regrets(row) for row in rows if row["held_out"] is held_out]
        if pairs:
            found[name] = {
                "runs": len(pairs),
                "lost": sum(not share <= LOST_SHARE for _, share in pairs),
                "median_pct": median(pct for pct, _ in pairs),
                "median_gain_pct": median(share for _, share in pairs),
                "worst_gain_pct": max(share for _, share in pairs),
            }
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--only", choices=REPORTING, action="append")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.only or chosen_tasks():
        for start in STARTS:
            for held_out in (False, True):
                to = mp.get_context("spawn").SimpleQueue()
                arguments = (options.processes, free_port(), name, start, held_out, to)
                start_processes(train, arguments, nprocs=options.processes)
                rows.append(to.get())
                settings = {"starts": STARTS, "processes": options.processes}
                write_result(PATH, headline=headline(rows), settings=settings, seeds=[0], rows=rows)
                print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
