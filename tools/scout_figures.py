"""Draw the figures of docs/explanation/how-the-scout-decides.md and how-the-guard-decides.md.

    python tools/scout_figures.py

reads the scores of one recorded sweep from benchmarks/results/settle.json, and writes
docs/assets/scout-evidence.svg and docs/assets/guard-ceiling.svg. The output depends on that file
and on the library alone, so a second call writes the same bytes.
"""

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import hdet
from hdet.control.guard_monitor import GuardMonitor
from hdet.lr_search.estimator import Estimate, SearchContext, estimate
from hdet.lr_search.evidence import Belief, belief_of_divergence, belief_of_gains, divergence_of
from hdet.lr_search.observations import Observation, Observations
from hdet.lr_search.prior import Prior, prior_of

ROOT = Path(__file__).parent.parent
TASK, LR, SEED = "language, AdamW", 2e-3, 0
"""The recorded run, whose scores are drawn."""
NUM_PARAMETERS = 3_300_000
PEAK_OVER_MEAN = 2.07
"""That of OneCycleLR."""
WIDE, LEFT, RIGHT = 760, 64, 24
INK, SOFT, LINE = "#343a40", "#868e96", "#dee2e6"
SCORE, GAINS, PRIOR, CHOICE, DANGER = "#1c7ed6", "#0b7285", "#f08c00", "#d6336c", "#c92a2a"


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


def path(points: Sequence[tuple[float, float]], stroke: str, width: float = 2) -> str:
    steps = " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<path d="M{steps}" fill="none" stroke="{stroke}" stroke-width="{width}"/>'


# The evidence of a search -----------------------------------------------------------------------


class Recorded(NamedTuple):
    """The scores of a recorded sweep, and what the present search says to them."""

    points: list[Observation]
    start: float
    prior: Prior
    divergence: float | None
    chosen: Estimate


def recorded() -> Recorded:
    runs = json.loads((ROOT / "benchmarks/results/settle.json").read_text())["runs"]
    job = {"task": TASK, "method": "hdet", "lr": LR, "seed": SEED}
    notes = next(run for run in runs if job.items() <= run["job"].items())["ended"]["notes"]
    points, start = sorted(Observation(*row) for row in notes["points"]), notes["outset"]
    known = prior_of("AdamW", num_parameters=NUM_PARAMETERS)
    assert known is not None
    prior = known._replace(mean=known.mean - math.log10(LR))
    chosen = estimate(Observations(points, start), SearchContext(prior, PEAK_OVER_MEAN))
    return Recorded(points, start, prior, divergence_of(points, start), chosen)


def evidence_figure(scout: Recorded) -> str:
    """Above, the score of each learning rate; below, what each piece of evidence says."""
    low, high = math.log10(scout.points[0].factor) - 0.2, math.log10(scout.points[-1].factor) + 0.2

    def across(log: float) -> float:
        return LEFT + (log - low) / (high - low) * (WIDE - LEFT - RIGHT)

    parts = [text(LEFT, 26, "Score of each learning rate after a short round", size=14)]
    parts += _scores(scout, across, 48, 200)
    parts += [text(LEFT, 250, "What each piece of evidence says", size=14)]
    parts += _beliefs(scout, across, (low, high), 262, 372)
    for power in range(math.ceil(low + math.log10(LR)), math.floor(high + math.log10(LR)) + 1):
        x = across(power - math.log10(LR))
        parts += [line(x, 48, x, 200), line(x, 262, x, 372)]
        parts += [text(x, 392, f"1e{power}", "middle", SOFT)]
    x = across(math.log10(scout.chosen.factor))
    told = f"peak of the run {LR * scout.chosen.factor:.1e}".replace("e-0", "e-")
    parts += [line(x, 48, x, 372, CHOICE), text(x + 6, 60, told, fill=CHOICE)]
    middle = (LEFT + WIDE - RIGHT) / 2
    parts += [text(middle, 412, "learning rate", "middle", SOFT)]
    return picture(426, "Scores of a sweep, and the evidence of the scout", parts)


def _scores(scout: Recorded, across: Callable[[float], float], top: int, bottom: int) -> list[str]:
    known = [(math.log10(p.factor), math.log(p.score)) for p in scout.points if p.score is not None]
    levels = [level for _, level in known]
    low, high = min(levels) - 0.15, max(levels) + 0.15

    def down(level: float) -> float:
        return top + (high - level) / (high - low) * (bottom - top)

    y = down(math.log(scout.start))
    parts = [line(LEFT, y, WIDE - RIGHT, y, INK, "6 4")]
    parts += [text(WIDE - RIGHT, y - 8, "score before the first step", "end")]
    parts += [dot(across(log), down(level), SCORE) for log, level in known]
    if scout.divergence is not None:
        x = across(math.log10(scout.divergence))
        parts += [line(x, top, x, bottom, DANGER, "6 4")]
        parts += [text(x - 6, top + 30, "divergence threshold", "end", DANGER)]
    return parts


