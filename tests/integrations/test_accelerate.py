"""hdet with Accelerate, in two real processes."""

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.features import (
    ACCUMULATES,
    CLIPS,
    FINDS,
    FP16,
    FSDP2,
    HOLDS_OUT,
    LOGS,
    LORA,
    PREPARED,
    REFUSED,
    STACKED,
)
from tests.integrations.launch import launch

RUNS = "tests.integrations.accelerate_runs"


@pytest.mark.works("Accelerate", FINDS)
def test_accelerate_with_a_bad_learning_rate_gets_the_loss_of_a_good_one() -> None:
    loss, _ = launch(f"{RUNS}:three_ways", num_steps=300)
    assert loss["bad"] > 2.0
    assert loss["hdet"] <= 1.05 * loss["good"]


@pytest.fixture(scope="module")
def accumulated() -> list[dict[str, Any]]:
    return launch(f"{RUNS}:accumulates", num_steps=300)


@pytest.mark.integrations
@pytest.mark.works("Accelerate", ACCUMULATES)
def test_accelerate_clock_counts_optimizer_steps(accumulated: list[dict[str, Any]]) -> None:
    for found in accumulated:
        assert found["clock"] == found["updates"] == 300
        assert found["batches"] == 587  # each of 13 epochs ends with a step of one batch
        assert found["loss"] < 0.2


@pytest.mark.integrations
@pytest.mark.works("Accelerate", CLIPS)
def test_accelerate_clips_gradients_also_in_the_scout(accumulated: list[dict[str, Any]]) -> None:
    for found in accumulated:
        assert 0.4 < found["norm"] < 0.5 + 1e-4


@pytest.mark.integrations
@pytest.mark.works("Accelerate", LOGS)
def test_accelerate_logs_the_learning_rates_of_all_replicas(
    accumulated: list[dict[str, Any]],
) -> None:
    logged = accumulated[0]["logged"]
    assert len(logged) == 300
    for replica, found in enumerate(accumulated):
        mine = [values[f"hdet/lr/group0/replica{replica}"] for values in logged]
        assert mine == found["rates"]
    assert logged[-1]["hdet/lr/group0"] == accumulated[0]["rates"][-1]


@pytest.mark.integrations
def test_accelerate_observes_the_loss_of_every_micro_batch() -> None:
    found = launch(f"{RUNS}:observes")
    cycles = found[0]["recorded"]
    assert len(cycles) == 2
    for replica, own in enumerate(one["own"] for one in found):
        assert [losses[replica] for losses in cycles] == pytest.approx(own, rel=1e-5)


@pytest.mark.integrations
@pytest.mark.works("Accelerate", FP16)
def test_accelerate_loss_scale_is_equal_after_steps_that_one_process_skips() -> None:
    one, other = launch(f"{RUNS}:scales", num_steps=300)
    for found in (one, other):
        assert found["clock"] == 300
        assert found["updates"] < 300
        assert found["loss"] < 0.2
    assert one["updates"] != other["updates"]
    assert one["scale"] == other["scale"]
    assert one["digest"] == other["digest"]


@pytest.mark.integrations
@pytest.mark.works("Accelerate", HOLDS_OUT)
def test_accelerate_scout_compares_replicas_on_batches_of_the_loop() -> None:
    found, _ = launch(f"{RUNS}:holds_out", num_steps=300)
    assert set(found["by"]) == {"held out"}
    assert found["loss"] < 0.2


@pytest.mark.integrations
@pytest.mark.works("Accelerate", PREPARED + REFUSED)
def test_accelerate_schedulers_and_models_at_the_wrong_place_are_refused() -> None:
    for stepped, wrapped, bare in launch(f"{RUNS}:refuses"):
        assert stepped.startswith("AttributeError: a scheduler of hdet has no `_step_count`.")
        assert "Leave the scheduler out of `accelerator.prepare`" in stepped
        assert wrapped.startswith("TypeError: `base` must be a schedule that Accelerate has not")
        assert "one that `accelerator.prepare` has wrapped in DDP, got a Sequential" in bare


@pytest.mark.integrations
@pytest.mark.works("Accelerate", LORA)
def test_accelerate_with_lora_gets_a_learning_rate_that_trains() -> None:
    loss, _ = launch(f"{RUNS}:trains_lora", num_steps=300)
    assert loss["hdet"] < 0.3 < 2.0 < loss["bad"]


@pytest.mark.integrations
@pytest.mark.works("Accelerate", FSDP2)
def test_accelerate_resumes_replicas_of_two_shards_in_mid_cycle(tmp_path: Path) -> None:
    ranks = launch(f"{RUNS}:shards", 4, folder=str(tmp_path))
    for shard in range(2):
        one, other = ranks[shard], ranks[2 + shard]
        assert one["mid-cycle"] != other["mid-cycle"]
        assert one["saved"] == other["saved"]
    for found in ranks:
        assert found["loss"] < 0.2
        assert found["loaded"] == found["saved"]
        assert found["end again"] == found["end"]
        assert "FSDP2 must keep several replicas of the model" in found["one replica"]


@pytest.mark.integrations
@pytest.mark.works("Accelerate", STACKED)
def test_accelerate_trains_several_replicas_on_one_device() -> None:
    (found,) = launch(f"{RUNS}:stacks", 1, num_steps=300)
    assert found["loss"] < 0.2
