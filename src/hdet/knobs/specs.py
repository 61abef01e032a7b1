"""What a run may explore: the knobs that a user names.

A knob says what it is called, in which space it lives, between which bounds, and how far replicas
are spread. Bound to a run it becomes a handle (handles.py).
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet._validation import check_number, check_range
from hdet.control.knob_state import KnobInfo
from hdet.control.space import Space
from hdet.knobs.binding import BindingContext, BoundKnob, Schedule, on_rim
from hdet.knobs.dial import Dial
from hdet.knobs.layers import (
    clip_by,
)
from hdet.knobs.param_groups import Key, read_setting, use_tensor, write_setting

Kind = Literal["log", "linear", "logit"]
Bounds = tuple[float, float]
DEFAULT_SPREAD = 0.5
"""Replicas reach from 1 / 1.5 to 1.5 times the centre."""


@dataclass(frozen=True, kw_only=True)
class KnobSpec:
    """What all knobs have in common."""

    name: str
    space: Kind
    bounds: Bounds
    spread: float
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"`name` must be a text, got {self.name!r}.")
        check_bounds(self.name, self.bounds)
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

    def bind(self, bench: BindingContext) -> list[BoundKnob]:
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
        check_bounds(self.name, self.bounds)
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


class Knob(KnobSpec):
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
        width = default_spread(name, spread, space, bounds)
        super().__init__(name=name, space=space, bounds=bounds, spread=width, schedule=schedule)
        object.__setattr__(self, "get", get)
        object.__setattr__(self, "set", set)

    def bind(self, bench: BindingContext) -> list[BoundKnob]:
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
            BoundKnob(
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
class GroupKnob(KnobSpec):
    """A setting of the optimizer's parameter groups."""

    key: str
    groups: Sequence[str] | None = None
    shared: bool = True

    def bind(self, bench: BindingContext) -> list[BoundKnob]:
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

    def _handle(self, bench: BindingContext, key: Key, part: list[int]) -> BoundKnob:
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
        return BoundKnob(
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
class DialKnob(KnobSpec):
    """Dials in a model or a loss, which one call has put there."""

    dials: Mapping[str, Mapping[Dial, float]] = field(default_factory=dict)
    """Under each name (one, or those of the groups): dials and their start values."""
    rest: float | None = None
    clips: bool = False
    trains_only: bool = False
    """Whether it acts in training alone: a score knows it by what it has done to the weights."""

    def bind(self, bench: BindingContext) -> list[BoundKnob]:
        handles = [self._handle(bench, name, starts) for name, starts in self.dials.items()]
        if self.clips:
            self._clip(bench, handles[0])
        return handles

    def _handle(self, bench: BindingContext, name: str, starts: Mapping[Dial, float]) -> BoundKnob:
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

        return BoundKnob(
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

    def _clip(self, bench: BindingContext, handle: BoundKnob) -> None:
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


# Binding them all ------------------------------------------------------------------------------


def flatten_knobs(knobs: Any) -> list[Any]:
    """The knobs of a run; a factory may have made several."""
    if isinstance(knobs, (LearningRate, KnobSpec)) or not isinstance(knobs, (list, tuple)):
        knobs = [knobs]
    flat = [one for knob in knobs for one in (knob if isinstance(knob, (list, tuple)) else [knob])]
    for knob in flat:
        if not isinstance(knob, (LearningRate, KnobSpec)):
            raise TypeError(
                f"`knobs` must be knobs such as hdet.lr() or hdet.weight_decay(), got {knob!r}."
            )
    if sum(isinstance(knob, LearningRate) for knob in flat) > 1:
        raise ValueError("`knobs` must hold hdet.lr() at most once: name its groups there.")
    return flat


def lr_knobs(knobs: Sequence[Any], names: Sequence[str], spread: float) -> list[KnobInfo]:
    """The learning rates that are explored: one for each group, or one for all."""
    for knob in knobs:
        if isinstance(knob, LearningRate):
            chosen = chosen_groups(knob, names)
            width = spread if knob.spread is None else knob.spread
            space = Space("log", *knob.bounds)
            if knob.shared:
                members = tuple(names.index(name) for name in chosen)
                return [KnobInfo("lr", space, width, 1.0, members)]
            return [
                KnobInfo(f"lr/{name}", space, width, 1.0, (names.index(name),)) for name in chosen
            ]
    return []


def bind_knobs(knobs: Sequence[Any], bench: BindingContext) -> list[BoundKnob]:
    """The handles of all knobs beside the learning rate."""
    return [handle for knob in knobs if isinstance(knob, KnobSpec) for handle in knob.bind(bench)]


def chosen_groups(knob: GroupKnob | LearningRate, names: Sequence[str]) -> Sequence[str]:
    """The parameter groups a knob is for."""
    if knob.groups is not None and len(set(knob.groups)) < len(knob.groups):
        raise ValueError(f"`groups` of knob {knob.name!r} must be different, got {knob.groups!r}.")
    if knob.groups is None:
        return names
    check_known_groups(knob.name, knob.groups, names)
    return knob.groups


def check_known_groups(knob: str, groups: Sequence[str], names: Sequence[str]) -> None:
    if isinstance(groups, str) or not groups:
        raise TypeError(f"`groups` of knob {knob!r} must be a list of names, got {groups!r}.")
    for name in groups:
        if name not in names:
            raise ValueError(
                f"`groups` of knob {knob!r} must be among {list(names)[:20]}, got {name!r}."
            )


def default_spread(
    name: str, given: float | None, space: Kind, bounds: Bounds, usual: float = DEFAULT_SPREAD
) -> float:
    """What was given; else a tenth of the bounds where steps are linear, or what is usual."""
    if given is not None:
        return given
    if space != "linear":
        return usual
    check_bounds(name, bounds)
    width = (bounds[1] - bounds[0]) / 10
    if width == math.inf:
        raise ValueError(f"`spread` of knob {name!r} must be given where its bounds are infinite.")
    return width


def check_bounds(name: str, bounds: Any) -> None:
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise TypeError(f"`bounds` of knob {name!r} must be two numbers, got {bounds!r}.")


def _start(bench: BindingContext, index: int, key: Key) -> float:
    """Of a group's setting; replicas on a device have what a schedule has written from their first
    step on only."""
    if momenta := _cycled(bench, key):
        return momenta[index]
    return read_setting(bench.optimizers[0].param_groups[index], key)


def _cycled(bench: BindingContext, key: Key) -> Sequence[float] | None:
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
