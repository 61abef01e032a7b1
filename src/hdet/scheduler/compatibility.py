"""Which options, schedules, models and engines work together.

`RULES`, `SCOUT_RULES` and `DEFAULT_SCOUT_RULES` are also the source of the page
`docs/reference/compatibility.md`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from hdet._messages import Warn, warn
from hdet.control.controller import complete_controller
from hdet.control.knob_bank import KnobBank
from hdet.knobs.dial_knob import DialKnob
from hdet.replicas.protocol import Replicas
from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.optimizer_rules import OPTIMIZER_RULES
from hdet.scheduler.rules import Rule, Setup, first_broken
from hdet.scheduler.scout_rules import DEFAULT_SCOUT_RULES, SCOUT_RULES
from hdet.scheduler.settings import Settings
from hdet.scheduler.start_warnings import StartWarnings
from hdet.weights.outer_optimizer import describe_outer


def _when_requested(rule: Rule) -> Rule:
    """Return a scout's rule as an error for runs that have a scout."""
    return replace(
        rule,
        applies=lambda setup: setup.settings.scout is not None and rule.applies(setup),
        message=lambda setup: f"{rule.message(setup)}.",
    )


def _needs_lr_knob(name: str) -> Rule:
    return Rule(
        name=f"{name}-needs-lr-knob",
        limit=f"`{name}` needs the learning rate among the knobs.",
        remedy=f"Add `hdet.lr()` to `knobs`, or pass `{name}=None`.",
        applies=lambda setup: getattr(setup.settings, name) is not None and not setup.has_lr_knob,
        message=lambda _: (
            f"`{name}` needs hdet.lr() among the knobs, got none. Add hdet.lr(), or pass "
            f"{name}=None."
        ),
    )


def _fixed_when_elastic(name: str, usual: Any) -> Rule:
    """Return the rule for an option that needs the same replicas in every cycle."""
    return Rule(
        name=f"elastic-{name.replace('_', '-')}",
        limit=f"With `TorchftReplicas`, `{name}` must be `{usual!r}`: replicas join and leave.",
        remedy=f"Pass `{name}={usual!r}`.",
        applies=lambda setup: setup.is_elastic and getattr(setup.settings, name) != usual,
        message=lambda setup: (
            f"`{name}` must be {usual!r} with TorchftReplicas, got "
            f"{getattr(setup.settings, name)!r}."
        ),
    )


def _training_dials(setup: Setup) -> list[str]:
    """Return the dials that act in training only: a probe sees their effect on weights alone."""
    knobs = setup.settings.knobs
    return [knob.name for knob in knobs if isinstance(knob, DialKnob) and knob.trains_only]


def _outlasts_schedule(setup: Setup) -> bool:
    total, limit = setup.settings.total_steps, setup.base.total_steps
    return total is not None and limit is not None and total > limit


def _never_syncs_before_the_end(setup: Setup) -> bool:
    total = setup.settings.total_steps
    return total is not None and setup.settings.sync_every > total and setup.num_replicas > 1


MODEL_RULES = (
    Rule(
        name="local-gradients-need-model",
        limit="`gradients='local'` needs the model.",
        remedy="Pass `model=`.",
        applies=lambda setup: setup.settings.gradients == "local" and setup.model is None,
        message=lambda _: "`gradients='local'` needs `model=`, got None.",
    ),
    Rule(
        name="probe-needs-model",
        limit="`probe` needs the model.",
        remedy="Pass `model=`.",
        applies=lambda setup: setup.settings.probe is not None and not setup.has_every_model,
        message=lambda _: "`probe` needs `model=`, got None.",
    ),
)

