"""What does `scheduler.step(loss)` cost within a cycle, beside OneCycleLR's? -> step.json

    python -m benchmarks.systems.step [--quick] [--out FILE]

Each row is a scheduler after its scout, on a small network whose optimizer has one parameter group.
It takes turns with a plain OneCycleLR in the same process, block by block in random order. "Over
OneCycleLR" is the median over the blocks of a row's microseconds a step over those of the plain
schedule beside it.

The headline has blocks of steps that follow each other at once, so that both schedulers are in the
caches of the processor. "In training" the same steps are timed one by one between the forward and
backward passes of a training loop, where caches are cold: both schedulers take several times as
long. A replica of a stack trains in a loop of its own, so its rows in training are also compared
with a OneCycleLR on the same stacked optimizer. Ends of cycles are not timed here: converge.json
has them.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks.result_file import RESULTS, write_result

N, PROCESSES = 8, 2
TOTAL_STEPS = 1_000_000
ONE, DDP, STACKED = "one replica", "DDP", "stacked 8"
OPTIONS = ("plain", "record", "spread", "record and spread")
HEADLINE = {"one_replica": ONE, "ddp": DDP, "stacked": STACKED}


class Plan(NamedTuple):
    """How much is timed."""

    blocks: int
    """Blocks of each row, of steps that follow each other."""
    block: int
    training_blocks: int
    training_block: int


FULL = Plan(blocks=400, block=20, training_blocks=20, training_block=40)
QUICK = Plan(blocks=10, block=20, training_blocks=3, training_block=10)


class Loop:
    """A training loop and its scheduler.

    Args:
        kind: How many replicas there are, and where.
        options: What the scheduler does beside its schedule; None for a plain OneCycleLR.
        folder: Where records go.
    """

    def __init__(self, kind: str, options: str | None, folder: str) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        model: nn.Module = DistributedDataParallel(net) if kind == DDP else net
        own = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        batch = torch.randn(64, 16), torch.randn(64, 1)
        replicas = hdet.StackedReplicas(net, N) if kind == STACKED else None
        self._optimizer = own if replicas is None else replicas.optimizer(own)
        self._losses: Callable[[], Tensor]
        if replicas is None:
            self._losses = lambda: loss_of(model, *batch)
        else:
            self._losses = lambda: replicas.losses(loss_of, *batch)
        base = OneCycleLR(self._optimizer, 0.01, total_steps=TOTAL_STEPS)
        self._scheduler: Any = base
        self._is_plain = options is None
        if options is not None:
            self._scheduler = hdet.HDET(
                base,
                model=model,
                replicas=replicas,
                scout=hdet.Scout(steps=10, share=2e-4),
                spread=0.1 if "spread" in options else 0.0,
                sync_every=TOTAL_STEPS // 2,
                record=f"{folder}/{kind} {options}" if "record" in options else None,
            )
            while self._scheduler.is_scouting:
                self.train()
        self.train()
        self._loss = self._losses().detach()

    def train(self) -> float:
        """Make a step of the loop; the seconds that the scheduler took."""
        self._optimizer.zero_grad()
        losses = self._losses()
        losses.sum().backward()
        self._optimizer.step()
        loss = losses.detach()
        start = time.perf_counter()
        if self._is_plain:
            self._scheduler.step()
        else:
            self._scheduler.step(loss)
        return time.perf_counter() - start

    def repeat(self, num: int) -> float:
        """Make steps of the scheduler alone; the seconds that one took."""
        step, loss = self._scheduler.step, self._loss
        start = time.perf_counter()
        if self._is_plain:
            for _ in range(num):
                step()
        else:
            for _ in range(num):
                step(loss)
        return (time.perf_counter() - start) / num


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss that all loops train with."""
    return (model(x) - y).square().mean()


