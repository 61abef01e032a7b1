"""Plots of a learning-rate search."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from hdet.records.events import SearchEvent, TriedRate
from hdet.records.history import History
from hdet.report.figures.plot import Plot
from hdet.report.plotly import (
    Trace,
    axis,
    brief,
    known,
    layout_of,
    look,
    rounded,
    shortened,
)


def scouts(history: History) -> list[Plot | None]:
    """One plot for each search."""
    return [_scout(history, seen) for seen in history.scouts]


def _scout(history: History, seen: SearchEvent) -> Plot | None:
    """What a few steps came to at every learning rate that was tried."""
    given = known(seen.reference_lrs.values())
    single = len(seen.reference_lrs) == 1 and given and given[0] > 0
    unit = given[0] if single else 1.0
    tried = _rates(seen.points, unit)
    points = [(rate, score) for rate, score in tried if score is not None]
    if len(points) < 2:
        return None
    close = [(rate, score) for rate, score in _rates(seen.refined, unit) if score is not None]
    rates, scores = [rate for rate, _ in points], [score for _, score in points]
    # The lowest has hardly moved; what is far worse than that would flatten everything else.
    low = min(score for _, score in [*points, *close])
    top = min(scores[0] + 0.6 * (scores[0] - low), max(scores))
    traces = [_scores("score", points, 0)]
    if close:
        traces.append(_scores("around the first choice, in longer rounds", close, 1))
    lost = [rate for rate, score in tried if score is None]
    found = None if seen.found is None else rounded(seen.found * unit)
    what = "learning rate" if single else "times the given learning rate"
    layout = layout_of(
        axis("score", **_frame(low, top)),
        [history],
        showlegend=bool(close),
        hovermode="closest",
        xaxis=axis(what, rates, showline=True, ticks="outside"),
        shapes=[_upright(found)] if found else [],
    )
    caption = _scouted(seen, unit, sum(score > top for score in scores), lost)
    first = seen is history.scouts[0]
    title = "What the scout saw" if first else f"What it saw until step {seen.step}"
    return Plot(title, caption, traces, layout)


def _rates(points: Iterable[TriedRate], unit: float) -> list[tuple[float, float | None]]:
    """The learning rates that were tried, from below."""
    tried = [
        (rate, point.score)
        for point in points
        if point.factor is not None and 0 < (rate := point.factor * unit) < math.inf
    ]
    return sorted(tried, key=_first)


def _scores(name: str, points: Sequence[tuple[float, float]], place: int) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [rounded(rate) for rate, _ in points],
        "y": [rounded(score) for _, score in points],
        "hovertemplate": "%{x:.3~g}: %{y:.4~g}<extra></extra>",
        **look(place, 2.2),
    }


COMPARED = {
    "probe": ", scored by the probe",
    "held out": ", scored on batches that none of them trained on",
    "losses": ", and its mean loss in the second half of them",
}


def _scouted(seen: SearchEvent, unit: float, num_above: int, lost: Sequence[float]) -> str:
    how = COMPARED.get(seen.compared_by, "")
    told = [f"Every point is a replica that trained alone for a few steps{how}; lower is better."]
    if num_above:
        told.append(f"{num_above} of them lie above the frame.")
    if lost:
        told.append(f"At {brief(min(lost))} nothing finite was left.")
    if seen.found is not None:
        told.append(f"Chosen: {brief(seen.found * unit)}, {shortened(seen.reason, 120)}.")
    elif seen.factor is not None:
        told.append(f"None of them was chosen: {shortened(seen.reason, 120)}.")
    if seen.factor is not None:
        why = f": {shortened(seen.factor_reason, 120)}" if seen.factor_reason else ""
        begins = f"The schedule peaks at {brief(seen.factor * unit)}"
        if seen.mid_run:
            begins = f"From here on learning rates are {brief(seen.factor)} times what they were"
        told.append(f"{begins}{why}.")
    return " ".join(told)


def _first(pair: tuple[float, float | None]) -> float:
    return pair[0]


def _frame(low: float, high: float) -> dict[str, Any]:
    margin = 0.08 * (high - low)
    ends = [low - margin, high + margin]
    return {"range": ends} if margin > 0 and all(map(math.isfinite, ends)) else {}


def _upright(rate: float) -> dict[str, Any]:
    line = {"color": "@c2", "width": 2, "dash": "dash"}
    ends = {"x0": rate, "x1": rate, "y0": 0, "y1": 1, "xref": "x", "yref": "paper"}
    return {"type": "line", "layer": "below", "line": line, **ends}
