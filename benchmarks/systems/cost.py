"""What do scout, probe and guard cost a run, in time? -> cost.json

    python -m benchmarks.systems.cost [--quick] [--data FOLDER] [--out FILE]     stacked replicas
    python -m benchmarks.systems.cost --processes [--data FOLDER] [--out FILE]   DDP, same file
    python -m benchmarks.systems.cost --launches [--data FOLDER] [--out FILE]    counted, same file

The language model of the settling benchmark on stacked replicas, the same in a run of 10 000 steps
(`long`), and one of the size of GPT-2 small (`large`), by the library itself: with a plain
schedule, with scout and guard, and with a probe besides. The cost of a run is the share of its time
that its scout took, plus whatever its rest took longer than the same steps of the plain run. All
kinds of runs were begun once before, so that no kind is charged for work that a process does once
(loading kernels, choosing algorithms), and AdamW is fused, as one would have it on a GPU: in a
scout eight of them step instead of one. After their scouts the runs take turns at every step, each
first as often as last, so that a machine that gets slower slows all; rounds of 50 steps are
compared with those of the plain run beside them, and the one in the middle counts, so that a hiccup
of the machine does not. `twin` is a second plain run: what it seems to cost is the error of all of
this. With --processes a smaller model is trained by two gloo processes under DDP, whose replicas
step no slower in a scout than outside.

Small models wait for the host, and what that does is counted with --launches: the operations that
torch is asked for, but for views and memory. On any device they are the same, and they are no
times: one that works on all tensors at once counts as one.
"""

import argparse
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils._python_dispatch import TorchDispatchMode

import hdet
from benchmarks.learning_rate import confirm
from benchmarks.learning_rate.methods.bench import SYNC_EVERY, N
from benchmarks.result_file import RESULTS, made_with, read_result, write_result
from benchmarks.zoo import tasks
from benchmarks.zoo.entries import ENTRIES
from benchmarks.zoo.models import Size
from benchmarks.zoo.tasks import Plan, Task

ROUND, ROUNDS, FEW = 50, 12, 7
"""Steps of a round, and how many rounds after the scout (few of a large model, and of a long run).
The rest of a run is like them."""
LONG = 10_000
PROCESSES = 2
UNDER_DDP = Plan("AdamW", 1500, 16, 2e-3, Size(256, 64, 4, 4, 192))


class Timed:
    """One run by the library, in pieces, with the time of every piece."""

    def __init__(
        self, task: Task, plan: Plan, how: dict[str, Any], *, fused: bool | None = None
    ) -> None:
        self._task, self._batch = task, task.batches([0])
        net, fused = task.model(0), torch.cuda.is_available() if fused is None else fused
        own = torch.optim.AdamW(net.parameters(), plan.middle, weight_decay=0.01, fused=fused)
        self._optimizer: torch.optim.Optimizer = own
        self._losses: Callable[[Tensor], Tensor]
        model, replicas = net, None
        if dist.is_initialized():
            model = DistributedDataParallel(net)
            self._losses = lambda tokens: task.loss(model, tokens)
        else:
            replicas = hdet.StackedReplicas(net, N)
            self._optimizer = replicas.optimizer(own)
            self._losses = lambda tokens: replicas.losses(task.loss, tokens)
        self._scheduler = hdet.HDET(
            OneCycleLR(self._optimizer, plan.middle, total_steps=plan.steps),
            model=model,
            replicas=replicas,
            sync_every=SYNC_EVERY,
            spread=0.0,
            controller=None,
            **how,
            preset="paper",
        )
        self.steps = 0

    def scout(self) -> float:
        """Until it is over; the seconds it took."""
        return seconds(self.restore)

    def restore(self) -> None:
        """From its scout."""
        while self._scheduler.is_scouting:
            self._one_step()

    def advance(self) -> float:
        """One step; the seconds it took."""
        return seconds(self._one_step)

    def _one_step(self) -> None:
        (tokens,) = self._batch(torch.tensor([self.steps]))
        mine = tokens[0]
        if dist.is_initialized():
            mine = mine.chunk(PROCESSES)[dist.get_rank()]
        self._optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=mine.is_cuda):
            losses = self._losses(mine)
        losses.sum().backward()
        self._optimizer.step()
        self._scheduler.step(losses.detach())
        self.steps += 1


def seconds(call: Callable[[], None]) -> float:
    """Until the device is idle again, from when it was."""
    wait: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    begin = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begin


