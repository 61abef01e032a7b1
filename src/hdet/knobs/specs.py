"""What a run may explore: a knob's name, its space, its bounds and its spread.

A spec is what a user passes. Bound to the optimizers of a run it becomes a `BoundKnob`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hdet._validation import check_number, check_range
from hdet.control.knob_state import KnobInfo
from hdet.control.space import Space
from hdet.knobs.binding import BindingContext, BoundKnob, Schedule
from hdet.knobs.dial import Dial

Kind = Literal["log", "linear", "logit"]
Bounds = tuple[float, float]
DEFAULT_SPREAD = 0.5
"""In a log space, replicas reach from 1 / 1.5 to 1.5 times the centre."""


@dataclass(frozen=True, kw_only=True)
class KnobSpec:
    """What all knobs except the learning rate have in common.

    Attributes:
        name: The name of the knob in records and messages.
        space: Where steps have equal size: "log", "linear" or "logit".
        bounds: The lowest and the highest value.
        spread: How far the replicas' values lie from their centre.
        schedule: step -> the factor of the knob's start value at that step.
    """

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
            self.make_space()
        except (TypeError, ValueError) as error:
            raise type(error)(f"knob {self.name!r}: {error}") from None
        check_number("spread", self.spread)
        if not 0 <= self.spread < math.inf:
            raise ValueError(
                f"`spread` of knob {self.name!r} must be 0 or more, got {self.spread!r}."
            )
        if self.schedule is not None and not callable(self.schedule):
            raise TypeError(f"`schedule` must be a function of the step, got {self.schedule!r}.")

    def make_space(self) -> Space:
        """The space with its bounds."""
        return Space(self.space, *self.bounds)

    def bind(self, context: BindingContext) -> list[BoundKnob]:
        """Bind the knob to a run: one bound knob, or one for each of its groups."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """The settings, which must be equal on all replicas and which the record keeps."""
        return {
            "name": self.name,
            "space": self.space,
            "bounds": list(self.bounds),
            "spread": self.spread,
            "scheduled": self.schedule is not None,
        }


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate, explored around the base schedule.

    Attributes:
        spread: How far the replicas' learning rates lie from their centre, one number or one for
            each named group; None takes the scheduler's `spread`.
        groups: Names of parameter groups; None for all.
        shared: Whether all groups share one factor.
        bounds: The lowest and the highest factor of the base schedule.
    """

    spread: float | Mapping[str, float] | None = None
    groups: Sequence[str] | None = None
    shared: bool = False
    bounds: Bounds = (1e-18, 1e18)
    name: str = "lr"

    def __post_init__(self) -> None:
        for name, spread in self.spreads.items():
            check_range(f"spread[{name!r}]" if name else "spread", spread, least=0, below=math.inf)
        if self.shared and isinstance(self.spread, Mapping):
            raise ValueError(
                "`spread` of knob 'lr' must be one number where all groups share one factor, got "
                f"{self.spread!r}."
            )
        check_bounds(self.name, self.bounds)
        Space("log", *self.bounds)
        if not self.bounds[0] <= 1 <= self.bounds[1]:
            raise ValueError(
                "`bounds` of knob 'lr' are factors of the base schedule and must contain 1, got "
                f"{self.bounds!r}."
            )

    @property
    def spreads(self) -> Mapping[str, float]:
        """The spreads that are given by group; one number stands under an empty name."""
        if self.spread is None:
            return {}
        return self.spread if isinstance(self.spread, Mapping) else {"": self.spread}

    def spread_of(self, group: str, default: float) -> float:
        """The spread of a group."""
        return self.spreads.get(group, self.spreads.get("", default))

    def describe(self) -> dict[str, Any]:
        """The settings, which must be equal on all replicas and which the record keeps."""
        groups = None if self.groups is None else list(self.groups)
        spread = dict(self.spread) if isinstance(self.spread, Mapping) else self.spread
        own = {"spread": spread, "groups": groups, "shared": self.shared}
        return {"name": self.name, "bounds": list(self.bounds), **own}


