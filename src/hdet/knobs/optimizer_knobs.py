"""Knobs of the optimizer: learning rate, weight decay, momentum, betas, eps, gradient clipping."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

from hdet._validation import check_number
from hdet.knobs.binding import Schedule
from hdet.knobs.dial import Dial
from hdet.knobs.dial_knob import DialKnob
from hdet.knobs.group_knob import GroupKnob
from hdet.knobs.specs import DEFAULT_SPREAD, Bounds, Kind, LearningRate, default_spread


def lr(
    *,
    spread: float | Mapping[str, float] | None = None,
    groups: Sequence[str] | None = None,
    shared: bool = False,
    bounds: Bounds = (1e-18, 1e18),
) -> LearningRate:
    """Explore the learning rate around the base schedule.

    Args:
        spread: How far the replicas' learning rates lie from their centre: one number, or a
            dictionary from the name of a group to its number. By default, and for groups that the
            dictionary lacks, the scheduler's `spread`.
        groups: Names of parameter groups; all of them by default. The name of a group is its entry
            "name", or "group0", "group1" and so on.
        shared: Whether all groups share one factor. By default each group has its own.
        bounds: The lowest and the highest factor of the base schedule.

    Returns:
        A knob for `knobs=`.

    Raises:
        TypeError: `bounds` are not two values.
        ValueError: `bounds` do not contain 1, `spread` is negative, or it is a dictionary where all
            groups share one factor.

    Example:
        >>> lr(shared=True, bounds=(0.1, 10.0)).bounds
        (0.1, 10.0)
    """
    return LearningRate(spread=spread, groups=groups, shared=shared, bounds=bounds)


class GroupOptions(TypedDict, total=False):
    """The options of every knob on a setting of parameter groups.

    Attributes:
        spread: How far the replicas' values lie from their centre. By default 0.5 (2 for `eps`); in
            a linear space a tenth of the bounds.
        space: Where steps have equal size: "log", "linear" or "logit".
        groups: Names of parameter groups; all of them by default.
        shared: Whether all groups share one knob, which is the default.
        schedule: step -> the factor of the start value at that step.
    """

    spread: float | None
    space: Kind
    groups: Sequence[str] | None
    shared: bool
    schedule: Schedule | None


def weight_decay(bounds: Bounds = (1e-6, 10.0), **options: Unpack[GroupOptions]) -> GroupKnob:
    """Explore the weight decay. Groups without weight decay stay without.

    Args:
        bounds: The lowest and the highest weight decay.
        **options: `spread`, `space`, `groups`, `shared` and `schedule`, as in `GroupOptions`.

    Returns:
        A knob for `knobs=`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `bounds` do not fit the space, or `spread` is negative.

    Example:
        >>> knob = weight_decay((1e-4, 1.0), spread=1.0)
        >>> knob.name, knob.space, knob.spread
        ('weight_decay', 'log', 1.0)
    """
    return _group_knob("weight_decay", bounds, "log", options)


def momentum(bounds: Bounds = (0.05, 0.999), **options: Unpack[GroupOptions]) -> GroupKnob:
    """Explore the momentum: the entry of SGD, or the first of Adam's betas.

    If the base schedule cycles the momentum, as OneCycleLR does, the replicas explore around the
    scheduled value.

    Args:
        bounds: The lowest and the highest momentum.
        **options: `spread`, `space`, `groups`, `shared` and `schedule`, as in `GroupOptions`.

    Returns:
        A knob for `knobs=`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `bounds` do not fit the space, or `spread` is negative.

    Example:
        >>> momentum().space
        'logit'
    """
    return _group_knob("momentum", bounds, "logit", options)


def betas(
    beta1: Bounds | None = (0.05, 0.999),
    beta2: Bounds | None = (0.5, 0.99999),
    **options: Unpack[GroupOptions],
) -> list[GroupKnob]:
    """Explore Adam's betas, each as a knob of its own.

    Args:
        beta1: The lowest and the highest first beta; None does not explore it.
        beta2: The lowest and the highest second beta; None does not explore it.
        **options: `spread`, `space`, `groups`, `shared` and `schedule`, as in `GroupOptions`.

    Returns:
        A list of knobs, as one entry for `knobs=`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `bounds` do not fit the space, or `spread` is negative.

    Example:
        >>> betas(beta1=None)[0].name
        'beta2'
    """
    given = {"beta1": beta1, "beta2": beta2}
    return [
        _group_knob(name, bounds, "logit", options)
        for name, bounds in given.items()
        if bounds is not None
    ]


def eps(bounds: Bounds = (1e-12, 1e-1), **options: Unpack[GroupOptions]) -> GroupKnob:
    """Explore the epsilon of Adam and similar optimizers.

    Epsilon has an effect over decades only, so that the default spread is 2.

    Args:
        bounds: The lowest and the highest epsilon.
        **options: `spread`, `space`, `groups`, `shared` and `schedule`, as in `GroupOptions`.

    Returns:
        A knob for `knobs=`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `bounds` do not fit the space, or `spread` is negative.

    Example:
        >>> eps().spread
        2.0
    """
    return _group_knob("eps", bounds, "log", options, default=2.0)


def _group_knob(
    name: str, bounds: Bounds, space: Kind, options: GroupOptions, default: float = DEFAULT_SPREAD
) -> GroupKnob:
    space = options.get("space", space)
    spread = default_spread(name, options.get("spread"), space, bounds, default)
    given: Any = {**options, "space": space, "spread": spread}
    return GroupKnob(name=name, key=name, bounds=bounds, **given)


def gradient_clip(
    max_norm: float,
    bounds: Bounds | None = None,
    *,
    spread: float = DEFAULT_SPREAD,
    schedule: Schedule | None = None,
) -> DialKnob:
    """Clip the norm of the gradient before every optimizer step, and explore the highest norm.

    This replaces `torch.nn.utils.clip_grad_norm_` in the training loop.

    Args:
        max_norm: The highest norm at the start.
        bounds: The lowest and the highest value of `max_norm`. By default from a hundredth to a
            hundred times its start value.
        spread: How far the replicas' values lie from their centre.
        schedule: step -> the factor of the start value at that step.

    Returns:
        A knob for `knobs=`.

    Raises:
        TypeError: `max_norm` is no number.
        ValueError: `max_norm` is not above 0.

    Example:
        >>> gradient_clip(1.0).bounds
        (0.01, 100.0)
    """
    check_number("max_norm", max_norm)
    if not max_norm > 0:
        raise ValueError(f"`max_norm` must be above 0, got {max_norm!r}.")
    return DialKnob(
        name="gradient_clip",
        bounds=bounds or (max_norm / 100, max_norm * 100),
        spread=spread,
        space="log",
        schedule=schedule,
        dials={"gradient_clip": {Dial(max_norm): float(max_norm)}},
        clips=True,
    )
