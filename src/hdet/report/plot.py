"""A plot of a report: what the figures make and the page shows."""

from typing import Any, NamedTuple

Trace = dict[str, Any]
"""A line, or a set of markers, as plain data for plotly.js."""


class Plot(NamedTuple):
    """A plot and the sentences that go with it.

    Attributes:
        title: The heading.
        caption: What the plot shows.
        data: The traces.
        layout: Axes, legend and margins, for plotly.js.
        size: The share of a row that it takes: `wide`, `most`, `rest` or `half`.
    """

    title: str
    caption: str
    data: list[Trace]
    layout: dict[str, Any]
    size: str = "wide"
