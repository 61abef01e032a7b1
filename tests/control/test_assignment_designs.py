"""Designs: balanced, uncorrelated, the same everywhere, and fair to every replica over time."""

import math
from itertools import combinations

import pytest

from hdet.control.assignment import contrasts, is_active, levels


def correlation(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    product = math.fsum(a * b for a, b in zip(one, other, strict=True))
    return product / math.sqrt(math.fsum(a * a for a in one) * math.fsum(b * b for b in other))


@pytest.mark.parametrize("num", range(2, 33))
def test_n_replicas_tell_n_minus_one_knobs_apart(num: int) -> None:
    columns = contrasts(num)
    assert len(columns) == num - 1
    assert all(abs(math.fsum(column)) < 1e-9 for column in columns)
    assert all(max(map(abs, column)) == 1 for column in columns)
    assert all(abs(correlation(a, b)) < 1e-9 for a, b in combinations(columns, 2))


@pytest.mark.parametrize("num", [2, 4, 8, 12, 16, 20, 24, 32])
def test_contrasts_have_two_levels_where_a_hadamard_matrix_exists(num: int) -> None:
    assert {level for column in contrasts(num) for level in column} == {-1.0, 1.0}


@pytest.mark.parametrize("kind", ["orthogonal", "latin", "permutation"])
@pytest.mark.parametrize("num", [2, 3, 6, 8])
def test_every_knob_is_balanced_in_every_cycle(kind: str, num: int) -> None:
    for cycle in range(20):
        for column in levels(kind, num, ["a", "b"][: num - 1], seed=3, cycle=cycle):
            assert abs(math.fsum(column)) < 1e-9
            assert max(map(abs, column)) == pytest.approx(1)


def test_orthogonal_knobs_are_uncorrelated_in_every_cycle() -> None:
    for cycle in range(30):
        columns = levels("orthogonal", 8, list("abcdefg"), seed=0, cycle=cycle)
        assert all(abs(correlation(a, b)) < 1e-9 for a, b in combinations(columns, 2))


def test_permutations_are_correlated_by_chance_and_latin_squares_less() -> None:
    def root_mean_square(kind: str) -> float:
        squares = [
            correlation(a, b) ** 2
            for cycle in range(200)
            for a, b in combinations(levels(kind, 8, list("abcd"), seed=cycle, cycle=cycle), 2)
        ]
        return math.sqrt(math.fsum(squares) / len(squares))

    assert root_mean_square("permutation") == pytest.approx(1 / math.sqrt(7), abs=0.03)
    assert root_mean_square("latin") < 0.15


def test_a_latin_square_gives_every_replica_every_level_once() -> None:
    num = 5
    for knob in range(3):
        seen = [levels("latin", num, list("abc"), seed=1, cycle=c)[knob] for c in range(num)]
        assert all(len(set(column)) == num for column in seen)
        assert all(len({column[r] for column in seen}) == num for r in range(num))


def test_no_replica_keeps_a_level_over_many_cycles() -> None:
    columns = [levels("orthogonal", 8, ["a"], seed=0, cycle=cycle)[0] for cycle in range(400)]
    for replica in range(8):
        assert abs(math.fsum(column[replica] for column in columns)) / 400 < 0.2


def test_knobs_take_turns_if_there_are_more_than_replicas_tell_apart() -> None:
    names = list("abcde")
    turns = [0] * len(names)
    for cycle in range(10):
        columns = levels("orthogonal", 4, names, seed=0, cycle=cycle)
        spread = [any(column) for column in columns]
        assert sum(spread) == 3
        assert spread == [is_active(i, 5, 4, cycle) for i in range(5)]
        turns = [turn + on for turn, on in zip(turns, spread, strict=True)]
    assert turns == [6] * 5


def test_levels_depend_on_the_arguments_alone() -> None:
    one = levels("orthogonal", 8, ["a", "b"], seed=1, cycle=4)
    assert one == levels("orthogonal", 8, ["a", "b"], seed=1, cycle=4)
    assert one != levels("orthogonal", 8, ["a", "b"], seed=2, cycle=4)
    assert one != levels("orthogonal", 8, ["a", "b"], seed=1, cycle=5)
    assert levels("orthogonal", 1, ["a"], seed=0, cycle=0) == [(0.0,)]
