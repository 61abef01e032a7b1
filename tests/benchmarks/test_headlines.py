"""The headline of every stored result follows from the rows beside it.

cost.json has no rows: it stores percentages only. The count of recompiles has no rows either.
"""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.knobs import counts
from benchmarks.knobs.headline import headline
from benchmarks.learning_rate import (
    confirm,
    curves,
    explosion,
    held_out_ddp,
    regret,
    rewind,
    scouts,
    settle_headline,
    settle_page,
    signals,
    spikes,
    trackers,
    wrong,
)
from benchmarks.learning_rate.names import TASK_WORDS
from benchmarks.replication import stability, table1
from benchmarks.result_file import RESULTS, flat, plain_json, read_result
from benchmarks.systems import (
    converge,
    hosts,
    overhead,
    saving,
    scale,
    stacked,
    step,
    tensor_sets,
)
from benchmarks.zoo import (
    zoo_curves,
    zoo_ddp,
    zoo_fit,
    zoo_headline,
    zoo_rounds,
    zoo_sizes,
)
from tests.integrations import __main__ as integrations

Result = dict[str, Any]


def of_settle(results: Result) -> dict[str, Any]:
    return settle_headline.headline(regret.rows_of(results["runs"]), results["runs"])


def of_knobs(results: Result) -> dict[str, Any]:
    found = {
        **headline(results["rows"], results["six"]),
        **counts.counts(results["rows"], results["six"]),
    }
    return {name: value for name, value in found.items() if value == value}


def of_converge(results: Result) -> dict[str, Any]:
    settings = {name: results["settings"][name] for name in tensor_sets.Settings._fields}
    report = converge.report(tensor_sets.Settings(**settings), results)
    return dict(report["headline"])


def of_groups(results: Result) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for task, numbers in results["tasks"].items():
        changes = {name: change["truth_pct"] for name, change in numbers["changes"].items()}
        best = min(changes, key=changes.__getitem__)
        found[f"{TASK_WORDS[task]}_best_change"] = best
        found[f"{TASK_WORDS[task]}_best_change_pct"] = changes[best]
    return found


def of_overhead(results: Result) -> dict[str, Any]:
    """The comparison with peers is that of converge.json."""
    parts = results["seconds"]
    beside = of_converge(read_result(RESULTS / "converge.json"))
    return {
        **{f"{length}_over_ddp": value for length, value in overhead.ratios(parts).items()},
        **overhead.added(parts),
        "host_syncs_per_step": parts["waits"],
        "cycle_bytes_over_model_bytes": parts["cycle_bytes"] / parts["model_bytes"],
        "decision_ms_n64_k16": results["decision_ms"]["n64_k16"],
        **{name: beside[name] for name in converge.BESIDE_PEERS},
        **overhead.gpu_headline({name: on_gpu(results["h200"][name]) for name in overhead.ENGINES}),
    }


def on_gpu(results: Result) -> Result:
    """The ratios of one engine, from its seconds."""
    parts = results["seconds"]
    busy = overhead.busy(parts, results["device"], results["ahead"])
    return {**results, "over_plain": overhead.ratios(parts), "busy": busy}


HEADLINES: dict[str, Callable[[Result], dict[str, Any]]] = {
    "confirm": lambda results: confirm.headline(results["rows"], results["settings"]["plan"][3]),
    "converge": of_converge,
    "curves": lambda results: curves.headline(results["cases"]),
    "explosion": lambda results: explosion.headline(results["cases"]),
    "groups": of_groups,
    "replication_table1": lambda results: table1.headline(results["rows"], ["feed", "census"]),
    "replication_stability": lambda results: stability.headline(results["rows"]),
    "integrations": lambda results: integrations.headline(results["rows"]),
    "held_out_ddp": lambda results: held_out_ddp.headline(results["rows"]),
    "hosts": lambda results: hosts.headline(results["cases"]),
    "knobs": of_knobs,
    "knobs.fresh": of_knobs,
    "overhead": of_overhead,
    "rewind": lambda results: rewind.headline(results["tasks"]),
    "saving": lambda results: saving.headline(results["kills"], results["cuts"], results["flips"]),
    "scale": lambda results: scale.answer(results["points"])["headline"],
    "scouts": lambda results: scouts.headline(results["scouts"]),
    "settle": of_settle,
    "signals": lambda results: signals.headline(results["rows"]),
    "spikes": lambda results: spikes.headline(results["losses"]),
    "stacked": lambda results: stacked.headline(results["workloads"]),
    "step": lambda results: step.headline(results["rows"]),
    "trackers": lambda results: trackers.headline(results["tasks"]),
    "wrong": lambda results: wrong.headline(results["situations"]),
    "zoo": lambda results: zoo_headline.headline(results["rows"]),
    "zoo_curves": lambda results: zoo_curves.headline(results["rows"]),
    "zoo_fit": lambda results: zoo_fit.headline(results["rows"]),
    "zoo_ddp": lambda results: zoo_ddp.headline(results["rows"]),
    "zoo_rounds": lambda results: zoo_rounds.headline(results["rows"]),
    "zoo_sizes": lambda results: zoo_sizes.headline(results["rows"]),
}


@pytest.mark.parametrize("name", HEADLINES)
def test_the_headline_follows_from_the_rows(name: str) -> None:
    results = read_result(RESULTS / f"{name}.json")
    found = plain_json(flat(HEADLINES[name](results)))
    stored = {key: value for key, value in results["headline"].items() if key != "recompiles"}
    assert found.keys() == stored.keys()
    for key, value in stored.items():
        is_number = isinstance(value, (int, float))
        assert found[key] == (pytest.approx(value, rel=1e-5) if is_number else value), key


def test_the_parts_of_the_cost_stand_in_its_headline() -> None:
    results = read_result(RESULTS / "cost.json")
    for part in ("ddp", "launches"):
        stored = {
            name.removeprefix(f"{part}_"): value
            for name, value in results["headline"].items()
            if name.startswith(f"{part}_")
        }
        assert stored == results[part]["numbers"]


@pytest.mark.parametrize("kind", ["losses", "probe"])
@pytest.mark.parametrize("plan", ["", "long_", "large_", "ddp_"])
def test_the_cost_is_that_of_the_scout_and_of_the_rest(plan: str, kind: str) -> None:
    stored = read_result(RESULTS / "cost.json")["headline"]
    scout, rest, cost = (stored[f"{plan}{kind}_{part}_pct"] for part in ("scout", "rest", "cost"))
    assert scout + rest == pytest.approx(cost, abs=1e-5)


def test_every_result_file_but_that_of_the_cost_is_recomputed() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} - HEADLINES.keys() == {"cost"}


def test_the_tables_follow_from_the_rows() -> None:
    results = read_result(RESULTS / "settle.json")
    assert settle_page.tables(regret.rows_of(results["runs"]), results["runs"]) == results["tables"]


def test_the_knobs_end_where_the_pages_say() -> None:
    first, fresh = (
        read_result(RESULTS / f"{name}.json")["headline"] for name in ("knobs", "knobs.fresh")
    )
    assert (first["six_problems_value_runs"], first["six_problems_runs"]) == (57, 60)
    assert first["four_lrs_transformer_loss_runs"] == first["four_lrs_transformer_runs"] == 10
    assert first["four_lrs_transformer_value_runs"] == 8
    assert (first["dummy_moved_runs"], first["six_at_once_runs"]) == (3, 10)
    assert (fresh["all_value_runs"], fresh["all_loss_runs"], fresh["all_runs"]) == (19, 11, 20)
