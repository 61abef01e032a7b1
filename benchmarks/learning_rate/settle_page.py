"""What do the runs of settle.json come to? Its headline, its tables, docs/assets/settle.svg

    python -m benchmarks.learning_rate.settle_page [FILE ...]

writes the runs of all FILEs (by default of results/settle.json), their headline and their tables
into results/settle.json, and makes docs/assets/settle.svg of them.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from benchmarks.learning_rate.names import TASK_WORDS
from benchmarks.learning_rate.regret import (
    DEFAULT,
    HDET,
    REFERENCE,
    Luck,
    Row,
    by,
    curve_of,
    defaults,
    from_common_starts,
    is_lost,
    loss_at,
    luck_of,
    percent,
    quantile,
    rows_of,
    small_grids,
    table_of,
)
from benchmarks.learning_rate.settle_figure import figure_of
from benchmarks.learning_rate.settle_headline import headline
from benchmarks.result_file import RESULTS, ROOT, flat, plain_json, read_result, text_of

FIGURE = ROOT / "docs" / "assets" / "settle.svg"


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
        steps = fewer.get(f"{TASK_WORDS.get(task)}_fewer_steps_pct")
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
"""The 95 % interval of a mean of few values, in standard errors."""


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


# The page -------------------------------------------------------------------------------------


def tables(rows: Sequence[Row], runs: Sequence[Mapping[str, Any]]) -> dict[str, list[list[str]]]:
    """The tables of the page by name; the first row of each is its head."""
    found = {
        "probe": numbers_of(rows, luck_of(runs)),
        "no_probe": numbers_of(rows, luck_of(runs), DEFAULT),
        "parts": parts_of(rows, runs, read_result(RESULTS / "rewind.json")["headline"]),
        "methods": table_of(from_common_starts(rows)),
        "starts": starts_of(rows, [HDET, REFERENCE, "paper"]),
        "grids": grids_of(runs),
        "averaged": table_of(from_common_starts(rows), lambda row: row.averaged),
        "measures": measures_of(rows),
        "controls": controls_of(runs),
    }
    return {name: cells_of(text) for name, text in found.items()}


def cells_of(text: str) -> list[list[str]]:
    """The cells of a Markdown table, without the line below its head."""
    lines = text.splitlines()
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in [lines[0], *lines[2:]]
    ]


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """One file of several pieces; what is known twice is taken from the last."""
    outcome: dict[str, Any] = {}
    runs: dict[str, Any] = {}
    for path in paths:
        piece = json.loads(path.read_text())
        for name, value in piece.items():
            if name != "runs":
                outcome[name] = _joined(outcome.get(name), value)
        runs.update({json.dumps(run["job"], sort_keys=True): run for run in piece["runs"]})
    return {**outcome, "runs": list(runs.values())}


def _joined(old: Any, new: Any) -> Any:
    """Tables are put together, at every depth; of anything else the new one counts."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: _joined(old.get(name), value) for name, value in new.items()}}
    return new


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]] or [RESULTS / "settle.json"]
    outcome = merged(paths)
    rows = rows_of(outcome["runs"])
    numbers = flat(headline(rows, outcome["runs"]))
    outcome = {**outcome, "headline": numbers, "tables": tables(rows, outcome["runs"])}
    outcome["runs"] = outcome.pop("runs")  # the longest part comes last
    (RESULTS / "settle.json").write_text(text_of(plain_json(outcome)))
    FIGURE.write_text(figure_of(rows))
    print(table_of(rows))


if __name__ == "__main__":
    main()
