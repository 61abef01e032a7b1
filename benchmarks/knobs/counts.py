"""How many runs of knobs.json end near the best value and near the best loss."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
KINDS = ("value", "loss")
WITHIN = {"value": "within_factor", "loss": "within_share"}
TRANSFORMER = "four_lrs_transformer"


def word_of_problem(name: str) -> str:
    """The short name of a problem.

    >>> word_of_problem("four learning rates of a transformer")
    'four_lrs_transformer'
    """
    if name.startswith("four"):
        return TRANSFORMER if "transformer" in name else "four_lrs_quadratic"
    words = {
        "weight": "weight_decay",
        "dropout": "dropout",
        "label": "label_smoothing",
        "attention": "temperature",
        "momentum": "momentum",
    }
    return next(word for start, word in words.items() if name.startswith(start))


def counts(rows: Sequence[Row], six: Sequence[Row]) -> dict[str, Any]:
    """Runs of each problem, of all, and of all but the transformer, as numbers of runs.

    A run counts for hdet by a scout where the problem has one, else by the tracker.
    """
    results: dict[str, Any] = {}
    sums: dict[str, int] = defaultdict(int)
    for name in dict.fromkeys(row["problem"] for row in rows):
        word = word_of_problem(name)
        found = of_problem([row for row in rows if row["problem"] == name])
        results |= {f"{word}_{key}": value for key, value in found.items()}
        for group in ("all", *(["six_problems"] if word != TRANSFORMER else [])):
            for key, value in found.items():
                sums[f"{group}_{key}"] += value
    return {**results, **sums, **of_six(six)}


def of_problem(rows: Sequence[Row]) -> dict[str, int]:
    rule = "scout" if any(row["rule"] == "scout" for row in rows) else "tracker"
    own = [row for row in rows if row["rule"] == rule]
    paper = [row for row in rows if row["rule"] == "paper"]
    return {
        "runs": len(own),
        **{f"{kind}_runs": sum(bool(row[WITHIN[kind]]) for row in own) for kind in KINDS},
        **{f"paper_{kind}_runs": sum(bool(row[WITHIN[kind]]) for row in paper) for kind in KINDS},
    }


def of_six(six: Sequence[Row]) -> dict[str, Any]:
    """Six knobs at once: whether five were found, and how often the one without effect moved."""
    if not six:
        return {}
    return {
        "six_at_once_runs": len(six),
        "six_at_once_found_runs": sum(bool(row["within_factor"]) for row in six),
        "dummy_moved_runs": sum(row["dummy_moves"] > 0 for row in six),
        "dummy_moves": sum(row["dummy_moves"] for row in six),
        "dummy_lowest_ratio": min(math.exp(row["dummy_drift"]) for row in six),
    }
