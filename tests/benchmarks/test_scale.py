"""Benchmarks of overhead and scale: what they make of points, and what they simulate."""

import copy
import json
import math
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import torch

from benchmarks.result_file import RESULTS
from benchmarks.systems import converge, overhead, scale, scale_page
from benchmarks.systems.averaging import FOLLOWED, HEADLINE, OUTER, outer_way
from benchmarks.systems.cluster import (
    ETHERNET,
    GPUS,
    INFINIBAND,
    ROW_BYTES,
    SIZES,
    Cluster,
    all_reduce,
    layout,
    simulate,
    table,
)
from benchmarks.systems.loops import waits_of
from benchmarks.systems.points import Point, shapes_for
from benchmarks.systems.scale_fit import ALL_REDUCE, fit, parts_of, predict, solve, stacked, wire

KNOWN = {"start": 1e-4, "latency": 8e-5, "byte": 4e-10, "shared_byte": 2e-11}


def wires(known: dict[str, float]) -> list[Point]:
    """Points that a machine with these coefficients would give."""
    points: list[Point] = [
        {"processes": num, "parameters": size * 10**power}
        for num in (2, 3, 4, 6, 8)
        for power in (5, 6, 7)
        for size in (1, 3)
    ]
    return [{**p, "all_reduce": predict(wire, known, p)} for p in points]


# The fit -------------------------------------------------------------------------------------


def test_cost_fit_recovers_known_coefficients() -> None:
    found = fit(ALL_REDUCE, {"wire": wires(KNOWN)})
    assert found.coefficients == pytest.approx(KNOWN, rel=1e-6)
    held_out = {(p["processes"], p["parameters"]) for p in found.held_out}
    assert (3, 100_000) in held_out
    assert (8, 100_000) in held_out
    assert (2, 300_000) in held_out
    assert (2, 100_000) not in held_out
    assert max(abs(p["error_pct"]) for p in found.held_out) < 1e-4


def test_one_outlier_hardly_changes_the_cost_fit() -> None:
    points = wires(KNOWN)
    disturbed = next(p for p in points if (p["processes"], p["parameters"]) == (4, 10**6))
    disturbed["all_reduce"] *= 2
    found = fit(ALL_REDUCE, {"wire": points})
    assert max(abs(p["error_pct"]) for p in found.held_out) < 10


def test_cost_fit_reports_the_error_of_held_out_points() -> None:
    points = wires(KNOWN)
    held = next(p for p in points if p["processes"] == 8)
    held["all_reduce"] *= 0.8
    found = fit(ALL_REDUCE, {"wire": points})
    assert max(p["error_pct"] for p in found.held_out) == pytest.approx(25, rel=1e-4)


def test_cost_fit_has_no_negative_coefficient() -> None:
    assert solve([[1, 1], [1, 2], [1, 3]], [3, 2, 1])[1] == 0


def test_stacked_cost_is_the_slower_of_host_and_device() -> None:
    known = {"start": 1e-3, "replica": 4e-4, "byte": 2.5e-13}
    points: list[Point] = [{"replicas": n, "parameters": 3 * 10**7} for n in (2, 4, 8, 16, 64)]
    points += [{"replicas": 2, "parameters": 10**power} for power in (5, 6, 7, 8, 9)]
    made = [{**p, "converge": predict(stacked, known, p)} for p in points]
    small, large = made[5], made[9]
    assert small["converge"] == pytest.approx(1e-3 + 2 * 4e-4)
    assert large["converge"] == pytest.approx(1e-3 + 8 * 2 * 4e9 * 2.5e-13)
    part = parts_of(KNOWN)["stacked_converge"]
    assert fit(part, {"stack": made}).coefficients == pytest.approx(known, rel=1e-6)


# The cluster ---------------------------------------------------------------------------------

FITS = {
    "stacked_end": {"start": 2e-3, "replica": 1e-3, "byte": 0.0},
    "decision": {"start": 1e-4, "replica": 1e-6},
}


def test_layout_gives_a_replica_the_fewest_gpus_that_hold_it() -> None:
    cluster = Cluster(shard_bytes=60e9)
    assert layout(cluster, 64, 1e9) == (64, 1)
    assert layout(cluster, 64, 7e9) == (32, 2)
    assert layout(cluster, 4096, 400e9) == (32, 128)
    assert simulate(cluster, 8, 30e9, FITS) is None  # one replica


def test_simulated_all_reduce_inside_one_host_and_across_hosts() -> None:
    cluster = INFINIBAND
    inside = all_reduce(cluster, 8, 1, 1e9)
    assert inside == pytest.approx(14 * 5e-6 + 2 * 7 / 8 * 1e9 / 450e9)
    # Every eighth GPU: one link each.
    assert all_reduce(cluster, 2, 8, 1e9) == pytest.approx(2 * 20e-6 + 1e9 / 50e9)
    # All GPUs of 512 hosts: eight links for each host, and a tree for the latency.
    wide = all_reduce(cluster, 4096, 1, 1e9)
    assert wide == pytest.approx(2 * 12 * 20e-6 + 2 * 1e9 / 400e9)
    assert all_reduce(cluster, 1, 1, 1e9) == 0


