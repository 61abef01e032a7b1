"""The state of a run as plain data, and the check that a run can continue from one."""

from collections.abc import Mapping, Sequence
from typing import Any

from hdet.control.knob_state import KnobInfo
from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.joined_schedule import JoinedSchedule
from hdet.scheduler.search_state import rule_of_search
from hdet.scheduler.settings import Settings
from hdet.scheduler.state_rules import (
    Rule,
    entries,
    integer,
    list_of,
    number,
    optional,
    row,
    rule_of_schedule,
    rule_of_state,
    text,
)

FRAME = entries(
    {
        "base": entries({"kind": text}),
        "knobs": list_of(entries({"name": text})),
    }
)
"""What must be there to say whether a state fits."""

VERSION = 2


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
            f"got the keys {sorted(map(str, plain))}."
        )
    integer(-1)("last_epoch", plain["last_epoch"])
    state = saved(base.step_of_state(plain), settings, base, knob_bank)
    return {**state, "base": base.adopted(plain)}


def check(
    state: Mapping[str, Any], settings: Settings, base: BaseSchedule, knobs: Sequence[KnobInfo]
) -> None:
    """Refuse a state of another version, schedule or set of knobs, or with a damaged field.

    Raises:
        ValueError: If the run cannot continue from the state.
    """
    if not isinstance(state["hdet"], int) or state["hdet"] != VERSION:
        raise ValueError(f"`state_dict` must have version {VERSION}, got {state['hdet']!r}.")
    FRAME("", state)
    if state["base"]["kind"] != base.kind:
        raise ValueError(
            f"`state_dict` must be of a {base.kind}, got that of a {state['base']['kind']}."
        )
    names, own = [knob["name"] for knob in state["knobs"]], [knob.name for knob in knobs]
    if names != own:
        raise ValueError(f"`state_dict` must hold the knobs {own}, got {names}.")
    rule_of_state(_rule_of_base(base), rule_of_search, knobs, base.peaks)("", state)
    total = settings.total_steps
    if settings.on_overrun == "raise" and total is not None and state["step"] > total:
        raise ValueError(
            f"`total_steps` must be at least the step of the state ({state['step']}), got {total}."
        )


def _rule_of_base(base: BaseSchedule) -> Rule:
    if isinstance(base, JoinedSchedule):
        return entries({"members": row(*map(_rule_of_base, base.members))})
    num = len(base.lrs)
    momenta = optional(list_of(optional(number()), num))
    schedule = rule_of_schedule(base.schedule.state_dict(), num)
    return entries({"schedule": schedule}, {"momenta": momenta})
