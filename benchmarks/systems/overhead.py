"""What does hdet add to a step, to the end of a cycle and to a decision? -> overhead.json

    python -m benchmarks.systems.overhead [--quick] [--out FILE]    two processes, other libraries
    python -m benchmarks.systems.overhead --gpu [--out FILE]        one GPU, into the same file
    python -m benchmarks.systems.overhead --decisions [--out FILE]  only the decisions

Two gloo processes train a small GPT under DDP, with OneCycleLR and with hdet around it, by turns.
What a step takes longer is lost in the noise of any machine, so its parts are timed on their own,
each by the median: the step itself, the call of a schedule, the call of hdet between two cycles and
at the end of one, and a bare all-reduce of the same bytes. The ratio of a step with hdet to one
without, at a cycle of T steps and beyond the all-reduce itself, is made of them. Host syncs are
counted by a profiler, the bytes of a cycle read from the record. The decision is what is computed
from the replicas' scores. The first command also runs converge.py, a converge beside
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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from benchmarks.result_file import RESULTS, made_with, plain_json, write_result
from benchmarks.systems import converge, tensor_sets
from benchmarks.systems.decisions import decisions
from benchmarks.systems.loops import (
    CYCLE,
    PROCESSES,
    STACKED,
    Loop,
    Settings,
    ddp,
    seconds,
    stacked,
)
from benchmarks.zoo.models import GPT2_SMALL, SMALL_GPT, Size

LENGTHS = (10, 100, 1000)
WINDOWS = 3
"""Of steps that nothing waits for, in a round."""


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


# Parts of a step -----------------------------------------------------------------------------


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
        results = {
            **parts_of(plain, ours, bare),
            "waits": waits,
            "model_bytes": flat.nbytes,
            "cycle_bytes": cycle_bytes(Path(folder) / "run" / "record.jsonl"),
        }
        (Path(folder) / "told.json").write_text(json.dumps(results))
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
    results = {
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
    print(json.dumps(plain_json(results)), flush=True)
    return results


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


def gpu_headline(results: dict[str, Any]) -> dict[str, float]:
    return {
        f"h200_{engine}_{name}": value
        for engine in ENGINES
        for name, value in gpu_numbers(results[engine]).items()
    }


def gpu_numbers(results: dict[str, Any]) -> dict[str, float]:
    return {
        **{f"{length}_over_plain": results["over_plain"][length] for length in ("t100", "t1000")},
        **{f"{length}_busy": results["busy"][length] for length in ("t100", "t1000")},
        "host_syncs_per_step": results["host_syncs_per_step"],
    }


# The decision --------------------------------------------------------------------------------


def measure(settings: Settings, *, quick: bool) -> dict[str, Any]:
    """All but the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (settings, folder), PROCESSES)
        parts = json.loads((Path(folder) / "told.json").read_text())
    decided = decisions(FEW_DECISIONS if quick else DECISIONS)
    beside = converge.measure(tensor_sets.QUICK if quick else tensor_sets.FULL)
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


PARTS = ("seconds", "decision_ms", "against_peers", "h200")


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
        results = {**known, "decision_ms": decisions(DECISIONS)}
        results["headline"]["decision_ms_n64_k16"] = results["decision_ms"]["n64_k16"]
    elif options.gpu:
        results = {**known, "h200": measure_gpu(QUICK_ON_GPU if options.quick else ON_GPU)}
    else:
        results = {**known, **measure(QUICK if options.quick else FULL, quick=options.quick)}
    if "h200" in results:
        results["headline"] = {**results.get("headline", {}), **gpu_headline(results["h200"])}
    parts = {key: value for key, value in results.items() if key in PARTS}
    is_part = options.gpu or options.decisions
    write_result(
        out,
        headline=results["headline"],
        settings=results.get("settings", {}),
        seeds=[],
        kept=known if is_part else None,
        **parts,
    )
    for name, value in results["headline"].items():
        print(f"{name}: {value:.5g}")


if __name__ == "__main__":
    main()
