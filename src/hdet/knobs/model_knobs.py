"""Knobs of a model and its loss: dropout, label smoothing, attention temperature."""

from collections.abc import Mapping, Sequence

from torch import nn

from hdet._messages import launched_first, warn
from hdet.knobs.binding import Schedule
from hdet.knobs.dial_knob import DialKnob
from hdet.knobs.layers import (
    DROPOUTS,
    SteeredCrossEntropyLoss,
    steer_dropout,
    steer_label_smoothing,
    steer_temperature,
)
from hdet.knobs.specs import DEFAULT_SPREAD, Bounds, Kind, check_known_groups, default_spread


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
    """Explore the probability of a model's nn.Dropout layers.

    The layers change in place, so that a new probability compiles nothing. The state_dict stays as
    it is. Call this before the model is stacked or compiled.

    Args:
        model: The model.
        bounds: The lowest and the highest probability.
        spread: How far the replicas' values lie from their centre. By default 0.5; in a linear
            space a tenth of the bounds.
        space: Where steps have equal size: "logit", "log" or "linear".
        groups: Names of modules; only layers inside of these are explored. By default all layers.
        shared: Whether all groups share one knob. With False, each group has its own, or each layer
            without `groups`.
        schedule: step -> the factor of the start value at that step.

    Returns:
        A knob for `knobs=`.

    Raises:
        TypeError: `groups` is no list of names.
        ValueError: The model, or one of the groups, has no nn.Dropout layers, or the model was
            stacked before.

    Warns:
        UserWarning: Some dropout stays as it is: that of nn.MultiheadAttention, or of a subclass of
            nn.Dropout.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.2))
        >>> dropout(model).name
        'dropout'
    """
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) in DROPOUTS or type(layer) in DROPOUTS.values()
    }
    if not layers:
        raise ValueError("`model` must have nn.Dropout layers for knob 'dropout', got none.")
    _warn_of_fixed_dropout(model, layers)
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


def _warn_of_fixed_dropout(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Warn of dropout that the knob does not change, on the first process."""
    if not launched_first():
        return
    fixed = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention) and module.dropout
    ]
    if fixed:
        warn(
            f"the dropout inside nn.MultiheadAttention ({fixed[0]!r}) is not steered: torch takes "
            "it as a number."
        )
    others = [
        f"{name!r} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, tuple(DROPOUTS)) and name not in layers
    ]
    if others:
        warn(
            f"the dropout in {others[0]} is not steered: hdet does not know what a subclass of "
            "nn.Dropout does."
        )


def label_smoothing(
    criterion: nn.CrossEntropyLoss,
    bounds: Bounds = (1e-3, 0.9),
    *,
    spread: float | None = None,
    space: Kind = "logit",
    schedule: Schedule | None = None,
) -> DialKnob:
    """Explore the label smoothing of a cross-entropy. A probe scores replicas without smoothing.

    The criterion changes in place. Call this before it is stacked or compiled.

    Args:
        criterion: The loss, which must smooth labels already: a start value of 0 cannot move.
        bounds: The lowest and the highest smoothing.
        spread: How far the replicas' values lie from their centre. By default 0.5; in a linear
            space a tenth of the bounds.
        space: Where steps have equal size: "logit", "log" or "linear".
        schedule: step -> the factor of the start value at that step.

    Returns:
        A knob for `knobs=`.

    Raises:
        TypeError: `criterion` is no nn.CrossEntropyLoss, or a subclass of it.

    Example:
        >>> label_smoothing(nn.CrossEntropyLoss(label_smoothing=0.1)).name
        'label_smoothing'
    """
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
        probe_value=0.0,
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
    """Explore the temperature of attention: scores are divided by it before the softmax.

    It acts on `scaled_dot_product_attention` and on nn.MultiheadAttention. The modules' forward
    functions change in place. Call this before the model is stacked or compiled.

    Args:
        model: The model.
        bounds: The lowest and the highest temperature.
        start: The start value. 1 is the model without the knob.
        spread: How far the replicas' temperatures lie from their centre.
        groups: Names of modules; only attention inside of these is explored. By default all.
        shared: Whether all groups share one knob. With False, each group has its own.
        schedule: step -> the factor of the start value at that step.

    Returns:
        A knob for `knobs=`.

    Raises:
        TypeError: `groups` is no list of names.
        ValueError: A group is unknown or lies inside of another one, or the model was stacked
            before.

    Example:
        >>> attention_temperature(nn.MultiheadAttention(4, 2), spread=0.2).spread
        0.2
    """
    if groups is None:
        # A probe calls the module inside of DDP.
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


def _check_not_nested(groups: Sequence[str]) -> None:
    """Raise a ValueError if a group lies inside of another: scores would be divided twice."""
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
    """Name of a knob -> its layers: all layers, or those inside of the modules in `groups`."""
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
                f"`groups` of knob {knob!r} must contain dropout layers, got {group!r} with none."
            )
    return _join_if_shared(knob, found, shared)


def _join_if_shared(
    knob: str, each: Mapping[str, list[nn.Module]], shared: bool
) -> dict[str, list[nn.Module]]:
    if shared:
        return {knob: [module for part in each.values() for module in part]}
    return {f"{knob}/{name}": part for name, part in each.items()}
