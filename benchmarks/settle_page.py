"""What the settling benchmark has shown: one table, one figure, one page.

    python -m benchmarks.settle_page [FILE ...]

writes the runs of all FILEs (by default of results/settle.json) and their headline into
results/settle.json, and makes docs/settle.md and docs/settle.svg of them.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from benchmarks.methods import METHODS
from benchmarks.regret import (
    DEFAULT,
    HDET,
    REFERENCE,
    Luck,
    Row,
    by,
    curve_of,
    defaults,
    headline,
    is_lost,
    loss_at,
    luck_of,
    percent,
    quantile,
    rows_of,
    small_grids,
    table_of,
)
from benchmarks.settle import RESULTS, plain_json

DOCS = Path(__file__).parent.parent / "docs"


# Words ----------------------------------------------------------------------------------------


NEAR = 1.5


def numbers_of(rows: Sequence[Row], luck: Mapping[str, Luck], method: str = HDET) -> str:
    """What hdet loses on each task; and by how much it does not lie at the learning rate."""
    lines = [
        f"| {method} | median | 90th percentile | worst | lost | from the best | learning rate "
        f"within x {NEAR:g} | median of these | the best one, against itself: 90th percentile | "
        "worst |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    tasks = by((row for row in rows if row.method == method), lambda row: row.task)
    for task, part in tasks.items():
        regrets = [row.regret for row in part]
        close = [row.regret for row in part if 1 / NEAR < row.lr < NEAR]
        first = [row.regret for row in part if math.isclose(row.start, 1.0)]
        cells = [
            percent(median(regrets)),
            percent(quantile(regrets, 0.9)),
            percent(max(regrets)),
            f"{sum(map(is_lost, part))} of {len(part)}",
            percent(median(first)) if first else "",
            f"{len(close)} of {len(part)}",
            percent(median(close)) if close else "",
            *(map(percent, luck[task]) if task in luck else ["", ""]),
        ]
        lines.append(f"| {task} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parts_of(
    rows: Sequence[Row], runs: Sequence[Mapping[str, Any]], fewer: Mapping[str, float]
) -> str:
    """What hdet loses by the learning rate it chooses, by the steps of its scout, and by luck."""
    lines = [
        "| | all of it: median | 90th percentile | worst | its learning rate: median | 90th "
        "percentile | worst | 3 % fewer steps | luck: 90th percentile | worst |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    luck, grids = luck_of(runs), by(runs, lambda run: run["job"]["task"])
    ours = by((row for row in rows if row.method == HDET), lambda row: row.task)
    for task, part in ours.items():
        curve = curve_of(grids[task])
        best = min(curve, key=curve.__getitem__)
        chosen = [100 * (loss_at(curve, row.lr * best) / curve[best] - 1) for row in part]
        steps = fewer.get(f"{task}: 3 % fewer, made up over the whole run")
        cells = [*_spread([row.regret for row in part]), *_spread(chosen)]
        cells += ["" if steps is None else percent(steps), *map(percent, luck[task])]
        lines.append(f"| {task} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _spread(regrets: Sequence[float]) -> list[str]:
    return [percent(median(regrets)), percent(quantile(regrets, 0.9)), percent(max(regrets))]


def starts_of(rows: Sequence[Row], methods: Sequence[str]) -> str:
    """From every start: the mean regret over seeds, and how uncertain it is."""
    own = [row for row in rows if row.method in methods and not math.isnan(row.start)]
    starts = sorted({round(math.log10(row.start), 3): row.start for row in own}.values())
    lines = [
        "| | | " + " | ".join(f"x {start:.3g}" for start in starts) + " |",
        "|---|---|" + "---|" * len(starts),
    ]
    for task, part in by(own, lambda row: row.task).items():
        for method in methods:
            cells = []
            for start in starts:
                found = [
                    row.regret
                    for row in part
                    if row.method == method and math.isclose(row.start, start, rel_tol=1e-3)
                ]
                cells.append(_mean(found))
            if any(cells):
                lines.append(f"| {task} | {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""95 % of the time a mean of so few lies within so many of its standard errors."""


