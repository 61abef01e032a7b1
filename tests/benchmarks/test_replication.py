"""The scripts that make the paper's table and figures again, in seconds."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import hdet
from benchmarks.replication import (
    conditions,
    direction_runs,
    directions,
    figures,
    groups,
    quadratics,
    review,
    stability,
    table1,
    tail,
)
from benchmarks.replication.jobs import work_through
from benchmarks.replication.ranker import NUM_PARTS, ROWS
from benchmarks.replication.tail_tasks import KINDS, calibration
from benchmarks.result_file import plain_json
from benchmarks.zoo.tasks import GROUPS
from hdet.control.controller import Evidence, ScaleState


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
    lines = [[line[1], line[3]] for line in made["tables"]["groups"][1:]]
    assert lines == [[name, ratio] for name in ("paper", "tracker") for ratio in ("1", "9")]
    assert made["headline"]["paper_short_runs"] == made["headline"]["tracker_short_runs"] == 1


def test_chance_of_the_papers_order_is_that_of_random_orders() -> None:
    assert groups.chance_of(0, 20) == pytest.approx(1)
    assert groups.chance_of(20, 20) == pytest.approx(12.0**-20)
    assert groups.chance_of(1, 2) == pytest.approx(1 - (11 / 12) ** 2)


def with_order(*names: str) -> dict[str, object]:
    lrs = {name: [10.0**place] * 4 for place, name in enumerate(names)}
    return {"group_lrs": lrs, "low": 1.0, "ratio": 1}


def test_place_of_a_group_counts_cycles_until_little_is_left_of_the_peak() -> None:
    lrs = {name: [1.0, 1.0, 0.1, 0.01, 1e-6] for name in GROUPS} | {GROUPS[0]: [1.0] * 5}
    row = {"group_lrs": lrs, "low": 1.0, "ratio": 1}
    assert groups.places(row)[GROUPS[1]] == pytest.approx(math.log(0.1) / 2)
    assert groups.rank_of(row, GROUPS[0]) == 4
    assert groups.rank_of(row, GROUPS[1]) == 2  # three groups share the ranks 1, 2 and 3


def test_agreement_is_one_for_equal_orders_and_nothing_for_opposite_ones() -> None:
    order = GROUPS
    w, chance = groups.agreement([with_order(*order)] * 20)
    assert w == pytest.approx(1)
    assert chance == pytest.approx(chi_squared_above(60), rel=1e-6)
    w, chance = groups.agreement([with_order(*order), with_order(*order[::-1])])
    assert (w, chance) == (0, 1)


def chi_squared_above(value: float) -> float:
    """With three degrees of freedom: the upper part of a gamma distribution of shape 3/2."""
    return float(torch.special.gammaincc(*map(torch.tensor, (1.5, value / 2))))


def test_course_of_learning_rates_keeps_its_last_value() -> None:
    assert groups.thinned([1.0, 2.0]) == [1.0, 2.0]
    course = groups.thinned([float(value) for value in range(300)])
    assert len(course) == 60
    assert course[-2:] == [294, 299]
    assert groups.thinned([]) == []


def crashed(curve: Sequence[float | None], *, is_crashed: bool = True) -> dict[str, object]:
    measures = {"validation_loss": 2.0, "validation_normalised_entropy": 1.0}
    return {"is_crashed": is_crashed, "curve": curve, **measures}


def test_run_crashes_where_its_training_loss_is_that_of_the_label_shares_for_good() -> None:
    parts = NUM_PARTS
    late = crashed([2.0, *[1.0] * 9, *[2.0] * (parts - 10)])
    never_learnt, lost = crashed([2.0] * parts), crashed([1.0] * 4 + [None] * (parts - 4))
    assert table1.crash_place([late]) == 10 / parts
    assert table1.crash_place([late, never_learnt, lost]) == 4 / parts
    assert math.isnan(table1.crash_place([crashed([1.0] * parts, is_crashed=False)]))


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
    out, task = tmp_path / "tail.json", "census, 10 epochs"
    tail.main(["--smoke", "--only", task, "--workers", "0", "--out", str(out)])
    made = json.loads(out.read_text())
    lines = [line[0] for line in made["tables"]["many_epochs_large_batches"][1:]]
    assert lines == ["best control", *tail.CONTROLS, *tail.TRIED]
    wanted = {"mean_gain_pct", "standard_error", "tasks_won", "tasks"}
    assert wanted <= {key.removeprefix("soup_") for key in made["headline"]}
    assert [line[1] for line in made["tables"]["differences"][1:3]] == ["runs of their own", "soup"]


def tails_of(losses: dict[str, list[float]], task: str) -> dict[str, object]:
    same = {name: [1.0] * 4 for name in tail.CONTROLS}
    right = {"plain": [0.5] * 4, "soup": [0.51] * 4}
    every = {**same, **losses}
    return {"kind": "tails", "task": task, "seeds": "0-3", "losses": every, "right": right}


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


def test_recipe_has_more_right_answers_than_plain_training() -> None:
    rows = [tails_of({"soup": [1.0] * 4}, "a")]
    assert tail.more_right(rows, "a", "soup", range(4)) == pytest.approx(1)


def test_headline_of_a_recipe_is_the_mean_over_the_tasks_of_all_kinds() -> None:
    few, many = (list(tasks) for tasks in KINDS.values())
    rows = [tails_of({"soup": [0.98, 0.97, 0.98, 0.97]}, task) for task in few]
    rows += [tails_of({"soup": [0.92, 0.93, 0.92, 0.93]}, task) for task in many]
    found = tail.headline(rows, "quick")["soup"]
    assert found["mean_gain_pct"] == pytest.approx(5)
    assert found["few epochs"]["mean_gain_pct"] == pytest.approx(2.5)
    assert (found["tasks_won"], found["tasks"]) == (6, 6)
    error = 0.5 / 3**0.5  # of a task; of the mean over six tasks
    assert found["standard_error"] == pytest.approx(error / 6**0.5)


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
    assert ways == [*review.PLAIN, review.LONGER, *review.AWAY, *review.WAYS]
    assert [line[0] for line in made["tables"]["intervals"][1:]] == list(review.FANS)
    assert [line[0] for line in made["tables"]["factorial"][1:-1]] == list(review.LEVELS)
    before = out.read_text()
    review.main(["--smoke", "--workers", "0", "--out", str(out)])
    assert out.read_text() == before, "a second call runs nothing again"


def test_quadratics_end_where_their_closed_forms_say() -> None:
    for what, (_, values) in quadratics.QUESTIONS.items():
        for value in values:
            found = quadratics.run(what, value, seed=0)
            assert found.measured == pytest.approx(found.predicted, rel=0.1), (what, value)


def test_directions_have_a_table_for_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HDET_DATA", raising=False)
    out = tmp_path / "directions.json"
    directions.main(["--smoke", "--workers", "0", "--out", str(out)])
    made = json.loads(out.read_text())
    assert list(made["tables"]) == list(directions.PARTS)
    assert [line[1] for line in made["tables"]["spreads"][1:]] == ["equal", "equal"]
    assert [line[0] for line in made["tables"]["stream"][1:]] == ["plain", "paper", "tracker"]
    assert {"feed_paper_depth_correlation", "feed_paper_equal_pct"} <= set(made["headline"])


def test_rank_correlation_with_depth_is_that_of_the_order() -> None:
    rising = {name: float(place) for place, name in enumerate(direction_runs.DEPTHS)}
    falling = {name: -value for name, value in rising.items()}
    swapped = rising | {"embedding": 1.0, "attention": 0.0}
    assert directions.depth_correlation({"places": rising}) == pytest.approx(1)
    assert directions.depth_correlation({"places": falling}) == pytest.approx(-1)
    assert directions.depth_correlation({"places": swapped}) == pytest.approx(1 - 12 / 210)


def test_smoothed_losses_are_the_mean_over_cycles_at_each_place_of_the_spread() -> None:
    asked: list[Sequence[float]] = []
    controller = direction_runs.SmoothedPaper(0.5, warmup_steps=0)
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setattr(
            hdet.PaperController, "update", lambda _, state, evidence: asked.append(evidence.losses)
        )
        controller.update(ScaleState(), Evidence([1.0, 3.0], [0.9, 1.1]))
        controller.update(ScaleState(), Evidence([6.0, 2.0], [1.1, 0.9]))  # replicas have swapped
    assert asked[0] == pytest.approx([1.0, 3.0])
    # Deviations of the lower place: -1, then -2; their weights are 1/3 and 2/3.
    assert asked[1] == pytest.approx([4 + 5 / 3, 4 - 5 / 3])


def test_conditions_have_a_line_for_each_batch_and_number_of_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HDET_DATA", raising=False)
    out = tmp_path / "conditions.json"
    conditions.main(["--smoke", "--workers", "0", "--out", str(out)])
    made = json.loads(out.read_text())
    assert [line[:2] for line in made["tables"]["loss"][1:]] == [["16", "1"]]
    assert {"batch_16_epochs_1_r1_quadratic_rule_gain_pct"} <= set(made["headline"])


@pytest.mark.parametrize("name", ["table1", "stability"])
def test_figure_of_the_docs_is_that_of_its_result_file(name: str) -> None:
    drawn = figures.figure_of(name)
    ElementTree.fromstring(drawn)
    assert figures.path_of(name).read_text() == drawn
