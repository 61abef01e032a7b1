"""The figure of the settling benchmark: regret against the start, one panel for each task."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, median

from benchmarks.learning_rate.methods.registry import METHODS
from benchmarks.learning_rate.regret import DEFAULT, HDET, REFERENCE, Row, by

COLOURS = {
    HDET: "#d6336c",
    DEFAULT: "#f783ac",
    REFERENCE: "#868e96",
    "Schedule-Free AdamW": "#1c7ed6",
    "GreedyLR": "#f08c00",
    "PBT": "#2f9e44",
    "paper": "#7048e8",
    "Prodigy": "#0b7285",
    "Prodigy, warm-up and clipping": "#15aabf",
    "D-Adapt Adam": "#a61e4d",
    "DoG": "#5c940d",
    "L-DoG": "#862e9c",
}
WIDE, HIGH, LEFT, TOP = 300, 190, 52, 34
TICKS = (-1, 0, 1, 10, 100)


def height_of(regret: float) -> float:
    """Linear around nothing, logarithmic above one percent."""
    regret = min(max(regret, -3.0), 400.0)
    return regret if abs(regret) <= 1 else math.copysign(1 + math.log10(abs(regret)), regret)


def figure_of(rows: Sequence[Row]) -> str:
    """Regret against start, one panel for each task; what takes no learning rate is a level."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    columns = 3
    num = math.ceil(len(tasks) / columns)
    width, height = columns * (WIDE + LEFT) + 20, num * (HIGH + TOP + 30) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, task in enumerate(tasks):
        x, y = LEFT + place % columns * (WIDE + LEFT), TOP + place // columns * (HIGH + TOP + 30)
        own = [row for row in rows if row.task == task]
        parts.append(f'<g transform="translate({x},{y})">{_panel(task, own)}</g>')
    parts.append(_legend([m for m in COLOURS if any(r.method == m for r in rows)], height - 40))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(task: str, rows: Sequence[Row]) -> str:
    low, high = height_of(-3), height_of(400)

    def across(start: float) -> float:
        return (math.log10(start) + 3.3) / 6.6 * WIDE

    def down(regret: float) -> float:
        return HIGH * (high - height_of(regret)) / (high - low)

    parts = [f'<text x="0" y="-10" font-weight="600">{task}</text>']
    for tick in TICKS:
        at = down(tick)
        stroke = "#495057" if tick == 0 else "#e9ecef"
        parts.append(f'<line x1="0" x2="{WIDE}" y1="{at:.1f}" y2="{at:.1f}" stroke="{stroke}"/>')
        parts.append(f'<text x="-6" y="{at + 4:.1f}" text-anchor="end">{tick} %</text>')
    for power in range(-3, 4):
        at = across(10.0**power)
        name = {-3: "x 0.001", 0: "the best", 3: "x 1000"}.get(power, "")
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{HIGH}" stroke="#f1f3f5"/>')
        parts.append(f'<text x="{at:.1f}" y="{HIGH + 15}" text-anchor="middle">{name}</text>')
    for method, colour in COLOURS.items():
        found = [row for row in rows if row.method == method]
        if found:
            parts.append(_line(found, colour, method == HDET, across, down))
    return "".join(parts)


def _line(
    rows: Sequence[Row],
    colour: str,
    bold: bool,
    across: Callable[[float], float],
    down: Callable[[float], float],
) -> str:
    width = 2.6 if bold else 1.2
    if math.isnan(rows[0].start):
        at = down(median(row.regret for row in rows))
        return (
            f'<line x1="0" x2="{WIDE}" y1="{at:.1f}" y2="{at:.1f}" stroke="{colour}" '
            f'stroke-width="{width}" stroke-dasharray="5 3"/>'
        )
    starts = by(rows, lambda row: round(math.log10(row.start), 3))
    points = [
        (across(10**start), down(fmean(min(row.regret, 400.0) for row in part)))
        for start, part in sorted(starts.items())
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{width}"/>' for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
        f'<g fill="{colour}">{dots}</g>'
    )


def _legend(methods: Sequence[str], y: float) -> str:
    parts, x = [], float(LEFT)
    for method in methods:
        dash = "" if METHODS[method].takes_lr else ' stroke-dasharray="5 3"'
        parts.append(
            f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" stroke="{COLOURS[method]}" '
            f'stroke-width="{2.6 if method == HDET else 1.4}"{dash}/>'
            f'<text x="{x + 27}" y="{y + 4}">{method}</text>'
        )
        x += 42 + 6.4 * len(method)
    return "".join(parts)
