"""hdet with Accelerate, in two real processes."""

import pytest

from tests.integrations.features import FINDS
from tests.integrations.launch import launch

RUNS = "tests.integrations.accelerate_runs"


@pytest.mark.works("Accelerate", FINDS)
def test_accelerate_with_a_bad_learning_rate_gets_the_loss_of_a_good_one() -> None:
    loss, _ = launch(f"{RUNS}:three_ways", num_steps=300)
    assert loss["bad"] > 2.0
    assert loss["hdet"] <= 1.05 * loss["good"]
