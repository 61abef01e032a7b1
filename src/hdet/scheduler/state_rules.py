"""Rules for the fields of a saved state: each has a type and a range. A damaged one is refused.

A rule gets the name and the value of a field, and raises a `ValueError` if the value breaks it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hdet.control.knob_state import KnobInfo
from hdet.lr_search.constants import MAX_LR

Rule = Callable[[str, Any], None]
MAX_COUNT = 10**15
"""No run makes so many steps, and a float holds every integer up to it."""


def refuse(name: str, rule: str, value: Any) -> None:
    """Raise the error of a field that breaks a rule."""
    shown = repr(value)
    if len(shown) > 80:
        shown = f"{shown[:80]}..."
    raise ValueError(f"`state_dict` must have {rule} as `{name}`, got {shown}.")


def anything(name: str, value: Any) -> None:
    """Every value will do."""


def flag(name: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        refuse(name, "True or False", value)


def text(name: str, value: Any) -> None:
    """A string."""
    if not isinstance(value, str):
        refuse(name, "a text", value)


def evidence(name: str, value: Any) -> None:
    """A number that was measured, so that it may be infinite or NaN."""
    if isinstance(value, bool) or not isinstance(value, Real):
        refuse(name, "a number", value)


def level(name: str, value: Any) -> None:
    """A number that may be infinite."""
    evidence(name, value)
    if math.isnan(value):
        refuse(name, "a number", value)


def number(*, least: float = -math.inf, above: float = -math.inf, most: float = math.inf) -> Rule:
    """A finite number."""

    def rule(name: str, value: Any) -> None:
        evidence(name, value)
        if most < value < math.inf:
            refuse(name, f"a number of at most {most:g}", value)
        if not (math.isfinite(value) and value >= least and value > above):
            bound = f" of at least {least:g}" if least > -math.inf else ""
            bound = f" above {above:g}" if above > -math.inf else bound
            refuse(name, f"a finite number{bound}", value)

    return rule


def integer(least: int, most: int = MAX_COUNT) -> Rule:
    """An integer between two bounds."""

    def rule(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            refuse(name, f"an integer of at least {least}", value)
        if value > most:
            refuse(name, f"an integer of at most {most}", value)

    return rule


def optional(rule: Rule) -> Rule:
    """None, or what the rule says."""
    return lambda name, value: None if value is None else rule(name, value)


def list_of(rule: Rule, length: int | None = None) -> Rule:
    """A list of such values, of any length or of this one."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, list | tuple):
            refuse(name, "a list", value)
        if length is not None and len(value) != length:
            refuse(name, f"a list of {length} values", value)
        for place, entry in enumerate(value):
            rule(f"{name}[{place}]", entry)

    return check


def row(*rules: Rule) -> Rule:
    """A list with one value for each rule."""

    def check(name: str, value: Any) -> None:
        list_of(anything, len(rules))(name, value)
        for place, (rule, entry) in enumerate(zip(rules, value, strict=True)):
            rule(f"{name}[{place}]", entry)

    return check