ELASTIC_RULES = (
    Rule(
        name="elastic-optimizer",
        limit="The base schedule does not work with a torchft optimizer.",
        remedy="Make the schedule for the optimizer inside, and step torchft's in your loop.",
        applies=lambda setup: setup.is_elastic and setup.has_torchft_optimizer,
        message=lambda setup: (
            "`base` must be a schedule of the plain optimizer, got one of torchft's "
            f"{type(setup.base.optimizer).__name__}. Step the torchft optimizer in your loop."
        ),
    ),
    Rule(
        name="elastic-gradients",
        limit="With `TorchftReplicas`, `gradients` must say what the model does.",
        remedy="Pass `'shared'` under `torchft.DistributedDataParallel`, otherwise `'local'`.",
        applies=lambda setup: (
            setup.is_elastic and setup.settings.gradients != setup.torchft_gradients
        ),
        message=lambda setup: (
            f"`gradients` must be {setup.torchft_gradients!r} for this model, got "
            f"{setup.settings.gradients!r}. Over a torchft manager they are shared by "
            "torchft.DistributedDataParallel, and otherwise local."
        ),
    ),
    _fixed_when_elastic("scout", None),
    _fixed_when_elastic("guard", None),
    _fixed_when_elastic("outer", None),
    _fixed_when_elastic("overlap", 0),
    _fixed_when_elastic("compress", None),
    _fixed_when_elastic("optimizer_state", "keep"),
)

AVERAGING_RULES = (
    Rule(
        name="probe-shared-dials",
        limit="With shared gradients, a probe sees no effect of dials that act in training only.",
        remedy="Pass `gradients='local'`.",
        applies=lambda setup: (
            setup.settings.probe is not None
            and setup.settings.gradients == "shared"
            and bool(_training_dials(setup))
        ),
        message=lambda setup: (
            f"the probe cannot compare values of {', '.join(_training_dials(setup))}: with shared "
            "gradients all replicas have the same weights. Pass gradients='local'."
        ),
        is_warning=True,
    ),
    Rule(
        name="overlap-half-cycle",
        limit="`overlap` is at most half of `sync_every`.",
        remedy="Lower `overlap`, or raise `sync_every`.",
        applies=lambda setup: 2 * setup.settings.overlap > setup.settings.sync_every,
        message=lambda setup: (
            "`overlap` must be at most half of `sync_every` "
            f"({setup.settings.sync_every}), got {setup.settings.overlap}."
        ),
    ),
    Rule(
        name="overlap-optimizer-state",
        limit="`overlap` does not work with an averaged or reset optimizer state.",
        remedy="Pass `optimizer_state='keep'`.",
        applies=lambda setup: (
            bool(setup.settings.overlap) and setup.settings.optimizer_state != "keep"
        ),
        message=lambda setup: (
            f"`overlap` needs optimizer_state='keep', got {setup.settings.optimizer_state!r}. The "
            "optimizer state changes while the average is under way."
        ),
    ),
    Rule(
        name="compress-one-device",
        limit="`compress` does not work with `StackedReplicas`, which send nothing.",
        remedy="Pass `compress=None`.",
        applies=lambda setup: setup.settings.compress is not None and not setup.can_compress,
        message=lambda setup: (
            "`compress` must be None for replicas on one device, which send nothing, got "
            f"{setup.settings.compress!r}."
        ),
    ),
    Rule(
        name="outer-one-replica",
        limit="`outer` has no effect with one replica.",
        remedy="Use several replicas, or leave `outer` out.",
        applies=lambda setup: setup.settings.outer is not None and setup.num_replicas == 1,
        message=lambda _: "`outer` has no effect: it needs several replicas, got one.",
        is_warning=True,
    ),
)

LENGTH_RULES = (
    Rule(
        name="total-steps-schedule",
        limit="`total_steps` is at most the length of the base schedule.",
        remedy="Make a longer base schedule.",
        applies=_outlasts_schedule,
        message=lambda setup: (
            f"`total_steps` must be at most that of the base schedule ({setup.base.total_steps}), "
            f"got {setup.settings.total_steps}."
        ),
    ),
    Rule(
        name="sync-every-run-length",
        limit="With `sync_every` above `total_steps`, the controller never moves a knob.",
        remedy="Lower `sync_every`.",
        applies=_never_syncs_before_the_end,
        message=lambda setup: (
            f"`sync_every` ({setup.settings.sync_every}) is longer than the run "
            f"({setup.settings.total_steps} steps): replicas are averaged only at its end, and no "
            "knob moves. Pass a smaller sync_every."
        ),
        is_warning=True,
    ),
)

