"""What a run may explore: the knobs that a user names.

A knob says what it is called, in which space it lives, between which bounds, and how far replicas
are spread. Bound to a run it becomes a handle (handles.py).
"""

import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from hdet.dials import (
    DROPOUTS,
    Dial,
    SteeredCrossEntropyLoss,
    clip_by,
    steer_dropout,
    steer_label_smoothing,
    steer_temperature,
)
from hdet.groups import Key, read_setting, use_tensor, write_setting
from hdet.handles import Bench, Handle, Schedule, on_rim
from hdet.space import Space
from hdet.steering import Explored
from hdet.validation import check_number, check_range

Kind = Literal["log", "linear", "logit"]
Bounds = tuple[float, float]
SPREAD = 0.5
"""Replicas reach from 1 / 1.5 to 1.5 times the centre."""


@dataclass(frozen=True, kw_only=True)
class _Spec:
    """What all knobs have in common."""

    name: str
    space: Kind
    bounds: Bounds
    spread: float
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"`name` must be a text, got {self.name!r}.")
        _check_two(self.name, self.bounds)
        try:
            self._space()
        except (TypeError, ValueError) as error:
            raise type(error)(f"knob {self.name!r}: {error}") from None
        check_number("spread", self.spread)
        if not 0 <= self.spread < math.inf:
            raise ValueError(
                f"`spread` of knob {self.name!r} must be 0 or more, got {self.spread!r}."
            )
        if self.schedule is not None and not callable(self.schedule):
            raise TypeError(f"`schedule` must be a function of the step, got {self.schedule!r}.")

    def _space(self) -> Space:
        return Space(self.space, *self.bounds)

    def bind(self, bench: Bench) -> list[Handle]:
        """The handles of this knob in a run: one, or one for each of its groups."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """What replicas must have in common, and what the record keeps."""
        return {
            "name": self.name,
            "space": self.space,
            "bounds": list(self.bounds),
            "spread": self.spread,
            "scheduled": self.schedule is not None,
        }


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate: explored around the base schedule, with bounds of a factor."""

    spread: float | None = None
    groups: Sequence[str] | None = None
    shared: bool = False
    bounds: Bounds = (1e-18, 1e18)
    name: str = "lr"

    def __post_init__(self) -> None:
        if self.spread is not None:
            check_range("spread", self.spread, least=0, below=math.inf)
        _check_two(self.name, self.bounds)
        Space("log", *self.bounds)
        if not self.bounds[0] <= 1 <= self.bounds[1]:
            raise ValueError(
                "`bounds` of knob 'lr' are factors of the base schedule and must contain 1, got "
                f"{self.bounds!r}."
            )

    def describe(self) -> dict[str, Any]:
        chosen = None if self.groups is None else list(self.groups)
        own = {"spread": self.spread, "groups": chosen, "shared": self.shared}
        return {"name": self.name, "bounds": list(self.bounds), **own}


