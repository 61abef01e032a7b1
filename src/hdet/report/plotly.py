"""Texts, numbers, lines and axes of plots, as plain data for plotly.js.

A colour is a name ("@c0", "@ink/0.2"), which the page replaces by a colour of its light or dark
palette. Each text of a record passes through `label` or `wrapped`: plotly reads a subset of HTML
in its texts, and a knob may have any name.
"""

import html
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from hdet.records.history import History
from hdet.report.plot import Trace

NUM_COLOURS = 8
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "cross", "x", "star", "hexagon", "pentagon")
MAX_MARKERS = 30
MANY = 300
"""The number of cycles beyond which lines are thinner."""
LABEL_LENGTH = 40
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"

LEGEND = {
    "orientation": "h",
    "traceorder": "normal",
    "yref": "container",
    "y": 0,
    "yanchor": "bottom",
    "xref": "paper",
    "x": 0,
    "xanchor": "left",
}

CROWD = {
    "line": {"color": "@soft", "width": 1},
    "marker": {"color": "@soft", "size": 3},
    "opacity": 0.5,
    "legendgroup": "replicas",
    "showlegend": False,
}

# Texts and numbers ---------------------------------------------------------------------------


def shortened(text: str, most: int = LABEL_LENGTH) -> str:
    """A text of at most `most` characters.

    >>> shortened("embedding", 6)
    'embed…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def label(text: str, most: int = LABEL_LENGTH) -> str:
    """A short text of the record, escaped for plotly.

    >>> label("<b>a & b")
    '&lt;b&gt;a &amp; b'
    """
    return html.escape(shortened(text, most), quote=False)


def wrapped(text: str) -> str:
    """A sentence of the record, escaped for plotly, in lines that fit a phone."""
    return "<br>".join(
        html.escape(line, quote=False) for line in textwrap.wrap(shortened(text, 280), 44)
    )


def rounded(value: float | None) -> float | None:
    """A number with six digits: a screen shows no more, and the page has half the size."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def brief(value: float | None) -> str:
    """A number with three digits, with or without an exponent.

    >>> brief(0.000123456), brief(1234567), brief(12345), brief(0.25), brief(None)
    ('1.23e-4', '1.23e6', '12345', '0.25', '-')
    """
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0 or 1e-2 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def duration(seconds: float) -> str:
    """A time in milliseconds or seconds.

    >>> duration(0.0123), duration(12.3), duration(0)
    ('12.3 ms', '12.3 s', '0 s')
    """
    return f"{seconds * 1e3:.3g} ms" if 0 < seconds < 1 else f"{brief(seconds)} s"


def volume(num_bytes: float) -> str:
    """A number of bytes with a decimal prefix.

    >>> volume(4_200_000), volume(12), volume(0)
    ('4.2 MB', '12 B', '0 B')
    """
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if num_bytes >= size:
            return f"{brief(num_bytes / size)} {prefix}B"
    return f"{num_bytes:.0f} B"


def mean(values: Sequence[float]) -> float:
    """The mean; values are divided before they are summed, so that the sum does not overflow.

    >>> mean([1e308, 1e308, 1e308]) == 1e308
    True
    """
    return math.fsum(value / len(values) for value in values)


def known(values: Iterable[float | None]) -> list[float]:
    """The values that are not missing."""
    return [value for value in values if value is not None]


def needs_log(values: Iterable[float | None]) -> bool:
    """Whether the values are positive and span more than a decade.

    >>> needs_log([1, 11]), needs_log([1, 9]), needs_log([0, 100]), needs_log([])
    (True, False, False, False)
    """
    numbers = known(values)
    return bool(numbers) and min(numbers) > 0 and max(numbers) / min(numbers) > 10


# Traces and axes -----------------------------------------------------------------------------


def curve(
    name: str, points: Sequence[tuple[int, float | None]], *, own_steps: bool = False, **more: Any
) -> Trace:
    """A line. A point between two gaps gets a marker, so that each point can be seen.

    Plotly lists the nearest point of each line under the step of the pointer. A line with steps of
    its own, or with gaps, therefore shows the step of its value.

    Args:
        name: The entry in the legend.
        points: Steps and values.
        own_steps: Whether the line has other steps than the lines beside it.
        **more: Further entries of the trace.
    """
    values = [value for _, value in points]
    own_steps = own_steps or None in values
    trace: Trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [step for step, _ in points],
        "y": [rounded(value) for value in values],
        "hovertemplate": f"%{{y:.4~g}}{' (step %{x:,d})' if own_steps else ''}",
        **more,
    }
    if len(known(values)) > MAX_MARKERS:
        alone = _alone(values)
        trace["mode"] = "lines+markers" if any(alone) else "lines"
        if any(alone):
            trace["marker"] = {**trace.get("marker", {}), "size": [5 if a else 0 for a in alone]}
    return trace


