"""Presets: the values of options that the user leaves open."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from hdet._messages import Warn, warn
from hdet._validation import check_choice, check_integer
from hdet.control.controller import Controller
from hdet.control.guard import Guard
from hdet.control.paper import PaperController
from hdet.control.tracker import Tracker
from hdet.knobs.specs import LearningRate
from hdet.lr_search.scout import Scout

Auto = Literal["auto"]
Restart = Literal["restart"]
PRESETS = ("best", "paper")
SPREAD, SYNC_EVERY = 1 / 9, 1000
"""The values of the paper."""
NUM_CYCLES, NUM_EXPLORING_CYCLES = 60, 30
"""Cycles in a run with the best preset, and in one that explores: short cycles let a guard act
early, long ones tell replicas apart. Cycles never exceed the paper's length."""
MIN_CYCLE_STEPS = 8
"""Steps of a cycle that does not explore, at least: fewer losses do not show their noise."""


class GivenOptions(NamedTuple):
    """The options as the user gives them. "auto", or None for numbers, leaves one open."""

    spread: float | None = None
    sync_every: int | None = None
    controller: Controller | Auto | None = "auto"
    scout: Scout | Auto | Restart | None = "auto"
    guard: Guard | Auto | None = "auto"
    knobs: Sequence[Any] | None = None


class ChosenOptions(NamedTuple):
    """The options that a run uses."""

    spread: float
    sync_every: int
    controller: Controller | None
    scout: Scout | None
    guard: Guard | None


def choose_options(
    preset: str,
    given: GivenOptions,
    *,
    total_steps: int | None,
    num_replicas: int,
    warn: Warn = warn,
) -> ChosenOptions:
    """Fill in the options that the user leaves open.

    Args:
        preset: `"best"` or `"paper"`.
        given: The options as the user gives them.
        total_steps: Steps of the run, None if unknown.
        num_replicas: Replicas of the run.
        warn: Raises a warning. A process that must be quiet passes one that does nothing.

    Returns:
        The options that the run uses.

    >>> choose_options("best", GivenOptions(), total_steps=3000, num_replicas=8)[:3]
    (0.0, 50, None)
    >>> choose_options("paper", GivenOptions(), total_steps=3000, num_replicas=8)[1]
    1000
    """
    check_choice("preset", preset, PRESETS)
    if isinstance(given.scout, str):
        check_choice("scout", given.scout, ("auto", "restart"))
    if total_steps is not None:
        check_integer("total_steps", total_steps, at_least=1)
    usual = _paper() if preset == "paper" else _best(given, total_steps)
    is_length_open = total_steps is None and given.sync_every is None
    if preset == "best" and is_length_open and usual.spread and num_replicas > 1:
        warn(
            f"the length of the run is unknown: cycles have {SYNC_EVERY} steps, and no knob moves "
            "before the first one ends. Pass total_steps= or sync_every= to HDET."
        )
    return ChosenOptions(
        usual.spread if given.spread is None else given.spread,
        usual.sync_every if given.sync_every is None else given.sync_every,
        usual.controller if given.controller == "auto" else given.controller,
        _chosen_scout(given.scout, usual.scout),
        usual.guard if given.guard == "auto" else given.guard,
    )


def _chosen_scout(given: Scout | Auto | Restart | None, usual: Scout | None) -> Scout | None:
    if given == "restart":
        return Scout(restart=True)
    return usual if given == "auto" else given


def _paper() -> ChosenOptions:
    return ChosenOptions(SPREAD, SYNC_EVERY, PaperController(), None, None)


def _best(given: GivenOptions, total_steps: int | None) -> ChosenOptions:
    """Return a scout and a guard. Replicas explore only if the user asks for it."""
    has_controller = given.controller not in ("auto", None)
    explores = given.knobs is not None or bool(given.spread) or has_controller
    has_lr = given.knobs is None or any(isinstance(knob, LearningRate) for knob in given.knobs)
    return ChosenOptions(
        SPREAD if explores else 0.0,
        _cycle_length(total_steps, explores=explores),
        Tracker(relative=has_lr and given.scout is not None) if explores else None,
        Scout() if has_lr else None,
        Guard(offload=True) if has_lr else None,
    )


def _cycle_length(total_steps: int | None, *, explores: bool) -> int:
    if total_steps is None:
        return SYNC_EVERY
    if explores:
        return max(min(SYNC_EVERY, total_steps // NUM_EXPLORING_CYCLES), 1)
    return min(max(min(SYNC_EVERY, total_steps // NUM_CYCLES), MIN_CYCLE_STEPS), total_steps)


def without_scout(controller: Controller | None) -> Controller | None:
    """Return the controller for a run without a scout: it tracks the learning rates themselves."""
    return replace(controller, relative=False) if isinstance(controller, Tracker) else controller
