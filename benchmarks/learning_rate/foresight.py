"""What would the present scout have chosen in the runs of settle.json? Prints, and writes no file.

    python -m benchmarks.learning_rate.foresight [FILE]

Runs in FILE (by default results/settle.json) have recorded what every replica of their scout
scored. The present rule is applied to those scores, and the loss at the learning rate it chooses is
read off the curve of the grid. An estimate: another rule would have made its rounds elsewhere.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hdet.lr_search.response import judge_sweep
from hdet.lr_search.transfer import peak_over_mean

from benchmarks.learning_rate.methods.bench import N
from benchmarks.learning_rate.methods.schedules import shape
from benchmarks.learning_rate.regret import HDET, by, curve_of, loss_at, percent, quantile
from benchmarks.result_file import RESULTS
from benchmarks.zoo.entries import ENTRIES
from hdet.lr_search.budget import sweep_steps
from hdet.lr_search.estimator import SearchContext, estimate
from hdet.lr_search.observations import Observation, Observations
from hdet.lr_search.scout import Scout


class Foreseen(NamedTuple):
    task: str
    chosen: float
    """In units of the best of the grid."""
    """Both are NaN where the rule would have tried more learning rates."""
    regret: float


def foreseen(runs: Sequence[Mapping[str, Any]], method: str = HDET) -> Iterator[Foreseen]:
    for task, own in by(runs, lambda run: run["job"]["task"]).items():
        curve = curve_of(own)
        best = min(curve, key=curve.__getitem__)
        for run in own:
            notes = run["ended"]["notes"]
            if run["job"]["method"] == method and notes["close"]:
                factor = choice(notes, ENTRIES[task].full.optimizer, run["job"]["steps"])
                lr = None if factor is None else factor * run["job"]["lr"]
                regret = math.nan if lr is None else 100 * (loss_at(curve, lr) / curve[best] - 1)
                yield Foreseen(task, math.nan if lr is None else lr / best, regret)


def choice(notes: Mapping[str, Any], optimizer: str, steps: int) -> float | None:
    """What the library estimates from what was recorded; None where it would look further."""
    points = sorted(Observation(*point) for point in notes["points"])
    refined = sorted(Observation(*point) for point in notes["close"])
    start = notes.get("outset", points[0].score)
    if judge_sweep(points, start).shift:
        return None
    round_steps = sweep_steps(Scout(), steps, N)
    wave = shape("one cycle", steps, True)
    context = SearchContext(
        N,
        optimizer,
        sweep_steps=round_steps,
        refine_steps=notes["steps"] - round_steps * _sweeps(len(points)),
        peak=peak_over_mean(sum(wave.lrs) / steps),
    )
    return estimate(Observations(points, refined, start, notes["noise"]), context).factor


def _sweeps(points: int) -> int:
    """How many there were: each after the first tries two learning rates again."""
    return round((points - N) / (N - 2)) + 1


def table(found: Sequence[Foreseen]) -> str:
    lines = [
        "| | median | 90th percentile | worst | chosen, in units of the best | not known |",
        "|---|---|---|---|---|---|",
    ]
    for task, part in by(found, lambda one: one.task).items():
        unknown = sum(math.isnan(one.regret) for one in part)
        part = [one for one in part if not math.isnan(one.regret)]
        regrets = [one.regret for one in part]
        chosen = [one.chosen for one in part]
        lines.append(
            f"| {task} | {percent(median(regrets))} | {percent(quantile(regrets, 0.9))} | "
            f"{percent(max(regrets))} | {min(chosen):.2g} to {max(chosen):.2g} | "
            f"{unknown} of {len(part) + unknown} |"
        )
    return "\n".join(lines)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "settle.json"
    print(table(list(foreseen(json.loads(path.read_text())["runs"]))))


if __name__ == "__main__":
    main()
