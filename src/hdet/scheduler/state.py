"""The state of a run as plain data, and the check that a run can continue from one."""

from collections.abc import Mapping, Sequence
from typing import Any

from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.settings import Settings

VERSION = 2
REQUIRED_KEYS = {"step", "base", "knobs", "cycle", "started", "closed", "held", "noise"}


def length_of(settings: Settings) -> dict[str, Any]:
    """Return the settings that the decay of the scales depends on."""
    return {"total_steps": settings.total_steps, "sync_every": settings.sync_every}


def saved(
    step: int, settings: Settings, base: BaseSchedule, knob_bank: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state to save: plain data that does not depend on the number of replicas."""
    return {
        "hdet": VERSION,
        "step": step,
        **length_of(settings),
        "base": base.state_dict(),
        **knob_bank,
    }


def adopted(
    plain: Mapping[str, Any], settings: Settings, base: BaseSchedule, knob_bank: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert the state of a plain schedule into that of a run at the same step.

    Raises:
        ValueError: If it is not the state of a torch schedule.
    """
    if "last_epoch" not in plain:
        raise ValueError(
            "`state_dict` must come from hdet or from a torch LRScheduler, "
            f"got the keys {sorted(plain)}."
        )
    state = saved(base.step_of_state(plain), settings, base, knob_bank)
    return {**state, "base": base.adopted(plain)}


def check(
    state: Mapping[str, Any], settings: Settings, base: BaseSchedule, knobs: Sequence[str]
) -> None:
    """Refuse a state of another version, schedule or set of knobs.

    Raises:
        ValueError: If the run cannot continue from the state.
    """
    if state["hdet"] != VERSION:
        raise ValueError(f"`state_dict` must have version {VERSION}, got {state['hdet']!r}.")
    missing = sorted(REQUIRED_KEYS - state.keys())
    if missing:
        raise ValueError(f"`state_dict` must be complete, got one without {missing[0]!r}.")
    if state["base"]["kind"] != base.kind:
        raise ValueError(
            f"`state_dict` must be of a {base.kind}, got that of a {state['base']['kind']}."
        )
    names = [knob["name"] for knob in state["knobs"]]
    if names != knobs:
        raise ValueError(f"`state_dict` must hold the knobs {knobs}, got {names}.")
    total = settings.total_steps
    if settings.on_overrun == "raise" and total is not None and state["step"] > total:
        raise ValueError(
            f"`total_steps` must be at least the step of the state ({state['step']}), got {total}."
        )