def time_kind(kind: str, plan: Plan, folder: str) -> list[dict[str, Any]]:
    """Time all rows of a kind of replicas, turn by turn with a plain OneCycleLR."""
    plain = {"OneCycleLR": Loop(DDP if kind == DDP else ONE, None, folder)}
    if kind == STACKED:
        plain["OneCycleLR, stacked optimizer"] = Loop(STACKED, None, folder)
    loops = plain | {options: Loop(kind, options, folder) for options in OPTIONS}
    alone: dict[str, list[float]] = {name: [] for name in loops}
    training: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(plan.blocks):
        for name in Random(number).sample(list(loops), len(loops)):
            alone[name].append(loops[name].repeat(plan.block))
    for number in range(plan.training_blocks):
        for name in Random(number).sample(list(loops), len(loops)):
            times = [loops[name].train() for _ in range(plan.training_block)]
            training[name].append(median(times))
    return [row(kind, name, alone, training) for name in loops]


def row(
    kind: str, name: str, alone: dict[str, list[float]], training: dict[str, list[float]]
) -> dict[str, Any]:
    """The microseconds of one row, and its ratios to the plain schedules."""
    first = "OneCycleLR"
    same = "OneCycleLR, stacked optimizer" if kind == STACKED else first
    quarter = len(alone[name]) // 4
    return {
        "replicas": kind,
        "scheduler": name,
        "microseconds": 1e6 * median(alone[name]),
        "over_onecycle": median_ratio(alone[name], alone[first]),
        "last_quarter_over_first": median(alone[name][-quarter:]) / median(alone[name][:quarter]),
        "in_training_microseconds": 1e6 * median(training[name]),
        "in_training_over_onecycle": median_ratio(training[name], training[first]),
        "in_training_over_same_optimizer": median_ratio(training[name], training[same]),
    }


def median_ratio(times: list[float], others: list[float]) -> float:
    """The median over the blocks of a time over that of the block beside it."""
    return median(mine / theirs for mine, theirs in zip(times, others, strict=True))


def measure(plan: Plan) -> dict[str, Any]:
    """All rows: those of DDP in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        rows = time_kind(ONE, plan, folder)
        spawn(work, (plan, folder), PROCESSES)
        rows += json.loads(Path(folder, "ddp.json").read_text())
        rows += time_kind(STACKED, plan, folder)
    return {"headline": headline(rows), "rows": rows}


def headline(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The ratios without record and spread, alone and in training."""
    plain = {one["replicas"]: one for one in rows if one["scheduler"] == "plain"}
    numbers = {f"{name}_over_onecycle": plain[k]["over_onecycle"] for name, k in HEADLINE.items()}
    for name, kind in HEADLINE.items():
        ratio = plain[kind]["in_training_over_same_optimizer"]
        numbers[f"{name}_over_onecycle_in_training"] = ratio
    return numbers


def work(rank: int, plan: Plan, folder: str) -> None:
    """One process of DDP. Both time their steps in the same order; the first one reports."""
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    rows = time_kind(DDP, plan, folder)
    if rank == 0:
        Path(folder, "ddp.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'':44}{'us':>8}{'ratio':>8}{'in training, us':>18}{'ratio':>8}{'same':>8}"]
    for one in rows:
        lines.append(
            f"{one['replicas'] + ', ' + one['scheduler']:44}{one['microseconds']:8.2f}"
            f"{one['over_onecycle']:8.2f}{one['in_training_microseconds']:18.2f}"
            f"{one['in_training_over_onecycle']:8.2f}{one['in_training_over_same_optimizer']:8.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, write the result file, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few blocks")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plan = QUICK if options.quick else FULL
    result = measure(plan)
    settings = {**plan._asdict(), "stacked": N, "processes": PROCESSES, "backend": "gloo"}
    out = options.out or RESULTS / ("step.quick.json" if options.quick else "step.json")
    write_result(out, **result, settings=settings, seeds=[0])
    print(table(result["rows"]))
    for name, value in result["headline"].items():
        print(f"{name} = {value:.3f}")


if __name__ == "__main__":
    main()
