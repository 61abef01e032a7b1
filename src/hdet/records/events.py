"""The events of a record: what each line says."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from hdet.control.controller import Move
from hdet.control.controller_loop import CycleMoves
from hdet.control.knob_state import KnobState
from hdet.control.regression import Slope
from hdet.control.replica_health import ReplicaHealth
from hdet.lr_search.estimator import Estimate
from hdet.lr_search.reasons import describe
from hdet.scheduler.search_trial import SearchTrial


def search_event(
    step: int, trial: SearchTrial, peaks: Mapping[str, float], begin: Estimate | None
) -> dict[str, Any]:
    """What the record says of a round, and of what the run begins with if it was the last."""
    search = trial.search
    return {
        "event": "scout",
        "step": step,
        "late": trial.trigger.is_mid_run,
        "by": trial.by,
        "points": [point._asdict() for point in search.points],
        "close": [point._asdict() for point in search.refined_observations],
        "noise": search.noise,
        "peaks": dict(peaks),
        "found": search.found,
        "factor": None if begin is None else begin.factor,
        "why": "" if begin is None else begin.text,
        "edge": search.lowest_lost,
        "explosion": search.divergence,
        "reason": describe(search.reasons),
    }


def converge_event(step: int, verdict: ReplicaHealth, num_bytes: int) -> dict[str, Any]:
    """What a converge did."""
    return {
        "event": "converge",
        "step": step,
        "excluded": [{"replica": r, "reason": why} for r, why in verdict.excluded.items()],
        "converge": {"bytes": num_bytes},
    }


def guard_event(step: int, reason: str, back_to: int, factor: float | None) -> dict[str, Any]:
    """Why a run was taken back, to which step, and what its scale was multiplied by."""
    return {
        "event": "guard",
        "step": step,
        "reason": reason,
        "back_to": back_to,
        "factor": factor,
    }


def cycle_event(
    cycle: int,
    names: Sequence[str],
    losses: Sequence[float | None],
    errors: Sequence[float | None],
    distances: Sequence[float | None],
    scores: Sequence[Sequence[float]] | None,
    steered: CycleMoves,
    ran_with: Sequence[float],
    knobs: Sequence[KnobState],
    used: Sequence[tuple[float, Sequence[float]]],
    course: dict[str, Any],
) -> dict[str, Any]:
    """What a cycle showed and what came of it. `lrs` are those of its last step; `used` has the
    centre of every knob and where each replica stood.

    Learning rates have one entry for every parameter group, whatever knob moves them.
    """
    rates: dict[int, dict[str, Any]] = {}
    others = []
    rows = zip(knobs, steered.moves, steered.slopes, used, strict=True)
    for knob, move, slope, (centre, values) in rows:
        told = _knob_entry(knob, move, slope)
        for group, base in enumerate(ran_with):
            if group in knob.info.groups:
                own = {"lrs": [base * factor for factor in values], "centre": base * centre}
                rates[group] = {"name": names[group], **own, **told}
        if not knob.info.groups:
            others.append({"name": knob.name, "values": values, "centre": centre, **told})
    for group, lr in enumerate(ran_with):
        still = {"decision": "stay", "reason": "not explored"}
        lrs = [lr] * len(losses)
        rest = {"lrs": lrs, "centre": lr, "scale": 1.0, **still}
        rates.setdefault(group, {"name": names[group], **rest})
    return {
        "event": "cycle",
        "cycle": cycle,
        "losses": losses,
        "loss_errors": errors,
        "weights": steered.weights,
        "distances": distances,
        "scores": None if scores is None else [fmean(each) if each else None for each in scores],
        "course": course,
        "knobs": [*(rates[group] for group in sorted(rates)), *others],
    }


def _knob_entry(knob: KnobState, move: Move, slope: Slope | None) -> dict[str, Any]:
    return {
        "space": knob.info.space.kind,
        **move.state._asdict(),
        "hypergradient": move.hypergradient,
        "hypergradient_error": move.error,
        "slope": None if slope is None else slope.slope,
        "slope_error": None if slope is None else slope.error,
        "decision": move.decision,
        "reason": move.reason,
    }


def as_json(value: Any) -> Any:
    """What strict JSON can say; a number that is not finite becomes null."""
    if isinstance(value, dict):
        return {str(key): as_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
