"""What hdet costs at sizes nobody here can run: a model of a step and of a converge, by simulation.

    python -m benchmarks.scale --measure [--quick] [--out FILE]   the points, on one machine
    python -m benchmarks.scale --decisions [--out FILE]           those of decisions alone, anew
    python -m benchmarks.scale [--out FILE]                       the fit, the table and the page

The first command writes the points of benchmarks/points.py into results/scale.json. The second fits
a few coefficients to some of them, checks what these say of the others, simulates a cluster with
the same forms and the hardware it is told, and makes docs/scale.md and docs/scale.svg. A fit is by
relative errors, squared up to a tenth and by their amount beyond: one point that the machine has
disturbed does not bend it. No coefficient is negative.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks import points, scale_page
from benchmarks.points import Point
from benchmarks.settle import RESULTS, made_with, plain_json
from hdet.tensors.buckets import SLOTS

CORES = 16
"""Of the machine on which the points were measured."""
CACHED_BYTES = 16 << 20
"""Beyond it a message falls out of the caches near a core."""
PASSES = 8
"""How often the mean of stacked replicas reads or writes each of them."""
LINEAR = 0.1
"""The relative error from which on it counts by its amount."""

GUESSES = [{"replica": 1e-3, "byte": byte} for byte in (1e-14, 1e-13, 1e-12)]
"""Where a fit sets out from, if it has to know whether host or device is slower."""

Coefficients = Mapping[str, float]
Features = dict[str, float]


# Forms ---------------------------------------------------------------------------------------


def ring(processes: float, num_bytes: float) -> float:
    """Bytes that each of them sends.

    >>> ring(4, 100.0)
    150.0
    """
    return 2 * (processes - 1) / processes * num_bytes


def wire(point: Point, _: Coefficients) -> Features:
    """A ring; what is out of the caches is fetched from memory that all processes share."""
    num, num_bytes = point["processes"], 4 * point["parameters"]
    return {
        "start": 1.0,
        "latency": 2 * (num - 1),
        "byte": ring(num, num_bytes),
        "shared_byte": 2 * (num - 1) * max(num_bytes - CACHED_BYTES, 0),
    }


def local_step(point: Point, _: Coefficients) -> Features:
    """Matrix products, and an optimizer that reads memory which all processes share."""
    size = point["parameters"]
    return {
        "start": 1.0,
        "token": size * point["tokens"],
        "parameter": size,
        "shared_parameter": size * point["processes"],
    }


def shared_step(all_reduce: Coefficients) -> Callable[[Point, Coefficients], Features]:
    """The same, and the share of its gradients' all-reduce that is waited for."""

    def features(point: Point, known: Coefficients) -> Features:
        wired = predict(wire, all_reduce, point)
        return {**local_step(point, known), "exposed": wired}

    return features


def stacked(point: Point, known: Coefficients) -> Features:
    """The host launches while the device computes: the slower of the two is waited for."""
    launches = point["replicas"]
    moved = PASSES * point["replicas"] * 4 * point["parameters"]
    on_device = moved * known["byte"] > launches * known["replica"]
    return {
        "start": 1.0,
        "replica": 0.0 if on_device else launches,
        "byte": moved if on_device else 0.0,
    }


def deciding(point: Point, _: Coefficients) -> Features:
    return {"start": 1.0, "replica": point["replicas"]}


Form = Callable[[Point, Coefficients], Features]


def predict(form: Form, known: Coefficients, point: Point) -> float:
    return sum(known[name] * value for name, value in form(point, known).items())


# Fits ----------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Something that is timed, and which of its points are kept from the fit."""

    kind: str
    key: str
    form: Form
    held_out: Callable[[Point], bool]
    inside: Callable[[Point], bool] = lambda point: True
    """Whether the model is about a point at all."""


def is_between(point: Point) -> bool:
    """Sizes of three times a power of ten, and numbers of processes that others surround or that
    are more than all others."""
    return point["processes"] in (3, 8) or str(point["parameters"])[0] == "3"


def is_middle(point: Point) -> bool:
    return point["processes"] == 4 or 1.5e6 < point["parameters"] < 2e6


