"""The scripts that make the paper's table and figures again, in seconds."""

import json
from pathlib import Path

import pytest

from benchmarks.replication import table1
from benchmarks.replication.jobs import work_through
from benchmarks.replication.ranker import ROWS
from benchmarks.result_file import plain_json


def test_jobs_that_are_known_are_not_run_again() -> None:
    jobs = [{"seed": seed, "lr": 0.1 + 0.2} for seed in range(3)]
    ran: list[int] = []

    def run(job: dict[str, int]) -> dict[str, float]:
        ran.append(job["seed"])
        return {"loss": 1.0}

    kept: list[int] = []
    first = work_through(jobs[:1], run, [], lambda rows: kept.append(len(rows)), workers=0)  # type: ignore[arg-type]
    known = json.loads(json.dumps(plain_json(first)))
    rows = work_through(jobs, run, known, lambda rows: kept.append(len(rows)), workers=0)  # type: ignore[arg-type]
    assert ran == [0, 1, 2]
    assert kept == [1, 2, 3]
    assert [row["seed"] for row in rows] == [0, 1, 2]


def test_table_has_every_row_of_the_paper_and_two_controls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HDET_DATA", raising=False)
    out = tmp_path / "table.json"
    table1.main(["--smoke", "--only", "feed", "--workers", "0", "--out", str(out)])
    made = json.loads(out.read_text())
    assert [line[0] for line in made["tables"]["feed"][1:]] == list(ROWS)
    assert {"full_vs_low_pct", "full_vs_low_plus_checkpoint_pct", "crashed_rows"} <= set(
        made["headline"]
    )
    assert made["headline"]["seeds"] == 1
    assert made["settings"]["low"]["feed"] in table1.GRID
    groups = next(row["group_lrs"] for row in made["rows"] if row["row"] == "HDET")
    assert set(groups) == {"embedding", "no_decay", "non_embedding", "transformer"}


def test_paired_difference_is_the_mean_over_seeds_in_percent() -> None:
    ours = {0: {"validation_loss": 1.1}, 1: {"validation_loss": 2.6}}
    theirs = {0: {"validation_loss": 1.0}, 1: {"validation_loss": 2.0}}
    mean, error = table1.paired(ours, theirs, "validation_loss")
    assert mean == pytest.approx(20)
    assert error == pytest.approx(10)
