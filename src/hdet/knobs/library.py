"""The knobs that hdet offers: learning rate, weight decay, dropout and others."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from torch import nn
from typing_extensions import Unpack

from hdet._validation import check_number
from hdet.knobs.binding import Schedule
from hdet.knobs.dial import Dial
from hdet.knobs.layers import (
    DROPOUTS,
    SteeredCrossEntropyLoss,
    steer_dropout,
    steer_label_smoothing,
    steer_temperature,
)
from hdet.knobs.specs import (
    DEFAULT_SPREAD,
    Bounds,
    DialKnob,
    GroupKnob,
    Kind,
    LearningRate,
    check_known_groups,
    default_spread,
)

# What a user calls -----------------------------------------------------------------------------


def lr(
    *,
    spread: float | None = None,
    groups: Sequence[str] | None = None,
    shared: bool = False,
    bounds: Bounds = (1e-18, 1e18),
) -> LearningRate:
    """The learning rate of every parameter group, or of those named; one for all if `shared`.

    `spread` is that of the scheduler unless it is given. Bounds are factors of the base schedule.
    """
    return LearningRate(spread=spread, groups=groups, shared=shared, bounds=bounds)


class GroupOptions(TypedDict, total=False):
    """What every knob of parameter groups takes beside its bounds."""

    spread: float | None
    """By default 0.5 (2 for eps), in a linear space a tenth of the bounds."""
    space: Kind
    groups: Sequence[str] | None
    """Names of parameter groups; all of them unless given."""
    shared: bool
    """One knob for all of them (unless given), or one for each."""
    schedule: Schedule | None


def weight_decay(bounds: Bounds = (1e-6, 10.0), **options: Unpack[GroupOptions]) -> GroupKnob:
    """The weight decay of the groups that have one; groups without stay without."""
    return _group_knob("weight_decay", bounds, "log", options)


def momentum(bounds: Bounds = (0.05, 0.999), **options: Unpack[GroupOptions]) -> GroupKnob:
    """The momentum: that of SGD, or Adam's first beta. Under a base schedule that cycles momenta
    it is explored around them."""
    return _group_knob("momentum", bounds, "logit", options)


def betas(
    beta1: Bounds | None = (0.05, 0.999),
    beta2: Bounds | None = (0.5, 0.99999),
    **options: Unpack[GroupOptions],
) -> list[GroupKnob]:
    """Adam's betas, each within its bounds; None leaves one alone."""
    given = {"beta1": beta1, "beta2": beta2}
    return [
        _group_knob(name, bounds, "logit", options)
        for name, bounds in given.items()
        if bounds is not None
    ]


def eps(bounds: Bounds = (1e-12, 1e-1), **options: Unpack[GroupOptions]) -> GroupKnob:
    """The epsilon of Adam and its kind. It acts over decades, hence the wide spread."""
    return _group_knob("eps", bounds, "log", options, usual=2.0)


def _group_knob(
    name: str, bounds: Bounds, space: Kind, options: GroupOptions, usual: float = DEFAULT_SPREAD
) -> GroupKnob:
    space = options.get("space", space)
    spread = default_spread(name, options.get("spread"), space, bounds, usual)
    given: Any = {**options, "space": space, "spread": spread}
    return GroupKnob(name=name, key=name, bounds=bounds, **given)


def dropout(
    model: nn.Module,
    bounds: Bounds = (0.01, 0.9),
    *,
    spread: float | None = None,
    space: Kind = "logit",
    groups: Sequence[str] | None = None,
    shared: bool = True,
    schedule: Schedule | None = None,
) -> DialKnob:
    """The probability of the nn.Dropout layers of a model, or of those below the named modules.

    Replaces the layers' code in place, so that a new probability compiles nothing; the state_dict
    stays as it is. Call it before the model is stacked or compiled.
    """
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) in DROPOUTS or type(layer) in DROPOUTS.values()
    }
    if not layers:
        raise ValueError("`model` must have nn.Dropout layers for knob 'dropout', got none.")
    fixed = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention) and module.dropout
    ]
    if fixed:
        warnings.warn(
            f"the dropout inside nn.MultiheadAttention stays as it is ({fixed[0]!r}): torch takes "
            "it as a number.",
            stacklevel=2,
        )
    others = [
        f"{name!r} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, tuple(DROPOUTS)) and name not in layers
    ]
    if others:
        warnings.warn(
            f"dropout stays as it is in {others[0]}: what a class of your own does with it is not "
            "known.",
            stacklevel=2,
        )
    parts = _layers_by_name("dropout", layers, groups, shared)
    return DialKnob(
        name="dropout",
        bounds=bounds,
        spread=default_spread("dropout", spread, space, bounds),
        space=space,
        schedule=schedule,
        dials={name: steer_dropout(part) for name, part in parts.items()},
        trains_only=True,
    )


