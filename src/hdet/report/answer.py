"""The paragraph at the top of a report: what was given and found, how sure, why, and the cost."""

import math
from collections.abc import Mapping

from hdet.records.events import SearchEvent
from hdet.records.history import History
from hdet.report.figures.curves import centres
from hdet.report.plotly import brief

EVIDENCE = {
    "prior": "what is usual for this optimizer",
    "gains": "what short rounds gained",
    "divergence": "where short rounds diverged",
}
"""Share of the evidence -> its words."""
LEAST_SHARE = 0.005
"""Evidence with a smaller share is not named."""


def answer(history: History) -> str:
    """Given, found, how sure, by which evidence, the cost, and what the guard did; in words.

    Empty for a record in which nothing was trained.
    """
    if history.is_empty:
        return ""
    starts = [search for search in history.scouts if not search.mid_run]
    sentences = _searched(history, starts[-1]) if starts else _not_searched(history)
    return " ".join([*sentences, *_guarded(history), *_compared(history)])


def _searched(history: History, search: SearchEvent) -> list[str]:
    given = _given(search.reference_lrs)
    if search.factor is None:
        return [f"{given} The search had not ended at step {search.step:,}."]
    sentences = [f"{given} {_found(search, search.factor)}"]
    if search.within is not None and math.isfinite(search.within):
        sure = f"The best one probably lies within a factor of {brief(search.within)} of it"
        sentences.append(f"{sure}{_evidence(search.shares)}.")
    elif search.factor_reason:
        sentences.append(f"Why: {search.factor_reason}.")
    sentences.append(_cost(history, search))
    return sentences


def _given(reference_lrs: Mapping[str, float | None]) -> str:
    rates = [rate for rate in reference_lrs.values() if rate is not None]
    if len(rates) == 1:
        return f"Given a learning rate of {brief(rates[0])},"
    return f"Given {len(rates)} learning rates," if rates else "From the given learning rate,"


def _found(search: SearchEvent, factor: float) -> str:
    rates = [rate for rate in search.reference_lrs.values() if rate is not None]
    if abs(factor - 1) < 1e-3:
        return "the scout kept it."
    if len(rates) == 1:
        return f"the scout found {brief(rates[0] * factor)}, {brief(factor)} times the given one."
    return f"the scout found {brief(factor)} times the given ones."


def _evidence(shares: Mapping[str, float]) -> str:
    """The pieces of evidence, the strongest first."""
    named = sorted(shares.items(), key=lambda pair: -pair[1])
    parts = [
        f"{EVIDENCE.get(name, name)} ({share:.0%})" for name, share in named if share > LEAST_SHARE
    ]
    return f", judged by {', '.join(parts)}" if parts else ""


def _cost(history: History, search: SearchEvent) -> str:
    total = history.total_steps
    share = f" of {total:,} steps ({search.step / total:.1%})" if total else " steps"
    return f"The search took {search.step:,}{share}."


def _not_searched(history: History) -> list[str]:
    names = history.rate_names
    if not names:
        return []
    points = centres(history, names[0])
    if not points:
        return []
    highest = brief(max(value for _, value in points))
    of = "" if len(names) == 1 else f" of {names[0]}"
    sentence = f"No search: the learning rate{of} is the given one, {highest} at its highest."
    moves = sum(k.decision in ("up", "down") for c in history.cycles for k in c.knobs)
    if not moves:
        return [sentence]
    return [
        f"No search: {history.num_replicas} replicas explored around the given learning rate, "
        f"and moved it {moves:,} times; its highest value{of} was {highest}."
    ]


def _guarded(history: History) -> list[str]:
    """The rollbacks, and the ceiling that they left."""
    rollbacks = [event for event in history.rollbacks if event.back_to < event.step]
    if not rollbacks:
        return [] if not history.cycles or not history.settings.get("guard") else ["No rollback."]
    times = "once" if len(rollbacks) == 1 else f"{len(rollbacks):,} times"
    sentence = f"The guard went back to earlier weights {times}"
    factor = math.prod(event.factor for event in history.rollbacks if event.factor is not None)
    if factor < 1:
        return [f"{sentence}; the ceiling left {brief(factor)} times the learning rate."]
    return [f"{sentence}, and left the learning rate as it was."]


def _compared(history: History) -> list[str]:
    """How the last held-out loss lies beside the reference."""
    reference, loss = history.reference, history.last("loss")
    band = None if reference is None else reference.bands.get("loss")
    if reference is None or band is None or loss is None or not history.is_finished:
        return []
    where = f"{brief(band[0])} to {brief(band[1])}"
    return [f"The run ended at a held-out loss of {brief(loss)}; {reference.text}: {where}."]