def test_shared_gradients_add_only_the_cost_of_a_cycle_end() -> None:
    row = simulate(INFINIBAND, 8, 1e9, FITS)
    assert row is not None
    step = 6 * 1e9 * 8192 / 400e12  # gradients hide behind the backward
    wired = 14 * 5e-6 + 1.75 * 4e9 / 450e9
    end = 3e-3 + 8 * ROW_BYTES / 50e9 + 3 * 20e-6 + 1e-4 + 8e-6
    converge = wired + end + 8 * 4e9 / 2.6e12
    assert row["step"] == pytest.approx(step)
    assert row["converge"] == pytest.approx(converge)
    assert row["shared_pct"] == pytest.approx(100 * (2e-4 + converge / 100) / step)
    assert row["local_pct"] == pytest.approx(row["shared_pct"])


def test_local_gradients_never_cost_more_than_shared_ones() -> None:
    rows = [*table(ETHERNET, FITS), *table(INFINIBAND, FITS)]
    assert all(row["local_pct"] <= row["shared_pct"] + 1e-9 for row in rows)
    assert min(row["local_pct"] for row in rows) < -30
    assert {row["gpus"] for row in rows} == set(GPUS)
    assert {row["parameters"] for row in rows} == set(SIZES)


# The page ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads((RESULTS / "scale.json").read_text())


def test_scale_headline_follows_from_the_stored_points(results: dict[str, Any]) -> None:
    found = scale.answer(results["points"])
    assert found["headline"] == pytest.approx(results["headline"], rel=1e-4)
    for name in ("model_error_pct", "decision_ms_n64_k16"):
        assert math.isfinite(results["headline"][name])


def test_scale_tables_match_the_file_and_the_figure_is_valid_svg(
    results: dict[str, Any],
) -> None:
    assert scale_page.tables(results) == results["tables"]
    tables = {"a": results["table"], "b": results["table_ethernet"]}
    root = ElementTree.fromstring(scale_page.figure_of(tables))
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 * len(scale_page.WAYS) * len(SIZES)


def test_shapes_for_splits_parameters_into_tensors_of_a_million() -> None:
    assert [math.prod(shape) for shape in shapes_for(2_300_000)] == [1_000_000, 1_000_000, 300_000]
    assert shapes_for(1_000_000) == [(1_000_000,)]


# Beside other libraries ------------------------------------------------------------------------


def measured() -> dict[str, Any]:
    times = {
        HEADLINE: 1.1,
        "torch PeriodicModelAverager": 2.0,
        "Accelerate LocalSGD": 2.2,
        "torchft LocalSGD": 1.6,
        FOLLOWED: 3.0,
        "torchft DiLoCo": 2.5,
    }
    rows = {name: {"over_raw": value} for name, value in times.items()}
    peaks = {name: {"peak_bytes": 100 * value} for name, value in times.items()}
    return {"rows": {"gpt2": rows, "small_tensors": rows}, "memory": peaks}


def test_average_is_compared_with_the_best_peer_of_its_kind() -> None:
    answer = measured()
    found = {(row["what"], row["kind"]): row for row in converge.against_peers(answer)}
    local = found["time, gpt2", "Local SGD"]
    assert (local["best_peer"], local["ratio"]) == ("torchft LocalSGD", pytest.approx(1.1 / 1.6))
    assert found["memory, gpt2", "DiLoCo"]["ratio"] == pytest.approx(3.0 / 2.5)
    assert converge.worst(answer, "time") == pytest.approx(1.2)
    assert converge.worst(answer, "memory") == pytest.approx(1.2)


def test_library_that_did_not_run_is_not_compared() -> None:
    answer = copy.deepcopy(measured())
    for rows in answer["rows"].values():
        rows["torchft DiLoCo"] = rows["torchft LocalSGD"] = {"error": "not installed"}
    answer["memory"]["torchft DiLoCo"] = "not installed"
    found = {(row["what"], row["kind"]): row for row in converge.against_peers(answer)}
    assert found["time, gpt2", "DiLoCo"]["ratio"] is None
    assert found["time, gpt2", "Local SGD"]["best_peer"] == "torch PeriodicModelAverager"
    assert converge.worst(answer, "time") == pytest.approx(1.1 / 2.0)


def test_first_outer_step_exceeds_the_mean_by_the_known_factor() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    outer = OUTER([weight])
    weight.grad = -torch.ones(1)  # the mean is at one
    outer.step()
    assert float(weight.detach()) == pytest.approx(outer_way())


# What hdet adds to a step ------------------------------------------------------------------------


def test_overhead_ratio_follows_from_the_measured_parts() -> None:
    parts = {"step": 1.0, "schedule": 0.0, "between": 0.01, "end": 0.51, "all_reduce": 0.3}
    assert overhead.ratio(parts, 10) == pytest.approx(1.03)
    assert overhead.ratio(parts, 1000) == pytest.approx(1.0102)
    added = {"step_ms": 1000, "added_ms_per_step": 10, "added_ms_per_cycle": 200}
    assert overhead.added(parts) == pytest.approx(added)


def test_waits_of_counts_how_often_the_host_waits() -> None:
    loss = torch.ones(3)
    assert not any(waits_of(lambda: loss.sum()).values())
    assert all(waits_of(lambda: loss.sum().item()).values())
