"""What scout, probe and guard cost a run, in time.

    python -m benchmarks.cost [--quick] [--data FOLDER] [--out FILE]

The language model of the settling benchmark on stacked replicas, and one of the size of GPT-2 small
(`large`), by the library itself: with a plain schedule, with scout and guard, and with a probe
besides. The cost of a run is the share of its time that its scout took, plus whatever its rest
took longer than the same steps of the plain run. All kinds of runs were begun once before, so that
nobody is charged for what a process does once (loading kernels, choosing algorithms),
and AdamW is fused, as one would have it on a GPU: in a scout eight of them step instead of one. The
runs take turns, so that a machine that gets slower slows all; a turn is compared with that of the
plain run beside it, and the one in the middle counts, so that a hiccup of the machine does not.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks import confirm, methods, tasks
from benchmarks.settle import ENTRIES, RESULTS, write_result
from benchmarks.tasks import Plan, Task

ROUND, ROUNDS, FEW = 50, 12, 7
"""Steps of one run before another has its turn, and how many turns after the scout (few of a large
model). The rest of a run is like them."""


class Timed:
    """One run by the library, in pieces, with the time of every piece."""

    def __init__(self, task: Task, plan: Plan, **how: Any) -> None:
        net = task.model(0)
        self._task, self._batch = task, task.batches([0])
        self._replicas = hdet.StackedReplicas(net, methods.N)
        fused = torch.cuda.is_available()
        own = torch.optim.AdamW(net.parameters(), plan.middle, weight_decay=0.01, fused=fused)
        self._optimizer = self._replicas.optimizer(own)
        base = OneCycleLR(self._optimizer, plan.middle, total_steps=plan.steps)
        self._scheduler = hdet.HDET(
            base,
            model=net,
            replicas=self._replicas,
            sync_every=methods.SYNC_EVERY,
            spread=0.0,
            controller=None,
            **how,
            preset="paper",
        )
        self._sync: Callable[[], None] = (
            torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        )
        self._step = 0
        self.times: list[float] = []
        """Of every round."""

    def advance(self, num: int) -> None:
        self._sync()
        begin = time.perf_counter()
        for _ in range(num):
            self._one_step()
        self._sync()
        self.times.append(time.perf_counter() - begin)

    def _one_step(self) -> None:
        (tokens,) = self._batch(torch.tensor([self._step]))
        self._optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
            losses: Tensor = self._replicas.losses(self._task.loss, tokens[0])
        losses.sum().backward()
        self._optimizer.step()
        self._scheduler.step(losses.detach())
        self._step += 1


def measured(task: Task, plan: Plan, rounds: int) -> dict[str, float]:
    first = int(hdet.Scout().share * plan.steps)
    guarded = {"scout": hdet.Scout(), "guard": hdet.Guard()}
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "losses": guarded,
        "probe": {**guarded, "probe": task.probe},
    }
    for how in kinds.values():
        Timed(task, plan, **how).advance(first + 1)
    runs = {name: Timed(task, plan, **how) for name, how in kinds.items()}
    pieces = [first, *[ROUND] * min(rounds, (plan.steps - first) // ROUND)]
    for place, num in enumerate(pieces):
        for run in runs.values():
            run.advance(num)
        print(f"\r{place + 1} of {len(pieces)} rounds", end="", flush=True)
    print()
    plain = runs.pop("plain").times[1:]
    turns = (plan.steps - first) / ROUND
    numbers = {}
    for name, run in runs.items():
        scout = run.times[0]
        longer = turns * median(mine - its for mine, its in zip(run.times[1:], plain, strict=True))
        whole = scout + turns * median(plain) + longer
        numbers[f"{name}_scout_pct"] = 100 * scout / whole
        numbers[f"{name}_rest_pct"] = 100 * longer / whole
        numbers[f"{name}_cost_pct"] = 100 * (scout + longer) / whole
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, a short run")
    parser.add_argument("--data", type=Path, default=os.environ.get("HDET_DATA"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    entry = ENTRIES["language, AdamW"]
    plans = {"": (entry.full, ROUNDS), "large_": (confirm.FULL, FEW)}
    if options.quick:
        plans = {"": (entry.quick, ROUNDS)}
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device("cuda" if on_gpu else "cpu")
    numbers: dict[str, float] = {}
    for size, (plan, rounds) in plans.items():
        task = tasks.language(plan, options.data and Path(options.data), device)
        numbers |= {f"{size}{name}": n for name, n in measured(task, plan, rounds).items()}
    told = {
        "headline": numbers,
        "settings": {"plans": [list(plan) for plan, _ in plans.values()], "replicas": methods.N},
    }
    out = options.out or RESULTS / ("cost.quick.json" if options.quick else "cost.json")
    write_result(out, told)
    for name, value in numbers.items():
        print(f"{name}: {value:.3g}")


if __name__ == "__main__":
    main()
