"""What hdet adds to a step of DDP, to the end of a cycle, and to the time of a decision.

    python -m benchmarks.overhead [--quick] [--out FILE]

Two gloo processes train a small GPT under DDP, with OneCycleLR and with hdet around it, by turns.
What a step takes longer is lost in the noise of any machine, so its parts are timed on their own,
each by the median: the step itself, the call of a schedule, the call of hdet between two cycles and
at the end of one, and a bare all-reduce of the same bytes. The ratio of a step with hdet to one
without, at a cycle of T steps and beyond the all-reduce itself, is made of them. Host syncs are
counted by a profiler, the bytes of a cycle read from the record. The decision is what is computed
from the replicas' scores; benchmarks/converge.py has a converge beside those of other libraries.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks.models import GPT, Size, gpt_loss
from benchmarks.settle import RESULTS, write_result
from hdet.knobs import LearningRate, explored_rates
from hdet.steering import Steering

PROCESSES, CYCLE = 2, 10
LENGTHS = (10, 100, 1000)
WAITS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")
"""What makes the host wait for a device."""


class Settings(NamedTuple):
    size: Size
    batch: int
    rounds: int
    decisions: int


FULL = Settings(Size(256, 64, 4, 4, 192), 8, 30, 300)
QUICK = Settings(Size(256, 32, 2, 2, 48), 2, 3, 20)


class Loop:
    """One training loop, a step at a time, with the time of its parts."""

    def __init__(self, settings: Settings, folder: str | None) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(GPT(settings.size))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._shape = (settings.batch, settings.size.context + 1)
        self.schedule: Any = OneCycleLR(self.optimizer, 1e-3, total_steps=100_000)
        if folder is not None:
            self.schedule = hdet.HDET(
                self.schedule,
                model=self.model,
                preset="paper",
                controller=hdet.PaperController(),
                sync_every=CYCLE,
                record=folder,
            )
        self.steps: list[float] = []
        self.calls: list[float] = []
        self.ends: list[float] = []

    def step(self) -> None:
        begin = time.perf_counter()
        loss = self._train()
        self.steps.append(time.perf_counter() - begin)
        is_end = (
            isinstance(self.schedule, hdet.HDET) and (self.schedule.last_epoch + 1) % CYCLE == 0
        )
        if is_end:
            dist.barrier()  # whoever is late has nothing to do with it
        (self.ends if is_end else self.calls).append(seconds(lambda: self._advance(loss)))

    def waits(self) -> float:
        """Of the host, in the calls between two cycles, for each of them."""
        num, seen = 0, 0
        for _ in range(CYCLE - 1):
            loss = self._train()
            with profile(use_kineto=False) as told:
                self._advance(loss)
            num += 1
            seen += sum(event.name in WAITS for event in told.function_events or [])
        self._advance(self._train())
        return seen / num

    def _train(self) -> Tensor:
        tokens = torch.randint(256, self._shape)
        self.optimizer.zero_grad()
        loss = gpt_loss(self.model, tokens)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _advance(self, loss: Tensor) -> None:
        if isinstance(self.schedule, hdet.HDET):
            self.schedule.step(loss)
        else:
            self.schedule.step()


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def work(rank: int, settings: Settings, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES
    )
    plain, ours = Loop(settings, None), Loop(settings, f"{folder}/run")
    flat = nn.utils.parameters_to_vector(plain.model.parameters()).detach()
    bare: list[float] = []
    for number in range(settings.rounds):
        for loop in (plain, ours):
            for _ in range(CYCLE):
                loop.step()
        dist.barrier()
        bare.append(seconds(lambda: dist.all_reduce(flat)))
        if rank == 0:
            print(f"\r{number + 1} of {settings.rounds} rounds", end="", flush=True)
    waits = ours.waits()
    if rank == 0:
        print()
        told = {
            "step": median(plain.steps),
            "schedule": median(plain.calls),
            "between": median(ours.calls),
            "end": median(ours.ends),
            "all_reduce": median(bare),
            "waits": waits,
            "model_bytes": flat.nbytes,
            "cycle_bytes": cycle_bytes(Path(folder) / "run" / "record.jsonl"),
        }
        (Path(folder) / "told.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def cycle_bytes(record: Path) -> int:
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    (sent,) = {line["converge"]["bytes"] for line in lines if line["event"] == "cycle"}
    return int(sent)


def ratio(parts: dict[str, float], length: int) -> float:
    """A step with hdet over one without, beyond the all-reduce itself."""
    end = parts["end"] - parts["between"] - parts["all_reduce"]
    return (parts["step"] + parts["between"] + end / length) / (parts["step"] + parts["schedule"])


def decision(num_replicas: int, num_knobs: int, times: int) -> float:
    """Seconds from the scores of a probe to the moves of all knobs."""
    names = [f"group{place}" for place in range(num_knobs)]
    steering = Steering(
        explored_rates((LearningRate(),), names, 0.1),
        num_replicas=num_replicas,
        design="orthogonal",
        sync_every=CYCLE,
        seed=0,
        controller=hdet.Tracker(),
        total_steps=None,
    )
    steering.start_if_due(0, [0.1] * num_knobs)
    draw, taken, everyone = random.Random(0), [], range(num_replicas)
    losses, errors = [2.0] * num_replicas, [0.01] * num_replicas
    for _ in range(times):
        steering.fan_out()
        scores = [[draw.gauss(2.0, 0.01) for _ in range(8)] for _ in everyone]
        taken.append(seconds(partial(steering.steer, losses, everyone, errors, scores)))
        steering.cycle += 1
    return median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, few rounds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    settings = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (settings, folder), PROCESSES)
        parts = json.loads((Path(folder) / "told.json").read_text())
    grid = [(n, k) for n in (2, 8, 16, 64) for k in (1, 4, 16) if k < n]
    decisions = {f"n{n}_k{k}": 1e3 * decision(n, k, settings.decisions) for n, k in grid}
    numbers = {
        **{f"t{length}_over_ddp": ratio(parts, length) for length in LENGTHS},
        "host_syncs_per_step": parts["waits"],
        "cycle_bytes_over_model_bytes": parts["cycle_bytes"] / parts["model_bytes"],
        "decision_ms_n64_k16": decisions["n64_k16"],
    }
    out = options.out or RESULTS / ("overhead.quick.json" if options.quick else "overhead.json")
    told = {
        "headline": numbers,
        "settings": {"processes": PROCESSES, **settings._asdict()},
        "seconds": parts,
        "decision_ms": decisions,
    }
    write_result(out, told)
    for name, value in numbers.items():
        print(f"{name}: {value:.5g}")


if __name__ == "__main__":
    main()