def is_other_stack(point: Point) -> bool:
    return point["replicas"] in (8, 32) or point["parameters"] in (10**6, 10**8)


def has_cores(point: Point) -> bool:
    """A converge has several messages on the wire at a time, and each wants a core."""
    return point["processes"] * SLOTS <= CORES


def parts_of(all_reduce: Coefficients) -> dict[str, Part]:
    return {
        "converge": Part("wire", "converge", wire, is_between, has_cores),
        "local_step": Part("step", "local", local_step, is_middle),
        "shared_step": Part("step", "shared", shared_step(all_reduce), is_middle),
        "stacked_converge": Part("stack", "converge", stacked, is_other_stack),
        "stacked_end": Part("stack", "end", stacked, is_other_stack),
    }


ALL_REDUCE = Part("wire", "all_reduce", wire, is_between)
DECISION = Part(
    "decision",
    "seconds",
    deciding,
    lambda point: point["replicas"] == 512,
    lambda point: point["knobs"] == 1 and point["replicas"] >= 64,
)


class Fit(NamedTuple):
    coefficients: dict[str, float]
    held_out: list[dict[str, float]]
    """Each with what the model says of it, and by how many per cent that is off."""
    outside: list[dict[str, float]]
    """The same for points that the model is not about."""


def fit(part: Part, known: Mapping[str, Sequence[Point]]) -> Fit:
    own = [point for point in known[part.kind] if part.inside(point)]
    used = [point for point in own if not part.held_out(point)]
    tried = [settle(part, used, guess) for guess in GUESSES]
    coefficients = min(tried, key=lambda found: loss(part, used, found))

    def checked(kept: Sequence[Point]) -> list[dict[str, float]]:
        told = []
        for point in kept:
            said = predict(part.form, coefficients, point)
            error = 100 * (said / point[part.key] - 1)
            told.append({**point, "predicted": said, "error_pct": error})
        return told

    others = [point for point in known[part.kind] if not part.inside(point)]
    return Fit(
        coefficients,
        checked([point for point in own if part.held_out(point)]),
        checked(others) if part.kind == "wire" else [],
    )


def settle(part: Part, used: Sequence[Point], guess: Coefficients) -> dict[str, float]:
    """Which of two things is slower is known when both are: guess, fit, and look again."""
    found = dict(guess)
    for _ in range(10):
        rows = [part.form(point, found) for point in used]
        solved = solve([list(row.values()) for row in rows], [point[part.key] for point in used])
        found = dict(zip(rows[0], solved, strict=True))
    return found


def loss(part: Part, used: Sequence[Point], known: Coefficients) -> float:
    errors = [abs(predict(part.form, known, point) / point[part.key] - 1) for point in used]
    return sum(min(error, LINEAR) * (2 * error - min(error, LINEAR)) for error in errors)


