"""The rule of the saved state of a search, and of the held-out batches in it."""

from typing import Any

import torch
from torch import Tensor

from hdet.lr_search.constants import MAX_DECADES, MAX_SWEEPS
from hdet.lr_search.grids import SweepGrid
from hdet.lr_search.scout import Scout
from hdet.scheduler.state_rules import (
    Rule,
    anything,
    entries,
    evidence,
    flag,
    integer,
    list_of,
    number,
    optional,
    refuse,
    row,
    text,
)

MAX_REPLICAS = 10**6
MAX_CENTRE = 300.0
"""The middle of a grid is a power of ten, and a float holds none beyond this one."""


def rule_of_search(name: str, value: Any) -> None:
    """A search in mid-run: what it was asked for, its rounds, and its held-out batches."""
    _SEARCH(name, value)
    if len(value["grid"]) == 3:  # hdet 0.1 has two entries, and other rounds: they are not read
        _GRID(f"{name}.grid", value["grid"])
        _rounds(name, value, SweepGrid(*value["grid"]))
    else:
        row(number(above=0), integer(1))(f"{name}.grid", value["grid"])


def _rounds(name: str, value: Any, grid: SweepGrid) -> None:
    """The rounds of a search, on the places that its grid has."""
    beside = (MAX_SWEEPS - 1) * grid.num
    place = integer(-beside, beside + grid.num - 1)
    entries(
        {
            "first": integer(-beside, beside),
            "round": integer(0, grid.num_rounds),
            "ways": list_of(integer(-1, 1)),
            "points": list_of(_point(place)),
            "start_scores": list_of(number()),
        }
    )(name, value)
    if (value["round"] or value["ways"]) and not value["points"]:
        refuse(f"{name}.points", "an entry for each learning rate that was tried", [])


def _point(place: Rule) -> Rule:
    """A place, the learning rate there, its score, and maybe its error and whether to trust it."""
    rules = (place, number(above=0), optional(number()), evidence, flag)

    def check(name: str, value: Any) -> None:
        list_of(anything)(name, value)
        row(*rules[: max(len(value), 3)])(name, value)

    return check


def _scout(name: str, value: Any) -> None:
    """The options of a search in mid-run."""
    entries({})(name, value)
    try:
        Scout(**value)
    except (TypeError, ValueError):
        refuse(name, "the options of a Scout", value)


def _losses(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        refuse(name, "a tensor of losses", value)


def _dtype(name: str, value: Any) -> None:
    if not isinstance(value, torch.dtype):
        refuse(name, "a dtype of torch", value)


def _held_out(name: str, value: Any) -> None:
    """Batches that the engine has recorded, or those that the loop gave."""
    entries({})(name, value)
    (_RECORDED if "calls" in value else _GIVEN)(name, value)


_GRID = row(
    number(least=0.5, most=MAX_DECADES),
    integer(1, MAX_REPLICAS),
    number(least=-MAX_CENTRE, most=MAX_CENTRE),
)
_CALL = entries(
    {
        "parts": list_of(anything),
        "losses": _losses,
        "autocast": optional(_dtype),
        "training": list_of(flag),
    }
)
_RECORDED = entries({"left": integer(0), "calls": list_of(list_of(_CALL))})
_GIVEN = entries({}, {"left": integer(0), "batches": list_of(list_of(list_of(anything)))})
_SEARCH = entries(
    {"grid": list_of(anything), "used": integer(0)},
    {
        "late": optional(entries({"scout": _scout, "total_steps": optional(integer(0))})),
        "unasked": flag,
        "by": optional(text),
        "held_out": _held_out,
    },
)
