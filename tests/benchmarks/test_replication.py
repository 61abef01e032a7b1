"""The scripts that make the paper's table and figures again, in seconds."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.replication import groups, quadratics, review, stability, table1, tail
from benchmarks.replication.jobs import work_through
from benchmarks.replication.ranker import ROWS
from benchmarks.replication.tail_tasks import calibration
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


def test_groups_have_a_line_for_each_controller_and_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HDET_DATA", raising=False)
    out = tmp_path / "groups.json"
    groups.main(["--smoke", "--only", "census", "--workers", "0", "--out", str(out)])
    made = json.loads(out.read_text())
    lines = [line[:3] for line in made["tables"]["groups"][1:]]
    assert lines == [["census", name, ratio] for name in groups.CONTROLLERS for ratio in ("1", "9")]
    assert made["headline"]["paper_runs"] == made["headline"]["tracker_runs"] == 2


def test_chance_of_the_papers_order_is_that_of_random_orders() -> None:
    assert groups.chance_of(0, 20) == pytest.approx(1)
    assert groups.chance_of(20, 20) == pytest.approx(12.0**-20)
    assert groups.chance_of(1, 2) == pytest.approx(1 - (11 / 12) ** 2)


def test_stability_has_a_line_for_each_way_and_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HDET_DATA", raising=False)
    out = tmp_path / "stability.json"
    stability.main(["--smoke", "--only", "feed", "--workers", "0", "--out", str(out)])
    made = json.loads(out.read_text())
    lines = [line[:3] for line in made["tables"]["stability"][1:]]
    assert lines == [[way, "nothing", "9"] for way in stability.WAYS]
    assert made["headline"]["nothing_set_runs"] == 1


def test_tails_have_a_line_for_each_control_and_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HDET_DATA", raising=False)
    out, task = tmp_path / "tail.json", "census, 3 epochs"
    tail.main(["--smoke", "--only", task, "--workers", "0", "--out", str(out)])
    made = json.loads(out.read_text())
    lines = [line[0] for line in made["tables"]["tails"][1:]]
    assert lines == ["best control", *tail.CONTROLS, *tail.TRIED]
    assert {"mean_gain_pct", "standard_error", "tasks_won", "tasks"} <= {
        key.removeprefix("soup_") for key in made["headline"]
    }
    assert [line[1] for line in made["tables"]["differences"][1:3]] == ["runs of their own", "soup"]


def tails_of(losses: dict[str, list[float]], task: str) -> dict[str, object]:
    same = {name: [1.0] * 4 for name in tail.CONTROLS}
    return {"kind": "tails", "task": task, "seeds": "0-3", "losses": {**same, **losses}}


def test_recipe_wins_a_task_by_two_standard_errors() -> None:
    rows = [
        tails_of({"soup": [0.98, 0.97, 0.98, 0.97]}, "a"),
        tails_of({"soup": [0.9, 1.09, 0.95, 1.04]}, "b"),
    ]
    assert tail.won(rows, "soup", range(4), ["a", "b"]) == 1
    mean, error = tail.gain(rows, "a", "soup", range(4))
    assert mean == pytest.approx(2.5)
    assert error == pytest.approx(0.5 / 3**0.5)


def test_recipe_is_compared_with_the_best_control_and_stops_where_it_is_worse() -> None:
    rows = [
        tails_of({"soup": [0.95] * 4, "EMA 5 %": [0.9] * 4}, "a"),
        tails_of({"soup": [1.1] * 4}, "b"),
    ]
    assert tail.gain(rows, "a", "soup", range(4))[0] == pytest.approx(100 * (1 - 0.95 / 0.9))
    assert tail.stopped(rows, "soup", range(4), ["a", "b"])
    assert not tail.stopped(rows, "soup", range(4), ["a"])


def test_calibration_of_equal_and_of_opposite_members() -> None:
    sure = torch.tensor([[5.0, -5.0], [-5.0, 5.0]])
    truth = torch.tensor([0, 1])
    same = calibration(torch.stack([sure, sure]), truth)
    assert same["disagreement"] == 0
    assert same["ensemble_loss"] == pytest.approx(same["member_loss"])
    apart = calibration(torch.stack([sure, -sure]), truth)
    assert apart["disagreement"] == 1
    assert apart["ensemble_loss"] == pytest.approx(0.6931, abs=1e-3)


def test_review_has_a_table_for_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HDET_DATA", raising=False)
    out = tmp_path / "review.json"
    review.main(["--smoke", "--workers", "0", "--out", str(out)])
    made = json.loads(out.read_text())
    assert list(made["tables"]) == list(review.PARTS)
    ways = [line[0] for line in made["tables"]["networks"][1:]]
    assert ways == [*review.PLAIN, review.LONGER, *(w for w in review.WAYS if w != review.ALONE)]
    assert [line[0] for line in made["tables"]["intervals"][1:]] == list(review.FANS)
    assert [line[0] for line in made["tables"]["factorial"][1:-1]] == list(review.LEVELS)
    before = out.stat().st_mtime_ns
    review.main(["--smoke", "--workers", "0", "--out", str(out)])
    assert out.stat().st_mtime_ns == before, "a second call runs nothing again"


def test_quadratics_end_where_their_closed_forms_say() -> None:
    for what, (_, values) in quadratics.QUESTIONS.items():
        for value in values:
            found = quadratics.run(what, value, seed=0)
            assert found.measured == pytest.approx(found.predicted, rel=0.1), (what, value)
