"""What a plot is, and the numbers that several plots share."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hdet.records.events import KnobEntry
from hdet.records.history import History
from hdet.report.plotly import Trace, known, mean

MAX_STAYS = 600


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


class Plot(NamedTuple):
    """A plot and the plain sentences that go with it."""

    title: str
    caption: str
    data: list[Trace]
    layout: dict[str, Any]
    size: str = "wide"
    """How much room it asks for: `wide`, `most`, `rest` or `half` of a row."""


# Curves of a history -------------------------------------------------------------------------


def mean_loss(history: History) -> list[tuple[int, float]]:
    """The mean of the replicas' training losses, where any is known."""
    pairs = [(cycle.step, known(cycle.losses)) for cycle in history.cycles]
    return [(step, mean(losses)) for step, losses in pairs if losses]


def centres(history: History, name: str) -> list[tuple[int, float]]:
    """The centre of the spread of a knob, at the end of every cycle."""
    pairs = [(step, centre_of(knob)) for step, knob in history.knob(name)]
    return [(step, centre) for step, centre in pairs if centre is not None]


def centre_of(knob: KnobEntry) -> float | None:
    """What the consensus is trained with; in records from before it was noted, the mean."""
    values = known(knob.values)
    return mean(values) if knob.centre is None and values else knob.centre


def other_measures(histories: Iterable[History]) -> list[str]:
    """The measures that get plots of their own: all but the held-out loss."""
    names = dict.fromkeys(name for history in histories for name in history.measure_names)
    return [name for name in names if name != "loss"]


def blocks(points: Sequence[tuple[int, float]], length: int) -> list[tuple[int, float | None]]:
    """The mean of every so many points, at the last of their steps.

    >>> blocks([(1, 0.0), (2, 1.0), (3, 4.0)], length=2)
    [(2, 0.5), (3, 4.0)]
    """
    parts = [points[start : start + length] for start in range(0, len(points), length)]
    return [(part[-1][0], mean([value for _, value in part])) for part in parts]
