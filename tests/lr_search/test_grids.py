"""The learning rates of a sweep: how many, how far apart, and which of them in which round."""

import pytest

from hdet.lr_search.constants import SWEEP_POINTS
from hdet.lr_search.grids import SweepGrid


@pytest.mark.parametrize("num_replicas", range(1, 17))
def test_rounds_of_a_sweep_try_each_place_once(num_replicas: int) -> None:
    grid = SweepGrid(4.0, num_replicas)
    rounds = [grid.places(5, number) for number in range(grid.num_rounds)]
    assert sorted(place for one in rounds for place in one) == list(range(5, 5 + grid.num))
    assert all(len(one) == num_replicas for one in rounds)
    assert SWEEP_POINTS <= grid.num < SWEEP_POINTS + num_replicas


@pytest.mark.parametrize("num_replicas", [1, 4, 8, 16])
def test_sweep_covers_its_decades_around_the_centre(num_replicas: int) -> None:
    grid = SweepGrid(3.0, num_replicas, centre=-2.0)
    assert grid.factor(0) == pytest.approx(10**-3.5)
    assert grid.factor(grid.num - 1) == pytest.approx(10**-0.5)


@pytest.mark.parametrize("num_replicas", [1, 3, 8])
def test_next_sweep_continues_with_the_same_spacing_without_a_gap(num_replicas: int) -> None:
    grid = SweepGrid(4.0, num_replicas)
    tried = range(grid.num)
    above, below = grid.next_to(tried, 1), grid.next_to(tried, -1)
    assert above == grid.num
    assert below + grid.num == 0
    spacing = grid.factor(1) / grid.factor(0)
    assert grid.factor(above) / grid.factor(above - 1) == pytest.approx(spacing)
    assert grid.factor(0) / grid.factor(below + grid.num - 1) == pytest.approx(spacing)
