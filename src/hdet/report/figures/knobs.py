"""Plots of knobs: values, spread, moves, hypergradients and sensitivities."""

from collections.abc import Iterable, Sequence
from typing import Any

from hdet.control.knob_state import INTERVAL_IN_ERRORS
from hdet.control.regression import DecayedSlope
from hdet.records.events import KnobEntry
from hdet.records.history import History
from hdet.report.figures.curves import MAX_STAYS, MOVES, blocks, centre_of, centres
from hdet.report.plot import Plot, Trace
from hdet.report.plotly import (
    MANY,
    NUM_COLOURS,
    axis,
    brief,
    colour,
    curve,
    known,
    label,
    layout_of,
    look,
    rounded,
    shortened,
    wrapped,
)


def knob(history: History, name: str, size: str) -> Plot | None:
    """One knob over the steps: the values of the replicas and the moves of the controller."""
    knobs = [(step, knob) for step, knob in history.knob(name) if known(knob.values)]
    if not knobs:
        return None
    stays = sum(knob.decision in ("stay", "abstain") for _, knob in knobs)
    shown = tuple(MOVES) if stays <= MAX_STAYS else ("up", "down")
    centre = centre_line(knobs, 0, "centre of the spread")
    # Only this line reacts to the pointer, with all facts about its cycle.
    centre["text"] = [_hover_text(knob, shown) for _, knob in knobs]
    centre["hovertemplate"] = "%{text}<extra></extra>"
    traces = [*spread_band(knobs, 0, "spread"), centre]
    traces += [trace for decision in shown if (trace := _moves(knobs, decision))]
    what = "learning rates" if name in history.rate_names else "values"
    caption = (
        f"The band spans the replicas' {what} in the last step of each cycle; triangles "
        "are moves of the controller, and pointing at a cycle shows the reason."
    )
    if "stay" not in shown:
        caption += f" The {stays:,} stays are not marked; their reasons are in the record."
    layout = layout_of(knob_axis([history], name, traces), [history])
    return Plot(knob_title([history], name), caption, traces, layout, size)


def knob_title(histories: Sequence[History], name: str) -> str:
    """The title of a plot of this knob."""
    is_lr = any(name in history.rate_names for history in histories)
    return f"Learning rate: {shortened(name)}" if is_lr else f"Knob: {shortened(name)}"


def knob_axis(histories: Sequence[History], name: str, traces: Sequence[Trace]) -> dict[str, Any]:
    """The axis of the values of this knob."""
    values = [value for trace in traces for value in trace["y"]]
    if any(name in history.rate_names for history in histories):
        return axis("learning rate", values, tickformat="~e")
    return axis(label(name), values)


def spread_band(
    knobs: Sequence[tuple[int, KnobEntry]], index: int, name: str, **more: Any
) -> list[Trace]:
    """The band between the lowest and the highest value of the replicas."""
    lrs = [known(knob.values) for _, knob in knobs]
    edge = {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [step for step, _ in knobs],
        "line": {"color": f"{colour(index)}/0.55", "width": 1},
        "hoverinfo": "skip",
    }
    lower = {**edge, "y": [rounded(min(each)) for each in lrs], "showlegend": False}
    fill = {"fill": "tonexty", "fillcolor": f"{colour(index)}/0.18"}
    return [lower, {**edge, "y": [rounded(max(each)) for each in lrs], **fill, **more}]


def centre_line(
    knobs: Sequence[tuple[int, KnobEntry]], index: int, name: str, **more: Any
) -> Trace:
    """The line of the centres of the spread."""
    points = [(step, centre_of(knob)) for step, knob in knobs]
    trace = curve(name, points, own_steps=True, **look(index, 2.2), **more)
    trace["mode"] = "lines" if len(points) > 1 else "lines+markers"
    return trace


def _hover_text(knob: KnobEntry, shown: Sequence[str]) -> str:
    """The text that is shown when the pointer is at a cycle."""
    lrs = known(knob.values)
    lines = [f"{brief(centre_of(knob))}, spread {brief(min(lrs))} to {brief(max(lrs))}"]
    if knob.decision in MOVES:
        lines.append(f"<b>{MOVES[knob.decision].name}</b>")
    if knob.decision in shown or knob.decision not in MOVES:
        lines.append(wrapped(knob.reason) or "no reason recorded")
    if knob.scale is not None and knob.decision in ("up", "down"):
        lines.append(f"scale after it: {brief(knob.scale)}")
    return "<br>".join(lines)


def _moves(knobs: Sequence[tuple[int, KnobEntry]], decision: str) -> Trace | None:
    """The marks of all cycles with this decision."""
    made = [(step, knob) for step, knob in knobs if knob.decision == decision]
    if not made:
        return None
    name, symbol, tint, size = MOVES[decision]
    is_dense = len(knobs) > MANY
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [step for step, _ in made],
        "y": [rounded(centre_of(knob)) for _, knob in made],
        "hoverinfo": "skip",
        "marker": {
            "symbol": symbol,
            "color": tint,
            "size": max(4, size // 2) if is_dense else size,
            "line": {"color": "@card", "width": 0 if is_dense else 1},
        },
    }


