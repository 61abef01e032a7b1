"""The headline of knobs.json as shares of runs."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any


def drift_in_sigmas(rows: Sequence[Mapping[str, Any]]) -> float:
    """How far the dummies went on average, in units of the standard error of that mean.

    Runs are independent: what has a direction shows in most of them.
    """
    drifts = [row["dummy_drift"] for row in rows]
    if len(drifts) < 2 or not any(drifts):
        return 0.0
    error = stdev(drifts) / math.sqrt(len(drifts))
    return abs(fmean(drifts)) / error if error else math.inf


def headline(rows: Sequence[Mapping[str, Any]], six: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def share(rule: str, key: str) -> float:
        chosen = [row for row in rows if row["rule"] == rule]
        return sum(bool(row[key]) for row in chosen) / len(chosen) if chosen else math.nan

    scouted = {row["problem"] for row in rows if row["rule"] == "scout"}
    # What hdet is for: a scout where all knobs are learning rates of one model, else the tracker.
    ours = [
        row for row in rows if row["rule"] == ("scout" if row["problem"] in scouted else "tracker")
    ]
    return {
        "cases": len(ours),
        "within_1pct_share": sum(bool(row["within_share"]) for row in ours) / max(len(ours), 1),
        "within_factor_1_5_share": sum(bool(row["within_factor"]) for row in ours)
        / max(len(ours), 1),
        "tracker_within_1pct_share": share("tracker", "within_share"),
        "tracker_within_factor_1_5_share": share("tracker", "within_factor"),
        "paper_within_1pct_share": share("paper", "within_share"),
        "paper_within_factor_1_5_share": share("paper", "within_factor"),
        "scout_within_1pct_share": share("scout", "within_share"),
        "six_within_factor_1_5_share": (
            sum(bool(row["within_factor"]) for row in six) / len(six) if six else math.nan
        ),
        "dummy_drift_in_its_own_sigmas": drift_in_sigmas(six) if six else math.nan,
    }
