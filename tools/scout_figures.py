"""Draw the two figures of docs/explanation/how-the-scout-decides.md.

    python tools/scout_figures.py

reads one recorded scout from benchmarks/results/settle.json and writes
docs/assets/scout-phases.svg and docs/assets/scout-scores.svg. The output depends on that file
alone, so a second call writes the same bytes.
"""

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
TASK, LR, SEED = "language, AdamW", 2e-6, 0
"""The recorded run: the given learning rate is a thousandth of the best one of the grid."""
REPLICAS, SHARE = 8, 0.03
REPEATED = 2
"""Learning rates of a sweep that the next sweep tries again."""
NEARLY = 0.07
"""The choice gains at least 93 % of the best gain."""
WIDE, LEFT, RIGHT = 760, 64, 24
INK, SOFT, LINE = "#343a40", "#868e96", "#dee2e6"
SWEEP, SECOND, REFINED, CHOICE, DANGER = "#1c7ed6", "#0b7285", "#f08c00", "#d6336c", "#c92a2a"


class Point(NamedTuple):
    lr: float
    score: float


class Recorded(NamedTuple):
    """What one scout saw and chose; learning rates are absolute."""

    sweeps: list[list[Point]]
    refined: list[Point]
    start_score: float
    found: float
    diverges: float
    peak: float
    total_steps: int
    steps: int

    @property
    def sweep_steps(self) -> int:
        """A sweep takes at most a quarter of the scout's share of the run."""
        return int(SHARE * self.total_steps) // 4

    @property
    def refined_steps(self) -> int:
        return self.steps - len(self.sweeps) * self.sweep_steps


def recorded() -> Recorded:
    runs = json.loads((ROOT / "benchmarks/results/settle.json").read_text())["runs"]
    job = {"task": TASK, "method": "hdet", "lr": LR, "seed": SEED}
    run = next(run for run in runs if job.items() <= run["job"].items())
    notes = run["ended"]["notes"]
    points = _points(notes["points"])
    first = REPLICAS - REPEATED if len(points) > REPLICAS else REPLICAS
    return Recorded(
        [part for part in (points[:first], points[first:]) if part],
        _points(notes["close"]),
        notes["outset"],
        notes["found"] * LR,
        notes["explosion"] * LR,
        run["ended"]["lr"],
        run["job"]["steps"],
        notes["steps"],
    )


def _points(rows: Sequence[Sequence[Any]]) -> list[Point]:
    return [Point(factor * LR, score) for factor, score, *_ in rows if score is not None]


# Shapes -----------------------------------------------------------------------------------------


def text(
    x: float, y: float, words: str, anchor: str = "start", fill: str = INK, size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" '
        f'font-size="{size}">{escape(words)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = LINE, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{dashed}/>'
    )


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" '
        f'fill="{fill}"/>'
    )


def dot(x: float, y: float, fill: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}"/>'


