"""What hdet adds to a step of DDP, to the end of a cycle, and to the time of a decision.

    python -m benchmarks.overhead [--quick] [--out FILE]     two processes, and other libraries
    python -m benchmarks.overhead --gpu [--out FILE]         one GPU; goes into the same file
    python -m benchmarks.overhead --decisions [--out FILE]   the decisions alone, anew

Two gloo processes train a small GPT under DDP, with OneCycleLR and with hdet around it, by turns.
What a step takes longer is lost in the noise of any machine, so its parts are timed on their own,
each by the median: the step itself, the call of a schedule, the call of hdet between two cycles and
at the end of one, and a bare all-reduce of the same bytes. The ratio of a step with hdet to one
without, at a cycle of T steps and beyond the all-reduce itself, is made of them. Host syncs are
counted by a profiler, the bytes of a cycle read from the record. The decision is what is computed
from the replicas' scores. The first command also runs benchmarks/converge.py, a converge beside
those of other libraries, and writes its file.

With --gpu the same parts are timed on one CUDA device, each until the device is idle: one replica
under DDP with NCCL, with which nothing is averaged, and stacked replicas, whose average counts in
full. Nothing there runs beside anything else, so the sum of parts is more than hdet adds to a step
that keeps the device busy: there its Python runs while the device works, and only what it launches
counts. So steps are also made without waiting, and events tell how long the device is at hdet's
own work ("device"), and after which share of the steps it had not yet come to it when the host was
done ("ahead"). "busy" is the ratio that is left: the device's time, or that of the host for the
other steps. "side_by_side" is that of the times themselves between two cycles, in turns, with its
standard error. Host syncs are what CUDA's own debug mode reports. Each command keeps what the
others have written.
"""

import argparse
import json
import math
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks import converge
from benchmarks.models import GPT, GPT2_SMALL, SMALL_GPT, Size, gpt_loss
from benchmarks.settle import RESULTS, made_with, plain_json, write_result
from hdet.control.knob_bank import KnobBank
from hdet.knobs.specs import LearningRate, lr_knobs

PROCESSES, STACKED, CYCLE, FEW_STEPS = 2, 8, 10, 3
LENGTHS = (10, 100, 1000)
WINDOWS = 3
"""Of steps that nothing waits for, in a round."""
WAITS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")
"""What makes the host wait for a device."""


class Settings(NamedTuple):
    size: Size
    batch: int
    rounds: int


FULL = Settings(Size(256, 64, 4, 4, 192), 8, 30)
QUICK = Settings(Size(256, 32, 2, 2, 48), 2, 3)
ON_GPU = {
    "ddp": Settings(GPT2_SMALL, 8, 20),
    "stacked": Settings(GPT2_SMALL, 64, 10),
    "stacked_small": Settings(SMALL_GPT, 64, 20),  # the host itself holds such short steps up
}
ENGINES = tuple(ON_GPU)
QUICK_ON_GPU = {engine: QUICK._replace(batch=2 * STACKED) for engine in ENGINES}
DECISIONS, FEW_DECISIONS = 300, 20


