"""The plots of a report: what of a history is drawn, on which axes, in which words."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hdet.drawing import (
    MANY,
    NUM_COLOURS,
    Trace,
    axis,
    brief,
    colour,
    curve,
    known,
    label,
    layout_of,
    look,
    mean,
    per_replica,
    rounded,
    shortened,
    wrapped,
)
from hdet.fit import Felt
from hdet.history import History, Knob, Scouted

MOST_STAYS = 600


class Mark(NamedTuple):
    """How a decision of the controller is shown."""

    name: str
    symbol: str
    tint: str
    size: int


MOVES = {
    "up": Mark("moved up", "triangle-up", "@c2", 10),
    "down": Mark("moved down", "triangle-down", "@c1", 10),
    "stay": Mark("stayed", "circle", "@soft", 4),
    "abstain": Mark("abstained", "circle-open", "@soft", 5),
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


def centre_of(knob: Knob) -> float | None:
    """What the consensus is trained with; in records from before it was noted, the mean."""
    values = known(knob.values)
    return mean(values) if knob.centre is None and values else knob.centre


def other_measures(histories: Iterable[History]) -> list[str]:
    """The measures that get plots of their own: all but the held-out loss."""
    names = dict.fromkeys(name for history in histories for name in history.measure_names)
    return [name for name in names if name != "loss"]


# Plots of one run ----------------------------------------------------------------------------


def losses(history: History) -> Plot | None:
    rows = [(cycle.step, cycle.losses) for cycle in history.cycles]
    errors = [cycle.loss_errors for cycle in history.cycles]
    traces = per_replica(rows, history.most_replicas, errors)
    held_out = history.measure("loss")
    thick = {"line": {"color": "@ink", "width": 3}, "marker": {"color": "@ink", "size": 7}}
    title = "Loss of every replica"
    caption = "Each thin line is the mean training loss of one replica over each cycle. "
    if held_out:
        traces.append(curve("consensus, held-out data", held_out, own_steps=True, **thick))
        title += " and of the consensus"
        caption += "The thick line is the loss of the consensus on held-out data, as it was noted."
    elif len(traces) > 1:
        mean_line = curve("mean of the replicas (training)", mean_loss(history), own_steps=True)
        traces.append({**mean_line, **thick})
        caption += "The thick line is their mean; no held-out loss of the consensus was noted."
    else:
        caption += "No held-out loss of the consensus was noted."
    if not traces:
        return None
    y_axis = axis("loss", [value for trace in traces for value in trace["y"]])
    mode = "closest" if history.most_replicas > NUM_COLOURS else "x unified"
    return Plot(title, caption, traces, layout_of(y_axis, [history], hovermode=mode))


def knob(history: History, name: str, size: str) -> Plot | None:
    """A learning rate or any other knob: where the replicas were, and what was decided."""
    knobs = [(step, knob) for step, knob in history.knob(name) if known(knob.values)]
    if not knobs:
        return None
    stays = sum(knob.decision in ("stay", "abstain") for _, knob in knobs)
    shown = tuple(MOVES) if stays <= MOST_STAYS else ("up", "down")
    centre = _centre(knobs, 0, "centre of the spread")
    # The one line that answers to pointing: it knows everything about its cycle.
    centre["text"] = [_told(knob, shown) for _, knob in knobs]
    centre["hovertemplate"] = "%{text}<extra></extra>"
    traces = [*_band(knobs, 0, "spread"), centre]
    traces += [trace for decision in shown if (trace := _moves(knobs, decision))]
    what = "learning rates" if name in history.rate_names else "values"
    caption = (
        f"The band spans the replicas' {what} in the last step of each cycle; triangles "
        "are moves of the controller, and pointing at a cycle shows the reason."
    )
    if "stay" not in shown:
        caption += f" The {stays:,} stays are not marked; their reasons are in the record."
    layout = layout_of(_knob_axis([history], name, traces), [history])
    return Plot(_title([history], name), caption, traces, layout, size)


def _title(histories: Sequence[History], name: str) -> str:
    is_lr = any(name in history.rate_names for history in histories)
    return f"Learning rate: {shortened(name)}" if is_lr else f"Knob: {shortened(name)}"


def _knob_axis(histories: Sequence[History], name: str, traces: Sequence[Trace]) -> dict[str, Any]:
    values = [value for trace in traces for value in trace["y"]]
    if any(name in history.rate_names for history in histories):
        return axis("learning rate", values, tickformat="~e")
    return axis(label(name), values)


def _band(knobs: Sequence[tuple[int, Knob]], index: int, name: str, **more: Any) -> list[Trace]:
    """The lowest and the highest learning rate, and what lies between."""
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


def _centre(knobs: Sequence[tuple[int, Knob]], index: int, name: str, **more: Any) -> Trace:
    points = [(step, centre_of(knob)) for step, knob in knobs]
    trace = curve(name, points, own_steps=True, **look(index, 2.2), **more)
    trace["mode"] = "lines" if len(points) > 1 else "lines+markers"
    return trace


def _told(knob: Knob, shown: Sequence[str]) -> str:
    """What pointing at a cycle shows."""
    lrs = known(knob.values)
    lines = [f"{brief(centre_of(knob))}, spread {brief(min(lrs))} to {brief(max(lrs))}"]
    if knob.decision in MOVES:
        lines.append(f"<b>{MOVES[knob.decision].name}</b>")
    if knob.decision in shown or knob.decision not in MOVES:
        lines.append(wrapped(knob.reason) or "no reason recorded")
    if knob.scale is not None and knob.decision in ("up", "down"):
        lines.append(f"scale after it: {brief(knob.scale)}")
    return "<br>".join(lines)


def _moves(knobs: Sequence[tuple[int, Knob]], decision: str) -> Trace | None:
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
    knobs = [(s, knob) for s, knob in history.knob(name) if knob.hypergradient is not None]
    if not knobs:
        return None
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


def blocks(points: Sequence[tuple[int, float]], length: int) -> list[tuple[int, float | None]]:
    """The mean of every so many points, at the last of their steps.

    >>> blocks([(1, 0.0), (2, 1.0), (3, 4.0)], length=2)
    [(2, 0.5), (3, 4.0)]
    """
    parts = [points[start : start + length] for start in range(0, len(points), length)]
    return [(part[-1][0], mean([value for _, value in part])) for part in parts]


def scouts(history: History) -> list[Plot | None]:
    """One plot for each search."""
    return [_scout(history, seen) for seen in history.scouts]


def _scout(history: History, seen: Scouted) -> Plot | None:
    """What a few steps came to at every learning rate that was tried."""
    given = known(seen.peaks.values())
    single = len(seen.peaks) == 1 and given and given[0] > 0
    unit = given[0] if single else 1.0
    tried = _rates(zip(seen.factors, seen.scores, strict=True), unit)
    points = [(rate, score) for rate, score in tried if score is not None]
    if len(points) < 2:
        return None
    close = [(rate, score) for rate, score in _rates(seen.close, unit) if score is not None]
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


def _rates(
    points: Iterable[tuple[float | None, float | None]], unit: float
) -> list[tuple[float, float | None]]:
    """The learning rates that were tried, from below."""
    tried = [
        (rate, score)
        for factor, score in points
        if factor is not None and 0 < (rate := factor * unit) < math.inf
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


def _scouted(seen: Scouted, unit: float, num_above: int, lost: Sequence[float]) -> str:
    how = COMPARED.get(seen.by, "")
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
        why = f": {shortened(seen.why, 120)}" if seen.why else ""
        begins = f"The schedule peaks at {brief(seen.factor * unit)}"
        if seen.late:
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


def scales(history: History) -> Plot | None:
    """Every knob at once, each in units of where it began; for runs with many knobs."""
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
    """How the signal answered to every knob: slopes with intervals, over the steps."""
    traces = []
    for index, name in enumerate(history.knob_names):
        known_slopes = [
            (step, knob.slope, knob.slope_error)
            for step, knob in history.knob(name)
            if knob.slope is not None and knob.slope_error is not None
        ]
        points = faded(known_slopes)
        if not points:
            continue
        traces += _interval(points, index, f"s{index}")
        line = [(step, slope) for step, slope, _ in points]
        trace = curve(label(name), line, own_steps=True, legendgroup=f"s{index}", **look(index, 2))
        trace["text"] = [f" ± {1.96 * error:.2g}" for _, _, error in points]
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
    low = [rounded(slope - 1.96 * error) for _, slope, error in points]
    high = [rounded(slope + 1.96 * error) for _, slope, error in points]
    fill = {"fill": "tonexty", "fillcolor": f"{colour(index)}/0.12"}
    return [{**edge, "y": low}, {**edge, "y": high, **fill}]


def faded(slopes: Iterable[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    """At every step what the slopes so far have shown."""
    felt, points = Felt(), []
    for step, slope, error in slopes:
        felt = felt.and_then(slope, error)
        if felt.num:
            points.append((step, felt.slope, felt.error))
    return points


def distances(history: History) -> Plot | None:
    rows = [(cycle.step, cycle.distances) for cycle in history.cycles]
    traces = per_replica(rows, max((len(row) for _, row in rows), default=0))
    if not traces:
        return None
    values = [value for trace in traces for value in trace["y"]]
    caption = (
        "How far each replica had gone from the consensus just before the converge: the RMS of "
        "the difference, relative to that of the weights."
    )
    mode = "closest" if len(traces) > NUM_COLOURS else "x unified"
    layout = layout_of(axis("relative RMS distance", values), [history], hovermode=mode)
    return Plot("Distance before each converge", caption, traces, layout, "half")


def exclusions(history: History) -> Plot | None:
    excluded = history.excluded
    if not excluded:
        return None
    trace = {
        "type": "scatter",
        "mode": "markers",
        "name": "excluded",
        "x": [gone.step for gone in excluded],
        "y": [gone.replica for gone in excluded],
        "text": [wrapped(gone.reason) or "no reason recorded" for gone in excluded],
        "hovertemplate": "<b>replica %{y}, step %{x:,d}</b><br>%{text}<extra></extra>",
        "marker": {"symbol": "x", "size": 11, "color": "@c1", "line": {"width": 0}},
    }
    last = max(history.most_replicas - 1, *(gone.replica for gone in excluded))
    y_axis = axis("replica", range=[last + 0.5, -0.5], zeroline=False, tickformat="d")
    y_axis |= {"dtick": 1} if last < 16 else {}
    layout = layout_of(y_axis, [history], hovermode="closest", showlegend=False)
    caption = "A cross is a replica that was left out of the converge at that step."
    return Plot("Excluded replicas", caption, [trace], layout, "half")


def converge_cost(history: History) -> Plot | None:
    converges = history.every_converge
    seconds = [(c.step, c.seconds) for c in converges if c.seconds is not None]
    sizes = [(c.step, c.num_bytes) for c in converges if c.num_bytes is not None]
    if not seconds and not sizes:
        return None
    top = curve("time", seconds, **look(0, 1.6))
    bottom = curve("bytes sent by one replica", sizes, yaxis="y2", **look(0, 1.6))
    top["hovertemplate"], bottom["hovertemplate"] = "%{y:.3~s}s", "%{y:.4~s}B"
    from_zero: dict[str, Any] = {"rangemode": "tozero", "nticks": 5}
    layout = layout_of(
        axis("time", domain=[0.56, 1], tickformat="~s", ticksuffix="s", **from_zero),
        [history],
        yaxis2=axis("bytes", domain=[0, 0.44], tickformat="~s", ticksuffix="B", **from_zero),
        showlegend=False,
    )
    layout["xaxis"]["anchor"] = "y2"
    bottom["name"] = "bytes"
    caption = "The time of each converge (above) and the bytes it sent (below), both from zero."
    return Plot("Cost of converging", caption, [top, bottom], layout, "half")


# Plots of several runs -----------------------------------------------------------------------


def measure(runs: Sequence[Labelled], name: str, size: str = "half") -> Plot | None:
    """What was noted of a measure; with one run or with several."""
    traces = [
        curve(label(who or name), points, own_steps=len(runs) > 1, **look(index, 2))
        for index, (who, history) in enumerate(runs)
        if (points := history.measure(name))
    ]
    if not traces:
        return None
    title = "Held-out loss of the consensus" if name == "loss" else shortened(name)
    caption = "As it was noted in the record."
    if len(traces) < len(runs):
        caption += f" {len(runs) - len(traces)} of {len(runs)} runs noted none."
    values = [value for trace in traces for value in trace["y"]]
    y_axis = axis("held-out loss" if name == "loss" else label(name), values)
    layout = layout_of(y_axis, [history for _, history in runs], showlegend=len(runs) > 1)
    return Plot(title, caption, traces, layout, size)


def mean_losses(runs: Sequence[Labelled]) -> Plot | None:
    traces = [
        curve(label(who), points, own_steps=True, **look(index, 2))
        for index, (who, history) in enumerate(runs)
        if (points := mean_loss(history))
    ]
    if not traces:
        return None
    values = [value for trace in traces for value in trace["y"]]
    layout = layout_of(axis("training loss", values), [history for _, history in runs])
    caption = "The mean of the replicas' training losses over each cycle; not a held-out loss."
    return Plot("Training loss", caption, traces, layout)


def knobs_of(runs: Sequence[Labelled], name: str, size: str) -> Plot | None:
    traces: list[Trace] = []
    for index, (who, history) in enumerate(runs):
        knobs = [(step, knob) for step, knob in history.knob(name) if known(knob.values)]
        if knobs:
            group = {"legendgroup": str(index)}
            traces += _band(knobs, index, label(who), showlegend=False, **group)
            traces.append(_centre(knobs, index, label(who), **group))
    if not traces:
        return None
    histories = [history for _, history in runs]
    layout = layout_of(_knob_axis(histories, name, traces), histories)
    caption = (
        "The line is the centre of the spread of each run, the band runs from the lowest to the "
        "highest value of its replicas."
    )
    return Plot(_title(histories, name), caption, traces, layout, size)
