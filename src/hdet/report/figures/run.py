"""Plots of one run: losses, distances, excluded replicas and the cost of averaging."""

from typing import Any

from hdet.records.history import History
from hdet.report.figures.curves import mean_loss, reference_band
from hdet.report.plot import Plot
from hdet.report.plotly import NUM_COLOURS, axis, curve, layout_of, look, per_replica, wrapped


def losses(history: History) -> Plot | None:
    """The training loss of each replica, and the held-out loss of the consensus if it is known."""
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
    band = reference_band([history], "loss") if held_out else None
    if band is not None:
        traces.append(band.trace)
        caption += f" {band.text}"
    y_axis = axis("loss", [value for trace in traces for value in trace["y"]])
    mode = "closest" if history.most_replicas > NUM_COLOURS else "x unified"
    return Plot(title, caption, traces, layout_of(y_axis, [history], hovermode=mode))


def distances(history: History) -> Plot | None:
    """The distance of each replica from the average, just before each average."""
    rows = [(cycle.step, cycle.distances) for cycle in history.cycles]
    traces = per_replica(rows, max((len(row) for _, row in rows), default=0))
    if not traces:
        return None
    values = [value for trace in traces for value in trace["y"]]
    if not any(values):
        return None  # replicas that hold the same weights
    caption = (
        "How far each replica had gone from the consensus just before the converge: the RMS of "
        "the difference, relative to that of the weights."
    )
    mode = "closest" if len(traces) > NUM_COLOURS else "x unified"
    layout = layout_of(axis("relative RMS distance", values), [history], hovermode=mode)
    return Plot("Distance before each converge", caption, traces, layout, "half")


def exclusions(history: History) -> Plot | None:
    """The replicas that were left out of an average."""
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


def _converge_time(history: History, seconds: list[tuple[int, float]]) -> Plot:
    """The time of each average, for replicas that send nothing."""
    trace = curve("time", seconds, hovertemplate="%{y:.3~s}s", **look(0, 1.6))
    y_axis = axis("time", tickformat="~s", ticksuffix="s", rangemode="tozero", nticks=5)
    layout = layout_of(y_axis, [history], showlegend=False)
    caption = "The time of each converge. The replicas share one device and send nothing."
    return Plot("Cost of converging", caption, [trace], layout, "half")


def converge_cost(history: History) -> Plot | None:
    """The time and the bytes of each average."""
    costs = [(event.step, event.converge) for event in history.every_converge]
    seconds = [(step, cost.seconds) for step, cost in costs if cost.seconds is not None]
    sizes = [(step, cost.bytes) for step, cost in costs if cost.bytes is not None]
    if not any(value for _, value in (*seconds, *sizes)):
        return None
    if not any(size for _, size in sizes):
        return _converge_time(history, seconds)
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
