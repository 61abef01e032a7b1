"""The settling benchmark's book-keeping: what it compares with what, and what it makes of it."""

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning_rate import regret, settle_page
from benchmarks.learning_rate.methods.bench import Ended, Run
from benchmarks.learning_rate.settle import Book, Job, TimeIsUp
from benchmarks.learning_rate.settle_figure import figure_of
from benchmarks.learning_rate.settle_headline import headline
from benchmarks.result_file import plain_json

BEST = 0.01


def run(method: str, lr: float, seed: int, loss: float, task: str = "a") -> dict[str, Any]:
    measures = {"loss": loss}
    notes = {"steps": 20} if method == "hdet" else {}
    ended = Ended(measures, measures, lr, notes)
    return plain_json(
        {"job": Job(task, method, lr, seed, 1000)._asdict(), "ended": ended._asdict()}
    )


def made() -> list[dict[str, Any]]:
    """A grid whose best is lucky where it is picked, its reference, and three methods."""
    runs = [run("OneCycleLR", BEST * 2.0**k, 100, 2.0 + k * k) for k in range(-2, 3)]
    for seed, reference in ((0, 2.0), (1, 4.0)):
        runs.append(run("OneCycleLR", BEST, seed, reference))
        for start in (0.01, 1.0, 100.0):
            runs.append(run("hdet", BEST * start, seed, reference * 1.01))
            runs.append(
                run("PBT", BEST * start, seed, reference * (1.5 if start < 10 else math.inf))
            )
        runs.append(run("Prodigy", BEST, seed, reference * 1.2))
    return runs


def test_regret_is_relative_to_the_reference_run_of_the_same_seed() -> None:
    rows = regret.rows_of(made())
    own = [row for row in rows if row.method == "hdet"]
    assert len(own) == 6
    assert all(row.regret == pytest.approx(1.0, rel=1e-5) for row in own)
    assert {round(row.start, 6) for row in own} == {0.01, 1.0, 100.0}
    assert [row.regret for row in rows if row.method == "PBT"].count(math.inf) == 2
    assert all(math.isnan(row.start) for row in rows if row.method == "Prodigy")


def test_settle_headline_has_the_numbers_that_pages_quote() -> None:
    runs = made()
    head = headline(regret.rows_of(runs), runs)
    assert head["median_regret_pct"] == pytest.approx(1.0, rel=1e-5)
    assert (head["runs_lost"], head["scout_steps_pct"]) == (0, 2.0)
    assert (head["best_peer"], head["best_peer_median_regret_pct"]) == (
        "Prodigy",
        pytest.approx(20.0, rel=1e-5),
    )
    assert (head["pbt_seeds_won"], head["pbt_seeds_compared"]) == (2, 2)
    assert (head["peers_compared"], head["peers_beaten_on_every_seed"]) == (2, 2)
    assert "cost_pct" not in head  # time is measured in cost.json alone


def test_all_starts_of_a_seed_form_one_pair() -> None:
    rows = regret.rows_of(made())
    assert regret.pairs_by_seed(rows, "Prodigy", "a") == [pytest.approx((1.0, 20.0), rel=1e-4)] * 2
    capped = (50.0 + 50.0 + regret.INFINITE_PCT) / 3
    assert regret.pairs_by_seed(rows, "PBT", "a") == [pytest.approx((1.0, capped), rel=1e-4)] * 2


def test_hdet_is_compared_from_the_starts_of_its_peer() -> None:
    runs = [*made(), run("Schedule-Free AdamW", BEST, 0, 2.1)]
    runs += [run("hdet", 3 * BEST, 0, 20.0)]
    (pair,) = regret.pairs_by_seed(regret.rows_of(runs), "Schedule-Free AdamW", "a")
    assert pair == pytest.approx((1.0, 5.0), rel=1e-4)


