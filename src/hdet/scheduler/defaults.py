"""From the arguments of a user to the settings of a run."""

from dataclasses import replace
from typing import Any

from torch import nn

from hdet.knobs.specs import LearningRate, flatten_knobs
from hdet.replicas.protocol import Replicas
from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.compatibility import drop_impossible_scout
from hdet.scheduler.presets import GivenOptions, choose_options, without_scout
from hdet.scheduler.settings import Settings
from hdet.scheduler.start_warnings import StartWarnings
from hdet.tensors.joined_optimizer import members_of


def complete_settings(
    preset: str,
    given: GivenOptions,
    base: BaseSchedule,
    replicas: Replicas,
    model: nn.Module | None,
    *,
    warn: StartWarnings,
    total_steps: int | None,
    **options: Any,
) -> Settings:
    """Fill in what the user leaves open, for this schedule, engine and model.

    Args:
        preset: `"best"` or `"paper"`.
        given: The options that a preset can fill in.
        base: The wrapped schedule.
        replicas: The engine.
        model: The user's model.
        warn: The warnings of the construction.
        total_steps: Steps of the run; None takes the length of the schedule.
        **options: The other fields of `Settings`.
    """
    total = base.length if total_steps is None else total_steps
    knobs = None if given.knobs is None else tuple(flatten_knobs(given.knobs))
    # A replica that joins has no snapshots to roll back to.
    is_unguarded = given.guard == "auto" and replicas.capabilities.is_elastic
    given = given._replace(knobs=knobs, guard=None if is_unguarded else given.guard)
    chosen = choose_options(preset, given, total_steps=total, num_replicas=replicas.size, warn=warn)
    settings = Settings(
        **chosen._asdict(),
        **options,
        total_steps=total,
        knobs=(_default_knob(base),) if knobs is None else knobs,
    )
    if given.scout == "auto":
        settings = drop_impossible_scout(settings, base, replicas, model, warn=warn)
    if given.controller == "auto" and settings.scout is None and base.step == 0:
        settings = replace(settings, controller=without_scout(settings.controller))
    return settings


def _default_knob(base: BaseSchedule) -> LearningRate:
    """Return a learning rate for each group, or one factor for several optimizers."""
    return LearningRate(shared=len(members_of(base.optimizer)) > 1)
