"""The entries of a cycle's record: one for each parameter group, one for each other knob."""

from collections.abc import Sequence
from typing import NamedTuple

from hdet.control.controller import Move
from hdet.control.knob_state import KnobState
from hdet.control.regression import Slope
from hdet.records.events import KnobEntry, Numbers


class MovedKnob(NamedTuple):
    """A knob, what its replicas used in a cycle, and how the controller moved it.

    Attributes:
        knob: The knob after the move.
        centre: The centre of the spread before the move.
        factors: The position of each replica before the move.
        move: The decision of the controller.
        slope: The slope from the joint fit of the cycle, if there is one.
    """

    knob: KnobState
    centre: float
    factors: Sequence[float]
    move: Move
    slope: Slope | None


def knob_entries(
    names: Sequence[str], lrs: Sequence[float], moved: Sequence[MovedKnob], *, num_replicas: int
) -> tuple[KnobEntry, ...]:
    """The entries of all knobs.

    Args:
        names: The names of the parameter groups.
        lrs: The learning rates of the base schedule in the last step of the cycle, by group.
        moved: All knobs that are explored. One may move the learning rates of several groups.
        num_replicas: The number of replicas.

    Returns:
        One entry for each parameter group, in their order, then one for each other knob.
    """
    owners = {group: one for one in moved for group in one.knob.info.groups}
    rates = [
        _rate_entry(name, lr, owners[group])
        if group in owners
        else _unexplored_entry(name, lr, num_replicas)
        for group, (name, lr) in enumerate(zip(names, lrs, strict=True))
    ]
    others = [
        _entry(one.knob.name, tuple(one.factors), one.centre, one)
        for one in moved
        if not one.knob.info.groups
    ]
    return (*rates, *others)


def _rate_entry(name: str, lr: float, one: MovedKnob) -> KnobEntry:
    lrs = tuple(lr * factor for factor in one.factors)
    return _entry(name, lrs, lr * one.centre, one, is_lr=True)


def _unexplored_entry(name: str, lr: float, num_replicas: int) -> KnobEntry:
    return KnobEntry(
        name=name,
        values=(lr,) * num_replicas,
        is_lr=True,
        centre=lr,
        scale=1.0,
        decision="stay",
        reason="not explored",
    )


def _entry(
    name: str, values: Numbers, centre: float, one: MovedKnob, *, is_lr: bool = False
) -> KnobEntry:
    move, state, slope = one.move, one.move.state, one.slope
    return KnobEntry(
        name=name,
        values=values,
        is_lr=is_lr,
        centre=centre,
        space=one.knob.info.space.kind,
        scale=state.scale,
        velocity=state.velocity,
        decay=state.decay,
        floor=state.floor,
        evidence=state.pull,
        evidence_variance=state.mass,
        max_move=state.reach,
        spread_share=state.narrow,
        hypergradient=move.hypergradient,
        hypergradient_error=move.error,
        slope=None if slope is None else slope.slope,
        slope_error=None if slope is None else slope.error,
        decision=move.decision,
        reason=move.reason,
    )
