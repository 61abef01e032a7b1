"""hdet under Ray Train: real workers of Ray, which are killed and started again."""

from pathlib import Path
from typing import Any

import pytest

from hdet.integrations._replica_table import replica_table
from tests.integrations.digits import BAD_LR, GOOD_LR
from tests.integrations.features import (
    ACCUMULATES,
    CLIPS,
    EVALUATES,
    FINDS,
    HOLDS_OUT,
    KILLED,
    LOGS,
    RESUMES,
    RESUMES_SCOUT,
)
from tests.integrations.ray_runs import fit

Fits = tuple[Path, list[list[Any]]]


@pytest.mark.works("Ray Train", FINDS)
def test_run_at_a_far_too_low_learning_rate_ends_as_with_a_good_one(tmp_path: Path) -> None:
    (bad, _), mended, (good, _) = fit(
        tmp_path,
        {"lr": BAD_LR, "with_hdet": False, "steps": 300},
        {"lr": BAD_LR, "steps": 300},
        {"lr": GOOD_LR, "with_hdet": False, "steps": 300},
    )
    assert mended[0]["digest"] == mended[1]["digest"]
    assert mended[0]["loss"] <= 1.05 * good["loss"]
    assert bad["loss"] > 5 * good["loss"]


# Workers that are killed ------------------------------------------------------------------------

SAVES = {"save_at": [13, 130], "report_every": 10, "steps": 200}
"""It saves in the middle of the scout, and in mid-run in the middle of a cycle and of an epoch."""


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Fits:
    """A run to its end."""
    folder = tmp_path_factory.mktemp("untouched")
    return folder, fit(folder, SAVES)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Fits:
    """The same run, in which a worker kills itself twice by SIGKILL."""
    folder = tmp_path_factory.mktemp("killed")
    return folder, fit(folder, SAVES | {"die_at": [17, 141]}, max_failures=2)


@pytest.mark.integrations
@pytest.mark.works("Ray Train", KILLED)
@pytest.mark.works("Ray Train", RESUMES)
@pytest.mark.works("Ray Train", RESUMES_SCOUT)
def test_killed_workers_resume_and_end_as_if_nothing_had_happened(
    untouched: Fits, killed: Fits
) -> None:
    folder, (ended,) = killed
    resumed = (folder / "resumed.txt").read_text().splitlines()
    assert resumed == ["resumed at 13, scouting: True", "resumed at 130, scouting: False"]
    _, (expected,) = untouched
    assert [one["digest"] for one in ended] == [one["digest"] for one in expected]
    assert [one["lrs"][-1] for one in ended] == [one["lrs"][-1] for one in expected]


@pytest.mark.integrations
def test_ray_stores_whole_checkpoints_and_hdet_keeps_no_copy_of_its_own(untouched: Fits) -> None:
    folder, _ = untouched
    stored = sorted((folder / "run").glob("checkpoint_2*"))
    assert len(stored) == 2
    assert all((one / ".metadata").exists() for one in stored)
    assert not list((folder / "run/hdet").iterdir())


@pytest.mark.integrations
@pytest.mark.works("Ray Train", LOGS)
def test_table_shows_learning_rate_loss_and_score_of_every_replica(untouched: Fits) -> None:
    folder, (ended,) = untouched
    tables = (folder / "tables.txt").read_text().split("step ")[1:]
    first, last = tables[0].splitlines(), tables[-2].splitlines()
    assert first[0] == "10, scouting" and last[0] == "190"
    assert last[1].split() == ["replica", "lr/group0", "loss", "cycle", "loss"]
    for replica, worker in enumerate(ended):
        name, lr, *_ = first[2 + replica].split()
        assert (name, lr) == (f"{replica}", f"{worker['lrs'][9]:.4g}")
    rates = [float(line.split()[1]) for line in first[2:4]]
    assert rates[0] != rates[1]  # the scout compares them
    assert float(last[2].split()[1]) == pytest.approx(ended[0]["lrs"][189], rel=1e-3)


@pytest.mark.integrations
def test_table_names_the_worker_that_failed(killed: Fits) -> None:
    folder, _ = killed
    assert "worker 1 failed: " in (folder / "tables.txt").read_text()


@pytest.mark.integrations
def test_table_has_one_line_for_a_replica_of_several_workers() -> None:
    first = {
        "hdet/step": 7,
        "hdet/scouting": 0.0,
        "hdet/lr/group0": 0.2,
        "hdet/lr/group0/replica0": 0.1,
        "hdet/lr/group0/replica1": 0.3,
        "hdet/score/replica0": 1.5,
        "hdet/score/replica1": 1.25,
        "note": "text",
    }
    workers = [first | {"loss": float(rank), "hdet/replica": rank // 2} for rank in range(4)]
    assert replica_table(workers).splitlines() == [
        "step 7",
        "replica  lr/group0  loss  cycle score",
        "      0        0.1     0          1.5",
        "      1        0.3     2         1.25",
        "    all        0.2",
    ]


# Inside a run -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """Two runs that differ in an evaluation, one that accumulates, and one that holds out."""
    return fit(
        tmp_path_factory.mktemp("variants"),
        {"steps": 150},
        {"steps": 150, "evaluate_at": 122},
        {"steps": 300, "accumulate": 2, "max_norm": 1.0},
        {"steps": 300, "hold_out": 4},
    )


@pytest.mark.integrations
@pytest.mark.works("Ray Train", EVALUATES)
def test_evaluation_shows_the_consensus_and_changes_nothing(variants: list[list[Any]]) -> None:
    plain, evaluated, *_ = variants
    assert evaluated[0]["shown"] == evaluated[1]["shown"]
    assert evaluated[0]["digest"] == plain[0]["digest"]


@pytest.mark.integrations
@pytest.mark.works("Ray Train", ACCUMULATES)
@pytest.mark.works("Ray Train", CLIPS)
def test_accumulation_and_clipping_work_and_the_clock_counts_optimizer_steps(
    variants: list[list[Any]],
) -> None:
    *_, (first, second), _ = variants
    assert first["steps"] == second["steps"] == 300
    assert first["found"] > 30 * BAD_LR
    assert first["loss"] < 0.3


@pytest.mark.integrations
@pytest.mark.works("Ray Train", HOLDS_OUT)
def test_held_out_batches_compare_replicas(variants: list[list[Any]]) -> None:
    *_, (first, _) = variants
    assert first["found"] > 30 * BAD_LR
    assert first["loss"] < 0.3
