"""The benchmark of explosions: from grids and rounds with a known answer to a distance."""

import math
from typing import Any

import pytest

from benchmarks.learning_rate import explosion

BEST = 0.003


def case(far: float) -> dict[str, Any]:
    """The best learning rate between two of the grid; scores are twice as high `far` above it."""
    tried = [2e-3 * 2.0**place for place in range(-4, 5)]
    grid = [[lr, 2.0 + 0.1 * math.log2(lr / BEST) ** 2] for lr in tried]
    lrs = [10.0 ** (place / 3 - 6) for place in range(24)]
    scores = [4.0 + 6.0 * (lr / BEST / far) ** 2 for lr in lrs]
    results = {"lrs": lrs, "outset": 5.0, "noise": 1.0, "after 6": scores, "after 12": scores}
    scouts = {"probe": [BEST, 2 * BEST, 2 * BEST], "losses": [BEST] * 3}
    return {"optimizer": "AdamW", "grid": grid, "rounds": [results], "scouts": scouts}


def test_best_lr_is_interpolated_between_grid_points() -> None:
    assert explosion.best_of(case(40.0)["grid"]) == pytest.approx(BEST, rel=1e-6)
    assert explosion.best_of([[1.0, 5.0], [2.0, 4.0], [4.0, math.nan]]) == 2.0
    assert explosion.best_of([[1.0, 5.0], [2.0, 4.0], [4.0, 3.0]]) == 4.0


def test_distance_recovers_a_known_divergence_threshold() -> None:
    """Within half of the step between two learning rates of a round."""
    assert abs(math.log10(explosion.distance(case(40.0), 6) / 40.0)) <= 1 / 6


def test_explosion_headline_has_plain_numbers() -> None:
    cases = {"a": case(40.0), "b": case(20.0), "c": {**case(5.0), "optimizer": "SGD"}}
    head = explosion.headline(cases)
    assert head["variants"] == 3
    assert head["adamw_6_steps_farthest"] == pytest.approx(
        10 ** (1 / 3) * head["adamw_6_steps_nearest"], 1e-3
    )
    assert all(isinstance(value, (int, float)) for value in head.values())
    assert "| a | 0.003 |" in explosion.table(cases)
    assert "| x 2 |" in explosion.table(cases)


def test_regret_of_a_scout_is_interpolated_on_the_grid() -> None:
    grid = [[1.0, 4.0], [2.0, 2.0], [4.0, 2.2], [8.0, math.nan]]
    one = {"grid": grid, "scouts": {"probe": [2.0, 4.0, 1.0], "losses": [8.0, 2.0, 2.0]}}
    assert explosion.found_in(one, "probe")[1:] == pytest.approx((10.0, 100.0))
    assert explosion.found_in(one, "losses")[1:] == (0.0, math.inf)
