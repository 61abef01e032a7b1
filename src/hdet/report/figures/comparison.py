"""Plots that compare several runs."""

from collections.abc import Sequence

from hdet.report.figures.curves import Labelled, is_loss, mean_loss, reference_band
from hdet.report.figures.knobs import centre_line, knob_axis, knob_title, spread_band
from hdet.report.plot import Plot, Trace
from hdet.report.plotly import axis, curve, known, label, layout_of, look, shortened


def measure(runs: Sequence[Labelled], name: str, size: str = "half") -> Plot | None:
    """A measure over the steps, for one run or several; none if no run noted it."""
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
    histories = [history for _, history in runs]
    band = reference_band(histories, name)
    if band is not None:
        traces.append(band.trace)
        caption += f" {band.text}"
    values = [value for trace in traces for value in trace["y"]]
    shown = "held-out loss" if name == "loss" else label(name)
    y_axis = axis(shown, values, may_be_log=is_loss(name))
    legend = len(traces) > 1 or bool(runs[0][0])
    return Plot(title, caption, traces, layout_of(y_axis, histories, showlegend=legend), size)


def mean_losses(runs: Sequence[Labelled], size: str = "wide") -> Plot | None:
    """The mean training loss of each run."""
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
    return Plot("Training loss", caption, traces, layout, size)


def knob(runs: Sequence[Labelled], name: str, size: str) -> Plot | None:
    """One knob in several runs: the centre and the band of the spread."""
    traces: list[Trace] = []
    for index, (who, history) in enumerate(runs):
        entries = [(step, entry) for step, entry in history.knob(name) if known(entry.values)]
        if entries:
            group = {"legendgroup": str(index)}
            traces += spread_band(entries, index, label(who), showlegend=False, **group)
            traces.append(centre_line(entries, index, label(who), **group))
    if not traces:
        return None
    histories = [history for _, history in runs]
    layout = layout_of(knob_axis(histories, name, traces), histories)
    caption = (
        "The line is the centre of the spread of each run, the band runs from the lowest to the "
        "highest value of its replicas."
    )
    return Plot(knob_title(histories, name), caption, traces, layout, size)
