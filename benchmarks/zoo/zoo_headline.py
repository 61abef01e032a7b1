"""The numbers that pages quote of zoo.json, computed from its rows."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.learning_rate.regret import quantile
from benchmarks.zoo.peers import PEERS
from benchmarks.zoo.small.catalogue import TASKS
from benchmarks.zoo.small.curve import curve_rows, finite
from hdet.lr_search import constants

HDET = "hdet, 8 replicas"
PRIOR_AND_CEILING = "usual learning rate and ceiling"
WINNER_TAKES_ALL = "winner takes all"
LOST_SHARE = 20.0
"""A run is lost if it ends further behind than this share of the gain, in percent."""
FITTED = (
    "ADAM_PRIOR",
    "SGD_MOMENTUM_PRIOR",
    "MUON_PRIOR",
    "PRIOR_ERROR",
    "NEARLY_BEST_SHARE",
    "BEST_UNDER_PEAK",
    "GAIN_ERROR",
    "FULL_GAIN_SHARE",
    "LOW_GAIN_ERROR",
    "DIVERGENCE_OVER_BEST",
    "DIVERGENCE_ERROR",
    "CAUTION",
)
"""The constants that were fitted on the setting half."""

Row = Mapping[str, Any]


def regrets(row: Row) -> tuple[float, float]:
    """How far a run ends behind: in percent of the loss, and of the gain.

    The reference is the run with the same seed at the learning rate with the best mean, or that
    mean for a seed that the grid does not have.
    """
    best, outset = reference(row["task"], row["seed"])
    loss = finite(row["loss"])
    if not math.isfinite(loss):
        return math.inf, math.inf
    return 100 * (loss - best) / abs(best), 100 * (loss - best) / (outset - best)


def reference(task: str, seed: int) -> tuple[float, float]:
    """The loss of a plain run at the best learning rate, and the loss before the first step."""
    losses: dict[float, dict[int, float]] = defaultdict(dict)
    outsets = []
    for row in curve_rows(task):
        losses[row["lr"]][row["seed"]] = finite(row["loss"])
        outsets.append(row["outset"])
    best = min(losses, key=lambda lr: fmean(losses[lr].values()))
    return losses[best].get(seed, fmean(losses[best].values())), fmean(outsets)


def headline(rows: Sequence[Row]) -> dict[str, Any]:
    """The headline of the file, as far as its rows go."""
    found: dict[str, Any] = {"constants_fitted": len(FITTED)}
    assert all(hasattr(constants, name) for name in FITTED)
    of: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        of[row["method"]].append(row)
    found |= _of_hdet(of[HDET])
    for num, name in ((4, "hdet, 4 replicas"), (2, "hdet, 2 replicas"), (1, "hdet, 1 replica")):
        found |= _short(f"n{num}", of[name])
    found |= _short("n1_ceiling", of["ceiling alone"])
    prior = _short("", of[PRIOR_AND_CEILING])
    found |= {f"prior_and_ceiling_{name.removesuffix('_')}": one for name, one in prior.items()}
    found |= _short("luck", of["luck"])
    found |= _short("winner_takes_all", of[WINNER_TAKES_ALL])
    tasks = {row["task"] for row in of[HDET]}
    whole = [name for name in PEERS if of[name] and tasks <= {row["task"] for row in of[name]}]
    peers = {name: _short("peer", of[name]) for name in whole}
    if peers:
        best = min(peers, key=lambda name: peers[name]["median_regret_pct_peer"])
        found["best_peer"] = best
        found["best_peer_median_regret_pct"] = peers[best]["median_regret_pct_peer"]
        found["best_peer_lost"] = peers[best]["lost_peer"]
    for name in [*PEERS, WINNER_TAKES_ALL, PRIOR_AND_CEILING]:
        found |= _against(_word(name), of[HDET], of[name])
    guarded = [row for name, own in of.items() if name.startswith("hdet") for row in own]
    if guarded:
        fine = [row for row in guarded if 1 / 3 <= row["chosen"] * 1.0 <= 1.0]
        alarms = sum(row["rollbacks"] > 0 for row in fine)
        found["false_alarms_per_1000_runs"] = 1000 * alarms / max(len(fine), 1)
    return found


def _of_hdet(rows: Sequence[Row]) -> dict[str, Any]:
    if not rows:
        return {}
    short = _short("", rows)
    at_best = [regrets(row)[0] for row in rows if row["start"] == 1.0]
    return {
        "tasks_reported": len({row["task"] for row in rows}),
        **{name.removesuffix("_"): value for name, value in short.items()},
        "harm_at_best_pct": median(at_best) if at_best else None,
        "scout_steps_pct": 100 * fmean(row["scout_steps"] / row["steps"] for row in rows),
    }


def _short(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    if not rows:
        return {}
    found = [regrets(row) for row in rows]
    pct, shares = [one for one, _ in found], [share for _, share in found]
    return {
        f"runs_{name}": len(rows),
        f"lost_{name}": sum(share > LOST_SHARE for share in shares),
        f"median_regret_pct_{name}": median(pct),
        f"p90_regret_pct_{name}": quantile(pct, 0.9),
        f"worst_regret_pct_{name}": max(pct),
        f"median_gain_share_pct_{name}": median(shares),
        f"mean_gain_share_pct_{name}": fmean(min(share, 100.0) for share in shares),
        f"worst_gain_share_pct_{name}": max(shares),
    }


def _word(name: str) -> str:
    return name.lower().replace(" ", "_").replace("-", "_")


def _against(name: str, ours: Sequence[Row], theirs: Sequence[Row]) -> dict[str, Any]:
    """A sign test over pairs of the same task and seed, each the median over the starts."""
    mine, others = _medians(ours), _medians(theirs)
    pairs = [(mine[key], loss) for key, loss in others.items() if key in mine]
    if not pairs:
        return {}
    wins = sum(our < their for our, their in pairs)
    p = sum(math.comb(len(pairs), num) for num in range(wins, len(pairs) + 1)) / 2 ** len(pairs)
    return {f"wins_over_{name}": wins, f"pairs_with_{name}": len(pairs), f"sign_p_{name}": p}


def _medians(rows: Sequence[Row]) -> dict[tuple[str, int], float]:
    """For each task and seed the median loss over the starts."""
    losses: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in rows:
        losses[row["task"], row["seed"]].append(finite(row["loss"]))
    return {key: median(found) for key, found in losses.items()}


def table(rows: Sequence[Row], method: str = HDET) -> str:
    """Regrets by task, in percent of the gain, as a Markdown table."""
    lines = [
        "| task | runs | median regret, % of the loss | median, % of the gain | worst | lost |",
        "|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        found = [regrets(row) for row in rows if row["task"] == task and row["method"] == method]
        if found:
            pct, shares = [one for one, _ in found], [share for _, share in found]
            lost = sum(share > LOST_SHARE for share in shares)
            lines.append(
                f"| {task} | {len(found)} | {median(pct):.1f} | {median(shares):.1f} | "
                f"{max(shares):.1f} | {lost} |"
            )
    return "\n".join(lines)
