"""A cluster of GPUs as it is assumed, and what a step and a converge take on it."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.systems.scale_fit import Coefficients, ring


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
    """The time of `num` GPUs at this distance: by a ring or by a tree, the faster one."""
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
    results = replicas * ROW_BYTES / cluster.wire_bandwidth
    results += math.ceil(math.log2(replicas)) * cluster.wire_latency
    decided = fits["decision"]["start"] + replicas * fits["decision"]["replica"]
    return launches + results + decided


GPUS = (8, 64, 512, 4096)
SIZES = (1e9, 7e9, 30e9, 70e9, 400e9)


def table(cluster: Cluster, fits: Mapping[str, Coefficients]) -> list[dict[str, float]]:
    rows = [simulate(cluster, gpus, size, fits) for size in SIZES for gpus in GPUS]
    return [row for row in rows if row is not None]