class Knob(_Spec):
    """Any number of yours: `get()` reads it, `set(value)` turns it.

    Where a process has several replicas (on one device) both speak of a tensor with one value for
    each. `bounds` are needed, `space` says in what steps are even: "log", "linear" or "logit".
    """

    get: Callable[[], Any]
    set: Callable[[Any], None]

    def __init__(
        self,
        name: str,
        get: Callable[[], Any],
        set: Callable[[Any], None],  # noqa: A002 (it is what a user calls it)
        *,
        bounds: Bounds,
        space: Kind = "linear",
        spread: float | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        for key, function in (("get", get), ("set", set)):
            if not callable(function):
                raise TypeError(f"`{key}` of knob {name!r} must be a function, got {function!r}.")
        width = _spread(name, spread, space, bounds)
        super().__init__(name=name, space=space, bounds=bounds, spread=width, schedule=schedule)
        object.__setattr__(self, "get", get)
        object.__setattr__(self, "set", set)

    def bind(self, bench: Bench) -> list[Handle]:
        num, device = len(bench.optimizers), bench.device

        dial = getattr(self.get, "__self__", None)
        dials = [dial] if isinstance(dial, Dial) else []
        for one in dials:
            one.place(num, device)

        def write(target: int, values: Sequence[float], centre: float) -> None:
            self.set(values[0] if num == 1 else torch.tensor(values, device=device))
            for one in dials:
                one.alone.fill_(centre)

        def read(target: int) -> list[float]:
            told = self.get()
            try:
                seen = torch.as_tensor(told, dtype=torch.float64).flatten().tolist()
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(
                    f"`get` of knob {self.name!r} must return a number, got {told!r}."
                ) from None
            return seen * num if len(seen) == 1 else seen

        start = read(0)[0]
        return [
            Handle(
                self.name,
                self._space(),
                self.spread,
                [start],
                write,
                read,
                self.schedule,
                dials=dials,
                places=frozenset(dials),
            )
        ]


@dataclass(frozen=True, kw_only=True)
class GroupKnob(_Spec):
    """A setting of the optimizer's parameter groups."""

    key: str
    groups: Sequence[str] | None = None
    shared: bool = True

    def bind(self, bench: Bench) -> list[Handle]:
        chosen = [bench.names.index(name) for name in chosen_groups(self, bench.names)]
        first = bench.optimizers[0].param_groups
        key = _resolved(self.key, first[chosen[0]])
        for index in chosen:
            if _lacks(first[index], key):
                raise ValueError(
                    f"knob {self.name!r} needs an optimizer with {key[0]!r} in its groups, got "
                    f"{type(bench.optimizers[0]).__name__}."
                )
        moving = [i for i in chosen if not on_rim(self._space(), _start(bench, i, key))]
        if not moving or (self.groups is not None and len(moving) < len(chosen)):
            raise ValueError(
                f"knob {self.name!r} must start above 0 in a {self.space} space, got 0 in "
                f"{'one of its' if moving else 'all'} groups."
            )
        parts = [moving] if self.shared else [[index] for index in moving]
        return [self._handle(bench, key, part) for part in parts]

    def _handle(self, bench: Bench, key: Key, part: list[int]) -> Handle:
        def write(target: int, values: Sequence[float], centre: float) -> None:
            for optimizer, value in zip(bench.optimizers, values, strict=True):
                group = optimizer.param_groups[part[target]]
                use_tensor(group, key)
                write_setting(group, key, value)

        def read(target: int) -> list[float]:
            each = [optimizer.param_groups[part[target]] for optimizer in bench.optimizers]
            return [read_setting(group, key) for group in each]

        name = self.name if self.shared else f"{self.name}/{bench.names[part[0]]}"
        bases = [_start(bench, index, key) for index in part]
        return Handle(
            name,
            self._space(),
            self.spread,
            bases,
            write,
            read,
            self.schedule,
            places=frozenset((key, index) for index in part),
            setting=key[0],
            follows=part if _cycled(bench, key) else (),
        )

    def describe(self) -> dict[str, Any]:
        chosen = None if self.groups is None else list(self.groups)
        return {**super().describe(), "groups": chosen, "shared": self.shared}


@dataclass(frozen=True, kw_only=True)
class DialKnob(_Spec):
    """Dials in a model or a loss, which one call has put there."""

    dials: Mapping[str, Mapping[Dial, float]] = field(default_factory=dict)
    """Under each name (one, or those of the groups): dials and their start values."""
    rest: float | None = None
    clips: bool = False
    trains_only: bool = False
    """Whether it acts in training alone: a score knows it by what it has done to the weights."""

    def bind(self, bench: Bench) -> list[Handle]:
        handles = [self._handle(bench, name, starts) for name, starts in self.dials.items()]
        if self.clips:
            self._clip(bench, handles[0])
        return handles

    def _handle(self, bench: Bench, name: str, starts: Mapping[Dial, float]) -> Handle:
        dials = [dial for dial, start in starts.items() if not on_rim(self._space(), start)]
        if not dials:
            raise ValueError(
                f"knob {name!r} must start strictly inside of its {self.space} space, got "
                f"{', '.join(f'{start:g}' for start in starts.values())}."
            )
        for dial in starts:
            dial.place(len(bench.optimizers), bench.device)

        def write(target: int, values: Sequence[float], centre: float) -> None:
            turned = torch.tensor(values) if len(values) > 1 else values[0]
            dials[target].set(turned, centre)

        def read(target: int) -> list[float]:
            return [float(value) for value in dials[target].values]

        return Handle(
            name,
            self._space(),
            self.spread,
            [starts[dial] for dial in dials],
            write,
            read,
            self.schedule,
            () if self.clips else dials,
            self.rest,
            frozenset(map(id, dials)),
        )

    def _clip(self, bench: Bench, handle: Handle) -> None:
        """Clip before every step, as long as the run that turns the knob exists."""
        (dial,) = next(iter(self.dials.values()))
        weakly = weakref.ref(handle)
        in_place = len(bench.optimizers) == 1
        for replica, optimizer in enumerate(bench.optimizers):

            def clip(stepped: Optimizer, args: Any, options: Any, replica: int = replica) -> None:
                if weakly() is None:
                    return
                if options.get("closure") is not None or any(a is not None for a in args[1:]):
                    raise ValueError(
                        "`closure` must be None with hdet.gradient_clip: gradients are clipped "
                        "before the step, and a closure makes new ones in it."
                    )
                clip_by(
                    [p for group in stepped.param_groups for p in group["params"]],
                    dial.values[replica],
                    scale=getattr(stepped, "grad_scale", None),
                    in_place=in_place,
                )

            optimizer.register_step_pre_hook(clip)


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
    name: str, bounds: Bounds, space: Kind, options: GroupOptions, usual: float = SPREAD
) -> GroupKnob:
    space = options.get("space", space)
    spread = _spread(name, options.get("spread"), space, bounds, usual)
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
    parts = _parts("dropout", layers, groups, shared)
    return DialKnob(
        name="dropout",
        bounds=bounds,
        spread=_spread("dropout", spread, space, bounds),
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
        spread=_spread("label_smoothing", spread, space, bounds),
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
    spread: float = SPREAD,
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
        _check_known("attention_temperature", groups, list(modules))
        each = {name: [modules[name]] for name in groups}
        _check_beside(groups)
        parts = _joined("attention_temperature", each, shared)
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
    spread: float = SPREAD,
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


# Binding them all ------------------------------------------------------------------------------


def flattened(knobs: Any) -> list[Any]:
    """The knobs of a run; a factory may have made several."""
    if isinstance(knobs, (LearningRate, _Spec)) or not isinstance(knobs, (list, tuple)):
        knobs = [knobs]
    flat = [one for knob in knobs for one in (knob if isinstance(knob, (list, tuple)) else [knob])]
    for knob in flat:
        if not isinstance(knob, (LearningRate, _Spec)):
            raise TypeError(
                f"`knobs` must be knobs such as hdet.lr() or hdet.weight_decay(), got {knob!r}."
            )
    if sum(isinstance(knob, LearningRate) for knob in flat) > 1:
        raise ValueError("`knobs` must hold hdet.lr() at most once: name its groups there.")
    return flat


def explored_rates(knobs: Sequence[Any], names: Sequence[str], spread: float) -> list[Explored]:
    """The learning rates that are explored: one for each group, or one for all."""
    for knob in knobs:
        if isinstance(knob, LearningRate):
            chosen = chosen_groups(knob, names)
            width = spread if knob.spread is None else knob.spread
            space = Space("log", *knob.bounds)
            if knob.shared:
                members = tuple(names.index(name) for name in chosen)
                return [Explored("lr", space, width, 1.0, members)]
            return [
                Explored(f"lr/{name}", space, width, 1.0, (names.index(name),)) for name in chosen
            ]
    return []


def bind(knobs: Sequence[Any], bench: Bench) -> list[Handle]:
    """The handles of all knobs beside the learning rate."""
    return [handle for knob in knobs if isinstance(knob, _Spec) for handle in knob.bind(bench)]


def chosen_groups(knob: GroupKnob | LearningRate, names: Sequence[str]) -> Sequence[str]:
    """The parameter groups a knob is for."""
    if knob.groups is not None and len(set(knob.groups)) < len(knob.groups):
        raise ValueError(f"`groups` of knob {knob.name!r} must be different, got {knob.groups!r}.")
    if knob.groups is None:
        return names
    _check_known(knob.name, knob.groups, names)
    return knob.groups


def _check_known(knob: str, groups: Sequence[str], names: Sequence[str]) -> None:
    if isinstance(groups, str) or not groups:
        raise TypeError(f"`groups` of knob {knob!r} must be a list of names, got {groups!r}.")
    for name in groups:
        if name not in names:
            raise ValueError(
                f"`groups` of knob {knob!r} must be among {list(names)[:20]}, got {name!r}."
            )


def _check_beside(groups: Sequence[str]) -> None:
    """No group lies inside of another: there attention would be divided twice."""
    for outer in groups:
        for inner in groups:
            if inner != outer and f"{inner}.".startswith(f"{outer}." if outer else ""):
                raise ValueError(
                    "`groups` of knob 'attention_temperature' must lie beside each other, got "
                    f"{inner!r} inside of {outer!r}."
                )


def _parts(
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
    return _joined(knob, found, shared)


def _joined(
    knob: str, each: Mapping[str, list[nn.Module]], shared: bool
) -> dict[str, list[nn.Module]]:
    if shared:
        return {knob: [module for part in each.values() for module in part]}
    return {f"{knob}/{name}": part for name, part in each.items()}


def _spread(
    name: str, given: float | None, space: Kind, bounds: Bounds, usual: float = SPREAD
) -> float:
    """What was given; else a tenth of the bounds where steps are linear, or what is usual."""
    if given is not None:
        return given
    if space != "linear":
        return usual
    _check_two(name, bounds)
    width = (bounds[1] - bounds[0]) / 10
    if width == math.inf:
        raise ValueError(f"`spread` of knob {name!r} must be given where its bounds are infinite.")
    return width


def _check_two(name: str, bounds: Any) -> None:
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise TypeError(f"`bounds` of knob {name!r} must be two numbers, got {bounds!r}.")


def _start(bench: Bench, index: int, key: Key) -> float:
    """Of a group's setting; replicas on a device have what a schedule has written from their first
    step on only."""
    if momenta := _cycled(bench, key):
        return momenta[index]
    return read_setting(bench.optimizers[0].param_groups[index], key)


def _cycled(bench: Bench, key: Key) -> Sequence[float] | None:
    """What the base schedule makes of a setting in every group, if it cycles it."""
    return bench.momenta if key in (("momentum", None), ("betas", 0)) else None


def _resolved(key: str, group: Mapping[str, Any]) -> Key:
    """Where a setting lies: momentum is SGD's own entry, or the first of Adam's betas."""
    if key == "momentum" and "betas" in group:
        return "betas", 0
    if key in ("beta1", "beta2"):
        return "betas", int(key[-1]) - 1
    return key, None


def _lacks(group: Mapping[str, Any], key: Key) -> bool:
    value, place = group.get(key[0]), key[1]
    if place is None:
        return not isinstance(value, (int, float, Tensor))
    return not isinstance(value, (tuple, list)) or len(value) <= place
