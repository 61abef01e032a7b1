"""The hands that turn knobs: how each is read and written for every replica of this process."""

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

Schedule = Callable[[int], float]
"""step -> what the knob's start value is multiplied by there."""

TOLERANCE = 1e-5
"""How exactly a value must be read back: dials are float32."""


class BindingContext(NamedTuple):
    """What a knob is bound to: the optimizers of the replicas of this process."""

    optimizers: Sequence[Optimizer]
    names: Sequence[str]
    """Those of the parameter groups."""
    device: torch.device
    momenta: Sequence[float] | None
    """Those of each group if the base schedule cycles them."""


@dataclass
class BoundKnob:
    """A knob of a run."""

    name: str
    space: Space
    spread: float
    bases: list[float]
    """The start value of each target."""
    write: Callable[[int, Sequence[float], float], None]
    """(target, the value of each replica of this process, the centre)."""
    read: Callable[[int], Sequence[float]]
    """target -> the value of each replica of this process."""
    schedule: Schedule | None = None
    dials: Sequence[Dial] = ()
    rest: float | None = None
    """What a probe scores with, if the knob changes the loss itself."""
    places: frozenset[Any] = frozenset()
    """What it writes: no two knobs may write the same."""
    setting: str | None = None
    """The entry of parameter groups that it writes, if it does."""
    follows: Sequence[int] = ()
    """The groups whose momentum it writes, where the base schedule cycles momenta."""
    is_checked: bool = False
    """Whether something else than the start value was written and read back."""

    @property
    def start(self) -> float:
        """The centre of the spread at the beginning: the first target's."""
        return self.bases[0]

    def base(self, target: int, step: int, momenta: Sequence[float] | None) -> float:
        """What a target would have at a step without exploration."""
        base = self.bases[target]
        if momenta is not None and self.follows:
            base = momenta[self.follows[target]]
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
        return self.schedule is not None or bool(self.follows)

    def check(self) -> None:
        low, high = self.space.low, self.space.high
        for base in self.bases:
            if not (math.isfinite(base) and low <= base <= high) or on_rim(self.space, base):
                raise ValueError(
                    f"`bounds` of knob {self.name!r} must contain its start value, got "
                    f"({low:g}, {high:g}) and {base:g}."
                )

    def check_effect(self, target: int, written: Sequence[float]) -> None:
        """Read back what was written: a knob that nobody turns must not be steered."""
        seen = self.read(target)
        for value, wanted in zip(seen, written, strict=True):
            if not math.isclose(value, wanted, rel_tol=TOLERANCE, abs_tol=1e-12):
                raise ValueError(
                    f"knob {self.name!r} must take effect: `set` was given {wanted:g}, and `get` "
                    f"reads {value:g}."
                )


def on_rim(space: Space, value: float) -> bool:
    """Whether no step leads away from a value: zero in a log space, 0 or 1 in a logit space."""
    if space.kind == "linear":
        return False
    return value <= 0 or (space.kind == "logit" and value >= 1)


class BoundKnobs:
    """All the knobs of a run beside its learning rates."""

    def __init__(self, handles: Sequence[BoundKnob], local: Callable[[], range]) -> None:
        """`local` says which replicas live here; where they come and go it may change."""
        self._handles, self._find_local = handles, local
        self.are_scheduled = any(handle.is_scheduled() for handle in handles)
        """Whether there is something to turn at every step."""
        _check_apart(handles)
        for handle in handles:
            handle.check()

    @property
    def _local(self) -> range:
        return self._find_local()

    def explored(self) -> list[KnobInfo]:
        """What the decisions need to know of them."""
        return [KnobInfo(h.name, h.space, h.spread, h.start) for h in self._handles]

    def settings(self) -> set[str]:
        """The entries of parameter groups that they write."""
        return {handle.setting for handle in self._handles if handle.setting is not None}

    def write(
        self,
        knobs: Sequence[KnobState],
        step: int,
        momenta: Sequence[float] | None,
        *,
        everything: bool,
    ) -> None:
        """Give every replica of this process its values; within a cycle only what is scheduled.

        What is written for the first time is read back: a knob must take effect.
        """
        for handle, knob in zip(self._handles, knobs, strict=True):
            if everything or handle.is_scheduled():
                centre = knob.state.scale
                each = [knob.factor(replica) for replica in self._local]
                self._turn(handle, centre, each, step, momenta, check=everything)

    def _turn(
        self,
        handle: BoundKnob,
        centre: float,
        each: Sequence[float],
        step: int,
        momenta: Sequence[float] | None,
        *,
        check: bool,
    ) -> None:
        space, start = handle.space, handle.start
        for target in range(len(handle.bases)):
            base = handle.base(target, step, momenta)
            values = [space.clamped(space.carried(value, start, base)) for value in each]
            handle.write(target, values, space.clamped(space.carried(centre, start, base)))
            if check and not handle.is_checked:
                handle.check_effect(target, values)
        if check:
            handle.is_checked |= any(value != handle.start for value in each)

    @contextmanager
    def at_centre(
        self, knobs: Sequence[KnobState], step: int, momenta: Sequence[float] | None
    ) -> Iterator[None]:
        """Inside, the model has the values of the consensus; after it every replica its own."""
        pairs = [
            (handle, knob)
            for handle, knob in zip(self._handles, knobs, strict=True)
            if handle.setting is None
        ]
        for handle, knob in pairs:
            centre = knob.state.scale
            self._turn(handle, centre, [centre] * len(self._local), step, momenta, check=False)
        try:
            yield
        finally:
            for handle, knob in pairs:
                each = [knob.factor(replica) for replica in self._local]
                self._turn(handle, knob.state.scale, each, step, momenta, check=False)

    @contextmanager
    def without_regularization(self) -> Iterator[None]:
        """Inside, knobs that change the loss itself do not: a probe compares like with like."""
        resting = [
            (handle, target)
            for handle in self._handles
            for target in range(len(handle.bases))
            if handle.rest is not None
        ]
        kept = [
            (dial.values.clone(), dial.alone.clone()) for h, t in resting for dial in [h.dials[t]]
        ]
        for handle, target in resting:
            assert handle.rest is not None
            handle.write(target, [handle.rest] * len(self._local), handle.rest)
        try:
            yield
        finally:
            for (handle, target), (values, alone) in zip(resting, kept, strict=True):
                handle.dials[target].values.copy_(values)
                handle.dials[target].alone.copy_(alone)

    def unread(self) -> list[str]:
        """Those whose dials no code has read: they cannot have an effect."""
        return [
            handle.name
            for handle in self._handles
            if handle.dials and not any(dial.is_read for dial in handle.dials)
        ]

    def check_read(self, unread: Collection[str], step: int) -> None:
        for handle in self._handles:
            if handle.name in unread:
                raise ValueError(
                    f"knob {handle.name!r} must take effect, but nothing has read it until step "
                    f"{step}: does the training loop use the module that it was made for?"
                )


def _check_apart(handles: Sequence[BoundKnob]) -> None:
    names: set[str] = set()
    written: set[Any] = set()
    for handle in handles:
        if handle.name in names or handle.places & written:
            raise ValueError(
                f"`knobs` must each write something else, got a second one for {handle.name!r}."
            )
        names.add(handle.name)
        written |= handle.places
