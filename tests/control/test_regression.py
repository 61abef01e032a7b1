"""The joint fit: against numpy's least squares, and its errors against what chance does."""

import math
import random

import numpy as np
import pytest

from hdet.control.assignment import contrasts, levels
from hdet.control.regression import DecayedSlope, Noise, Slope, fit_slopes


@pytest.mark.parametrize("seed", range(5))
def test_slopes_and_errors_are_those_of_least_squares(seed: int) -> None:
    draw = np.random.default_rng(seed)
    positions, scores = draw.normal(size=(3, 9)), draw.normal(size=9)
    found = fit_slopes(positions.tolist(), [[score] for score in scores])
    matrix = np.column_stack([np.ones(9), positions.T])
    answer, squares, *_ = np.linalg.lstsq(matrix, scores, rcond=None)
    errors = np.sqrt(np.diag(np.linalg.inv(matrix.T @ matrix)) * squares[0] / (9 - 4))
    for slope, want, error in zip(found.slopes, answer[1:], errors[1:], strict=True):
        assert slope is not None
        assert slope.slope == pytest.approx(want)
        assert slope.error == pytest.approx(error)
        assert slope.freedom == pytest.approx(5)


def test_error_includes_the_choice_of_batches() -> None:
    column = [-1.0, 1.0, -1.0, 1.0]
    per_batch = [1.0, 2.0, 6.0]
    scores = [[slope * level for slope in per_batch] for level in column]
    (slope,) = fit_slopes([column], scores).slopes
    assert slope is not None
    assert slope.slope == pytest.approx(3.0)
    assert slope.error == pytest.approx(np.std(per_batch, ddof=1) / math.sqrt(3))
    assert slope.freedom == pytest.approx(2)


def test_noise_is_pooled_over_cycles() -> None:
    column, scores = [-1.0, 1.0, 0.0], [[0.0], [1.0], [0.0]]
    once = fit_slopes([column], scores)
    again = fit_slopes([column], scores, once.noise)
    assert once.noise.freedom == 1
    assert again.noise.freedom == pytest.approx(1.85)
    assert again.noise.variance == pytest.approx(once.noise.variance)
    first, second = once.slopes[0], again.slopes[0]
    assert first is not None and first.in_errors is not None
    assert second is not None and second.in_errors is not None
    assert abs(second.in_errors) > abs(first.in_errors)  # the same slope, better known


def test_knobs_with_equal_columns_have_no_slope() -> None:
    column = [-1.0, 1.0, -1.0, 1.0]
    other = [1.0, 1.0, -1.0, -1.0]
    still = [0.3] * 4
    twin = [2 * level + 5 for level in column]
    slopes = fit_slopes([column, twin, other, still], [[1.0], [2.0], [3.0], [5.0]]).slopes
    assert [slope is None for slope in slopes] == [True, True, False, True]


def test_slopes_without_a_degree_of_freedom_have_no_error() -> None:
    columns = [list(column) for column in contrasts(4)]
    slopes = fit_slopes(columns, [[1.0], [2.0], [4.0], [8.0]]).slopes
    assert all(slope is not None and slope.error is None for slope in slopes)
    assert all(slope is not None and slope.in_errors is None for slope in slopes)
    known = fit_slopes(columns, [[1.0], [2.0], [4.0], [8.0]], Noise(2.0, 4.0)).slopes
    assert all(slope is not None and slope.error is not None for slope in known)


@pytest.mark.parametrize("num_knobs", [1, 6])
def test_slopes_of_knobs_without_effect_are_rarely_significant(num_knobs: int) -> None:
    """Also with one degree of freedom in a cycle, where errors are tiny by chance."""
    draw = random.Random(0)
    noise, sure, total = Noise(), 0, 0
    for cycle in range(1500):
        names = [str(knob) for knob in range(num_knobs)]
        columns = levels("orthogonal", 8, names, seed=0, cycle=cycle)
        found = fit_slopes(columns, [[draw.gauss(0, 1)] for _ in range(8)], noise)
        noise = found.noise
        for slope in found.slopes:
            assert slope is not None and slope.in_errors is not None
            sure += abs(slope.in_errors) > 2
            total += 1
    assert 0.01 < sure / total < 0.06  # 4.6 % of a normal variable


def test_precise_first_slopes_do_not_outweigh_many_later_ones() -> None:
    recent_slope = DecayedSlope()
    for cycle in range(40):
        recent_slope = (
            recent_slope.and_then(-0.001, 0.0002) if cycle < 3 else recent_slope.and_then(0.2, 0.05)
        )
    assert recent_slope.slope == pytest.approx(0.2, rel=0.05)
    assert 0.05 / 10 < recent_slope.error < 0.05


def test_slope_without_noise_has_infinite_significance() -> None:
    assert Slope(1.0, 0.0).in_errors == math.inf
    assert Slope(0.0, 0.0).in_errors == 0.0


@pytest.mark.parametrize(("num", "num_knobs"), [(2, 1), (4, 3), (4, 1)])
def test_chance_of_replicas_is_noise_even_if_all_batches_agree(num: int, num_knobs: int) -> None:
    """As many knobs as replicas can tell apart leave no residual: then the cycles tell."""
    draw = random.Random(1)
    noise, before, sure, total = Noise(), [None] * num_knobs, 0, 0
    for cycle in range(1500):
        names = [str(knob) for knob in range(num_knobs)]
        columns = levels("orthogonal", num, names, seed=0, cycle=cycle)
        luck = [draw.gauss(0, 1) for _ in range(num)]
        scores = [[one + draw.gauss(0, 0.05) for _ in range(8)] for one in luck]
        found = fit_slopes(columns, scores, noise, before)
        noise = found.noise
        before = [None if slope is None else slope.slope for slope in found.slopes]  # type: ignore[misc]
        for slope in found.slopes:
            assert slope is not None
            if slope.in_errors is None:
                assert cycle == 0
                continue
            sure += abs(slope.in_errors) > 2
            total += 1
    assert 0.005 < sure / total < 0.08


def test_equal_scores_are_no_evidence() -> None:
    """Not even of rounding: what all have in common is taken away before anything is summed."""
    positions = [
        [0.1 * level - 2.3 for level in column] for column in ([-1, 1] * 4, [-1, -1, 1, 1] * 2)
    ]
    for score in (2.330684901525577, -1e6 / 3):
        found = fit_slopes(positions, [[score, 0.7 * score, 1.1]] * 8)
        assert [slope and slope.slope for slope in found.slopes] == [0.0, 0.0]
        assert [slope and slope.in_errors for slope in found.slopes] == [0.0, 0.0]
