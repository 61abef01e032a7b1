"""Bound knobs: how a knob is read and written for every replica of this process."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from hdet.control.knob_state import KnobInfo, KnobState
from hdet.control.space import Space
from hdet.knobs.dial import Dial
from hdet.knobs.param_groups import Momenta

Schedule = Callable[[int], float]
"""step -> the factor of a knob's start value at that step."""

TOLERANCE = 1e-5
"""The relative error that a value may have when it is read back: dials are float32."""


class BindingContext(NamedTuple):
    """What a knob is bound to: the replicas of this process."""

    optimizers: Sequence[Optimizer]
    """The optimizer of each replica."""
    names: Sequence[str]
    """The names of the parameter groups."""
    device: torch.device
    momenta: Momenta | None
    """The momentum of each group, if the base schedule cycles it."""


@dataclass
class BoundKnob:
    """A knob of a run. It writes one or several targets, such as parameter groups or dials."""

    name: str
    space: Space
    spread: float
    bases: list[float]
    """The start value of each target."""
    write: Callable[[int, Sequence[float], float], None]
    """Called with the target, the value of each replica of this process, and the centre."""
    read: Callable[[int], Sequence[float]]
    """target -> the value of each replica of this process."""
    schedule: Schedule | None = None
    dials: Sequence[Dial] = ()
    probe_value: float | None = None
    """The value while a probe scores, for a knob that changes the loss itself."""
    writes: frozenset[Any] = frozenset()
    """Identifies the targets: no two knobs may write the same."""
    setting: str | None = None
    """The entry of the parameter groups that the knob writes, if any."""
    momentum_groups: Sequence[int] = ()
    """For each target the group whose scheduled momentum is its base; empty for other knobs."""
    is_checked: bool = False
    """Whether a value other than the start value was written and read back."""

    @property
    def start(self) -> float:
        """The centre of the spread at the start: the base of the first target."""
        return self.bases[0]

    def base(self, target: int, step: int, momenta: Momenta | None) -> float:
        """The value of a target at a step without exploration."""
        base = self.bases[target]
        if momenta is not None and self.momentum_groups:
            scheduled_momentum = momenta[self.momentum_groups[target]]
            base = base if scheduled_momentum is None else scheduled_momentum
        if self.schedule is None:
            return base
        factor: Any = self.schedule(step)
        try:
            scheduled = base * float(factor)
        except (TypeError, ValueError):
            raise TypeError(
                f"`schedule` of knob {self.name!r} must return a number, got {factor!r} at step "
                f"{step}."
            ) from None
        if not math.isfinite(scheduled):
            raise ValueError(
                f"`schedule` of knob {self.name!r} must be finite, got {scheduled} at step {step}."
            )
        return scheduled

    def is_scheduled(self) -> bool:
        """Whether the value changes within a cycle."""
        return self.schedule is not None or bool(self.momentum_groups)

    def check(self) -> None:
        """Raise a ValueError if the bounds do not contain the start values."""
        low, high = self.space.low, self.space.high
        for base in self.bases:
            if not (math.isfinite(base) and low <= base <= high) or is_at_edge(self.space, base):
                raise ValueError(
                    f"`bounds` of knob {self.name!r} must contain its start value, got "
                    f"({low:g}, {high:g}) and {base:g}."
                )

    def check_effect(self, target: int, written: Sequence[float]) -> None:
        """Raise a ValueError if the written values cannot be read back."""
        seen = self.read(target)
        for value, wanted in zip(seen, written, strict=True):
            if not math.isclose(value, wanted, rel_tol=TOLERANCE, abs_tol=1e-12):
                raise ValueError(
                    f"knob {self.name!r} has no effect: `set` was given {wanted:g}, and `get` "
                    f"reads {value:g}. Let `set` write what `get` reads."
                )


def is_at_edge(space: Space, value: float) -> bool:
    """Whether no step can leave a value: 0 in a log space, 0 or 1 in a logit space."""
    if space.kind == "linear":
        return False
    return value <= 0 or (space.kind == "logit" and value >= 1)


