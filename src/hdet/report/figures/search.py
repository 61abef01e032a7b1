"""Plots of a learning-rate search."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from hdet.records.events import SearchEvent, TriedRate
from hdet.records.history import History
from hdet.report.plot import Plot, Trace
from hdet.report.plotly import (
    axis,
    brief,
    layout_of,
    look,
    rounded,
    shortened,
)


def searches(history: History) -> list[Plot | None]:
    """One plot for each search; none for a search with fewer than two scores."""
    return [_search(history, event) for event in history.scouts]


def _search(history: History, event: SearchEvent) -> Plot | None:
    """The score of each learning rate that the search tried."""
    unit, what = _unit(event)
    tried = _rates(event.points, unit)
    points = [(rate, score) for rate, score in tried if score is not None]
    if len(points) < 2:
        return None
    refined = [(rate, score) for rate, score in _rates(event.refined, unit) if score is not None]
    rates, scores = [rate for rate, _ in points], [score for _, score in points]
    # Scores far above that of the lowest learning rate would flatten all others.
    low = min(score for _, score in [*points, *refined])
    top = min(scores[0] + 0.6 * (scores[0] - low), max(scores))
    traces = [_scores("score", points, 0)]
    if refined:
        traces.append(_scores("around the first choice, in longer rounds", refined, 1))
    lost = [rate for rate, score in tried if score is None]
    layout = layout_of(
        axis("score", **_score_range(low, top)),
        [history],
        showlegend=bool(refined),
        hovermode="closest",
        xaxis=axis(what, rates, showline=True, ticks="outside"),
        shapes=_shapes(event, unit),
    )
    caption = _caption(event, unit, sum(score > top for score in scores), lost)
    first = event is history.scouts[0]
    title = "What the scout saw" if first else f"What it saw until step {event.step}"
    return Plot(title, caption, traces, layout)


def _unit(event: SearchEvent) -> tuple[float, str]:
    """The learning rate that a factor of 1 stands for, and the title of the axis."""
    given = [(name, lr) for name, lr in event.reference_lrs.items() if lr is not None and lr > 0]
    if not given:
        return 1.0, "times the given learning rate"
    name, lr = given[0]
    is_one = len({other for _, other in given}) == 1
    return lr, "learning rate" if is_one else f"learning rate, {shortened(name, 24)}"


def _shapes(event: SearchEvent, unit: float) -> list[dict[str, Any]]:
    """A line where the run goes on; older records have one where the search found its choice."""
    chosen = event.factor if event.found is None else event.found
    place = None if chosen is None or chosen <= 0 else rounded(chosen * unit)
    return [] if place is None else [_vertical_line(place)]


def _rates(points: Iterable[TriedRate], unit: float) -> list[tuple[float, float | None]]:
    """The learning rates that were tried and their scores, in ascending order."""
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


HOW_COMPARED = {
    "probe": ", scored by the probe",
    "held out": ", scored on batches that none of them trained on",
    "losses": ", and its mean loss in the second half of them",
}


EVIDENCE = {"prior": "usual learning rates", "gains": "gains", "divergence": "divergence"}


def _caption(event: SearchEvent, unit: float, num_above: int, lost: Sequence[float]) -> str:
    """What the points are, what was found, and what the run continues with."""
    how = HOW_COMPARED.get(event.compared_by, "")
    sentences = [
        f"Every point is a replica that trained alone for a few steps{how}; lower is better."
    ]
    if num_above:
        sentences.append(f"{num_above} of them lie above the frame.")
    if lost:
        sentences.append(f"At {brief(min(lost))} nothing finite was left.")
    if event.divergence is not None:
        sentences.append(f"Scores explode from {brief(event.divergence * unit)} on.")
    if event.found is not None:
        sentences.append(f"Chosen: {brief(event.found * unit)}, {shortened(event.reason, 120)}.")
    elif event.factor is not None and event.noise is not None:
        sentences.append(f"None of them was chosen: {shortened(event.reason, 120)}.")
    if event.factor is not None:
        why = f": {shortened(event.factor_reason, 120)}" if event.factor_reason else ""
        begins = f"The schedule peaks at {brief(event.factor * unit)}"
        if event.mid_run:
            begins = f"From here on learning rates are {brief(event.factor)} times what they were"
        sentences.append(f"{begins}{why}.")
    if event.within is not None:
        sentences.append(f"The best is probably within a factor of {event.within:.2g} of it.")
    if event.shares:
        parts = [f"{EVIDENCE.get(k, k)} {share:.0%}" for k, share in event.shares.items()]
        sentences.append(f"Share of each piece of evidence: {', '.join(parts)}.")
    return " ".join(sentences)


def _first(pair: tuple[float, float | None]) -> float:
    return pair[0]


def _score_range(low: float, high: float) -> dict[str, Any]:
    margin = 0.08 * (high - low)
    ends = [low - margin, high + margin]
    return {"range": ends} if margin > 0 and all(map(math.isfinite, ends)) else {}


def _vertical_line(rate: float) -> dict[str, Any]:
    line = {"color": "@c2", "width": 2, "dash": "dash"}
    ends = {"x0": rate, "x1": rate, "y0": 0, "y1": 1, "xref": "x", "yref": "paper"}
    return {"type": "line", "layer": "below", "line": line, **ends}
