"""Curves of a history that several plots share, and the marks of the controller's moves."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hdet.records.events import KnobEntry
from hdet.records.history import History
from hdet.report.plotly import known, mean

MAX_STAYS = 600
"""Beyond this number, cycles without a move get no mark."""


class Marker(NamedTuple):
    """How a decision of the controller is shown."""

    name: str
    symbol: str
    tint: str
    size: int


MOVES = {
    "up": Marker("moved up", "triangle-up", "@c2", 10),
    "down": Marker("moved down", "triangle-down", "@c1", 10),
    "stay": Marker("stayed", "circle", "@soft", 4),
    "abstain": Marker("abstained", "circle-open", "@soft", 5),
}

Labelled = tuple[str, History]
"""A run and the name that the report gives it."""


def mean_loss(history: History) -> list[tuple[int, float]]:
    """The mean of the replicas' training losses, at the end of each cycle that has losses."""
    pairs = [(cycle.step, known(cycle.losses)) for cycle in history.cycles]
    return [(step, mean(losses)) for step, losses in pairs if losses]


def centres(history: History, name: str) -> list[tuple[int, float]]:
    """The centre of the spread of a knob, at the end of each cycle."""
    pairs = [(step, centre_of(knob)) for step, knob in history.knob(name)]
    return [(step, centre) for step, centre in pairs if centre is not None]


def centre_of(knob: KnobEntry) -> float | None:
    """The centre of the spread; in early records, which lack it, the mean of the replicas."""
    values = known(knob.values)
    return mean(values) if knob.centre is None and values else knob.centre


def other_measures(histories: Iterable[History]) -> list[str]:
    """The measures that get plots of their own: all except the held-out loss."""
    names = dict.fromkeys(name for history in histories for name in history.measure_names)
    return [name for name in names if name != "loss"]


def blocks(points: Sequence[tuple[int, float]], length: int) -> list[tuple[int, float | None]]:
    """The mean of each group of `length` points, at the last of their steps.

    >>> blocks([(1, 0.0), (2, 1.0), (3, 4.0)], length=2)
    [(2, 0.5), (3, 4.0)]
    """
    parts = [points[start : start + length] for start in range(0, len(points), length)]
    return [(part[-1][0], mean([value for _, value in part])) for part in parts]