def _alone(values: Sequence[float | None]) -> list[bool]:
    """For each value, whether it has no neighbour to draw a line to."""
    padded = [None, *values, None]
    return [
        value is not None and before is None and after is None
        for before, value, after in zip(padded, values, padded[2:], strict=False)
    ]


def axis(
    title: str, values: Iterable[float | None] = (), *, may_be_log: bool = True, **more: Any
) -> dict[str, Any]:
    """An axis; logarithmic if the values span more than a decade, unless it must be linear."""
    values = known(values)
    is_log = may_be_log and needs_log(values)
    if values and 0 < min(values) == max(values) < 1e300:
        # Around a constant plotly would draw from minus one to one, whatever its size.
        more = {"range": [0, 2 * values[0]], **more}
    if is_log and max(values) / min(values) < 1000:
        # Few decades: 1, 2, 5 in full instead of plotly's lone digits.
        more = {"dtick": "D2", "tickformat": "~g", **more}
    elif is_log:
        more = {"dtick": 1, "tickformat": "~g", "minor": {"dtick": "D2", "ticks": "inside"}, **more}
    return {
        "title": {"text": f"{title} (log scale)" if is_log else title, "standoff": 8},
        "type": "log" if is_log else "linear",
        "automargin": True,
        "gridcolor": "@grid",
        "linecolor": "@line",
        "tickcolor": "@line",
        "zeroline": False,
        "exponentformat": "power",
        **more,
    }


def layout_of(y_axis: dict[str, Any], histories: Sequence[History], **more: Any) -> dict[str, Any]:
    """The layout of a plot over steps, with dotted lines at the resumes of a single run."""
    x_axis = axis("step", showline=True, ticks="outside", ticklen=4, tickformat=",d", nticks=8)
    x_axis["unifiedhovertitle"] = {"text": "<b>step %{x:,d}</b>"}
    # The same range in all plots of a page, so that equal steps are at equal places.
    last = max(1, *(history.last_step for history in histories))
    x_axis["range"] = [-0.015 * last, 1.02 * last]
    resumes = {step for history in histories for step in history.resumes}
    return {
        "autosize": True,
        "margin": {"l": 56, "r": 12, "t": 10, "b": 44},
        "paper_bgcolor": "@card",
        "plot_bgcolor": "@card",
        "font": {"family": FONT, "size": 12.5, "color": "@soft"},
        "hovermode": "x unified",
        "hoverlabel": {
            "bgcolor": "@card",
            "bordercolor": "@line",
            "align": "left",
            "font": {"family": FONT, "size": 12.5, "color": "@ink"},
        },
        "legend": LEGEND,
        "xaxis": x_axis,
        "yaxis": y_axis,
        "shapes": [_vertical(step) for step in sorted(resumes)] if len(histories) == 1 else [],
        **more,
    }


def _vertical(step: int) -> dict[str, Any]:
    line = {"color": "@soft", "width": 1, "dash": "dot"}
    ends = {"x0": step, "x1": step, "y0": 0, "y1": 1, "xref": "x", "yref": "paper"}
    return {"type": "line", "layer": "below", "line": line, **ends}


def colour(index: int) -> str:
    """The name of a colour of the palette, in turn."""
    return f"@c{index % NUM_COLOURS}"


def look(index: int, width: float) -> dict[str, Any]:
    """The colour, dash and symbol of the line with this index."""
    return {
        "line": {"color": colour(index), "width": width, "dash": DASHES[index % len(DASHES)]},
        "marker": {"color": colour(index), "symbol": SYMBOLS[index % len(SYMBOLS)], "size": 5},
    }


def per_replica(
    rows: Sequence[tuple[int, Sequence[float | None]]],
    num_replicas: int,
    errors: Sequence[Sequence[float | None]] = (),
) -> list[Trace]:
    """One thin line for each replica; more than eight share a colour and a legend entry."""
    is_crowd = num_replicas > NUM_COLOURS
    width = 1.3 if len(rows) <= MANY else 0.8
    traces = []
    for replica in range(num_replicas):
        points = [(step, row[replica] if replica < len(row) else None) for step, row in rows]
        style = CROWD if is_crowd else {**look(replica, width), "opacity": 0.9}
        trace = curve(f"replica {replica}", points, **style)
        if is_crowd:
            alone = f"replica {replica}, step %{{x:,d}}: %{{y:.4~g}}<extra></extra>"
            trace["hovertemplate"] = alone
        if any(replica < len(row) and row[replica] is not None for row in errors):
            trace["text"] = [_error(row, replica) for row in errors]
            trace["hovertemplate"] = trace["hovertemplate"].replace("~g}", "~g}%{text}")
        if known(trace["y"]):
            traces.append(trace)
    if is_crowd and traces:
        traces[0] |= {"name": f"{num_replicas} replicas", "showlegend": True}
    return traces


def _error(row: Sequence[float | None], replica: int) -> str:
    error = row[replica] if replica < len(row) else None
    return "" if error is None else f" ± {error:.2g}"