def wait() -> None:
    """Until the device is idle, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# Training loops ------------------------------------------------------------------------------


class Loop:
    """One training loop, a step at a time, with the time of its parts."""

    def __init__(self, train: Callable[[], Tensor], schedule: Any) -> None:
        self._train, self.schedule = train, schedule
        self.steps: list[float] = []
        self.calls: list[float] = []
        self.ends: list[float] = []
        self.device: list[float] = []
        """How long the device was at each call, without waiting."""
        self.ahead: list[bool] = []
        """Whether the device had yet to come to it when the host was done."""

    def step(self) -> None:
        begin = time.perf_counter()
        loss = self._train()
        wait()
        self.steps.append(time.perf_counter() - begin)
        is_end = (
            isinstance(self.schedule, hdet.HDET) and (self.schedule.last_epoch + 1) % CYCLE == 0
        )
        if is_end and dist.is_initialized():
            dist.barrier()  # whoever is late has nothing to do with it
        (self.ends if is_end else self.calls).append(seconds(lambda: self._advance(loss)))

    def window(self) -> float:
        """Seconds for a step between two cycles when nothing waits for the device."""
        marks: list[tuple[Any, Any]] = []

        def steps() -> None:
            for _ in range(CYCLE - 1):
                loss = self._train()
                before = mark()
                self._advance(loss)
                marks.append((before, mark()))
                # The first steps after a wait have nothing to run ahead of.
                if len(marks) > FEW_STEPS and marks[-1][1] is not None:
                    self.ahead.append(not marks[-1][1].query())

        taken = seconds(steps)
        self._advance(self._train())
        wait()
        self.device += [
            1e-3 * before.elapsed_time(after)
            for before, after in marks[FEW_STEPS:]
            if before is not None
        ]
        return taken / (CYCLE - 1)

    def waits(self) -> float:
        """Of the host, in the calls between two cycles, for each of them."""
        seen = 0
        for _ in range(CYCLE - 1):
            loss = self._train()
            seen += max(waits_of(partial(self._advance, loss)).values())
        self._advance(self._train())
        return seen / (CYCLE - 1)

    def control(self) -> dict[str, int]:
        """What is counted where there is a wait: who sees none here has seen nothing before."""
        loss = self._train()
        seen = waits_of(loss.mean().item)
        if not any(seen.values()):
            raise RuntimeError("a wait was not counted.")
        return seen

    def _advance(self, loss: Tensor) -> None:
        if isinstance(self.schedule, hdet.HDET):
            self.schedule.step(loss)
        else:
            self.schedule.step()


def mark() -> Any:
    """A point in what the device does; none where there is no such device."""
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def waits_of(call: Callable[[], Any]) -> dict[str, int]:
    """Of the host, as a profiler sees them, and where there is a GPU as CUDA itself does."""
    with noted_by_cuda() as noted, profile(use_kineto=False) as told:
        call()
    seen = {"profiler": sum(event.name in WAITS for event in told.function_events or [])}
    return {**seen, "cuda": len(noted)} if torch.cuda.is_available() else seen


@contextmanager
def noted_by_cuda() -> Iterator[list[Any]]:
    if not torch.cuda.is_available():
        yield []
        return
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield noted
        finally:
            torch.cuda.set_sync_debug_mode("default")


def step_of(
    optimizer: Any, settings: Settings, losses: Callable[[Tensor], Tensor], device: str
) -> Callable[[], Tensor]:
    shape = (settings.batch, settings.size.context + 1)

    def train() -> Tensor:
        tokens = torch.randint(settings.size.vocabulary, shape, device=device)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda"):
            found = losses(tokens)
        found.sum().backward()
        optimizer.step()
        return found.detach()

    return train


def schedule_of(optimizer: Any, model: nn.Module, folder: str | None, replicas: Any = None) -> Any:
    """OneCycleLR, or with a folder for the record hdet around it."""
    base = OneCycleLR(optimizer, 1e-3, total_steps=100_000)
    if folder is None:
        return base
    return hdet.HDET(
        base,
        model=model,
        preset="paper",
        controller=hdet.PaperController(),
        sync_every=CYCLE,
        replicas=replicas,
        record=folder,
    )


def ddp(settings: Settings, folder: str | None, device: str = "cpu") -> tuple[Loop, nn.Module]:
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(settings.size).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
    train = step_of(optimizer, settings, lambda tokens: gpt_loss(model, tokens), device)
    return Loop(train, schedule_of(optimizer, model, folder)), model


def stacked(settings: Settings, folder: str | None, device: str) -> tuple[Loop, Any]:
    torch.manual_seed(0)
    model = GPT(settings.size).to(device)
    ensemble = hdet.StackedReplicas(model, STACKED)
    if device == "cuda":
        ensemble.compile()
    one = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
    optimizer = ensemble.optimizer(one)
    train = step_of(optimizer, settings, lambda tokens: ensemble.losses(gpt_loss, tokens), device)
    return Loop(train, schedule_of(optimizer, model, folder, ensemble)), ensemble


def seconds(call: Callable[[], Any]) -> float:
    """Until the device is idle again."""
    begin = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begin


def parts_of(plain: Loop, ours: Loop, bare: list[float]) -> dict[str, float]:
    return {
        "step": median(plain.steps),
        "schedule": median(plain.calls),
        "between": median(ours.calls),
        "end": median(ours.ends),
        "all_reduce": median(bare),
    }


def ratio(parts: dict[str, float], length: int) -> float:
    """A step with hdet over one without, beyond the all-reduce itself."""
    end = parts["end"] - parts["between"] - parts["all_reduce"]
    return (parts["step"] + parts["between"] + end / length) / (parts["step"] + parts["schedule"])


def added(parts: dict[str, float]) -> dict[str, float]:
    """Beyond the all-reduce itself. A busy machine makes steps longer, and ratios smaller."""
    end = parts["end"] - parts["between"] - parts["all_reduce"]
    return {
        "step_ms": 1e3 * parts["step"],
        "added_ms_per_step": 1e3 * (parts["between"] - parts["schedule"]),
        "added_ms_per_cycle": 1e3 * end,
    }


def ratios(parts: dict[str, float]) -> dict[str, float]:
    return {f"t{length}": ratio(parts, length) for length in LENGTHS}


# Processes -----------------------------------------------------------------------------------


def work(rank: int, settings: Settings, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES
    )
    (plain, model), (ours, _) = ddp(settings, None), ddp(settings, f"{folder}/run")
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
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
    ours.control()
    if rank == 0:
        print()
        told = {
            **parts_of(plain, ours, bare),
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


# One GPU -------------------------------------------------------------------------------------


def measure_gpu(settings: dict[str, Settings]) -> dict[str, Any]:
    """Both engines; without a GPU on the CPU, to see that it runs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    answer: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
        )
        plain, _ = ddp(settings["ddp"], None, device)
        ours, _ = ddp(settings["ddp"], f"{folder}/ddp", device)
        answer["ddp"] = measure_pair(plain, ours, settings["ddp"], lambda: None)
        dist.destroy_process_group()
        for engine in ENGINES[1:]:
            plain, _ = stacked(settings[engine], None, device)
            ours, ensemble = stacked(settings[engine], f"{folder}/{engine}", device)
            answer[engine] = measure_pair(plain, ours, settings[engine], ensemble.converge_)
    return {**answer, "settings": {k: v._asdict() for k, v in settings.items()}, **made_with()}


