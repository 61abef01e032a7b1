"""Curves of a history that several plots share, and the marks of the controller's moves."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hdet.records.events import KnobEntry
from hdet.records.history import History
from hdet.report.plot import Trace
from hdet.report.plotly import known, label, mean, rounded

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

LOSSES = ("loss", "perplexity", "ppl", "nll")
"""Parts of the names of measures whose ratios count: they may get a logarithmic axis."""
Labelled = tuple[str, History]
"""A run and the name that the report gives it."""


class Band(NamedTuple):
    """A reference as a shaded area, and the sentence about it."""

    trace: Trace
    text: str


def is_loss(name: str) -> bool:
    """Whether a measure is one that falls by factors.

    >>> is_loss("train_loss"), is_loss("accuracy")
    (True, False)
    """
    return any(part in name.lower() for part in LOSSES)


def reference_band(histories: Sequence[History], name: str) -> Band | None:
    """The reference that all runs share, over all steps; None without one for this measure."""
    references = [history.reference for history in histories]
    first = references[0] if references else None
    ends = None if first is None else first.bands.get(name)
    if first is None or ends is None or any(other != first for other in references):
        return None
    last = max(1, *(history.last_step for history in histories))
    low, high = (rounded(end) for end in ends)
    trace = {
        "type": "scatter",
        "mode": "lines",
        "name": label(first.text, 80),
        "x": [0, last, last, 0, 0],
        "y": [low, low, high, high, low],
        "fill": "toself",
        "fillcolor": "@c4/0.3",
        "line": {"color": "@c4/0.6", "width": 1},
        "hoverinfo": "skip",
    }
    return Band(trace, f"The shaded band is the {first.text}.")


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