def solve(rows: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Coefficients, none of them negative, whose relative errors are small.

    >>> [round(x, 6) for x in solve([[1, 1], [1, 2], [1, 4]], [3, 5, 9])]
    [1.0, 2.0]
    """
    seconds = torch.tensor(times, dtype=torch.float64)[:, None]
    table = torch.tensor(rows, dtype=torch.float64) / seconds
    units = table.abs().amax(0).clamp(min=1e-300)
    table = table / units
    left = [place for place in range(table.shape[1]) if bool(table[:, place].any())]
    while True:
        found = robust(table[:, left])
        if bool((found >= 0).all()):
            break
        del left[int(found.argmin())]
    answer = torch.zeros(table.shape[1], dtype=torch.float64)
    answer[left] = found
    return (answer / units).tolist()


def robust(table: torch.Tensor) -> torch.Tensor:
    """What makes every row one, as nearly as can be."""
    ones = torch.ones(len(table), 1, dtype=torch.float64)
    weights = ones
    for _ in range(25):
        found = torch.linalg.lstsq(table * weights, weights, driver="gelsd").solution
        weights = (table @ found - 1).abs().clamp(min=LINEAR).rsqrt()
    return found[:, 0]


def fit_all(known: Mapping[str, Sequence[Point]]) -> dict[str, Fit]:
    first = fit(ALL_REDUCE, known)
    fits = {"all_reduce": first}
    for name, part in parts_of(first.coefficients).items():
        fits[name] = fit(part, known)
    return {**fits, "decision": fit(DECISION, known)}


# A cluster -----------------------------------------------------------------------------------


class Cluster(NamedTuple):
    """Hardware, as it is assumed."""

    flops: float = 400e12
    """Of one GPU, achieved in bf16."""
    host_gpus: int = 8
    host_bandwidth: float = 450e9
    """Bytes a second of one GPU to others of its host."""
    wire_bandwidth: float = 50e9
    """The same to other hosts."""
    host_latency: float = 5e-6
    wire_latency: float = 20e-6
    memory_bandwidth: float = 2.6e12
    """Achieved by passes over memory."""
    shard_bytes: float = 60e9
    """Of a GPU's memory, for weights, gradients and the optimizer's state."""
    tokens: int = 8192
    """Of one GPU at one step."""


INFINIBAND = Cluster()
ETHERNET = Cluster(wire_bandwidth=100e9 / 8 / 8)
"""One link of 100 Gbit/s for the eight GPUs of a host."""

STATE_BYTES = 16  # float32 weights, gradients and two moments
GRADIENT_BYTES, WEIGHT_BYTES = 2, 4
CYCLE, DELAY = 100, 5
HOST_SECONDS = 2e-4
"""What hdet's call takes between two cycles; in overhead.json it is less."""
ROW_BYTES = 8 * 4160
"""What a replica tells the others before a converge: a sample of its weights, mostly."""
HIDDEN = 2 / 3
"""Of a step's computing, during which gradients are on their way: its backward."""
END_PASSES = 8
"""Over a process's shard at the end of a cycle: whether it is finite, packed, divided, unpacked."""
FLIGHT_PASSES = 14
"""The same when the mean comes later: two copies, the difference, and its sum."""


class Layout(NamedTuple):
    replicas: int
    shards: int


def layout(cluster: Cluster, gpus: int, parameters: float) -> Layout:
    """As few GPUs for a replica as can hold it, a power of two."""
    least = STATE_BYTES * parameters / cluster.shard_bytes
    shards = 2 ** max(math.ceil(math.log2(least)), 0)
    return Layout(gpus // shards, shards)


def all_reduce(cluster: Cluster, num: int, stride: int, num_bytes: float) -> float:
    """Of `num` GPUs, each so many from the next: by a ring or by a tree, whichever is faster."""
    if num < 2:
        return 0.0
    inside = num * stride <= cluster.host_gpus
    # Those that share a host send over a link each.
    links = max(cluster.host_gpus // stride, 1)
    outward = min(cluster.wire_bandwidth * links, cluster.host_bandwidth)
    bandwidth = cluster.host_bandwidth if inside else outward
    latency = cluster.host_latency if inside else cluster.wire_latency
    by_ring = 2 * (num - 1) * latency + ring(num, num_bytes) / bandwidth
    by_tree = 2 * math.ceil(math.log2(num)) * latency + 2 * num_bytes / bandwidth
    return min(by_ring, by_tree)


def inside_step(cluster: Cluster, shards: int, parameters: float) -> float:
    """What FSDP sends inside a replica: weights twice, gradients once, half an all-reduce each."""
    return 1.5 * all_reduce(cluster, shards, 1, GRADIENT_BYTES * parameters)


def simulate(
    cluster: Cluster, gpus: int, parameters: float, fits: Mapping[str, Coefficients]
) -> dict[str, float] | None:
    """Seconds of a step and of a converge, and per cent that hdet adds; none for one replica."""
    replicas, shards = layout(cluster, gpus, parameters)
    if replicas < 2:
        return None
    compute = 6 * parameters * cluster.tokens / cluster.flops
    shard = parameters / shards
    inside = inside_step(cluster, shards, parameters)
    gradient = all_reduce(cluster, replicas, shards, GRADIENT_BYTES * shard)
    plain, alone = (
        compute + max(sent - HIDDEN * compute, 0) for sent in (inside + gradient, inside)
    )
    wired = all_reduce(cluster, replicas, shards, WEIGHT_BYTES * shard)
    end = end_of_cycle(cluster, replicas, fits)
    passes = WEIGHT_BYTES * shard / cluster.memory_bandwidth
    blocking = wired + end + END_PASSES * passes
    waited = max(wired - DELAY * alone, 0) + end + FLIGHT_PASSES * passes

    def percent(step: float, cycle: float) -> float:
        return 100 * ((step + HOST_SECONDS + cycle / CYCLE) / plain - 1)

    return {
        "gpus": gpus,
        "parameters": parameters,
        "replicas": replicas,
        "shards": shards,
        "step": plain,
        "gradient": gradient,
        "converge": blocking,
        "shared_pct": percent(plain, blocking),
        "local_pct": percent(alone, blocking),
        "overlapped_pct": percent(alone, waited),
    }


def end_of_cycle(cluster: Cluster, replicas: int, fits: Mapping[str, Coefficients]) -> float:
    """What does not depend on the model: launches, what replicas tell each other, the decision."""
    launches = fits["stacked_end"]["start"] + fits["stacked_end"]["replica"]
    told = replicas * ROW_BYTES / cluster.wire_bandwidth
    told += math.ceil(math.log2(replicas)) * cluster.wire_latency
    decided = fits["decision"]["start"] + replicas * fits["decision"]["replica"]
    return launches + told + decided


GPUS = (8, 64, 512, 4096)
SIZES = (1e9, 7e9, 30e9, 70e9, 400e9)


def table(cluster: Cluster, fits: Mapping[str, Coefficients]) -> list[dict[str, float]]:
    rows = [simulate(cluster, gpus, size, fits) for size in SIZES for gpus in GPUS]
    return [row for row in rows if row is not None]


# The answer ----------------------------------------------------------------------------------


def answer(known: Mapping[str, Sequence[Point]]) -> dict[str, Any]:
    fits = fit_all(known)
    errors = {
        name: [abs(point["error_pct"]) for point in found.held_out] for name, found in fits.items()
    }
    everything = [error for part in errors.values() for error in part]
    outside = [abs(point["error_pct"]) for found in fits.values() for point in found.outside]
    coefficients = {name: found.coefficients for name, found in fits.items()}
    (decision,) = (
        p["seconds"] for p in known["decision"] if (p["replicas"], p["knobs"]) == (64, 16)
    )
    return {
        "headline": {
            "model_error_pct": max(everything),
            "model_median_error_pct": median(everything),
            "short_of_cores_error_pct": max(outside, default=0.0),
            "decision_ms_n64_k16": 1e3 * decision,
        },
        "errors_pct": {
            name: {"points": len(part), "median": median(part), "worst": max(part)}
            for name, part in errors.items()
        },
        "fits": {name: found._asdict() for name, found in fits.items()},
        "assumptions": {"infiniband": INFINIBAND._asdict(), "ethernet": ETHERNET._asdict()},
        "table": table(INFINIBAND, coefficients),
        "table_ethernet": table(ETHERNET, coefficients),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="make the points anew")
    parser.add_argument("--decisions", action="store_true", help="these alone; the rest is kept")
    parser.add_argument("--quick", action="store_true", help="few points, to see that it runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or RESULTS / ("scale.quick.json" if options.quick else "scale.json")

    def keep(told: dict[str, Any]) -> None:
        out.write_text(json.dumps(plain_json({"points": told, **made_with()}), indent=1) + "\n")

    if options.measure:
        points.measure(points.QUICK if options.quick else points.FULL, keep)
        return
    told = json.loads(out.read_text())
    if options.decisions:  # plain Python: any machine will do
        told["points"]["decision"] = points.decisions(points.FULL)
    found = {**plain_json(answer(told["points"])), "points": told["points"]}
    found |= {key: told[key] for key in ("versions", "device")}
    out.write_text(json.dumps(found, indent=1) + "\n")
    if options.out is None:
        scale_page.write(found)
    print(json.dumps({"headline": found["headline"], "errors_pct": found["errors_pct"]}, indent=1))


if __name__ == "__main__":
    main()
