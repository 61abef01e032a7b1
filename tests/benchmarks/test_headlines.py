"""The headline of every stored result follows from the rows beside it."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.knobs import counts
from benchmarks.knobs.headline import headline
from benchmarks.learning_rate import (
    confirm,
    curves,
    explosion,
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
from benchmarks.result_file import RESULTS, flat, plain_json, read_result
from benchmarks.systems import hosts, scale, stacked

Result = dict[str, Any]


def of_settle(results: Result) -> dict[str, Any]:
    return settle_headline.headline(regret.rows_of(results["runs"]), results["runs"])


def of_knobs(results: Result) -> dict[str, Any]:
    found = {
        **headline(results["rows"], results["six"]),
        **counts.counts(results["rows"], results["six"]),
    }
    return {name: value for name, value in found.items() if value == value}


HEADLINES: dict[str, Callable[[Result], dict[str, Any]]] = {
    "confirm": lambda results: confirm.headline(results["rows"], results["settings"]["plan"][3]),
    "curves": lambda results: curves.headline(results["cases"]),
    "explosion": lambda results: explosion.headline(results["cases"]),
    "hosts": lambda results: hosts.headline(results["cases"]),
    "knobs": of_knobs,
    "knobs.fresh": of_knobs,
    "rewind": lambda results: rewind.headline(results["tasks"]),
    "scale": lambda results: scale.answer(results["points"])["headline"],
    "scouts": lambda results: scouts.headline(results["scouts"]),
    "settle": of_settle,
    "signals": lambda results: signals.headline(results["rows"]),
    "spikes": lambda results: spikes.headline(results["losses"]),
    "stacked": lambda results: stacked.headline(results["workloads"]),
    "trackers": lambda results: trackers.headline(results["tasks"]),
    "wrong": lambda results: wrong.headline(results["situations"]),
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
