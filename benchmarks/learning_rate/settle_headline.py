"""The headline of results/settle.json: what pages quote, computed from the rows of the file."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.learning_rate.methods.registry import METHODS
from benchmarks.learning_rate.names import METHOD_WORDS, task_word
from benchmarks.learning_rate.regret import (
    DEFAULT,
    HDET,
    Row,
    best_of_grid,
    by,
    curve_of,
    defaults,
    finite,
    from_common_starts,
    full_runs,
    is_lost,
    loss_at,
    luck_of,
    medians_of,
    pairs_by_seed,
    quantile,
    sign_test,
    small_grids,
)

Runs = Sequence[Mapping[str, Any]]
SCHEDULE_FREE = "Schedule-Free AdamW"


def headline(rows: Sequence[Row], runs: Runs) -> dict[str, Any]:
    """All keys, each a word; what a file has no rows for is left out."""
    return {
        **of_hdet(rows),
        **of_tuning(rows, runs),
        **of_peers(rows),
        **of_methods(rows),
        **of_grids(rows, runs),
    }


def of_hdet(rows: Sequence[Row]) -> dict[str, Any]:
    """What hdet loses over all tasks and starts, with a probe and without."""
    outcome: dict[str, Any] = {}
    for method, before in ((HDET, ""), (DEFAULT, "no_probe_")):
        own = [row for row in rows if row.method == method]
        if not own:
            continue
        regrets = [row.regret for row in own]
        outcome |= {
            f"{before}median_regret_pct": median(regrets),
            f"{before}p90_regret_pct": quantile(regrets, 0.9),
            f"{before}worst_regret_pct": finite(max(regrets)),
            f"{before}harm_at_best_pct": at_best(own),
            f"{before}runs_lost": sum(map(is_lost, own)),
        }
    return outcome


def at_best(rows: Sequence[Row]) -> float | None:
    """The median regret of runs that start at the best learning rate of the grid."""
    regrets = [row.regret for row in rows if math.isclose(row.start, 1.0, rel_tol=1e-3)]
    return finite(median(regrets)) if regrets else None


def _spread(name: str, regrets: Sequence[float]) -> dict[str, Any]:
    return {
        f"{name}_median_pct": finite(median(regrets)),
        f"{name}_p90_pct": finite(quantile(regrets, 0.9)),
        f"{name}_worst_pct": finite(max(regrets)),
    }


def of_tuning(rows: Sequence[Row], runs: Runs) -> dict[str, Any]:
    """What the search itself takes and costs, beside what one learning rate per group gains."""
    steps = [
        run["ended"]["notes"]["steps"] / run["job"]["steps"]
        for run in runs
        if run["job"]["method"] == HDET
    ]
    costs = []
    for task, own in by(runs, lambda run: run["job"]["task"]).items():
        curve = curve_of(own)
        best = min(curve, key=curve.__getitem__)
        chosen = [row.lr * best for row in rows if (row.method, row.task) == (HDET, task)]
        costs += [100 * (loss_at(curve, lr) / curve[best] - 1) for lr in chosen]
    grouped = [row.regret for row in rows if METHODS[row.method].kind == "groups"]
    restarted = [row.regret for row in rows if METHODS[row.method].kind == "guard"]
    return {
        "scout_steps_pct": 100 * max(steps) if steps else None,
        "chosen_lr_worst_pct": max(costs) if costs else None,
        "group_scout_vs_best_grid_pct": fmean(grouped) if grouped else None,
        "restart_within_2pct": sum(regret <= 2 for regret in restarted),
    }


def of_peers(rows: Sequence[Row]) -> dict[str, Any]:
    """Wins over every peer, one pair for each seed and task, and their chance (sign test)."""
    outcome: dict[str, Any] = {}
    peers = [name for name, method in METHODS.items() if method.kind == "peer"]
    tried = [name for name in peers if any(row.method == name for row in rows)]
    beaten = 0
    medians = {}
    for peer in tried:
        word = METHOD_WORDS[peer]
        tasks = list(dict.fromkeys(row.task for row in rows if row.method == peer))
        pairs = {task: pairs_by_seed(rows, peer, task) for task in tasks}
        won = {task: sum(mine < its for mine, its in own) for task, own in pairs.items()}
        for task, own in pairs.items():
            name = f"{word}_{task_word(task)}"
            outcome |= {
                f"{name}_seeds_won": won[task],
                f"{name}_seeds": len(own),
                f"{name}_chance": sign_test(won[task], len(own)),
            }
        clear = sum(won[task] == len(own) for task, own in pairs.items())
        medians[peer] = median(medians_of(rows, peer).values())
        outcome |= {
            f"{word}_seeds_won": sum(won.values()),
            f"{word}_seeds_compared": sum(map(len, pairs.values())),
            f"{word}_tasks": len(tasks),
            f"{word}_tasks_won_on_every_seed": clear,
            f"{word}_median_of_tasks_pct": finite(medians[peer]),
        }
        beaten += clear == len(tasks)
    best = min(medians, key=medians.__getitem__, default=None)
    chances = [value for key, value in outcome.items() if key.endswith("_chance")]
    return {
        "peers_compared": len(tried),
        "peers_beaten_on_every_seed": beaten,
        "least_chance_pct": 100 * min(chances, default=1.0),
        "best_peer": best,
        "best_peer_median_regret_pct": None if best is None else medians[best],
        **outcome,
    }


def of_methods(rows: Sequence[Row]) -> dict[str, Any]:
    """The regret of every method on all its tasks and on each, from the same starts."""
    outcome: dict[str, Any] = {}
    for method, own in by(from_common_starts(rows), lambda row: row.method).items():
        word = METHOD_WORDS[method]
        seeds = [row.seed for row in own]
        outcome |= {
            f"{word}_runs": len(own),
            f"{word}_lost": sum(map(is_lost, own)),
            f"{word}_seeds": f"{min(seeds)} to {max(seeds)}",
            **_spread(word, [row.regret for row in own]),
        }
        for task, part in by(own, lambda row: row.task).items():
            name = f"{word}_{task_word(task)}"
            outcome |= _spread(name, [row.regret for row in part])
            outcome[f"{name}_lost"] = sum(map(is_lost, part))
            if method == SCHEDULE_FREE:
                outcome[f"schedule_free_at_best_{task_word(task)}_median_pct"] = at_best(part)
    return outcome


def of_grids(rows: Sequence[Row], runs: Runs) -> dict[str, Any]:
    """What needs no method: luck, the best learning rate, a short sweep, one default for all."""
    outcome: dict[str, Any] = {}
    luck = luck_of(runs)
    for task, own in by(runs, lambda run: run["job"]["task"]).items():
        outcome[f"best_lr_{task_word(task)}"] = best_of_grid(full_runs(own))
    for task, found in luck.items():
        outcome[f"luck_{task_word(task)}_p90_pct"] = found.most
        outcome[f"luck_{task_word(task)}_worst_pct"] = found.worst
    if luck:
        outcome["luck_worst_pct"] = max(found.worst for found in luck.values())
    for task, regrets in small_grids(runs).items():
        outcome[f"sweep_same_steps_{task_word(task)}_median_pct"] = median(regrets)
    for task, default in defaults(runs, "AdamW").items():
        outcome[f"one_default_{task_word(task)}_pct"] = finite(default.regret)
    return outcome
