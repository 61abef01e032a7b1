"""hdet in the Trainer of Hugging Face: two processes, real checkpoints."""

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.features import (
    ACCUMULATES,
    BEST_MODEL,
    CLIPS,
    EVALUATES,
    FINDS,
    FP16,
    FSDP2,
    HOLDS_OUT,
    LOGS,
    LORA,
    REFUSED,
    RESUMES,
    RESUMES_SCOUT,
    STACKED,
    STOPS_EARLY,
)
from tests.integrations.launch import launch

RUNS = "tests.integrations.transformers_runs"


@pytest.mark.works("Transformers", FINDS)
@pytest.mark.works("Transformers", LOGS)
def test_trainer_finds_a_learning_rate_300_times_too_low(tmp_path: Path) -> None:
    first, second = launch(f"{RUNS}:finds", folder=str(tmp_path), steps=400)
    assert first["hdet"] <= 1.05 * first["good"]
    assert first["bad"] > 10 * first["good"]
    assert first["digest"] == second["digest"]
    assert first["steps"] == 400
    logged = [row for row in first["log"] if "loss" in row]
    assert max(row["loss"] for row in logged) < 2.5, "no loss of an exploding round of the scout"
    assert "grad_norm" not in logged[0]
    assert "grad_norm" in logged[-1]
    last = logged[-1]
    assert last["learning_rate"] == last["hdet/lr/group0"] == last["hdet/lr/group0/replica1"]
    assert last["hdet/scale/group0"] > 30
    rates = {logged[0][f"hdet/lr/group0/replica{index}"] for index in (0, 1)}
    assert len(rates) == 2
    assert logged[0]["learning_rate"] == pytest.approx(1e-5)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found in all other runs."""
    return launch(f"{RUNS}:shows", folder=str(tmp_path_factory.mktemp("shows")))


@pytest.mark.integrations
@pytest.mark.works("Transformers", EVALUATES)
def test_evaluations_show_the_consensus_and_change_nothing(shown: list[dict[str, Any]]) -> None:
    first, second = (one["evaluates"] for one in shown)
    assert first["with"] == first["without"] == second["with"]
    for index in (0, 1):  # in the scout, and in a cycle
        assert first["before"][index] != second["before"][index]
    assert first["shown"] == second["shown"]
    assert len(first["shown"]) == 4, "two sets, evaluated twice"
    assert first["losses"][0] == pytest.approx(2.3, abs=0.1), "the scout has changed nothing"
    assert first["losses"][1] < 0.5


@pytest.mark.integrations
@pytest.mark.works("Transformers", RESUMES)
@pytest.mark.works("Transformers", RESUMES_SCOUT)
@pytest.mark.works("Transformers", HOLDS_OUT)
def test_resumed_runs_end_with_the_same_bits(shown: list[dict[str, Any]]) -> None:
    for found in (one["resumes"] for one in shown):
        assert found["was_scouting"]
        assert found["scout"] == found["run"] == found["whole"]
        assert found["steps"] == [150, 150, 150]
        assert found["lr"] > 1e-3


@pytest.mark.integrations
@pytest.mark.works("Transformers", ACCUMULATES)
@pytest.mark.works("Transformers", CLIPS)
def test_clock_counts_optimizer_steps_and_gradients_are_clipped(
    shown: list[dict[str, Any]],
) -> None:
    for found in (one["accumulates"] for one in shown):
        assert found["hdet"] <= 1.05 * found["good"]
        assert found["steps"] == 400
        assert 0.4 < found["norm"] < 0.501


@pytest.mark.integrations
@pytest.mark.works("Transformers", BEST_MODEL)
@pytest.mark.works("Transformers", STOPS_EARLY)
def test_best_model_is_loaded_after_an_early_stop(shown: list[dict[str, Any]]) -> None:
    for found in (one["keeps_the_best"] for one in shown):
        assert found["is_best"]
        assert found["loss"] == pytest.approx(found["best"], abs=1e-6)
        assert found["stopped"] < 2000
        assert found["again"] == 5, "a second training starts anew"
        assert found["digest"] == shown[0]["keeps_the_best"]["digest"]


@pytest.mark.integrations
@pytest.mark.works("Transformers", LORA)
def test_adapters_get_the_mean_loss_of_their_labels_and_resume(
    shown: list[dict[str, Any]],
) -> None:
    for found in (one["adapts"] for one in shown):
        assert found["frozen"]
        assert found["resumed"] == found["whole"] == shown[0]["adapts"]["whole"]
        given, true = zip(*found["pairs"], strict=True)
        assert len(given) == 160
        assert given == pytest.approx(true, rel=1e-4)
        weights, labels = zip(*found["weights"], strict=True)
        assert weights == labels
        assert len(set(labels)) > 1


@pytest.mark.integrations
@pytest.mark.works("Transformers", FP16)
def test_steps_that_a_loss_scale_leaves_out_count(shown: list[dict[str, Any]]) -> None:
    first, second = (one["scales"] for one in shown)
    assert first["steps"] == second["steps"] == 100
    assert second["skipped"] > first["skipped"] >= 1
    assert first["scale"] == second["scale"] < 1024
    assert first["digest"] == second["digest"]
    assert first["loss"] < 0.5


@pytest.mark.integrations
def test_callback_explores_and_resumes(shown: list[dict[str, Any]]) -> None:
    for found in (one["listens"] for one in shown):
        assert found["resumed"] == found["whole"] == shown[0]["listens"]["whole"]
        assert found["steps"] == 100
        assert found["scales"] != {"lr/group0": 1.0}, "it has compared losses"


@pytest.mark.integrations
def test_reporters_of_the_trainer_get_learning_rates_and_scores(
    shown: list[dict[str, Any]],
) -> None:
    tags = set(shown[0]["brings_numbers"])
    assert {"train/hdet/lr/group0/replica1", "train/hdet/scout/factor"} <= tags
    assert {"train/hdet/loss/replica0", "train/learning_rate"} <= tags


@pytest.mark.integrations
@pytest.mark.works("Transformers", STACKED + REFUSED)
@pytest.mark.works("Transformers", FSDP2 + REFUSED)
def test_wrong_use_says_what_to_write(shown: list[dict[str, Any]]) -> None:
    expected = (
        "torchrun, or use StackedReplicas in your own loop",
        "Train with DDP, or use FSDP2",
        "torchrun --nproc-per-node 2",
        "its options as hdet_options=",
        "Pass optimizers=(optimizer, hdet.HDET(base",
        "Pass scout=None to HDET, or use HDETTrainer",
        "save_strategy='steps' or 'epoch'",
        "must not be a callback of HDETTrainer. Leave it out",
        "Pass eval_dataset to the trainer",
        "class Late(HDETMixin, Trainer)",
    )
    for said, remedy in zip(shown[0]["refuses"], expected, strict=True):
        assert remedy in said
