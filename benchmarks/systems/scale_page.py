"""What scale.json says: numbers for its headline, tables, and docs/assets/scale.svg."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.result_file import ROOT

FIGURE = ROOT / "docs" / "assets" / "scale.svg"
Row = Mapping[str, float]

NAMES = {
    "all_reduce": "all-reduce, 2 to 8 processes",
    "converge": "converge, 2 to 4 processes",
    "local_step": "step with local gradients",
    "shared_step": "step with shared gradients",
    "stacked_converge": "converge, 2 to 64 stacked replicas",
    "stacked_end": "whole end of a cycle, the same",
    "decision": "decision, 64 to 4096 replicas, one knob",
}
WAYS = {"shared_pct": "shared", "local_pct": "local", "overlapped_pct": "local, overlapped"}
COLOURS = ("#1864ab", "#2b8a3e", "#e67700", "#c92a2a", "#5f3dc4")
WIDE, HIGH, LEFT, TOP = 250, 200, 62, 46


# Tables --------------------------------------------------------------------------------------


def number(value: float) -> str:
    """
    >>> number(1e9), number(4e11), number(3e7)
    ('1 B', '400 B', '30 M')
    """
    return f"{value / 1e9:g} B" if value >= 1e9 else f"{value / 1e6:g} M"


def percent(value: float) -> str:
    """
    >>> percent(0.0341), percent(-31.4)
    ('0.034', '-31')
    """
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"


def milliseconds(seconds: float) -> str:
    """
    >>> milliseconds(0.0359), milliseconds(4.39)
    ('35.9', '4390')
    """
    return f"{1e3 * seconds:.0f}" if seconds >= 1 else f"{1e3 * seconds:.3g}"


def errors_of(found: Mapping[str, Any]) -> list[list[str]]:
    rows = [["", "points held out", "median error", "worst"]]
    for name, shown in NAMES.items():
        part = found["errors_pct"][name]
        errors = [f"{part['median']:.1f} %", f"{part['worst']:.1f} %"]
        rows.append([shown, str(part["points"]), *errors])
    return rows


def costs_of(costs: Sequence[Row]) -> list[list[str]]:
    head = ["parameters", "GPUs", "replicas x shards", "step, s", "converge, ms"]
    rows = [[*head, *(f"{way}, %" for way in WAYS.values())]]
    for row in costs:
        rows.append(
            [
                number(row["parameters"]),
                f"{row['gpus']:g}",
                f"{row['replicas']:g} x {row['shards']:g}",
                f"{row['step']:.3g}",
                milliseconds(row["converge"]),
                *(percent(row[key]) for key in WAYS),
            ]
        )
    return rows


def stacks_of(points: Sequence[Row]) -> list[list[str]]:
    head = ["replicas", "parameters of each", "converge, ms", "end of a cycle, ms", "decision, ms"]
    rows = [head]
    for point in points:
        times = [f"{1e3 * point[key]:.2f}" for key in ("converge", "end", "decision")]
        size = f"{point['parameters']:.0e}".replace("e+0", "e")
        rows.append([f"{point['replicas']:g}", size, *times])
    return rows


def over_raw(points: Sequence[Row], processes: Sequence[int]) -> tuple[float, float]:
    """A converge over a raw all-reduce of as many bytes, from 10 M parameters on: from, to."""
    ratios = [
        point["converge"] / point["all_reduce"]
        for point in points
        if point["processes"] in processes and point["parameters"] >= 1e7
    ]
    return min(ratios), max(ratios)


def decision_ms(points: Sequence[Row], replicas: int) -> float:
    """Milliseconds of a decision with one knob."""
    (taken,) = (p["seconds"] for p in points if (p["replicas"], p["knobs"]) == (replicas, 1))
    return 1e3 * taken


def beyond_raw(points: Sequence[Row]) -> list[float]:
    """Milliseconds of a converge beyond a raw all-reduce, of the smallest model."""
    least = min(point["parameters"] for point in points)
    small = [point for point in points if point["parameters"] == least]
    return [1e3 * (point["converge"] - point["all_reduce"]) for point in small]


# Figure --------------------------------------------------------------------------------------


def height_of(value: float) -> float:
    """Straight up to a tenth of a per cent, logarithmic beyond, to both sides."""
    return value * 10 if abs(value) <= 0.1 else math.copysign(2 + math.log10(abs(value)), value)


TICKS = (-50.0, -10.0, -1.0, -0.1, 0.0, 0.1, 1.0, 10.0, 50.0)


def figure_of(tables: Mapping[str, Sequence[Row]]) -> str:
    """One panel for each way and each kind of wire; per cent over GPUs."""
    width, height = len(WAYS) * (WIDE + LEFT) + 30, len(tables) * (HIGH + TOP + 34) + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for line, (wire, rows) in enumerate(tables.items()):
        for column, (key, way) in enumerate(WAYS.items()):
            x, y = LEFT + column * (WIDE + LEFT), TOP + line * (HIGH + TOP + 34)
            panel = _panel(f"{way}, {wire}", key, rows)
            parts.append(f'<g transform="translate({x},{y})">{panel}</g>')
    sizes = sorted({row["parameters"] for rows in tables.values() for row in rows})
    parts.append(_legend(sizes, height - 18))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(title: str, key: str, rows: Sequence[Row]) -> str:
    low, high = height_of(TICKS[0] * 2), height_of(TICKS[-1])
    gpus = sorted({row["gpus"] for row in rows})

    def across(num: float) -> float:
        return WIDE * (0.05 + 0.9 * math.log(num / gpus[0]) / math.log(gpus[-1] / gpus[0]))

    def down(value: float) -> float:
        return HIGH * (high - height_of(value)) / (high - low)

    parts = [f'<text x="0" y="-12" font-weight="600">{title}</text>']
    for tick in TICKS:
        at, stroke = down(tick), "#495057" if tick == 0 else "#e9ecef"
        parts.append(f'<line x1="0" x2="{WIDE}" y1="{at:.1f}" y2="{at:.1f}" stroke="{stroke}"/>')
        parts.append(f'<text x="-6" y="{at + 4:.1f}" text-anchor="end">{tick:g} %</text>')
    for num in gpus:
        shown = f"{num:g}" + (" GPUs" if num == gpus[-1] else "")
        parts.append(
            f'<text x="{across(num):.1f}" y="{HIGH + 16}" text-anchor="middle">{shown}</text>'
        )
    for size, colour in zip(sorted({row["parameters"] for row in rows}), COLOURS, strict=False):
        own = [(across(r["gpus"]), down(r[key])) for r in rows if r["parameters"] == size]
        parts.append(_line(own, colour))
    return "".join(parts)


def _line(places: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in places)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        f'<g fill="{colour}">{dots}</g>'
    )


def _legend(sizes: Sequence[float], y: float) -> str:
    parts = []
    for place, (size, colour) in enumerate(zip(sizes, COLOURS, strict=False)):
        x = LEFT + place * 136
        parts.append(f'<rect x="{x}" y="{y - 9}" width="18" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 24}" y="{y - 3}">{number(size)} parameters</text>')
    return "".join(parts)


# Numbers -------------------------------------------------------------------------------------


def numbers_of(
    points: Mapping[str, Sequence[Row]], fits: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """What pages quote of the points and the coefficients."""
    few, many = (over_raw(points["wire"], some) for some in ((2, 3, 4), (6, 8)))
    beyond = beyond_raw(points["wire"])
    return {
        "converge_over_raw_2_to_4_processes_least": few[0],
        "converge_over_raw_2_to_4_processes_most": few[1],
        "converge_over_raw_6_to_8_processes_least": many[0],
        "converge_over_raw_6_to_8_processes_most": many[1],
        "converge_beyond_raw_ms_least": min(beyond),
        "converge_beyond_raw_ms_most": max(beyond),
        "decision_ms_n64_k1": decision_ms(points["decision"], 64),
        "exposed_pct": 100 * fits["shared_step"]["exposed"],
        "memory_terabytes_per_second": 1e-12 / fits["stacked_converge"]["byte"],
        "launch_ms_per_replica": 1e3 * fits["stacked_converge"]["replica"],
        "decision_us_per_replica": 1e6 * fits["decision"]["replica"],
    }


def tables(found: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """The tables of the page by name; the first row of each is its head."""
    few_hosts = [row for row in found["table_ethernet"] if row["gpus"] in (64, 4096)]
    return {
        "errors": errors_of(found),
        "costs": costs_of(found["table"]),
        "ethernet": costs_of(few_hosts),
        "stacks": stacks_of(found["points"]["stack"]),
    }


def draw(found: Mapping[str, Any]) -> None:
    shown = {"50 GB/s": found["table"], "100 Gbit/s a host": found["table_ethernet"]}
    FIGURE.write_text(figure_of(shown))