def _beliefs(
    scout: Recorded,
    across: Callable[[float], float],
    ends: tuple[float, float],
    top: int,
    bottom: int,
) -> list[str]:
    beliefs = {
        "usual learning rates": (Belief(scout.prior.mean, scout.prior.error), PRIOR),
        "gains": (belief_of_gains(scout.points, scout.start), GAINS),
        "divergence": (belief_of_divergence(scout.divergence), DANGER),
    }
    parts, x = [], float(LEFT)
    for name, (belief, colour) in beliefs.items():
        if belief is None:
            continue
        places = [ends[0] + (ends[1] - ends[0]) * step / 200 for step in range(201)]
        heights = [math.exp(-0.5 * ((at - belief.mean) / belief.error) ** 2) for at in places]
        points = [
            (across(at), bottom - (bottom - top) * 0.25 * height / belief.error)
            for at, height in zip(places, heights, strict=True)
        ]
        parts += [path(points, colour), dot(x + 300, 246, colour), text(x + 310, 250, name)]
        x += 36 + 7 * len(name)
    return [*parts, line(LEFT, bottom, WIDE - RIGHT, bottom, SOFT)]


# The ceiling of a guard -------------------------------------------------------------------------

CYCLES, STABLE = 60, 0.3
"""The example run has so many cycles, and diverges above this learning rate."""


class Cycle(NamedTuple):
    lr: float
    ceiling: float
    has_failed: bool


def planned(cycle: int) -> float:
    """One cycle: up to 1 in 18 cycles, then down."""
    rising = cycle / 18
    return rising if rising < 1 else 0.5 * (1 + math.cos(math.pi * (cycle - 18) / (CYCLES - 18)))


def guarded() -> list[Cycle]:
    """What the monitor of the library makes of the example run."""
    monitor, scale, cycles = GuardMonitor(hdet.Guard()), 1.0, []
    monitor.set_first_loss(2.3, 0.02)
    learnt = 0.0
    for cycle in range(CYCLES):
        lr = scale * planned(cycle)
        loss = 9.0 if lr > STABLE else 2.3 * math.exp(-learnt)
        has_failed = monitor.check_cycle(loss, 0.02, lr=lr) is not None
        if has_failed:
            ahead = scale * max(map(planned, range(cycle + 1, CYCLES)))
            scale *= monitor.scale_factor(lr, ahead)
        else:
            scale *= monitor.scale_correction
            learnt += lr
        cycles.append(Cycle(lr, monitor.ceiling, has_failed))
    return cycles


def ceiling_figure(cycles: Sequence[Cycle]) -> str:
    top, bottom = 48, 260

    def at(cycle: int, lr: float) -> tuple[float, float]:
        across = LEFT + (WIDE - LEFT - RIGHT) * cycle / (CYCLES - 1)
        return across, bottom - (bottom - top) * lr

    parts = [text(LEFT, 26, "Learning rate at each cycle", size=14)]
    for lr in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = at(0, lr)[1]
        parts += [line(LEFT, y, WIDE - RIGHT, y), text(LEFT - 8, y + 4, f"{lr:g}", "end", SOFT)]
    for cycle in range(0, CYCLES, 10):
        parts += [text(at(cycle, 0)[0], bottom + 18, str(cycle), "middle", SOFT)]
    parts += [path([at(cycle, planned(cycle)) for cycle in range(CYCLES)], SOFT)]
    parts += [path([at(place, one.lr) for place, one in enumerate(cycles)], SCORE)]
    lowest = min(one.ceiling for one in cycles)
    y = at(0, lowest)[1]
    parts += [line(at(10, 0)[0], y, WIDE - RIGHT, y, CHOICE, "6 4")]
    parts += [dot(*at(place, one.lr), DANGER) for place, one in enumerate(cycles) if one.has_failed]
    parts += [text(WIDE - RIGHT, y - 6, "ceiling", "end", CHOICE)]
    parts += [text(at(29, 0)[0], 80, "schedule without a guard", fill=SOFT)]
    parts += [text(at(11, 0)[0], at(0, lowest)[1] - 6, "with a guard", fill=SCORE)]
    parts += [text(at(6, 0)[0] + 10, at(0, 0.3)[1], "a cycle that fails", fill=DANGER)]
    parts += [text((LEFT + WIDE - RIGHT) / 2, bottom + 38, "cycle", "middle", SOFT)]
    return picture(bottom + 52, "A schedule under the ceiling of a guard", parts)


def main() -> None:
    folder = ROOT / "docs/assets"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scout-evidence.svg").write_text(evidence_figure(recorded()))
    (folder / "guard-ceiling.svg").write_text(ceiling_figure(guarded()))


if __name__ == "__main__":
    main()
