"""The figures of the replication, from its result files -> docs/assets/replication-*.svg

python -m benchmarks.replication.figures
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.replication import groups, stability, table1, tail
from benchmarks.replication.jobs import Row
from benchmarks.replication.script import finite
from benchmarks.replication.tail_tasks import KINDS
from benchmarks.result_file import RESULTS, ROOT, read_result
from benchmarks.zoo.tasks import GROUPS

FOLDER = ROOT / "docs" / "assets"
COLOURS = ("#495057", "#1c7ed6", "#7048e8", "#f08c00", "#0b7285", "#d6336c")
WIDE, HIGH, LEFT, TOP, BELOW = 290, 180, 58, 44, 44
CRASHED = 1000.0
"""Where crashed runs are drawn, in percent of regret."""


class Axis(NamedTuple):
    """Values along a side of a panel, and the words at some of them."""

    place: Callable[[float], float]
    """A value -> its place, from 0 to 1."""
    ticks: Sequence[tuple[float, str]]


class Line(NamedTuple):
    """A line of a panel; `band` is what lies around each of its points."""

    colour: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]] = ()


def panel(title: str, across: Axis, up: Axis, lines: Sequence[Line]) -> str:
    """Lines over two axes."""

    def x(value: float) -> str:
        return f"{across.place(value) * WIDE:.1f}"

    def y(value: float) -> str:
        return f"{(1 - up.place(value)) * HIGH:.1f}"

    parts = [f'<text x="0" y="-12" font-weight="600">{title}</text>']
    for value, words in up.ticks:
        parts.append(f'<line x1="0" x2="{WIDE}" y1="{y(value)}" y2="{y(value)}" stroke="#e9ecef"/>')
        parts.append(f'<text x="-6" y="{y(value)}" dy="4" text-anchor="end">{words}</text>')
    for value, words in across.ticks:
        parts.append(f'<text x="{x(value)}" y="{HIGH + 16}" text-anchor="middle">{words}</text>')
    for line in lines:
        if line.band:
            edge = [(at, low) for (at, _), (low, _) in zip(line.points, line.band, strict=True)]
            back = [(at, top) for (at, _), (_, top) in zip(line.points, line.band, strict=True)]
            path = " ".join(f"{x(at)},{y(v)}" for at, v in [*edge, *back[::-1]])
            parts.append(f'<polygon points="{path}" fill="{line.colour}" opacity="0.15"/>')
        path = " ".join(f"{x(at)},{y(value)}" for at, value in line.points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"/>'
        )
    return "".join(parts)


def page(panels: Sequence[str], legend: Sequence[tuple[str, str]], columns: int = 2) -> str:
    """Panels side by side above a legend of colours and words."""
    rows = math.ceil(len(panels) / columns)
    width = columns * (WIDE + LEFT) + 20
    height = rows * (HIGH + TOP + BELOW) + 12 + 20 * math.ceil(len(legend) / 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, drawn in enumerate(panels):
        row, column = divmod(place, columns)
        x, y = LEFT + column * (WIDE + LEFT), TOP + row * (HIGH + TOP + BELOW)
        parts.append(f'<g transform="translate({x},{y})">{drawn}</g>')
    for place, (colour, words) in enumerate(legend):
        x = LEFT + place % 2 * (WIDE + LEFT)
        y = rows * (HIGH + TOP + BELOW) + 10 + 20 * (place // 2)
        parts.append(
            f'<line x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" '
            f'stroke-width="3"/><text x="{x + 28}" y="{y}">{words}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


# Losses over a run ------------------------------------------------------------------------------

LOSS_ROWS = ("Baseline-Low", "Baseline-High", "Warm-Init", "HDET without auto-LR", "HDET")
LOSS_RATIOS = (3, 9)


def losses_over_steps(rows: Sequence[Row]) -> str:
    """The training loss of rows of the table over a run: the median of the seeds."""
    colours = dict(zip(LOSS_ROWS, COLOURS, strict=False))
    panels = []
    for ratio, task in product(LOSS_RATIOS, dict.fromkeys(row["task"] for row in rows)):
        lines = [
            Line(colour, loss_course(list(table1.of(rows, task, name, ratio).values())))
            for name, colour in colours.items()
        ]
        values = [loss for line in lines for _, loss in line.points]
        low, high = min(values), max(values)
        across = Axis(lambda share: share, [(0, "start"), (0.5, "half of the run"), (1, "end")])
        up = Axis(partial(share_between, low, high), [(v, f"{v:.2f}") for v in (low, high)])
        panels.append(panel(f"{task}: {ratio} x the best learning rate", across, up, lines))
    return page(panels, [(colour, name) for name, colour in colours.items()])


def loss_course(runs: Sequence[Row]) -> list[tuple[float, float]]:
    """The middle of each part of the runs, and the median loss there."""
    num = len(runs[0]["curve"])
    parts = [[finite(run["curve"][part]) for run in runs] for part in range(num)]
    return [((part + 0.5) / num, median(losses)) for part, losses in enumerate(parts)]


def share_between(low: float, high: float, value: float) -> float:
    return (min(value, high) - low) / (high - low)


# Who survives ---------------------------------------------------------------------------------


STARTS = {"nothing": "nothing", "checkpoint": "a checkpoint"}


def regret_axis() -> Axis:
    """Linear up to one percent, then logarithmic up to runs that crashed."""

    def place(value: float) -> float:
        bent = value if value <= 1 else 1 + math.log10(value)
        return (max(bent, -1.0) + 1) / 5.2

    ticks = [(0, "0 %"), (1, "1 %"), (10, "10 %"), (100, "100 %"), (CRASHED, "crashed")]
    return Axis(place, ticks)


def survival(rows: Sequence[Row]) -> str:
    """Regret over the learning rate for each way to train, cold and from a checkpoint."""
    ratios = sorted({row["ratio"] for row in rows} - {1})
    across = Axis(
        lambda value: 0.08 + 0.84 * ratios.index(value) / (len(ratios) - 1),
        [(ratio, f"{ratio} x the best") for ratio in ratios],
    )
    colours = dict(zip(stability.WAYS, COLOURS, strict=True))
    panels = []
    for start in stability.STARTS:
        lines = []
        for way, colour in colours.items():
            points = []
            for ratio in ratios:
                own = stability.of(rows, way, start, ratio)
                known = stability.regrets(rows, way, start, ratio)
                seen = [
                    CRASHED if row["is_crashed"] else min(finite(regret), CRASHED)
                    for regret, row in zip(known, own, strict=True)
                ]
                points.append((float(ratio), median(seen)))
            lines.append(Line(colour, points))
        panels.append(panel(f"from {STARTS[start]}", across, regret_axis(), lines))
    return page(panels, [(colour, way) for way, colour in colours.items()])


# Learning rates by group ------------------------------------------------------------------------


def share_axis() -> Axis:
    ticks = [(10.0**power, f"{10.0**power:g}") for power in range(-6, 2)]
    return Axis(lambda value: (math.log10(max(value, 1e-7)) + 6.5) / 7.5, ticks)


def group_lrs(rows: Sequence[Row]) -> str:
    """The learning rate of each group over a long run, as a share of the given one."""
    colours = dict(zip(GROUPS, ("#1c7ed6", "#2f9e44", "#f08c00", "#d6336c"), strict=True))
    panels = []
    for task, name in product(dict.fromkeys(row["task"] for row in rows), groups.CONTROLLERS):
        own = [row for row in rows if groups.line_of(row) == (task, name, "long", 1)]
        num = min(len(row["group_lrs"][GROUPS[0]]) for row in own)
        across = Axis(partial(share_of, num - 1), [(0, "first cycle"), (num - 1, "last")])
        lines = [Line(c, *course(own, group, num)) for group, c in colours.items()]
        panels.append(panel(f"{task}: {name}", across, share_axis(), lines))
    return page(panels, [(colour, group) for group, colour in colours.items()], columns=4)


def share_of(whole: float, value: float) -> float:
    return value / whole


def course(
    rows: Sequence[Row], group: str, num: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """For each cycle the median over runs, and the half of them in the middle."""
    points, band = [], []
    for cycle in range(num):
        shares = sorted(row["group_lrs"][group][cycle] / row["low"] for row in rows)
        points.append((float(cycle), median(shares)))
        band.append((shares[len(shares) // 4], shares[-1 - len(shares) // 4]))
    return points, band


# Tails ------------------------------------------------------------------------------------------


def tail_gains(rows: Sequence[Row]) -> str:
    """The gain of each recipe over the best control with two standard errors, task by task."""
    names = [*tail.CONTROLS[:4], *tail.TRIED]
    high, step = 18 * len(names), 18
    low_end, high_end = -4.0, 2.0

    def x(value: float) -> float:
        return (min(max(value, low_end), high_end) - low_end) / (high_end - low_end) * 150

    tasks = [(kind, task) for kind, members in KINDS.items() for task in members]
    width, height = 210 + len(tasks) * 170, high + 80
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, name in enumerate(names):
        parts.append(f'<text x="200" y="{62 + place * step}" text-anchor="end">{name}</text>')
    for column, (kind, task) in enumerate(tasks):
        parts.append(f'<g transform="translate({214 + column * 170},50)">')
        parts.append(f'<text x="0" y="-28" fill="#868e96">{kind}</text>')
        parts.append(f'<text x="0" y="-12" font-weight="600">{task}</text>')
        for tick in (-4, -2, 0, 2):
            stroke = "#495057" if tick == 0 else "#e9ecef"
            parts.append(
                f'<path d="M{x(tick):.1f},0 V{high}" stroke="{stroke}"/>'
                f'<text x="{x(tick):.1f}" y="{high + 14}" text-anchor="middle">{tick} %</text>'
            )
        for place, name in enumerate(names):
            parts.append(mark(rows, kind, task, name, place * step + 8, x))
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def mark(
    rows: Sequence[Row], kind: str, task: str, name: str, y: float, x: Callable[[float], float]
) -> str:
    """A dot with its error; a cross at the edge for what lies beyond it."""
    seeds = tail.seeds_of(rows, list(KINDS[kind]), name, tail.SIZES["full"])
    mean, error = tail.gain(rows, task, name, seeds)
    if math.isnan(mean):
        return ""
    colour = "#2f9e44" if mean > 2 * error else "#d6336c" if mean < -2 * error else "#868e96"
    spread = 2 * error if math.isfinite(error) else 0.0
    return (
        f'<line x1="{x(mean - spread):.1f}" x2="{x(mean + spread):.1f}" y1="{y}" y2="{y}" '
        f'stroke="{colour}" stroke-width="2"/><circle cx="{x(mean):.1f}" cy="{y}" r="3" '
        f'fill="{colour}"/>'
    )


FIGURES: dict[str, Callable[[Sequence[Row]], str]] = {
    "table1": losses_over_steps,
    "stability": survival,
    "groups": group_lrs,
    "tail": tail_gains,
}


def figure_of(name: str) -> str:
    """A figure, from the rows of its result file."""
    rows: Any = read_result(RESULTS / f"replication_{name}.json")["rows"]
    return FIGURES[name](rows)


def path_of(name: str) -> Path:
    return FOLDER / f"replication-{name}.svg"


def main() -> None:
    for name in FIGURES:
        path_of(name).write_text(figure_of(name))
        print(path_of(name).relative_to(ROOT))


if __name__ == "__main__":
    main()
