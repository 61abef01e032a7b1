"""The words of an error at the door: the argument as typed, the rule, the value."""

import math
from collections.abc import Sequence
from typing import Any


def check_range(name: str, value: Any, rule: str, holds: bool) -> None:
    if not holds:
        raise ValueError(f"`{name}` must be in {rule}, got {value!r}.")


def check_integer(name: str, value: Any, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an integer, got {value!r}.")
    if value < at_least:
        raise ValueError(f"`{name}` must be at least {at_least}, got {value!r}.")


def check_finite(name: str, value: Any, *, above: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")
    if not (math.isfinite(value) and value > above):
        raise ValueError(f"`{name}` must be a finite number above {above:g}, got {value!r}.")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"`{name}` must be one of {listed}, got {value!r}.")