def test_plain_schedule_is_compared_from_the_starts_of_hdet() -> None:
    extra = [run("OneCycleLR", BEST * start, 0, 9.0) for start in (0.01, 100.0, 40.0)]
    rows = regret.from_common_starts(regret.rows_of(made() + extra))
    plain = [row for row in rows if row.method == "OneCycleLR"]
    assert [(row.seed, round(row.start, 3)) for row in plain] == [(0, 1), (0, 0.01), (0, 100)]
    assert len([row for row in rows if row.method == "hdet"]) == 6


def test_sign_test_of_five_seeds_does_not_reach_one_percent() -> None:
    assert regret.sign_test(5, 5) == pytest.approx(1 / 32)
    assert regret.sign_test(4, 5) == pytest.approx(6 / 32)
    assert regret.sign_test(0, 5) == 1.0


def test_settle_figure_is_valid_svg_and_tables_are_complete() -> None:
    runs = made() + [run("OneCycleLR", BEST * 2.0**k, 100, 2.0 + k * k, "b") for k in (-1, 0, 1)]
    rows = regret.rows_of(runs)
    root = ElementTree.fromstring(figure_of(rows))
    assert len(root.findall(".//{http://www.w3.org/2000/svg}polyline")) >= 3
    tables = settle_page.tables(rows, runs)
    assert ["**hdet**", "1.0 (1.0)"] in [row[:2] for row in tables["methods"]]
    for name, table in tables.items():
        assert len({len(row) for row in table}) == 1, name


def test_default_lr_is_chosen_on_the_other_tasks() -> None:
    runs = made() + [
        run("OneCycleLR", 4 * BEST * 2.0**k, 100, 1.0 + k * k, "b") for k in (-1, 0, 1)
    ]
    found = regret.defaults(runs, "AdamW")
    assert found["a"].lr == pytest.approx(4 * BEST)
    assert found["a"].regret == pytest.approx(200.0)
    assert found["b"].lr == pytest.approx(BEST)
    assert found["b"].regret == pytest.approx(100.0)
    assert not regret.defaults(runs, "SGD")


def test_sweep_of_equal_cost_takes_the_best_of_its_short_runs() -> None:
    short = [run("OneCycleLR", BEST * 2.0**k, 0, 3.0 + k * k) for k in (-1, 0, 1)]
    for one in short:
        one["job"]["steps"] = 111
    assert regret.small_grids(made()) == {}
    assert regret.small_grids(made() + short) == {"a": [pytest.approx(50.0)]}


def test_book_skips_jobs_that_its_file_already_has(tmp_path: Path) -> None:
    path, seen = tmp_path / "runs.json", []

    def train(runs: Any) -> list[Ended]:
        seen.extend(runs)
        return [Ended({"loss": math.nan}, {"loss": 1.0}, one.lr) for one in runs]

    jobs = [Job("a", "hdet", 0.1 / 3, seed, 10) for seed in range(5)]
    Book(path, math.inf).make(jobs[:3], 2, train)
    again = Book(path, math.inf)
    ended = again.make(jobs, 2, train)
    assert [one.seed for one in seen] == [0, 1, 2, 3, 4]
    assert ended[0].live["loss"] is None  # as it is in the file
    assert json.loads(path.read_text())["device"]
    with pytest.raises(TimeIsUp):
        Book(path, 0.0).make([Job("a", "hdet", 1.0, 9, 10)], 1, train)
    assert Run(1.0, 9) not in seen


def test_settle_files_of_several_runs_are_merged(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1), ("c", 1)):
        piece = {"runs": [run("hdet", BEST, seed, 2.0)], "seconds": {name: 1.0}, "device": "cpu"}
        piece["settings"] = {"replicas": 8, "plans": {name: [seed]}}
        (tmp_path / name).write_text(json.dumps(piece))
    results = settle_page.merged([tmp_path / name for name in "abc"])
    assert len(results["runs"]) == 2
    assert set(results["seconds"]) == set("abc")
    assert results["settings"] == {"replicas": 8, "plans": {"a": [0], "b": [1], "c": [1]}}
