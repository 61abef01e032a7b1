"""Saved states of the guard that had no ceiling yet."""

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from hdet.control.loss_level import LEVEL_CYCLES


def state_of_spike_guard(state: Mapping[str, Any], spare_every: int) -> dict[str, Any]:
    """The state of a monitor, from one that was saved before guards had a ceiling.

    Args:
        state: The saved state.
        spare_every: The cycles after which a learning rate can be spared.
    """
    good, errors = list(state["good"]), list(state.get("errors", []))
    noise = median(errors) if errors else 0.0
    recent = [[loss, noise] for loss in good]
    first = state["first"]
    return {
        "recent": recent,
        "best": [median(good[-LEVEL_CYCLES:]), noise] if good else None,
        "lowest": min(good, default=math.inf),
        "first": None if first is None else [first, state.get("first_error", 0.0)],
        "new_level": False,
        "ceiling": math.inf,
        "tolerance": [False, 1.0],
        "survived": 0.0,
        "rollbacks": state["in_a_row"],
        "last_bad": state.get("last"),
        "spared": [False, spare_every],
        "lowered_by": state.get("lowered", 1.0),
        "probation": [[], False],
    }
