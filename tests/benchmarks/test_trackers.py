"""Arms and judges of the benchmark that moves learning rates during a run."""

import pytest
import torch

from benchmarks.learning_rate import trackers
from benchmarks.learning_rate.methods.bench import Run
from tests.benchmarks.test_methods import LAYERS, bench


@pytest.mark.parametrize("name", trackers.CONTENDERS)
def test_every_tracker_contender_lowers_the_loss(name: str) -> None:
    contender, runs = trackers.CONTENDERS[name], [Run(0.01, 0), Run(0.03, 1)]
    ended = contender.train(bench("AdamW", LAYERS), runs)
    assert all((end.live["loss"] or 9.0) < 1.5 for end in ended)


def test_hadamard_levels_are_orthogonal() -> None:
    levels = trackers.hadamard(8)
    assert torch.equal(levels.T @ levels, 8 * torch.eye(8, dtype=torch.float64))


def test_slope_is_expressed_in_standard_errors() -> None:
    gains = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    assert float(trackers.in_errors(gains)) == pytest.approx(2 / (1 / 3**0.5))


def test_arms_without_a_difference_stay_equal() -> None:
    """All that is apart comes together again, weights and optimizer state alike."""
    arms = trackers.Arms(bench("AdamW"), [Run(0.01, 0)], trackers.still, by_group=False)
    arms.train()
    high, low = arms.fleet.weights
    torch.testing.assert_close(high, low)
    for state in arms.rule.states():
        torch.testing.assert_close(state[0], state[1])