class BoundKnobs:
    """All knobs of a run except its learning rates.

    Args:
        knobs: The bound knobs.
        local: Returns the replicas of this process; elastic replicas may change.
    """

    def __init__(self, knobs: Sequence[BoundKnob], local: Callable[[], range]) -> None:
        self._knobs, self._find_local = knobs, local
        self.are_scheduled = any(knob.is_scheduled() for knob in knobs)
        """Whether a knob changes at every step."""
        _check_distinct(knobs)
        for knob in knobs:
            knob.check()

    @property
    def _local(self) -> range:
        return self._find_local()

    def explored(self) -> list[KnobInfo]:
        """What the controller needs to know of each knob."""
        return [KnobInfo(k.name, k.space, k.spread, k.start) for k in self._knobs]

    def settings(self) -> set[str]:
        """The entries of the parameter groups that knobs write."""
        return {knob.setting for knob in self._knobs if knob.setting is not None}

    def write(
        self,
        states: Sequence[KnobState],
        step: int,
        momenta: Momenta | None,
        *,
        everything: bool,
    ) -> None:
        """Give every replica of this process its values.

        Args:
            states: The state of each knob.
            step: The current step.
            momenta: The momentum of each group, if the base schedule cycles it.
            everything: Whether to write all knobs, as between cycles; else only scheduled ones.
                The first new values are also read back, since a knob must take effect.
        """
        for knob, state in zip(self._knobs, states, strict=True):
            if everything or knob.is_scheduled():
                centre = state.state.scale
                each = [state.factor(replica) for replica in self._local]
                self._write(knob, centre, each, step, momenta, check=everything)

    def write_start(self) -> None:
        """Give every replica the start values, as they were before the run."""
        for knob in self._knobs:
            for target, base in enumerate(knob.bases):
                knob.write(target, [base] * len(self._local), base)

    def _write(
        self,
        knob: BoundKnob,
        centre: float,
        each: Sequence[float],
        step: int,
        momenta: Momenta | None,
        *,
        check: bool,
    ) -> None:
        space, start = knob.space, knob.start
        for target in range(len(knob.bases)):
            base = knob.base(target, step, momenta)
            values = [space.clamped(space.carried(value, start, base)) for value in each]
            knob.write(target, values, space.clamped(space.carried(centre, start, base)))
            if check and not knob.is_checked:
                knob.check_effect(target, values)
        if check:
            knob.is_checked |= any(value != knob.start for value in each)

    @contextmanager
    def at_centre(
        self, states: Sequence[KnobState], step: int, momenta: Momenta | None
    ) -> Iterator[None]:
        """Inside, the model has the centre values of its knobs; afterwards replicas their own."""
        pairs = [
            (knob, state)
            for knob, state in zip(self._knobs, states, strict=True)
            if knob.setting is None
        ]
        for knob, state in pairs:
            centre = state.state.scale
            self._write(knob, centre, [centre] * len(self._local), step, momenta, check=False)
        try:
            yield
        finally:
            for knob, state in pairs:
                each = [state.factor(replica) for replica in self._local]
                self._write(knob, state.state.scale, each, step, momenta, check=False)

    @contextmanager
    def without_regularization(self) -> Iterator[None]:
        """Inside, knobs that change the loss itself have their probe values.

        So a probe scores all replicas by the same loss.
        """
        targets = [
            (knob, target, knob.probe_value)
            for knob in self._knobs
            for target in range(len(knob.bases))
            if knob.probe_value is not None
        ]
        dials = [knob.dials[target] for knob, target, _ in targets]
        kept = [(dial.values.clone(), dial.centre.clone()) for dial in dials]
        for knob, target, value in targets:
            knob.write(target, [value] * len(self._local), value)
        try:
            yield
        finally:
            for dial, (values, centre) in zip(dials, kept, strict=True):
                dial.values.copy_(values)
                dial.centre.copy_(centre)

    def unread(self) -> list[str]:
        """Names of knobs whose dials no code has read: they cannot have an effect."""
        return [
            knob.name
            for knob in self._knobs
            if knob.dials and not any(dial.is_read for dial in knob.dials)
        ]

    def check_read(self, unread: Collection[str], step: int) -> None:
        """Raise a ValueError for the first knob that is `unread`."""
        for knob in self._knobs:
            if knob.name in unread:
                raise ValueError(
                    f"knob {knob.name!r} has no effect: nothing has read it until step {step}. Use "
                    "the module that the knob was made for in the training loop."
                )


def _check_distinct(knobs: Sequence[BoundKnob]) -> None:
    """Raise a ValueError if two knobs have one name or write the same target."""
    names: set[str] = set()
    written: set[Any] = set()
    for knob in knobs:
        if knob.name in names or knob.writes & written:
            raise ValueError(
                f"`knobs` must each write another setting, got a second one for {knob.name!r}."
            )
        names.add(knob.name)
        written |= knob.writes