def picture(height: int, title: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {height}" role="img" '
        f'font-family="system-ui, sans-serif"><title>{escape(title)}</title>'
        f'<rect width="{WIDE}" height="{height}" rx="6" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def lr_text(lr: float) -> str:
    return f"{lr:.1e}".replace("e-0", "e-")


# Figure 1: the phases on a time line ------------------------------------------------------------


class Phase(NamedTuple):
    name: str
    steps: int
    colour: str
    lowest: float
    highest: float


def phases_of(scout: Recorded) -> list[Phase]:
    names = ("Sweep", "Second sweep")
    colours = (SWEEP, SECOND)
    # The record keeps the later score of a learning rate that two sweeps have tried.
    ends = [part[REPEATED - 1].lr for part in scout.sweeps[1:]] + [scout.sweeps[-1][-1].lr]
    sweeps = [
        Phase(name, scout.sweep_steps, colour, points[0].lr, end)
        for name, colour, points, end in zip(names, colours, scout.sweeps, ends, strict=False)
    ]
    first, last = scout.refined[0].lr, scout.refined[-1].lr
    return [*sweeps, Phase("Refinement", scout.refined_steps, REFINED, first, last)]


def phases_figure(scout: Recorded) -> str:
    """Every round starts from the same weights; the run then starts from them too."""
    top, lanes, wide = 88, 112, 440.0
    parts = [text(LEFT, 26, "One scout of a run of 1500 steps, eight replicas", size=14)]
    x, step = float(LEFT), 0
    for phase in phases_of(scout):
        width = wide * phase.steps / scout.steps
        parts += _phase(phase, x, width, top, lanes)
        parts += [text(x, top + lanes + 20, str(step), "middle", SOFT)]
        parts += [line(x, top - 4, x, top + lanes + 6, INK, "3 3")]
        x, step = x + width, step + phase.steps
    parts += [line(x, top - 4, x, top + lanes + 6, INK, "3 3")]
    parts += [text(x, top + lanes + 20, str(step), "middle", SOFT)]
    rest = WIDE - RIGHT - x - 4
    parts += [box(x + 4, top, rest, lanes - 4, CHOICE)]
    parts += [text(x + 4 + rest / 2, top + 48, "The run", "middle", "white", 14)]
    told = f"peak learning rate {lr_text(scout.peak)}"
    parts += [text(x + 4 + rest / 2, top + 68, told, "middle", "white")]
    parts += [text(WIDE - RIGHT, top + lanes + 20, str(scout.total_steps), "end", SOFT)]
    parts += [text(LEFT, top + lanes + 44, "Training step (the run is not to scale)", fill=SOFT)]
    parts += [text(LEFT, top + lanes + 64, _legend(), fill=SOFT)]
    return picture(top + lanes + 82, "The phases of a scout on a time line", parts)


def _legend() -> str:
    return "Dashed line: all replicas restore the snapshot of the first weights. Bar: one replica."


def _phase(phase: Phase, x: float, width: float, top: int, lanes: int) -> list[str]:
    lane = lanes / REPLICAS
    parts = [text(x + 4, top - 26, phase.name, fill=phase.colour)]
    rates = f"{lr_text(phase.lowest)} to {lr_text(phase.highest)}"
    parts += [text(x + 4, top - 11, rates, fill=SOFT, size=10)]
    for replica in range(REPLICAS):
        opacity = 0.25 + 0.75 * replica / (REPLICAS - 1)
        bar = box(x + 4, top + replica * lane, width - 8, lane - 4, phase.colour)
        parts += [f'<g opacity="{opacity:.2f}">{bar}</g>']
    return parts


# Figure 2: scores against the learning rate -----------------------------------------------------


class Axes(NamedTuple):
    across: Callable[[float], float]
    down: Callable[[float], float]
    top: int
    bottom: int


def axes_of(scout: Recorded) -> Axes:
    points = [point for part in (*scout.sweeps, scout.refined) for point in part]
    left, right = math.log10(min(points).lr) - 0.2, math.log10(max(points).lr) + 0.2
    low = math.log(min(point.score for point in points)) - 0.15
    high = math.log(max(point.score for point in points)) + 0.15
    top, bottom = 48, 330

    def across(lr: float) -> float:
        return LEFT + (math.log10(lr) - left) / (right - left) * (WIDE - LEFT - RIGHT)

    def down(score: float) -> float:
        return top + (high - math.log(score)) / (high - low) * (bottom - top)

    return Axes(across, down, top, bottom)


def scores_figure(scout: Recorded) -> str:
    axes = axes_of(scout)
    parts = [text(LEFT, 26, "Score of each learning rate (probe loss, lower is better)", size=14)]
    parts += _grid(scout, axes)
    parts += _levels(scout, axes)
    for colour, points in zip((SWEEP, SECOND), scout.sweeps, strict=False):
        parts += [dot(axes.across(lr), axes.down(score), colour) for lr, score in points]
    parts += [dot(axes.across(lr), axes.down(score), REFINED) for lr, score in scout.refined]
    parts += _key(len(scout.sweeps), axes.bottom + 58)
    return picture(axes.bottom + 74, "Scores against the logarithm of the learning rate", parts)


def _grid(scout: Recorded, axes: Axes) -> list[str]:
    first, last = scout.sweeps[0][0].lr, scout.sweeps[-1][-1].lr
    parts = []
    for power in range(math.ceil(math.log10(first)), math.floor(math.log10(last)) + 1):
        x = axes.across(10.0**power)
        parts += [line(x, axes.top, x, axes.bottom)]
        parts += [text(x, axes.bottom + 18, f"1e{power}", "middle", SOFT)]
    for score in (4, 8, 16, 32, 64):
        y = axes.down(score)
        parts += [line(LEFT, y, WIDE - RIGHT, y), text(LEFT - 8, y + 4, str(score), "end", SOFT)]
    middle = (LEFT + WIDE - RIGHT) / 2
    return [*parts, text(middle, axes.bottom + 36, "learning rate", "middle", SOFT)]


def _levels(scout: Recorded, axes: Axes) -> list[str]:
    best = min(point.score for point in scout.refined)
    nearly = best + NEARLY * (scout.start_score - best)
    y = axes.down(scout.start_score)
    parts = [line(LEFT, y, WIDE - RIGHT, y, INK, "6 4")]
    parts += [text(LEFT + 6, y - 8, "score before the first step")]
    y = axes.down(nearly)
    parts += [line(axes.across(1e-4), y, axes.across(2e-2), y, REFINED, "6 4")]
    parts += [text(axes.across(1e-4) - 6, y + 4, "93 % of the best gain", "end", REFINED)]
    for lr, name, colour, anchor, height in (
        (scout.found, f"choice {lr_text(scout.found)}", CHOICE, "end", 150),
        (scout.peak, f"peak of the run {lr_text(scout.peak)}", CHOICE, "end", 110),
        (scout.diverges, f"divergence threshold {lr_text(scout.diverges)}", DANGER, "end", 70),
    ):
        x = axes.across(lr)
        parts += [line(x, height, x, axes.bottom, colour)]
        parts += [text(x - 6, height + 8, name, anchor, colour)]
    return parts


def _key(num_sweeps: int, y: float) -> list[str]:
    sweeps = [("sweep", SWEEP), ("second sweep", SECOND)][:num_sweeps]
    parts, x = [], float(LEFT)
    for name, colour in [*sweeps, ("refinement", REFINED)]:
        parts += [dot(x, y - 4, colour), text(x + 10, y, name)]
        x += 40 + 7 * len(name)
    return parts


def main() -> None:
    scout, folder = recorded(), ROOT / "docs/assets"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scout-phases.svg").write_text(phases_figure(scout))
    (folder / "scout-scores.svg").write_text(scores_figure(scout))


if __name__ == "__main__":
    main()
