"""Checks of arguments. Each error names the argument, the rule and the value."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any


def check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")


def check_range(name: str, value: Any, *, least: float, below: float) -> None:
    check_number(name, value)
    if not least <= value < below:
        raise ValueError(f"`{name}` must be in [{least:g}, {below:g}), got {value!r}.")


def check_integer(name: str, value: Any, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be an integer, got {value!r}.")
    if value < at_least:
        raise ValueError(f"`{name}` must be at least {at_least}, got {value!r}.")


def check_positive(name: str, value: Any) -> None:
    check_number(name, value)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"`{name}` must be a finite number above 0, got {value!r}.")


def number_of(name: str, value: Any) -> float:
    """A number, also from a tensor with one element."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise TypeError(f"`{name}` must be a number, got {value!r}.") from None


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"`{name}` must be one of {listed}, got {value!r}.")


def check_names(name: str, value: Any) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"`{name}` must be a list of names, got {value!r}.")
    for entry in value:
        if not isinstance(entry, str):
            raise TypeError(f"`{name}` must be a list of names, got {entry!r} in it.")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}.")


def check_bounds(name: str, value: Any) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise TypeError(f"`{name}` must be a pair of numbers, got {value!r}.")
    for bound in value:
        check_positive(name, bound)
    if value[0] > value[1]:
        raise ValueError(f"`{name}` must be in ascending order, got {value!r}.")
