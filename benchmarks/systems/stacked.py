"""What do N replicas on one GPU cost, beside one model with their batch? -> stacked.json

    python -m benchmarks.systems.stacked [--quick] [--only small_gpt,resnet] [--out FILE]

Ways to make the same step are timed in turns on one device: the plain model, compiled, and where
launches matter once more with CUDA graphs; `StackedReplicas`, compiled; and N separate processes
that share the GPU, each with its N-th of the batch, with shared gradients (DDP over gloo, since
NCCL takes one process for each GPU) and with local ones, which cost them nothing on the wire. All
train in bf16 autocast with fused AdamW. hdet's times include its scheduler, and a hundredth of the
end of a cycle (sync_every=100). "over plain" is against the compiled model, "speed-up over
processes" against those that do the same: shared gradients.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.profiler import ProfilerActivity, profile

import hdet
from benchmarks.result_file import RESULTS, read_result, write_result
from benchmarks.systems.workloads import WORKLOADS, Workload

N = 8
CYCLE = 100
BYTES_OF_A_PARAMETER = 4 + 4 + 8  # float32: itself, its gradient, two moments of AdamW

Step = Callable[[], Any]


# The ways ------------------------------------------------------------------------------------


def plain(work: Workload, **compile_options: Any) -> Step:
    """One model with OneCycleLR."""
    model = work.model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scheduler = OneCycleLR(optimizer, 1e-4, total_steps=1_000_000)
    loss_of = torch.compile(work.loss, **compile_options)
    batch = work.batch(work.samples)

    return step_of(optimizer, lambda: loss_of(model, *batch), lambda _: scheduler.step())


def stacked(work: Workload, mode: Any = "auto", gradients: Any = "shared") -> Step:
    """The same step with N replicas, each on its N-th of the batch."""
    model = work.model().cuda()
    ensemble = hdet.StackedReplicas(model, N, mode=mode)
    ensemble.compile()
    optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    scheduler = scheduler_of(work, optimizer, model, gradients, ensemble)
    batch = work.batch(work.samples)

    return step_of(optimizer, lambda: ensemble.losses(work.loss, *batch), scheduler.step)


def one_of_the_processes(work: Workload, gradients: Any) -> Step:
    """One replica that has the GPU's memory and time together with the others."""
    torch.manual_seed(0)
    model: nn.Module = work.model().cuda()
    if gradients == "shared":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scheduler = scheduler_of(work, optimizer, model, gradients, hdet.ProcessReplicas())
    loss_of = torch.compile(work.loss)
    batch = work.batch(work.samples // N)

    return step_of(optimizer, lambda: loss_of(model, *batch), scheduler.step)


def step_of(optimizer: Any, losses: Callable[[], Tensor], after: Callable[[Tensor], Any]) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            found = losses()
        found.sum().backward()
        optimizer.step()
        after(found)

    return step


def scheduler_of(
    work: Workload, optimizer: Any, model: nn.Module, gradients: Any, replicas: Any
) -> hdet.OneCycleHDET:
    return hdet.OneCycleHDET(
        optimizer,
        1e-4,
        total_steps=1_000_000,
        sync_every=work.steps,
        warmup_steps=work.steps,
        model=model,
        gradients=gradients,
        replicas=replicas,
    )


# Timing --------------------------------------------------------------------------------------


class Round(NamedTuple):
    """Milliseconds."""

    step: float
    """Within a cycle."""
    last: float
    """The step that ends it."""

    @property
    def mean(self) -> float:
        return (self.step * (CYCLE - 1) + self.last) / CYCLE


def round_of(step: Step, num: int) -> Round:
    """A cycle of `num` steps."""
    torch.cuda.synchronize()
    marks = [time.perf_counter()]
    for steps in (num - 1, 1):
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
    begun, ended, converged = (mark * 1000 for mark in marks)
    return Round((ended - begun) / (num - 1), converged - ended)


def row_of(rounds: list[Round]) -> dict[str, Any]:
    return {
        "ms": median(one.mean for one in rounds),
        "ms_within_a_cycle": median(one.step for one in rounds),
        "ms_of_its_last_step": median(one.last for one in rounds),
        "rounds": rounds,
    }


class Way(NamedTuple):
    step: Step
    peak_bytes: int


def prepare(make: Callable[[], Step], num_steps: int) -> Way:
    """Compile and warm up; the most memory that took, in steps as well as in set-up."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = make()
    for _ in range(num_steps):  # a whole cycle, with its converge
        step()
    torch.cuda.synchronize()
    return Way(step, torch.cuda.max_memory_allocated() - before)


def measure(work: Workload) -> dict[str, Any]:
    makers: dict[str, Callable[[], Step]] = {"plain": lambda: plain(work)}
    if work.small:
        makers["plain, CUDA graphs"] = lambda: plain(work, mode="reduce-overhead")
    makers["stacked"] = lambda: stacked(work)
    ways: dict[str, Way] = {}
    for name, make in makers.items():
        start = time.perf_counter()
        torch._dynamo.reset()
        ways[name] = prepare(make, work.steps)
        say(f"{work.name}: {name} is ready after {time.perf_counter() - start:.0f} s")
    rounds: dict[str, list[Round]] = {name: [] for name in ways}
    for number in range(work.rounds + 1):
        for name, way in ways.items():
            timed = round_of(way.step, work.steps)
            if number:  # the first only settles what another way has unsettled
                rounds[name].append(timed)
    rows = {name: {**row_of(rounds[name]), "peak_bytes": ways[name].peak_bytes} for name in ways}
    profiles = {name: kernels(ways[name].step) for name in ("plain", "stacked")}
    parameters = sum(p.numel() for p in work.model().parameters())
    return {"parameters": parameters, "rows": rows, "profiles": profiles}


def kernels(step: Step, num: int = 3, most: int = 14) -> list[dict[str, Any]]:
    """Where the device's time goes, in milliseconds a step."""
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        for _ in range(num):
            step()
        torch.cuda.synchronize()
    events = sorted(watched.key_averages(), key=lambda e: e.self_device_time_total, reverse=True)
    rows = [
        {"kernel": e.key[:100], "ms": e.self_device_time_total / num / 1000, "calls": e.count / num}
        for e in events
    ]
    rest = {"kernel": "all", "ms": sum(row["ms"] for row in rows), "calls": 0}
    return [rest, *rows[:most]]


# N processes on the same GPU -------------------------------------------------------------------


def measure_processes(work: Workload, gradients: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (work.name, gradients, folder, work.steps, work.rounds)
        spawn(serve, arguments, N)
        answer: dict[str, Any] = json.loads((Path(folder) / "answer.json").read_text())
    return answer


def serve(rank: int, name: str, gradients: str, folder: str, steps: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=N)
    found = next(one for one in WORKLOADS if one.name == name)
    work = found._replace(steps=steps, rounds=rounds)
    step = one_of_the_processes(work, gradients)
    for _ in range(work.steps):
        step()
    slowest = []
    for _ in range(max(work.rounds // 2, 1)):
        dist.barrier()
        times = torch.tensor(round_of(step, work.steps))
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        slowest.append(Round(*times.tolist()))
    if rank == 0:
        (Path(folder) / "answer.json").write_text(json.dumps(row_of(slowest)))
    dist.barrier()
    dist.destroy_process_group()


# The answer ------------------------------------------------------------------------------------


def summary(answer: dict[str, Any]) -> dict[str, float]:
    rows = answer["rows"]
    of_parameters = answer["parameters"] * BYTES_OF_A_PARAMETER
    activations = rows["plain"]["peak_bytes"] - of_parameters
    minimum = N * of_parameters + activations
    ms = rows["stacked"]["ms"]
    numbers = {
        "over_plain": ms / rows["plain"]["ms"],
        "minimum_bytes": minimum,
        "memory_over_minimum": rows["stacked"]["peak_bytes"] / minimum,
    }
    if "plain, CUDA graphs" in rows:
        numbers["over_plain_with_cuda_graphs"] = ms / rows["plain, CUDA graphs"]["ms"]
    for gradients in ("shared", "local"):
        if (row := rows.get(f"processes, {gradients}")) is not None:
            numbers[f"speedup_over_{gradients}_processes"] = row["ms"] / ms
    return numbers


NAMES = {
    "over_plain": "over_plain",
    "over_plain_with_cuda_graphs": "over_plain_with_cuda_graphs",
    "speedup_over_shared_processes": "speedup_over_processes",
    "speedup_over_local_processes": "speedup_over_processes_with_local_gradients",
}


def headline(answers: dict[str, Any]) -> dict[str, float]:
    found = {name: answer["summary"] for name, answer in answers.items()}
    numbers = {
        f"{name}_{shown}": one[key]
        for key, shown in NAMES.items()
        for name, one in found.items()
        if key in one
    }
    return {
        **numbers,
        "memory_over_minimum": max(one["memory_over_minimum"] for one in found.values()),
    }


def table(answers: dict[str, Any]) -> str:
    lines = [f"{'':10} {'way':26} {'ms a step':>10} {'over plain':>10} {'GiB':>7}"]
    for name, answer in answers.items():
        rows = answer["rows"]
        for way, row in rows.items():
            peak = f"{row['peak_bytes'] / 2**30:7.2f}" if "peak_bytes" in row else f"{'':>7}"
            ratio = row["ms"] / rows["plain"]["ms"]
            lines.append(f"{name:10} {way:26} {row['ms']:10.2f} {ratio:10.3f} {peak}")
        minimum = answer["summary"]["minimum_bytes"] / 2**30
        lines.append(f"{name:10} {'least memory':26} {'':10} {'':10} {minimum:7.2f}")
    return "\n".join(lines)


def write(answers: dict[str, Any], out: Path, *, quick: bool) -> None:
    for answer in answers.values():
        answer["summary"] = summary(answer)
    write_result(
        out,
        headline=headline(answers),
        settings={"replicas": N, "quick": quick, "precision": "bf16 autocast"},
        seeds=[],
        kept=read_result(out),
        workloads=answers,
    )


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--only", help="names of workloads, separated by commas; others are kept")
    parser.add_argument("--no-processes", action="store_true", help="leave out the processes")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.systems.stacked needs a CUDA device")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    names = chosen.only.split(",") if chosen.only else [work.name for work in WORKLOADS]
    out = chosen.out or RESULTS / ("stacked.quick.json" if chosen.quick else "stacked.json")
    # With --only the others stay as they were measured before.
    answers = json.loads(out.read_text())["workloads"] if chosen.only and out.exists() else {}
    for work in WORKLOADS:
        if work.name not in names:
            continue
        if chosen.quick:
            work = work._replace(steps=max(work.steps // 4, 5), rounds=3)
        answers[work.name] = measure(work)
        write(answers, out, quick=chosen.quick)  # what comes next takes long, and may be cut short
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        for gradients in ("shared", "local") if work.small and not chosen.no_processes else ():
            say(f"{work.name}: {N} processes with {gradients} gradients")
            row = measure_processes(work._replace(steps=work.steps // 2, rounds=4), gradients)
            answers[work.name]["rows"][f"processes, {gradients}"] = row
            write(answers, out, quick=chosen.quick)
    say(table(answers))


if __name__ == "__main__":
    main()
