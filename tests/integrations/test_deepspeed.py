"""hdet with DeepSpeed on the CPU, in two real processes."""

from typing import Any

import pytest

from tests.integrations.features import (
    ACCUMULATES,
    CLIPS,
    FINDS,
    HOLDS_OUT,
    LOGS,
    REFUSED,
    ZERO,
)
from tests.integrations.launch import launch

RUNS = "tests.integrations.deepspeed_runs"


@pytest.mark.works("DeepSpeed", FINDS)
def test_deepspeed_with_a_bad_learning_rate_gets_the_loss_of_a_good_one() -> None:
    loss, _ = launch(f"{RUNS}:three_ways", num_steps=300)
    assert loss["bad"] > 2.0
    assert loss["hdet"] <= 1.05 * loss["good"]


@pytest.fixture(scope="module")
def accumulated() -> list[dict[str, Any]]:
    return launch(f"{RUNS}:accumulates", num_steps=300)


@pytest.mark.integrations
@pytest.mark.works("DeepSpeed", ACCUMULATES)
def test_deepspeed_clock_counts_optimizer_steps(accumulated: list[dict[str, Any]]) -> None:
    for found in accumulated:
        assert found["clock"] == found["updates"] == 300
        assert found["batches"] == 600
        assert found["loss"] < 0.2


@pytest.mark.integrations
@pytest.mark.works("DeepSpeed", CLIPS)
def test_deepspeed_clips_gradients_also_in_the_scout(accumulated: list[dict[str, Any]]) -> None:
    for found in accumulated:
        assert 0.4 < found["norm"] < 0.5 + 1e-4


@pytest.mark.integrations
@pytest.mark.works("DeepSpeed", LOGS)
def test_deepspeed_steps_with_the_logged_learning_rate(accumulated: list[dict[str, Any]]) -> None:
    assert all(found["logged"] for found in accumulated)


@pytest.mark.integrations
def test_deepspeed_observes_the_loss_of_every_micro_batch() -> None:
    found = launch(f"{RUNS}:observes")
    cycles = found[0]["recorded"]
    assert len(cycles) == 3
    for replica, own in enumerate(one["own"] for one in found):
        assert [losses[replica] for losses in cycles] == pytest.approx(own, rel=1e-5)


@pytest.mark.integrations
@pytest.mark.works("DeepSpeed", HOLDS_OUT)
def test_deepspeed_scout_compares_replicas_on_batches_of_the_loop() -> None:
    found, _ = launch(f"{RUNS}:holds_out", num_steps=300)
    assert set(found["by"]) == {"held out"}
    assert found["loss"] < 0.2


@pytest.mark.integrations
@pytest.mark.works("DeepSpeed", ZERO + REFUSED)
def test_deepspeed_engines_that_split_or_copy_weights_are_refused() -> None:
    for said in launch(f"{RUNS}:refuses"):
        assert len(said) == 8
        for stage in (1, 2, 3):
            assert f"it has ZeRO stage {stage}. ZeRO splits the optimizer" in said[stage - 1]
        assert '"torch_autocast" instead' in said[3]
        assert "Call attach_hdet once" in said[4]
        assert 'Leave "scheduler" out of the config of DeepSpeed' in said[5]
        assert "Call attach_hdet before `engine.load_checkpoint`" in said[6]
        assert said[7].startswith("a step of hdet failed: `loss` must be")