def measure_pair(
    plain: Loop, ours: Loop, settings: Settings, average: Callable[[], Any]
) -> dict[str, Any]:
    """Two loops on one device by turns; whatever an average takes, it is hdet's."""
    begin = time.perf_counter()
    for loop in (plain, ours):
        loop.window()  # compiles
    print(f"ready after {time.perf_counter() - begin:.0f} s", flush=True)
    ratios_seen, averages = [], []
    for loop in (plain, ours):
        loop.device.clear()
        loop.ahead.clear()
    for number in range(settings.rounds):
        for loop in (plain, ours):
            for _ in range(CYCLE):
                loop.step()
        ratios_seen += [paired(plain, ours, number + i) for i in range(WINDOWS)]
        averages.append(seconds(average))
    parts = parts_of(plain, ours, [0.0])
    own = median(ours.device or [0.0]) - median(plain.device or [0.0])
    ahead = sum(ours.ahead) / max(len(ours.ahead), 1)
    told = {
        "over_plain": ratios(parts),
        "side_by_side": fmean(ratios_seen),
        "side_by_side_error": stdev(ratios_seen) / math.sqrt(len(ratios_seen)),
        "ahead": ahead,
        "device": own,
        "busy": busy(parts, own, ahead),
        "host_syncs_per_step": ours.waits(),
        "host_syncs_of_an_item": ours.control(),
        "seconds": {**parts, "average": median(averages)},
    }
    print(json.dumps(plain_json(told)), flush=True)
    return told


def paired(plain: Loop, ours: Loop, number: int) -> float:
    """Steps of one over steps of the other, each before the other in turn: a device slows down."""
    order = (plain, ours) if number % 2 == 0 else (ours, plain)
    taken = {loop: loop.window() for loop in order}
    return taken[ours] / taken[plain]


def busy(parts: dict[str, float], own: float, ahead: float) -> dict[str, float]:
    """The ratios without waiting: what the device does, or the host where it was not ahead."""
    late = (1 - ahead) * (parts["between"] - parts["schedule"])  # the device waits for it
    end, step = parts["end"] - parts["between"], parts["step"]
    return {f"t{length}": 1 + (max(own, late) + end / length) / step for length in LENGTHS}