def hypergradient(history: History, name: str, size: str) -> Plot | None:
    """The hypergradient of one knob, with its standard errors."""
    knobs = [(s, knob) for s, knob in history.knob(name) if knob.hypergradient is not None]
    if not any(knob.hypergradient for _, knob in knobs):
        return None  # no controller measured one
    errors = [rounded(knob.hypergradient_error) for _, knob in knobs]
    points = [(step, knob.hypergradient or 0.0) for step, knob in knobs]
    width, size_of_marker = (1.4, 5) if len(knobs) <= MANY else (0.7, 3)
    marker = {"color": "@c0", "size": size_of_marker}
    trace = curve("hypergradient", points, line={"color": "@c0", "width": width}, marker=marker)
    caption = "Above zero the losses ask for a higher value, below zero for a lower one"
    if known(errors):
        bars = {"type": "data", "array": errors, "width": 0, "thickness": width}
        trace["error_y"] = {**bars, "color": "@c0/0.45"}
        trace["text"] = ["" if e is None else f" ± {e:.2g}" for e in errors]
        trace["hovertemplate"] = "%{y:.3~g}%{text}"
        caption += "; bars are one standard error to each side."
    else:
        caption += "; no uncertainty was recorded."
    traces = [trace]
    if len(knobs) > MANY:
        window = len(knobs) // 60
        smooth = {"line": {"color": "@c1", "width": 2}}
        traces.append(
            curve(f"mean over {window} cycles", blocks(points, window), own_steps=True, **smooth)
        )
    zero: dict[str, Any] = {"zeroline": True, "zerolinecolor": "@soft", "zerolinewidth": 1.5}
    y_axis = axis("hypergradient", rangemode="tozero", **zero)
    layout = layout_of(y_axis, [history], showlegend=len(traces) > 1)
    return Plot(f"Hypergradient: {shortened(name)}", caption, traces, layout, size)


def scales(history: History) -> Plot | None:
    """All knobs, each in units of its first centre; for runs with many knobs."""
    traces = []
    for index, name in enumerate(history.knob_names):
        points = centres(history, name)
        if points and points[0][1] > 0:
            ratios = [(step, lr / points[0][1]) for step, lr in points]
            traces.append(curve(label(name), ratios, own_steps=True, **look(index, 1.6)))
    if not traces:
        return None
    caption = "The centre of every knob, as a multiple of that of its first cycle."
    values = [value for trace in traces for value in trace["y"]]
    mode = "x unified" if len(traces) <= NUM_COLOURS else "closest"
    layout = layout_of(axis("multiple of the first", values), [history], hovermode=mode)
    if mode == "closest":
        for trace in traces:
            trace["hovertemplate"] = "%{fullData.name}, step %{x:,d}: %{y:.4~g}<extra></extra>"
    return Plot("All knobs", caption, traces, layout)


def sensitivity(history: History) -> Plot | None:
    """The slope of the score along each knob, with intervals, over the steps."""
    traces = []
    for index, name in enumerate(history.knob_names):
        known_slopes = [
            (step, knob.slope, knob.slope_error)
            for step, knob in history.knob(name)
            if knob.slope is not None and knob.slope_error is not None
        ]
        points = running_slopes(known_slopes)
        if not points:
            continue
        traces += _interval(points, index, f"s{index}")
        line = [(step, slope) for step, slope, _ in points]
        trace = curve(label(name), line, own_steps=True, legendgroup=f"s{index}", **look(index, 2))
        trace["text"] = [f" ± {INTERVAL_IN_ERRORS * error:.2g}" for _, _, error in points]
        trace["hovertemplate"] = "%{y:.3~g}%{text}"
        trace["mode"] = "lines" if len(points) > 1 else "lines+markers"
        traces.append(trace)
    if not traces:
        return None
    caption = (
        "d loss / d knob, each in its own space (log or logit: for a change by a factor e), from "
        "the joint fit of every cycle, averaged over the last ten or so; the band is a 95 % "
        "interval. Below zero the loss falls when the knob is raised; a band across zero says "
        "that the run cannot tell."
    )
    zero: dict[str, Any] = {"zeroline": True, "zerolinecolor": "@soft", "zerolinewidth": 1.5}
    layout = layout_of(axis("slope of the loss", rangemode="tozero", **zero), [history])
    return Plot("Sensitivity", caption, traces, layout)


def _interval(points: Sequence[tuple[int, float, float]], index: int, group: str) -> list[Trace]:
    """The band of the 95 % intervals."""
    edge = {
        "type": "scatter",
        "mode": "lines",
        "x": [step for step, _, _ in points],
        "line": {"color": f"{colour(index)}/0.3", "width": 0.5},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": group,
        "name": "interval",
    }
    low = [rounded(slope - INTERVAL_IN_ERRORS * error) for _, slope, error in points]
    high = [rounded(slope + INTERVAL_IN_ERRORS * error) for _, slope, error in points]
    fill = {"fill": "tonexty", "fillcolor": f"{colour(index)}/0.12"}
    return [{**edge, "y": low}, {**edge, "y": high, **fill}]


def running_slopes(slopes: Iterable[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    """The running mean of the slopes at each step, in which old slopes fade.

    The record has the slope of each cycle. The running mean is that of `HDET.sensitivity()`.
    """
    recent_slope, points = DecayedSlope(), []
    for step, slope, error in slopes:
        recent_slope = recent_slope.and_then(slope, error)
        if recent_slope.num:
            points.append((step, recent_slope.slope, recent_slope.error))
    return points
