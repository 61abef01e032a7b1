"""Rules for the fields of a saved state: each has a type and a range. A damaged one is refused.

A rule gets the name and the value of a field, and raises a `ValueError` if the value breaks it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hdet.control.knob_state import KnobInfo
from hdet.lr_search.scout import Scout

Rule = Callable[[str, Any], None]


def _refuse(name: str, rule: str, value: Any) -> None:
    shown = repr(value)
    if len(shown) > 80:
        shown = f"{shown[:80]}..."
    raise ValueError(f"`state_dict` must have {rule} as `{name}`, got {shown}.")


def anything(name: str, value: Any) -> None:
    """Every value will do."""


def flag(name: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        _refuse(name, "True or False", value)


def text(name: str, value: Any) -> None:
    """A string."""
    if not isinstance(value, str):
        _refuse(name, "a text", value)


def evidence(name: str, value: Any) -> None:
    """A number that was measured, so that it may be infinite or NaN."""
    if isinstance(value, bool) or not isinstance(value, Real):
        _refuse(name, "a number", value)


def level(name: str, value: Any) -> None:
    """A number that may be infinite."""
    evidence(name, value)
    if math.isnan(value):
        _refuse(name, "a number", value)


def number(*, least: float = -math.inf, above: float = -math.inf) -> Rule:
    """A finite number."""

    def rule(name: str, value: Any) -> None:
        evidence(name, value)
        if not (math.isfinite(value) and value >= least and value > above):
            bound = f" of at least {least:g}" if least > -math.inf else ""
            bound = f" above {above:g}" if above > -math.inf else bound
            _refuse(name, f"a finite number{bound}", value)

    return rule


def integer(least: int) -> Rule:
    """An integer."""

    def rule(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            _refuse(name, f"an integer of at least {least}", value)

    return rule


def optional(rule: Rule) -> Rule:
    """None, or what the rule says."""
    return lambda name, value: None if value is None else rule(name, value)


def list_of(rule: Rule, length: int | None = None) -> Rule:
    """A list of such values, of any length or of this one."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, list | tuple):
            _refuse(name, "a list", value)
        if length is not None and len(value) != length:
            _refuse(name, f"a list of {length} values", value)
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
            _refuse(name, "a dict", value)
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
        _refuse(name, "a dict", value)
    for key, entry in value.items():
        if key == "optimizer" or callable(getattr(LRScheduler, str(key), None)):
            _refuse(name, f"no entry {key!r}", entry)
        like(own.get(key))(f"{name}.{key}", entry)


def _scout(name: str, value: Any) -> None:
    """The options of a search in mid-run."""
    entries({})(name, value)
    try:
        Scout(**value)
    except (TypeError, ValueError):
        _refuse(name, "the options of a Scout", value)


def _guard(name: str, value: Any) -> None:
    entries({})(name, value)
    (_OLD_GUARD if "good" in value else _GUARD)(name, value)


def _point(name: str, value: Any) -> None:
    """A place, the learning rate there, and its score; the rest may be left out."""
    list_of(anything)(name, value)
    row(integer(-(10**6)), number(above=0), optional(number()))(name, value[:3])


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
_BATCHES = list_of(list_of(anything))
_SEARCH = entries(
    {"grid": list_of(anything), "used": _COUNT},
    {
        "first": integer(-(10**6)),
        "round": _COUNT,
        "ways": list_of(integer(-1)),
        "points": list_of(_point),
        "start_scores": list_of(number()),
        "late": optional(entries({"scout": _scout, "total_steps": optional(integer(0))})),
        "unasked": flag,
        "held_out": entries({}, {"left": _COUNT, "batches": _BATCHES, "calls": _BATCHES}),
    },
)


def _knob(info: KnobInfo) -> Rule:
    return entries(
        {
            "name": text,
            "scale": number(above=0) if info.space.kind == "log" else number(),
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


def rule_of_state(base: Rule, knobs: Sequence[KnobInfo], num_groups: int) -> Rule:
    """The rule of a whole state.

    Args:
        base: The rule of the base schedule's state.
        knobs: The knobs of this run. Those of the state have their names already.
        num_groups: The parameter groups of the optimizer.
    """
    rates = list_of(number(least=0), num_groups)
    return entries(
        {
            "step": _COUNT,
            "total_steps": optional(_COUNT),
            "sync_every": integer(1),
            "base": base,
            "knobs": row(*map(_knob, knobs)),
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
            "search": _SEARCH,
        },
    )


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