def gpu_headline(told: dict[str, Any]) -> dict[str, float]:
    return {
        f"h200_{engine}_{name}": value
        for engine in ENGINES
        for name, value in gpu_numbers(told[engine]).items()
    }


def gpu_numbers(told: dict[str, Any]) -> dict[str, float]:
    return {
        **{f"{length}_over_plain": told["over_plain"][length] for length in ("t100", "t1000")},
        **{f"{length}_busy": told["busy"][length] for length in ("t100", "t1000")},
        "host_syncs_per_step": told["host_syncs_per_step"],
    }


# The decision --------------------------------------------------------------------------------


def decision(num_replicas: int, num_knobs: int, times: int) -> float:
    """Seconds from the scores of a probe to the moves of all knobs."""
    names = [f"group{place}" for place in range(num_knobs)]
    knob_bank = KnobBank(
        lr_knobs((LearningRate(),), names, 0.1),
        num_replicas=num_replicas,
        design="orthogonal",
        sync_every=CYCLE,
        seed=0,
        controller=hdet.Tracker(),
        total_steps=None,
    )
    knob_bank.start_if_due(0, [0.1] * num_knobs)
    draw, taken, everyone = random.Random(0), [], range(num_replicas)
    losses, errors = [2.0] * num_replicas, [0.01] * num_replicas
    for _ in range(times):
        knob_bank.fan_out()
        scores = [[draw.gauss(2.0, 0.01) for _ in range(8)] for _ in everyone]
        taken.append(seconds(partial(knob_bank.move_knobs, losses, everyone, errors, scores)))
        knob_bank.cycle += 1
    return median(taken)


def decisions(times: int) -> dict[str, float]:
    """Milliseconds."""
    grid = [(n, k) for n in (2, 8, 16, 64) for k in (1, 4, 16) if k < n]
    return {f"n{n}_k{k}": 1e3 * decision(n, k, times) for n, k in grid}


def measure(settings: Settings, *, quick: bool) -> dict[str, Any]:
    """All but the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (settings, folder), PROCESSES)
        parts = json.loads((Path(folder) / "told.json").read_text())
    decided = decisions(FEW_DECISIONS if quick else DECISIONS)
    beside = converge.measure(converge.QUICK if quick else converge.FULL)
    converge.save(beside, converge.default_path(quick=quick))
    peers = {key: beside["headline"][key] for key in converge.BESIDE_PEERS}
    numbers = {
        **{f"{length}_over_ddp": value for length, value in ratios(parts).items()},
        **added(parts),
        "host_syncs_per_step": parts["waits"],
        "cycle_bytes_over_model_bytes": parts["cycle_bytes"] / parts["model_bytes"],
        "decision_ms_n64_k16": decided["n64_k16"],
        **peers,
    }
    return {
        "headline": numbers,
        "settings": {"processes": PROCESSES, **settings._asdict()},
        "seconds": parts,
        "decision_ms": decided,
        "against_peers": beside["against_peers"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, few rounds")
    parser.add_argument("--gpu", action="store_true", help="one GPU instead of two processes")
    parser.add_argument("--decisions", action="store_true", help="these alone; the rest is kept")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or RESULTS / ("overhead.quick.json" if options.quick else "overhead.json")
    known: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if options.decisions:
        told = {**known, "decision_ms": decisions(DECISIONS)}
        told["headline"]["decision_ms_n64_k16"] = told["decision_ms"]["n64_k16"]
    elif options.gpu:
        told = {**known, "h200": measure_gpu(QUICK_ON_GPU if options.quick else ON_GPU)}
    else:
        told = {**known, **measure(QUICK if options.quick else FULL, quick=options.quick)}
    if "h200" in told:
        told["headline"] = {**told.get("headline", {}), **gpu_headline(told["h200"])}
    if options.gpu or options.decisions:  # the rest was made with what the file says
        out.write_text(json.dumps(plain_json(told), indent=1) + "\n")
    else:
        write_result(out, told)
    for name, value in told["headline"].items():
        print(f"{name}: {value:.5g}")


if __name__ == "__main__":
    main()
