"""hdet under torchtitan: its trainer, its checkpoints and its components, in real processes."""

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.digits import BAD_LR, GOOD_LR
from tests.integrations.features import (
    ACCUMULATES,
    CLIPS,
    EVALUATES,
    FINDS,
    FSDP2,
    LOGS,
    RESUMES,
    RESUMES_SCOUT,
)
from tests.integrations.launch import launch

Results = list[list[dict[str, Any]]]
"""For each process what each of its runs came to."""


def train(folder: Path, *runs: dict[str, Any], num: int = 2) -> Results:
    """Train in real processes, one run after the other."""
    name = "tests.integrations.torchtitan_runs:train"
    return launch(name, num, folder=f"{folder}", runs=runs)


@pytest.mark.works("torchtitan", FINDS)
@pytest.mark.works("torchtitan", FSDP2)
def test_run_at_a_far_too_low_learning_rate_ends_as_with_a_good_one(tmp_path: Path) -> None:
    first, second = train(
        tmp_path,
        {"lr": BAD_LR, "with_it": False},
        {"lr": BAD_LR},
        {"lr": GOOD_LR, "with_it": False},
    )
    bad, mended, good = first
    assert mended["digest"] == second[1]["digest"]
    assert mended["loss"] <= 1.05 * good["loss"]
    assert bad["loss"] > 5 * good["loss"]
    assert mended["steps"] == 300


# Checkpoints ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A run that saves every 12 steps, and two that continue it from its checkpoints."""
    folder = f"{tmp_path_factory.mktemp('resumed')}/run"
    run = {"folder": folder, "steps": 120, "save_every": 12}
    return train(Path(folder), run, run | {"load_step": 12}, run | {"load_step": 84})


@pytest.mark.integrations
@pytest.mark.works("torchtitan", RESUMES_SCOUT)
def test_run_resumes_bit_for_bit_in_the_middle_of_the_scout(resumed: Results) -> None:
    for whole, from_scout, _ in resumed:
        assert from_scout["scouting"]
        assert from_scout["digest"] == whole["digest"]
        assert from_scout["lr"] == whole["lr"]


@pytest.mark.integrations
@pytest.mark.works("torchtitan", RESUMES)
def test_run_resumes_bit_for_bit_in_mid_run(resumed: Results) -> None:
    for whole, _, from_later in resumed:
        assert not from_later["scouting"]
        assert from_later["digest"] == whole["digest"]
        assert from_later["lr"] == whole["lr"]


# Inside a run -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two runs that differ in a validation in mid-cycle, and one that accumulates."""
    folder = tmp_path_factory.mktemp("variants")
    return train(
        folder,
        {"steps": 150},
        {"steps": 150, "validate_at": 122},
        {"accumulate": 2},
    )


@pytest.mark.integrations
@pytest.mark.works("torchtitan", EVALUATES)
def test_validation_shows_the_consensus_and_changes_nothing(variants: Results) -> None:
    (plain, first, _), (_, second, _) = variants
    assert len(first["shown"]) == 1
    assert first["shown"] == second["shown"]
    assert first["digest"] == plain["digest"]


@pytest.mark.integrations
@pytest.mark.works("torchtitan", ACCUMULATES)
@pytest.mark.works("torchtitan", CLIPS)
def test_accumulation_works_and_the_clock_counts_optimizer_steps(variants: Results) -> None:
    for *_, accumulated in variants:  # torchtitan always clips gradients
        assert accumulated["steps"] == 300
        assert accumulated["found"] > 30 * BAD_LR
        assert accumulated["loss"] < 0.3


@pytest.mark.integrations
@pytest.mark.works("torchtitan", LOGS)
def test_log_has_learning_rates_of_all_replicas_and_no_loss_of_the_scout(
    variants: Results,
) -> None:
    (run, *_), _ = variants
    assert run["log"][0]["step"] > 20  # the scout had those before
    losses = [line["loss_metrics/global_avg_loss"] for line in run["log"]]
    assert all(0 < loss < 3 for loss in losses)
    last = run["log"][-1]
    assert last["lr/AdamW"] == last["hdet/lr/group0"] == last["hdet/lr/group0/replica1"]


@pytest.mark.integrations
def test_gradients_have_the_scale_of_the_mean_loss_in_and_after_the_scout(tmp_path: Path) -> None:
    name = "tests.integrations.torchtitan_runs:gradient_errors"
    for errors in launch(name, folder=f"{tmp_path}"):
        assert errors["scout"] < 1e-5
        assert errors["run"] < 1e-5


@pytest.mark.integrations
def test_model_of_dtensors_finds_a_learning_rate(tmp_path: Path) -> None:
    results = train(tmp_path, {"backend": "full_dtensor", "steps": 200})
    assert results[0][0]["found"] > 30 * BAD_LR
    assert len({runs[0]["digest"] for runs in results}) == 1


@pytest.mark.integrations
def test_replicas_of_two_shards_each_find_a_learning_rate(tmp_path: Path) -> None:
    results = train(tmp_path, {"replicate": 2, "shard": 2, "steps": 200}, num=4)
    assert results[0][0]["found"] > 30 * BAD_LR
    assert len({runs[0]["digest"] for runs in results}) == 1


# Its configs ------------------------------------------------------------------------------------


@pytest.mark.integrations
def test_command_line_of_torchtitan_reads_a_config_with_hdet() -> None:
    (answer,) = launch("tests.integrations.torchtitan_runs:parsed", 1)
    assert answer == ["HDETSchedulers.Config", {"guard": None}, 7]


@pytest.mark.integrations
def test_one_replica_cuda_graphs_and_pipelines_are_refused(tmp_path: Path) -> None:
    settings = [{"replicate": 1, "shard": 2}, {"cuda_graphs": True}, {"pipeline": 2}]
    name = "tests.integrations.torchtitan_runs:refused"
    one_replica, graphs, pipeline = launch(name, folder=f"{tmp_path}", runs=settings)[0]
    assert "data_parallel_replicate_degree to 2" in one_replica
    assert "disable_cuda_graphs" in graphs
    assert "pipeline_parallel_degree to 1" in pipeline
