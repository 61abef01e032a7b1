"""hdet under Lightning's Trainer."""

import pytest

from tests.integrations.features import FINDS
from tests.integrations.launch import launch

RUNS = "tests.integrations.lightning_runs"


@pytest.mark.works("Lightning", FINDS)
def test_run_with_a_learning_rate_far_too_low_ends_near_one_with_a_good_one() -> None:
    ranks = launch(f"{RUNS}:three_ways", epochs=6)
    assert ranks[0] == ranks[1]
    found = ranks[0]
    assert found["bad"] > 2.0
    assert found["hdet"] < 1.05 * found["good"]
    assert found["clock"] == 6 * 45
