"""What a run is set to where nobody has said: the best that is known, or what the paper has."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from hdet._validation import check_choice, check_integer
from hdet.control.controller import Controller
from hdet.control.paper import PaperController
from hdet.control.spike_guard import Guard
from hdet.control.tracker import Tracker
from hdet.knobs.specs import LearningRate
from hdet.lr_search.scout import Scout

Auto = Literal["auto"]
Restart = Literal["restart"]
PRESETS = ("best", "paper")
SPREAD, SYNC_EVERY = 1 / 9, 1000
"""Those of the paper."""
NUM_CYCLES = 30
"""A guard looks after a run so many times, or every thousand steps if that is more often."""


class GivenOptions(NamedTuple):
    """What somebody has said, or "auto" (none for numbers) where nobody has."""

    spread: float | None = None
    sync_every: int | None = None
    controller: Controller | Auto | None = "auto"
    scout: Scout | Auto | Restart | None = "auto"
    guard: Guard | Auto | None = "auto"
    knobs: Sequence[Any] | None = None


class ChosenOptions(NamedTuple):
    spread: float
    sync_every: int
    controller: Controller | None
    scout: Scout | None
    guard: Guard | None


def choose_options(
    preset: str, given: GivenOptions, *, total_steps: int | None, num_replicas: int
) -> ChosenOptions:
    """Fill in what nobody has said.

    >>> choose_options("best", GivenOptions(), total_steps=3000, num_replicas=8)[:3]
    (0.0, 100, None)
    >>> choose_options("paper", GivenOptions(), total_steps=3000, num_replicas=8)[1]
    1000
    """
    check_choice("preset", preset, PRESETS)
    if isinstance(given.scout, str):
        check_choice("scout", given.scout, ("auto", "restart"))
    if total_steps is not None:
        check_integer("total_steps", total_steps, at_least=1)
    usual = ChosenOptions(SPREAD, SYNC_EVERY, PaperController(), None, None)
    if preset == "best":
        usual = _best(given, total_steps)
        if total_steps is None and given.sync_every is None and usual.spread and num_replicas > 1:
            warnings.warn(
                f"nobody knows how long the run is: cycles have {SYNC_EVERY} steps, and nothing "
                "moves before the first ends; give `total_steps=` or `sync_every=`.",
                stacklevel=5,
            )
    if num_replicas == 1:
        usual = usual._replace(guard=None)  # one replica is the base schedule, and nothing else
    return ChosenOptions(
        usual.spread if given.spread is None else given.spread,
        usual.sync_every if given.sync_every is None else given.sync_every,
        usual.controller if given.controller == "auto" else given.controller,
        {"auto": usual.scout, "restart": Scout(restart=True)}[given.scout]
        if isinstance(given.scout, str)
        else given.scout,
        usual.guard if given.guard == "auto" else given.guard,
    )


def _best(given: GivenOptions, total_steps: int | None) -> ChosenOptions:
    """A scout and a guard; replicas differ only where somebody wants to explore."""
    steers = given.controller not in ("auto", None)
    explores = given.knobs is not None or bool(given.spread) or steers
    rates = given.knobs is None or any(isinstance(knob, LearningRate) for knob in given.knobs)
    return ChosenOptions(
        SPREAD if explores else 0.0,
        SYNC_EVERY if total_steps is None else max(min(SYNC_EVERY, total_steps // NUM_CYCLES), 1),
        Tracker(relative=rates and given.scout is not None) if explores else None,
        Scout() if rates else None,
        Guard(offload=True) if rates else None,
    )


def without_scout(controller: Controller | None) -> Controller | None:
    """The same without a scout: then nobody else finds how high learning rates are."""
    return replace(controller, relative=False) if isinstance(controller, Tracker) else controller
