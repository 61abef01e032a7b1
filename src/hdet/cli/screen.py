"""The live display of the demo in a terminal, with rich."""

import math
import time
from collections.abc import Sequence
from typing import Any

from hdet.cli.formats import number, remaining
from hdet.cli.progress import RemainingTime, ReplicaView, Status

FAN_WIDTH, BAR_WIDTH = 33, 12
"""The width in characters of the line with a replica's learning rate, and of its distance."""
CHART_WIDTH, CHART_HEIGHT = 60, 9
PAUSES = {"scout": 0.15, "fan out": 0.015, "converge": 0.5}
"""Seconds that a picture stays on the screen: small models would be too fast to watch."""


class Live:
    """A panel that is redrawn in place."""

    def __init__(self) -> None:
        from rich.live import Live as RichLive

        self._clock = RemainingTime()
        self._live = RichLive(refresh_per_second=12)
        self._furthest = 0.0

    def __enter__(self) -> "Live":
        self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.stop()

    def show(self, status: Status, *, milestone: bool) -> None:
        """Draw a status, and leave time to look at it."""
        distances = [view.distance or 0.0 for view in status.replicas]
        self._furthest = max(self._furthest, *distances)
        self._live.update(panel(status, self._clock.left(status), self._furthest))
        time.sleep(PAUSES.get(status.phase, 0.0))


def panel(status: Status, left: float | None, furthest: float = 0.0) -> Any:
    """The live display, as an object that rich prints.

    Args:
        status: What it shows.
        left: The seconds that are left.
        furthest: The distance whose bar is full.
    """
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    dots = "●" * status.step_of_cycle + "·" * (status.sync_every - status.step_of_cycle)
    where = Text.assemble(
        ("given ", "dim"), number(status.given),
        ("   step ", "dim"), f"{status.step}/{status.total}",
        ("   cycle ", "dim"), f"{status.cycle}   ",
        (f"{status.phase} ", "bold"), (dots if status.sync_every <= 40 else "", "cyan"),
        ("   " + remaining(left), "dim"),
    )  # fmt: skip
    bar = ProgressBar(total=status.total, completed=status.step)
    fans_out = status.phase in PAUSES
    shown = _fan(status, furthest) if fans_out else _chart(status)
    title = f"hdet demo, run {status.number} of {status.runs}: {status.title}"
    return Panel(Group(where, bar, Text(), shown), title=title, padding=(1, 2))


# Replicas ---------------------------------------------------------------------------------------


def _fan(status: Status, furthest: float) -> Any:
    """One row for each replica, and one for their average."""
    from rich.table import Table

    views = status.replicas
    table = Table(box=None, pad_edge=False)
    for title in ("replica", "learning rate", "", "loss", "from the average"):
        table.add_column(title, justify="left" if title in ("", "from the average") else "right")
    lrs = [view.lr for view in views]
    known = [view.loss for view in views if view.loss is not None and math.isfinite(view.loss)]
    lowest = min(known, default=None)
    for place, view in enumerate(views):
        loss = number(view.loss)
        table.add_row(
            str(place),
            number(view.lr),
            f"[green]{_line(view.lr, min(lrs), max(lrs))}[/]",
            f"[bold green]{loss}[/]" if view.loss == lowest is not None else loss,
            _distance(view, furthest),
        )
    if status.phase == "converge":
        mean = number(sum(known) / len(known)) if known else "-"
        told = f"[bold]{status.shown_measures}[/]"
        table.add_row("[bold]average[/]", number(status.lr), told, mean, "")
    else:
        what = (
            "own learning rate, shared gradient"
            if status.phase == "fan out"
            else "each trains alone"
        )
        table.add_row("", "", f"[dim]{what}[/]", "", "")
    return table


def _distance(view: ReplicaView, furthest: float) -> str:
    if view.distance is None:
        return ""
    full = round(BAR_WIDTH * view.distance / furthest) if furthest else 0
    return f"[cyan]{'▇' * full:<{BAR_WIDTH}}[/] {view.distance:.1e}"


def _line(lr: float, low: float, high: float) -> str:
    """A mark at the place of a learning rate, from the lowest to the highest.

    >>> _line(1.0, 0.1, 10.0).index("●")
    17
    """
    share = math.log(lr / low) / math.log(high / low) if 0 < low < high else 0.5
    row = ["─"] * FAN_WIDTH
    row[round(share * (FAN_WIDTH - 1))] = "●"
    return "├" + "".join(row) + "┤"


# The held-out loss beside the sweep -------------------------------------------------------------


def _chart(status: Status) -> Any:
    """The held-out loss over the steps, the band of the sweep behind it, and what was found."""
    from rich.console import Group
    from rich.text import Text

    lines = [Text("held-out loss (log scale)", style="dim")]
    lines += [Text.assemble(*row) for row in chart_rows(status.curve, status.total, status.band)]
    if status.band is not None:
        low, high = map(number, status.band)
        told = f" best of a sweep, {status.price}: {low} to {high}{_beside(status)}"
        lines.append(Text.assemble(("░░", "yellow"), (told, "dim")))
    between = "   " if status.measures else ""
    lines.append(Text(f"{status.shown_measures}{between}learning rate {number(status.lr)}"))
    lines.append(Text(status.finding, style="bold green"))
    return Group(*lines)


def _beside(status: Status) -> str:
    """How the held-out loss lies beside the band: a row of the chart is coarse."""
    loss = status.measures.get("loss")
    if loss is None or status.band is None:
        return ""
    low, high = status.band
    if loss > high:
        return f"; this run: {loss / high - 1:.1%} above"
    return "; this run: below" if loss < low else "; this run: within"


def chart_rows(
    curve: Sequence[tuple[int, float]], total: int, band: tuple[float, float] | None
) -> list[list[tuple[str, str]]]:
    """The rows of the chart from top to bottom, each as pieces of text with their styles."""
    points = [(step, loss) for step, loss in curve if 0 < loss < math.inf]
    values = [loss for _, loss in points] + [end for end in band or () if end > 0]
    low, high = (min(values), max(values)) if values else (1.0, 1.0)

    def row_of(loss: float) -> int:
        share = math.log(loss / low) / math.log(high / low) if high > low else 0.0
        return round((1 - share) * (CHART_HEIGHT - 1))

    shaded = range(row_of(band[1]), row_of(band[0]) + 1) if band else range(0)
    marks = {(row_of(loss), round(step / total * (CHART_WIDTH - 1))) for step, loss in points}
    ends = {0: number(high), CHART_HEIGHT - 1: number(low)}
    rows = []
    for row in range(CHART_HEIGHT):
        behind = ("░", "yellow") if row in shaded else (" ", "")
        cells = [
            ("●", "bold cyan") if (row, column) in marks else behind
            for column in range(CHART_WIDTH)
        ]
        rows.append([(f"{ends.get(row, ''):>8} │", "dim"), *cells])
    return rows