class Knob(KnobSpec):
    """Any number that you can read and write: a knob of your own.

    Where one process holds several replicas, as on one device, `get` and `set` handle a tensor with
    one value for each replica. A `Dial` does this by itself.

    Args:
        name: The name of the knob in records and messages.
        get: A function that returns the value.
        set: A function that takes the new value.
        bounds: The lowest and the highest value.
        space: Where steps have equal size: "linear" for additive changes, "log" for positive
            numbers of unknown size, "logit" for numbers between 0 and 1.
        spread: How far the replicas' values lie from their centre. By default a tenth of the
            bounds in a linear space, and 0.5 in the others.
        schedule: step -> the factor of the start value at that step.

    Raises:
        TypeError: `get` or `set` is no function, or another argument has the wrong type.
        ValueError: `bounds` do not fit the space, or `spread` is negative.

    Example:
        >>> temperature = Dial(2.0)
        >>> knob = Knob("temperature", temperature.get, temperature.set, bounds=(1.0, 6.0))
        >>> knob.spread
        0.5
    """

    get: Callable[[], Any]
    set: Callable[[Any], None]

    def __init__(
        self,
        name: str,
        get: Callable[[], Any],
        set: Callable[[Any], None],  # noqa: A002 (the name that users expect)
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

    def bind(self, context: BindingContext) -> list[BoundKnob]:
        """Bind the knob to a run.

        Args:
            context: The optimizers and the device of this process.

        Returns:
            One bound knob.
        """
        num, device = len(context.optimizers), context.device
        owner = getattr(self.get, "__self__", None)
        dials = [owner] if isinstance(owner, Dial) else []
        for dial in dials:
            dial.place(num, device)

        def write(target: int, values: Sequence[float], centre: float) -> None:
            self.set(values[0] if num == 1 else torch.tensor(values, device=device))
            for dial in dials:
                dial.centre.fill_(centre)

        def read(target: int) -> list[float]:
            value = self.get()
            try:
                values = torch.as_tensor(value, dtype=torch.float64).flatten().tolist()
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(
                    f"`get` of knob {self.name!r} must return a number, got {value!r}."
                ) from None
            return values * num if len(values) == 1 else values

        bound = BoundKnob(
            name=self.name,
            space=self.make_space(),
            spread=self.spread,
            bases=[read(0)[0]],
            write=write,
            read=read,
            schedule=self.schedule,
            dials=dials,
            writes=frozenset(dials),
        )
        return [bound]


# The knobs of a run ------------------------------------------------------------------------------


def flatten_knobs(knobs: Any) -> list[Any]:
    """A user's `knobs=` as a flat list: one knob, a list, or a list with lists of a factory.

    Raises:
        TypeError: An entry is no knob.
        ValueError: There is more than one learning rate.
    """
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
    """The learning rates that are explored: one for each parameter group, or one for all."""
    for knob in knobs:
        if isinstance(knob, LearningRate):
            chosen = chosen_groups(knob.name, knob.groups, names)
            space = Space("log", *knob.bounds)
            if knob.shared:
                members = tuple(names.index(name) for name in chosen)
                return [KnobInfo("lr", space, knob.spread_of("", spread), 1.0, members)]
            if isinstance(knob.spread, Mapping) and knob.spread:
                check_known_groups(knob.name, list(knob.spread), chosen, argument="spread")
            widths = [knob.spread_of(name, spread) for name in chosen]
            return [
                KnobInfo(f"lr/{name}", space, width, 1.0, (names.index(name),))
                for name, width in zip(chosen, widths, strict=True)
            ]
    return []


def bind_knobs(knobs: Sequence[Any], context: BindingContext) -> list[BoundKnob]:
    """Bind all knobs except the learning rate."""
    return [bound for knob in knobs if isinstance(knob, KnobSpec) for bound in knob.bind(context)]


# Checks and defaults -----------------------------------------------------------------------------


def chosen_groups(knob: str, groups: Sequence[str] | None, names: Sequence[str]) -> Sequence[str]:
    """The names of the parameter groups that a knob is for; all of them for None."""
    if groups is not None and len(set(groups)) < len(groups):
        raise ValueError(f"`groups` of knob {knob!r} must be different, got {groups!r}.")
    if groups is None:
        return names
    check_known_groups(knob, groups, names)
    return groups


def check_known_groups(
    knob: str, groups: Sequence[str], names: Sequence[str], argument: str = "groups"
) -> None:
    """Raise if `groups` is no list of known names."""
    if isinstance(groups, str) or not groups:
        raise TypeError(f"`{argument}` of knob {knob!r} must be a list of names, got {groups!r}.")
    for name in groups:
        if name not in names:
            raise ValueError(
                f"`{argument}` of knob {knob!r} must be among {list(names)[:20]}, got {name!r}."
            )


def default_spread(
    name: str, given: float | None, space: Kind, bounds: Bounds, default: float = DEFAULT_SPREAD
) -> float:
    """The given spread; else a tenth of the bounds in a linear space, and `default` elsewhere."""
    if given is not None:
        return given
    if space != "linear":
        return default
    check_bounds(name, bounds)
    width = (bounds[1] - bounds[0]) / 10
    if width == math.inf:
        raise ValueError(f"`spread` of knob {name!r} must be given where its bounds are infinite.")
    return width


def check_bounds(name: str, bounds: Any) -> None:
    """Raise a TypeError if `bounds` are not two values."""
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise TypeError(f"`bounds` of knob {name!r} must be two numbers, got {bounds!r}.")
