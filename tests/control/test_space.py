"""Spaces: even steps there and back, bounds that hold, and rims that nothing leaves."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.control.space import Space

SPACES = {
    "log": Space("log", 1e-6, 1e3),
    "linear": Space("linear", -5.0, 7.0),
    "logit": Space("logit", 0.001, 0.999),
}


@given(st.sampled_from(sorted(SPACES)), st.floats(0, 1))
def test_position_and_value_are_inverse(kind: str, share: float) -> None:
    space = SPACES[kind]
    value = space.low + share * (space.high - space.low)
    assert space.value(space.position(value)) == pytest.approx(value, rel=1e-9, abs=1e-12)


@given(st.sampled_from(sorted(SPACES)), st.floats(0, 1), st.floats(-2000, 2000))
def test_shifted_value_stays_within_the_bounds(kind: str, share: float, by: float) -> None:
    space = SPACES[kind]
    value = space.low + share * (space.high - space.low)
    shifted = space.shifted(value, by)
    assert space.low <= shifted <= space.high
    assert (shifted - value) * by >= 0 or shifted == pytest.approx(value)


@pytest.mark.parametrize(
    ("kind", "value", "spread", "low", "high"),
    [
        ("log", 0.2, 0.5, 0.2 / 1.5, 0.3),
        ("linear", 2.0, 0.5, 1.5, 2.5),
        ("logit", 0.5, 1.0, 1 / 3, 2 / 3),  # odds halved and doubled
    ],
)
def test_spread_is_symmetric_in_its_space(
    kind: str, value: float, spread: float, low: float, high: float
) -> None:
    space = SPACES[kind]
    width = space.width(spread)
    assert space.shifted(value, -width) == pytest.approx(low)
    assert space.shifted(value, width) == pytest.approx(high)


def test_carried_moves_targets_with_other_start_values_alike() -> None:
    assert SPACES["log"].carried(0.4, start=0.1, base=0.01) == pytest.approx(0.04)
    assert SPACES["linear"].carried(3.0, start=1.0, base=-2.0) == pytest.approx(0.0)
    odds = 0.2 / 0.8 * (0.5 / 0.5) / (0.1 / 0.9)
    carried = SPACES["logit"].carried(0.5, start=0.1, base=0.2)
    assert carried / (1 - carried) == pytest.approx(odds)


@pytest.mark.parametrize("kind", ["log", "logit"])
def test_carried_keeps_a_target_at_the_rim_of_the_space(kind: str) -> None:
    space = SPACES[kind]
    assert space.clamped(space.carried(0.4, start=0.1, base=0.0)) == 0.0
    assert SPACES["logit"].position(0.0) == -math.inf


@pytest.mark.parametrize(
    ("kind", "low", "high", "words"),
    [
        ("cubic", 0, 1, "`space` must be one of"),
        ("log", 0, 1, "must be above 0"),
        ("linear", 1, 1, "two rising numbers"),
        ("linear", 2, 1, "two rising numbers"),
        ("logit", -0.1, 0.5, r"in \[0, 1\]"),
        ("logit", 0.1, 1.5, r"in \[0, 1\]"),
        ("linear", math.nan, 1, "two rising numbers"),
    ],
)
def test_space_refuses_bad_bounds(kind: str, low: float, high: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Space(kind, low, high)
