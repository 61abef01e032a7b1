"""The random numbers that come next in this process: of Python, NumPy and torch."""

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Return the state of the generators as plain data and tensors."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (str(kind), keys.tolist(), *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Go on with the random numbers of a saved state. What is not used here is left out."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