def label_smoothing(
    criterion: nn.CrossEntropyLoss,
    bounds: Bounds = (1e-3, 0.9),
    *,
    spread: float | None = None,
    space: Kind = "logit",
    schedule: Schedule | None = None,
) -> DialKnob:
    """The label smoothing of a cross-entropy. A probe is scored without any."""
    if type(criterion) not in (nn.CrossEntropyLoss, SteeredCrossEntropyLoss):
        raise TypeError(
            "`criterion` must be an nn.CrossEntropyLoss itself, whose forward is known, got "
            f"{criterion!r}."
        )
    return DialKnob(
        name="label_smoothing",
        bounds=bounds,
        spread=default_spread("label_smoothing", spread, space, bounds),
        space=space,
        schedule=schedule,
        dials={"label_smoothing": steer_label_smoothing(criterion)},
        rest=0.0,
        trains_only=True,
    )


def attention_temperature(
    model: nn.Module,
    bounds: Bounds = (0.05, 20.0),
    *,
    start: float = 1.0,
    spread: float = DEFAULT_SPREAD,
    groups: Sequence[str] | None = None,
    shared: bool = True,
    schedule: Schedule | None = None,
) -> DialKnob:
    """What the scores of attention are divided by before the softmax; 1 is what the model does.

    It acts on `scaled_dot_product_attention` and nn.MultiheadAttention, anywhere in the model or
    below the modules that `groups` names. Call it before the model is stacked or compiled.
    """
    if groups is None:
        # Of DDP the module inside: a probe calls that one.
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        parts = {"attention_temperature": [model]}
    else:
        modules = dict(model.named_modules())
        check_known_groups("attention_temperature", groups, list(modules))
        each = {name: [modules[name]] for name in groups}
        _check_not_nested(groups)
        parts = _join_if_shared("attention_temperature", each, shared)
    return DialKnob(
        name="attention_temperature",
        bounds=bounds,
        spread=spread,
        space="log",
        schedule=schedule,
        dials={name: steer_temperature(part, start) for name, part in parts.items()},
    )


def gradient_clip(
    max_norm: float,
    bounds: Bounds | None = None,
    *,
    spread: float = DEFAULT_SPREAD,
    schedule: Schedule | None = None,
) -> DialKnob:
    """Clip the gradient's norm before every optimizer step, instead of a call in the loop."""
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


def _check_not_nested(groups: Sequence[str]) -> None:
    """No group lies inside of another: there attention would be divided twice."""
    for outer in groups:
        for inner in groups:
            if inner != outer and f"{inner}.".startswith(f"{outer}." if outer else ""):
                raise ValueError(
                    "`groups` of knob 'attention_temperature' must lie beside each other, got "
                    f"{inner!r} inside of {outer!r}."
                )


def _layers_by_name(
    knob: str, layers: Mapping[str, nn.Module], groups: Sequence[str] | None, shared: bool
) -> dict[str, list[nn.Module]]:
    """The layers of each handle: all, or those below the modules that are named."""
    if groups is None:
        each = layers.items() if not shared else []
        return {f"{knob}/{name}": [layer] for name, layer in each} or {knob: list(layers.values())}
    if isinstance(groups, str):
        raise TypeError(f"`groups` of knob {knob!r} must be a list of names, got {groups!r}.")
    found = {
        group: [layer for name, layer in layers.items() if f"{name}.".startswith(f"{group}.")]
        for group in groups
    }
    for group, below in found.items():
        if not below:
            raise ValueError(
                f"`groups` of knob {knob!r} must have layers, got {group!r} with none."
            )
    return _join_if_shared(knob, found, shared)


def _join_if_shared(
    knob: str, each: Mapping[str, list[nn.Module]], shared: bool
) -> dict[str, list[nn.Module]]:
    if shared:
        return {knob: [module for part in each.values() for module in part]}
    return {f"{knob}/{name}": part for name, part in each.items()}
