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


def of_settle(told: Result) -> dict[str, Any]:
    return settle_headline.headline(regret.rows_of(told["runs"]), told["runs"])


def of_knobs(told: Result) -> dict[str, Any]:
    found = {
        **headline(told["rows"], told["six"]),
        **counts.counts(told["rows"], told["six"]),
    }
    return {name: value for name, value in found.items() if value == value}


HEADLINES: dict[str, Callable[[Result], dict[str, Any]]] = {
    "confirm": lambda told: confirm.headline(told["rows"], told["settings"]["plan"][3]),
    "curves": lambda told: curves.headline(told["cases"]),
    "explosion": lambda told: explosion.headline(told["cases"]),
    "hosts": lambda told: hosts.headline(told["cases"]),
    "knobs": of_knobs,
    "knobs.fresh": of_knobs,
    "rewind": lambda told: rewind.headline(told["tasks"]),
    "scale": lambda told: scale.answer(told["points"])["headline"],
    "scouts": lambda told: scouts.headline(told["scouts"]),
    "settle": of_settle,
    "signals": lambda told: signals.headline(told["rows"]),
    "spikes": lambda told: spikes.headline(told["losses"]),
    "stacked": lambda told: stacked.headline(told["workloads"]),
    "trackers": lambda told: trackers.headline(told["tasks"]),
    "wrong": lambda told: wrong.headline(told["situations"]),
}


@pytest.mark.parametrize("name", HEADLINES)
def test_the_headline_follows_from_the_rows(name: str) -> None:
    told = read_result(RESULTS / f"{name}.json")
    found = plain_json(flat(HEADLINES[name](told)))
    stored = {key: value for key, value in told["headline"].items() if key != "recompiles"}
    assert found.keys() == stored.keys()
    for key, value in stored.items():
        is_number = isinstance(value, (int, float))
        assert found[key] == (pytest.approx(value, rel=1e-5) if is_number else value), key


def test_the_tables_follow_from_the_rows() -> None:
    told = read_result(RESULTS / "settle.json")
    assert settle_page.tables(regret.rows_of(told["runs"]), told["runs"]) == told["tables"]


def test_the_knobs_end_where_the_pages_say() -> None:
    first, fresh = (
        read_result(RESULTS / f"{name}.json")["headline"] for name in ("knobs", "knobs.fresh")
    )
    assert (first["six_problems_value_runs"], first["six_problems_runs"]) == (57, 60)
    assert first["four_lrs_transformer_loss_runs"] == first["four_lrs_transformer_runs"] == 10
    assert first["four_lrs_transformer_value_runs"] == 8
    assert (first["dummy_moved_runs"], first["six_at_once_runs"]) == (3, 10)
    assert (fresh["all_value_runs"], fresh["all_loss_runs"], fresh["all_runs"]) == (19, 11, 20)
