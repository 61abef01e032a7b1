"""hdet in the Trainer of Hugging Face: two processes, real checkpoints."""

from pathlib import Path

import pytest

from tests.integrations.features import FINDS, LOGS
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
    last = logged[-1]
    assert last["learning_rate"] == last["hdet/lr/group0"] == last["hdet/lr/group0/replica1"]
    assert last["hdet/scale/group0"] > 30
    rates = {logged[0][f"hdet/lr/group0/replica{index}"] for index in (0, 1)}
    assert len(rates) == 2
    assert logged[0]["learning_rate"] == pytest.approx(1e-5)