def entries(required: Mapping[str, Rule], maybe: Mapping[str, Rule] | None = None) -> Rule:
    """A dict with the required entries. Entries without a rule may have any value."""
    rules = {**required, **(maybe or {})}

    def check(name: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            refuse(name, "a dict", value)
        start = f"{name}." if name else ""
        for key in required:
            if key not in value:
                missing = f"{start}{key}"
                raise ValueError(f"`state_dict` must be complete, got one without {missing!r}.")
        for key, rule in rules.items():
            if key in value:
                rule(f"{start}{key}", value[key])

    return check


def like(own: Any) -> Rule:
    """A value of the same kind as one of this run: state that torch or the user has defined.

    Values may be None, and a dict may have other entries, but none that is a method of a schedule.
    """

    def check(name: str, value: Any) -> None:
        if own is None or value is None:
            return
        if isinstance(own, Mapping):
            _like_mapping(own, name, value)
        elif isinstance(own, list | tuple):
            list_of(anything)(name, value)
            for place, (mine, entry) in enumerate(zip(own, value, strict=False)):
                like(mine)(f"{name}[{place}]", entry)
        elif isinstance(own, bool):
            flag(name, value)
        elif isinstance(own, Real):
            level(name, value)
        elif isinstance(own, str):
            text(name, value)

    return check


def _like_mapping(own: Mapping[Any, Any], name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        refuse(name, "a dict", value)
    for key, entry in value.items():
        if key == "optimizer" or callable(getattr(LRScheduler, str(key), None)):
            refuse(name, f"no entry {key!r}", entry)
        like(own.get(key))(f"{name}.{key}", entry)


def _guard(name: str, value: Any) -> None:
    entries({})(name, value)
    (_OLD_GUARD if "good" in value else _GUARD)(name, value)


_SIZE, _COUNT = number(least=0), integer(0)
_LEVEL = row(number(), evidence)
_GUARD = entries(
    {
        "recent": list_of(_LEVEL),
        "best": optional(_LEVEL),
        "lowest": level,
        "first": optional(_LEVEL),
        "new_level": flag,
        "ceiling": level,
        "tolerance": row(flag, number(above=0)),
        "survived": _SIZE,
        "rollbacks": _COUNT,
        "last_bad": optional(number()),
        "spared": row(flag, _COUNT),
        "lowered_by": number(above=0),
        "probation": row(list_of(number()), flag),
    },
    {"lowered_in_all": number(above=0), "trained_with": _SIZE},
)
_OLD_GUARD = entries(
    {"good": list_of(number()), "first": optional(number()), "in_a_row": _COUNT},
    {
        "errors": list_of(evidence),
        "first_error": evidence,
        "last": optional(number()),
        "lowered": number(above=0),
    },
)


def _scale(info: KnobInfo, peaks: Sequence[float]) -> Rule:
    """The scale of a knob. That of a learning rate must leave it where a run can survive."""
    if info.space.kind != "log":
        return number()
    known = [peaks[group] for group in info.groups if peaks[group] > 0]
    return number(above=0, most=MAX_LR / min(1.0, *known)) if known else number(above=0)


def _knob(info: KnobInfo, peaks: Sequence[float]) -> Rule:
    return entries(
        {
            "name": text,
            "scale": _scale(info, peaks),
            "velocity": evidence,
            "decay": number(),
            "floor": number(),
            "pull": evidence,
            "mass": evidence,
            "reach": _SIZE,
            "narrow": number(above=0),
            "slope": optional(evidence),
            "felt": row(evidence, evidence, evidence, evidence),
        }
    )


def rule_of_state(
    base: Rule, search: Rule, knobs: Sequence[KnobInfo], peaks: Sequence[float]
) -> Rule:
    """The rule of a whole state.

    Args:
        base: The rule of the base schedule's state.
        search: The rule of a search.
        knobs: The knobs of this run. Those of the state have their names already.
        peaks: The highest learning rate of each parameter group of the optimizer.
    """
    rates = list_of(number(least=0), len(peaks))
    fields = entries(
        {
            "step": _COUNT,
            "total_steps": optional(_COUNT),
            "sync_every": integer(1),
            "base": base,
            "knobs": row(*(_knob(knob, peaks) for knob in knobs)),
            "cycle": _COUNT,
            "started": flag,
            "closed": flag,
            "peaks": optional(rates),
            "held": optional(rates),
            "noise": row(evidence, evidence),
        },
        {
            "base_step": _COUNT,
            "scouted": optional(row(_COUNT, _COUNT)),
            "found_lr": optional(number(above=0)),
            "guard": _guard,
            "search": search,
        },
    )

    def check(name: str, value: Any) -> None:
        fields(name, value)
        if value.get("scouted") is None:  # a scout lets the schedule catch up
            integer(0, value["step"])("base_step", value.get("base_step", 0))

    return check


def rule_of_schedule(own: Mapping[str, Any], num_groups: int) -> Rule:
    """The rule of the state of a torch schedule."""
    rates = list_of(number(), num_groups)
    known = {
        "last_epoch": integer(-1),
        "_step_count": _COUNT,
        "steps_per_epoch": integer(1),
        "base_lrs": rates,
        "_last_lr": rates,
    }

    def check(name: str, value: Any) -> None:
        like(own)(name, value)
        entries({}, {key: rule for key, rule in known.items() if key in own})(name, value)

    return check