RULES = (
    *OPTIMIZER_RULES,
    *MODEL_RULES,
    *(_when_requested(rule) for rule in SCOUT_RULES),
    _needs_lr_knob("scout"),
    _needs_lr_knob("guard"),
    *ELASTIC_RULES,
    *AVERAGING_RULES,
    *LENGTH_RULES,
)
"""Every run is checked against these, in this order."""


def check_compatible(
    settings: Settings,
    base: BaseSchedule,
    replicas: Replicas,
    model: nn.Module | None,
    warn: Warn = warn,
) -> None:
    """Refuse settings that do not work with each other, the schedule, the engine or the model.

    Args:
        settings: The settings of the run.
        base: The schedule that the run wraps.
        replicas: The engine.
        model: The model, if it is given.
        warn: Raises a warning. A process that must be quiet passes one that does nothing.

    Raises:
        ValueError: If a rule is broken that is not a warning.
        TypeError: If `outer` does not make a torch optimizer.
    """
    if settings.outer is not None:
        describe_outer(settings.outer)
    setup = Setup(settings, base, replicas, model)
    for rule in RULES:
        if not rule.applies(setup):
            continue
        if not rule.is_warning:
            raise ValueError(rule.message(setup))
        warn(rule.message(setup))


def why_no_scout(
    settings: Settings, base: BaseSchedule, replicas: Replicas, model: nn.Module | None
) -> str | None:
    """Return why a scout cannot run here, requested or not; None if it can."""
    setup = Setup(settings, base, replicas, model)
    broken = first_broken(SCOUT_RULES, setup)
    return None if broken is None else broken.message(setup)


def drop_impossible_scout(
    settings: Settings,
    base: BaseSchedule,
    replicas: Replicas,
    model: nn.Module | None,
    warn: StartWarnings,
) -> Settings:
    """Leave out the default scout where it cannot run, and warn about it.

    Args:
        settings: The settings of the run, with a scout that the user did not ask for.
        base: The schedule that the run wraps.
        replicas: The engine.
        model: The model, if it is given.
        warn: The warnings of the construction.

    Returns:
        The settings, without the scout if it cannot run.
    """
    if settings.scout is None:
        return settings
    if base.step > 0:  # a scout starts at the first step or never
        return replace(settings, scout=None)
    setup = Setup(settings, base, replicas, model)
    broken = first_broken(DEFAULT_SCOUT_RULES, setup)
    if broken is None:
        return settings
    say = warn.of_model if broken.is_about_model else warn
    say(f"scout disabled: {broken.message(setup)}. The given learning rate is kept.")
    return replace(settings, scout=None)


def check_knobs(
    settings: Settings,
    knob_bank: KnobBank,
    groups: Sequence[str],
    num_replicas: int,
    warn: Warn = warn,
) -> None:
    """Refuse a knob with the name of a parameter group, and warn about too many knobs.

    Args:
        settings: The settings of the run.
        knob_bank: The knobs of the run.
        groups: The names of the parameter groups.
        num_replicas: Replicas of the run.
        warn: Raises a warning. A process that must be quiet passes one that does nothing.

    Raises:
        ValueError: If a knob has the name of a parameter group.
    """
    rates = {knob.name for knob in knob_bank.knobs if knob.info.groups}
    for knob in knob_bank.knobs:
        # A record names learning rates by their groups. A state names every knob.
        if not knob.info.groups and knob.name in {*rates, *groups}:
            raise ValueError(
                f"`knobs` must have names that no parameter group has, got {knob.name!r}."
            )
    most, num = num_replicas - 1, knob_bank.num_spread
    controller = settings.controller
    # A controller that wants permutations judges each knob alone; any other tells them apart.
    alone = controller is None or complete_controller(controller).default_design == "permutation"
    if num <= most or most == 0 or (alone and settings.design == "permutation"):
        return
    remedy = f"the knobs take turns, {most} in every cycle."
    if settings.design == "permutation":
        remedy = "no knob will move. Leave `design` unset, or use more replicas."
    warn(f"{num_replicas} replicas can compare {most} knob(s) at a time, got {num}: {remedy}")