def _mean(regrets: Sequence[float]) -> str:
    if not regrets or not math.isfinite(fmean(regrets)) or len(regrets) not in STUDENT:
        return percent(fmean(regrets)) if regrets else ""
    error = stdev(regrets) / math.sqrt(len(regrets)) * STUDENT[len(regrets)]
    return f"{percent(fmean(regrets))} ± {percent(error)}"


MEASURED = (HDET, "Prodigy", "D-Adapt Adam", "PBT")


def measures_of(rows: Sequence[Row]) -> str:
    """What else is measured, beside the best of the grid: the mean over all runs."""
    names = {"accuracy": "accuracy", "auc": "AUC"}
    lines = [
        "| | | best of the grid | " + " | ".join(MEASURED) + " |",
        "|---|---|---|" + "---|" * len(MEASURED),
    ]
    for task, own in by(rows, lambda row: row.task).items():
        for key, name in names.items():
            if key in own[0].measures:
                best = [r for r in own if r.method == REFERENCE and math.isclose(r.start, 1.0)]
                parts = [best, *([r for r in own if r.method == m] for m in MEASURED)]
                cells = [
                    f"{fmean(r.measures[key] for r in part):.3f}" if part else "" for part in parts
                ]
                lines.append(f"| {task} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def controls_of(runs: Sequence[Mapping[str, Any]]) -> str:
    """What needs no training of its own: a default for all, and a sweep in the same steps."""
    short = small_grids(runs)
    lines = [
        "| | one default, chosen on the other tasks | its regret | a sweep of the same steps |",
        "|---|---|---|---|",
    ]
    for task, default in defaults(runs, "AdamW").items():
        swept = short.get(task)
        cell = f"{percent(median(swept))} ({percent(max(swept))})" if swept else ""
        lines.append(f"| {task} | {default.lr:.2g} | {percent(default.regret)} | {cell} |")
    return "\n".join(lines)


def grids_of(runs: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| | best learning rate | loss at half | at the best | at twice |",
        "|---|---|---|---|---|",
    ]
    for task, own in by(runs, lambda run: run["job"]["task"]).items():
        full = max(run["job"]["steps"] for run in own)
        curve = curve_of(run for run in own if run["job"]["steps"] == full)
        best = min(curve, key=curve.__getitem__)
        cells = [curve.get(best * by) for by in (0.5, 1, 2)]
        shown = " | ".join("" if cell is None else f"{cell:.4g}" for cell in cells)
        lines.append(f"| {task} | {best:g} | {shown} |")
    return "\n".join(lines)


def trackers_of(tasks: Mapping[str, Any]) -> str:
    """What moving the learning rate during a run does to it, from three starts."""
    starts = ("x0.25", "x1", "x4")
    lines = [
        "| | " + " | ".join(f"{task}: x 1/4, x 1, x 4" for task in tasks) + " |",
        "|---|" + "---|" * len(tasks),
    ]
    names = dict.fromkeys(name for table in tasks.values() for name in table)
    for name in names:
        cells = [
            ", ".join(_middle(table[name][start]) for start in starts) if name in table else ""
            for table in tasks.values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _middle(regrets: Sequence[float | None]) -> str:
    known = [regret for regret in regrets if regret is not None]
    return percent(fmean(known)) if len(known) == len(regrets) else "lost"


def curves_of(cases: Mapping[str, Any]) -> str:
    lines = ["| | median | from x 0.01, x 1, x 100 |", "|---|---|---|"]
    for name, case in cases.items():
        means = ", ".join(map(_middle, case["regret_pct"].values()))
        lines.append(f"| {name} | {percent(case['median_regret_pct'])} | {means} |")
    return "\n".join(lines)


def scouts_of(found: Mapping[str, Any]) -> str:
    lines = ["| | mean | 90th percentile | worst | lost | chosen, in units of the best |"]
    lines.append("|---" * 6 + "|")
    for name, told in found.items():
        costs = " | ".join(percent(told[key]) for key in ("mean_pct", "p90_pct", "worst_pct"))
        chosen = f"{told['lowest_lr']:.2g} to {told['highest_lr']:.2g}"
        lines.append(f"| {name} | {costs} | {told['lost']} | {chosen} |")
    return "\n".join(lines)


def wrong_of(situations: Mapping[str, Any]) -> str:
    shown = ("fixed, x 0.25", "fixed, x 1", "fixed, x 4", "tracker", "paper")
    lines = [f"| | {' | '.join(shown)} |", "|---" * (len(shown) + 1) + "|"]
    for name, table in situations.items():
        lines.append(f"| {name} | {' | '.join(percent(table[key]) for key in shown)} |")
    return "\n".join(lines)


# A picture ------------------------------------------------------------------------------------

COLOURS = {
    HDET: "#d6336c",
    DEFAULT: "#f783ac",
    REFERENCE: "#868e96",
    "Schedule-Free AdamW": "#1c7ed6",
    "GreedyLR": "#f08c00",
    "PBT": "#2f9e44",
    "paper": "#7048e8",
    "Prodigy": "#0b7285",
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


# The page -------------------------------------------------------------------------------------


def page(rows: Sequence[Row], runs: Sequence[Mapping[str, Any]], head: Mapping[str, Any]) -> str:
    text = (Path(__file__).parent / "settle_page.md").read_text()
    return text.format(
        headline="\n".join(f"| `{name}` | {_shown(value)} |" for name, value in head.items()),
        numbers=numbers_of(rows, luck_of(runs)),
        default=numbers_of(rows, luck_of(runs), DEFAULT),
        parts=parts_of(rows, runs, _result("rewind")["headline"]),
        trackers=trackers_of(_result("trackers")["tasks"]),
        scouts=scouts_of(_result("scouts")["headline"]),
        curves=curves_of(_result("curves")["cases"]),
        wrong=wrong_of(_result("wrong")["situations"]),
        table=table_of(rows),
        starts=starts_of(rows, [HDET, REFERENCE, "paper"]),
        grids=grids_of(runs),
        averaged=table_of(rows, lambda row: row.averaged),
        measures=measures_of(rows),
        controls=controls_of(runs),
    )


def _result(name: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return told


def _shown(value: Any) -> str:
    if value is None:
        return "not measured"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """One file of several pieces; what is known twice is taken from the last."""
    told: dict[str, Any] = {}
    runs: dict[str, Any] = {}
    for path in paths:
        piece = json.loads(path.read_text())
        for name, value in piece.items():
            if name != "runs":
                told[name] = _joined(told.get(name), value)
        runs.update({json.dumps(run["job"], sort_keys=True): run for run in piece["runs"]})
    return {**told, "runs": list(runs.values())}


def _joined(old: Any, new: Any) -> Any:
    """Tables are put together, at every depth; of anything else the new one counts."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: _joined(old.get(name), value) for name, value in new.items()}}
    return new


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]] or [RESULTS / "settle.json"]
    told = merged(paths)
    rows = rows_of(told["runs"])
    told["headline"] = headline(rows, told["runs"])
    told["headline"]["cost_pct"] = _result("cost")["headline"]["probe_cost_pct"]
    told = {"headline": told["headline"], **told}
    (RESULTS / "settle.json").write_text(json.dumps(plain_json(told)) + "\n")
    (DOCS / "settle.svg").write_text(figure_of(rows))
    (DOCS / "settle.md").write_text(page(rows, told["runs"], told["headline"]))
    print(table_of(rows))
    print(json.dumps(told["headline"], indent=1))


if __name__ == "__main__":
    main()
