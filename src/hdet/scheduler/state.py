"""What a saved run looks like, and whether a state can be gone on from."""

from collections.abc import Mapping, Sequence
from typing import Any

from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.settings import Settings

VERSION = 2
PARTS = {"step", "base", "knobs", "cycle", "started", "closed", "held", "noise"}


def length_of(settings: Settings) -> dict[str, Any]:
    """What a run's decays are computed for; what it is set to now counts."""
    return {"total_steps": settings.total_steps, "sync_every": settings.sync_every}


def saved(
    step: int, settings: Settings, base: BaseSchedule, knob_bank: Mapping[str, Any]
) -> dict[str, Any]:
    """Plain data, equal on all replicas, without a replica's index or their number."""
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
    """The state of a plain schedule, as that of an hdet run at its step."""
    if "last_epoch" not in plain:
        raise ValueError(
            "`state_dict` must come from hdet or from a torch LRScheduler, "
            f"got the keys {sorted(plain)}."
        )
    step = 0 if base.wants_metric else max(plain["last_epoch"], 0)
    state = saved(step, settings, base, knob_bank)
    return {**state, "base": {**state["base"], "schedule": plain}}


def check(
    state: Mapping[str, Any], settings: Settings, base: BaseSchedule, knobs: Sequence[str]
) -> None:
    """Refuse a state of another version, schedule or set of knobs, before anything is changed."""
    if state["hdet"] != VERSION:
        raise ValueError(f"`state_dict` must have version {VERSION}, got {state['hdet']!r}.")
    missing = sorted(PARTS - state.keys())
    if missing:
        raise ValueError(f"`state_dict` must be complete, got one without {missing[0]!r}.")
    kind = type(base.schedule).__name__
    if state["base"]["kind"] != kind:
        raise ValueError(
            f"`state_dict` must be of a {kind}, got that of a {state['base']['kind']}."
        )
    names = [knob["name"] for knob in state["knobs"]]
    if names != knobs:
        raise ValueError(f"`state_dict` must hold the knobs {knobs}, got {names}.")
    total = settings.total_steps
    if settings.on_overrun == "raise" and total is not None and state["step"] > total:
        raise ValueError(
            f"`total_steps` must be at least the step of the state ({state['step']}), got {total}."
        )