class Launches(TorchDispatchMode):
    """Counts what torch is asked to compute, while it is entered."""

    IDLE = ("empty", "detach", "_unsafe_view", "lift_fresh", "profiler")
    """What computes nothing, beside views."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not (call.is_view or any(name in str(call) for name in self.IDLE))
        return call(*args, **(kwargs or {}))


def launched(call: Callable[[], object]) -> int:
    with Launches() as count:
        call()
    return count.num


def counted(task: Task, plan: Plan) -> dict[str, float]:
    """Launches of a scout, and what a guarded cycle has beyond a plain one, in % of all."""

    def cycle(run: Timed) -> int:
        while run.steps % SYNC_EVERY:
            run.advance()
        return sum(launched(run.advance) for _ in range(SYNC_EVERY))

    kinds = _kinds(task)
    alone = Timed(task, plan, kinds.pop("plain"), fused=True)
    alone.advance()  # a first step makes the optimizer's state
    plain = cycle(alone)
    numbers = {"plain_step": plain / SYNC_EVERY}
    for name, how in kinds.items():
        run = Timed(task, plan, how, fused=True)
        scout = launched(run.restore)
        turns = (plan.steps - run.steps) / SYNC_EVERY
        own = cycle(run)
        whole = scout + turns * own
        numbers[f"{name}_scout_pct"] = 100 * scout / whole
        numbers[f"{name}_rest_pct"] = 100 * turns * (own - plain) / whole
    return numbers


def _kinds(task: Task) -> dict[str, dict[str, Any]]:
    guarded = {"scout": hdet.Scout(), "guard": hdet.Guard()}
    return {"plain": {}, "losses": guarded, "probe": {**guarded, "probe": task.probe}}


def measured(task: Task, plan: Plan, rounds: int) -> dict[str, float]:
    kinds = {**_kinds(task), "twin": {}}
    for how in kinds.values():
        begun = Timed(task, plan, how)
        begun.scout()
        begun.advance()
    runs = {name: Timed(task, plan, how) for name, how in kinds.items()}
    scouts = {name: run.scout() for name, run in runs.items()}
    took = {name: run.steps for name, run in runs.items()}
    rounds = min(rounds, (plan.steps - max(took.values())) // ROUND)
    times = {name: [0.0] * rounds for name in runs}
    order = deque(runs)
    for place in range(rounds):
        for _ in range(ROUND):
            order.rotate()
            for name in order:
                times[name][place] += runs[name].advance()
        print(f"\r{place + 1} of {rounds} rounds", end="", flush=True)
    print()
    plain = times.pop("plain")
    numbers = {}
    for name, own in times.items():
        turns = (plan.steps - took[name]) / ROUND
        longer = turns * median(mine - its for mine, its in zip(own, plain, strict=True))
        whole = scouts[name] + turns * median(plain) + longer
        if name == "twin":
            numbers["twin_rest_pct"] = 100 * longer / whole
            continue
        numbers[f"{name}_scout_steps_pct"] = 100 * took[name] / plan.steps
        numbers[f"{name}_scout_pct"] = 100 * scouts[name] / whole
        numbers[f"{name}_rest_pct"] = 100 * longer / whole
        numbers[f"{name}_cost_pct"] = 100 * (scouts[name] + longer) / whole
    return numbers


def stacked(plans: dict[str, tuple[Plan, int]], data: Path | None) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device("cuda" if on_gpu else "cpu")
    numbers: dict[str, float] = {}
    for size, (plan, rounds) in plans.items():
        task = tasks.language(plan, data, device)
        numbers |= {f"{size}{name}": n for name, n in measured(task, plan, rounds).items()}
    settings = {"plans": [list(plan) for plan, _ in plans.values()], "replicas": N}
    return {"headline": numbers, "settings": settings}


def in_launches(plan: Plan, data: Path | None) -> dict[str, Any]:
    """Of the language model: neither its width nor its batch makes a difference."""
    small = plan._replace(size=plan.size._replace(context=16, width=48))
    task = tasks.language(small, data, torch.device("cpu"))
    return {"numbers": counted(task, small), "settings": {"plan": list(small)}}


def under_ddp(data: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(_work, (folder, data), PROCESSES)
        numbers = json.loads(Path(folder, "told.json").read_text())
    settings = {"plan": list(UNDER_DDP), "processes": PROCESSES}
    return {"numbers": numbers, "settings": settings}


def _work(rank: int, folder: str, data: Path | None) -> None:
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    numbers = measured(tasks.language(UNDER_DDP, data, torch.device("cpu")), UNDER_DDP, FEW)
    if rank == 0:
        Path(folder, "told.json").write_text(json.dumps(numbers))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, a short run")
    parser.add_argument("--processes", action="store_true", help="two of them, instead of stacked")
    parser.add_argument("--launches", action="store_true", help="counted, instead of timed")
    parser.add_argument("--data", type=Path, default=os.environ.get("HDET_DATA"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    data, entry = options.data and Path(options.data), ENTRIES["language, AdamW"]
    out = options.out or RESULTS / ("cost.quick.json" if options.quick else "cost.json")
    known_file = read_result(out)
    results = dict(known_file)
    if options.processes:
        results["ddp"] = {**under_ddp(data), **made_with()}
    elif options.launches:
        results["launches"] = {**in_launches(entry.full, data), **made_with()}
    else:
        plans = {
            "": (entry.full, ROUNDS),
            "long_": (entry.full._replace(steps=LONG), FEW),
            "large_": (confirm.FULL, FEW),
        }
        results |= stacked({"": (entry.quick, ROUNDS)} if options.quick else plans, data)
    parts = ("ddp", "launches")
    known = results.get("headline", {}).items()
    results["headline"] = {name: value for name, value in known if not name.startswith(parts)}
    for part in parts:
        numbers = results.get(part, {}).get("numbers", {})
        results["headline"] |= {f"{part}_{name}": value for name, value in numbers.items()}
    write_result(
        out,
        headline=results["headline"],
        settings=results.get("settings", {}),
        seeds=[0],
        kept=known_file if options.processes or options.launches else None,
        **{part: results[part] for part in parts if part in results},
    )
    for name, value in results["headline"].items():
        print(f"{name}: {value:.3g}")


if __name__ == "__main__":
    main()
