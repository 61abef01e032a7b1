"""The facts at the top of a report, one for each tile."""

from collections import Counter
from collections.abc import Iterator

from hdet.records.history import History
from hdet.report.figures import curves
from hdet.report.html_elements import text
from hdet.report.plotly import brief, duration, known, mean, shortened, volume


def facts_of(history: History) -> Iterator[tuple[str, str, str]]:
    """Each fact as a title, a value in HTML, and a remark."""
    held_out, training = history.measure("loss"), curves.mean_loss(history)
    if held_out:
        yield "Held-out loss", brief(held_out[-1][1]), f"of the consensus, step {held_out[-1][0]:,}"
    elif training:
        remark = "mean of the replicas" if history.most_replicas > 1 else "no held-out loss noted"
        yield "Training loss", brief(training[-1][1]), remark
    if history.knob_names:
        yield _lr_fact(history)
    moves = Counter(knob.decision for cycle in history.cycles for knob in cycle.knobs)
    if moves["up"] or moves["down"] or history.settings.get("controller"):
        arrows = f"▲&nbsp;{moves['up']:,} ▼&nbsp;{moves['down']:,}"
        rest = f"up and down; {moves['stay']:,} stayed"
        rest += f", {moves['abstain']:,} abstained" if moves["abstain"] else ""
        yield "Moves", arrows, rest
    every = history.settings.get("sync_every")
    yield "Cycles", f"{len(history.cycles):,}", f"of {every:,} steps" if type(every) is int else ""
    yield _replica_fact(history)
    yield _excluded_fact(history)
    yield _converge_fact(history)
    shares = known(cycle.probe_share for cycle in history.cycles)
    if shares:
        yield "Probing", f"{100 * mean(shares):.2g} %", "of the time of a cycle, on average"


def _lr_fact(history: History) -> tuple[str, str, str]:
    names = history.knob_names
    if len(names) > 2:
        return "Knobs", f"{len(names)} knobs", "each in the table below"
    ranges = {name: _range_of(history, name) for name in names}
    title = "Learning rate" if history.rate_names else "Knob"
    if len(names) == 1:
        return title, ranges[names[0]], "centre: first, highest, last cycle"
    both = "<br>".join(
        f"{shown} <small>{text(shortened(name, 18))}</small>" for name, shown in ranges.items()
    )
    title = "Learning rates" if len(history.rate_names) == 2 else "Knobs"
    return title, both, "centre: first, highest, last cycle"


def _range_of(history: History, name: str) -> str:
    """The first, highest and last centre of a knob; the highest only where it differs."""
    values = [value for _, value in curves.centres(history, name)]
    if not values:
        return "-"
    first, top, last = values[0], max(values), values[-1]
    shown = (first, top, last) if top > max(first, last) else (first, last)
    return f"<span>{' → '.join(map(brief, shown))}</span>"


def _replica_fact(history: History) -> tuple[str, str, str]:
    """The number of replicas; all numbers in turn if resumes changed it."""
    sizes = list(dict.fromkeys(len(cycle.losses) for cycle in history.cycles))
    if not sizes and history.num_replicas is not None:
        sizes = [history.num_replicas]
    device = history.starts[-1].device if history.starts else None
    return "Replicas", " → ".join(map(str, sizes)) or "-", f"on {device}" if device else ""


def _excluded_fact(history: History) -> tuple[str, str, str]:
    excluded = history.excluded
    who = sorted({gone.replica for gone in excluded})
    named = ", ".join(map(str, who[:6])) + (", …" if len(who) > 6 else "")
    times = f"{len(excluded):,} time{'' if len(excluded) == 1 else 's'}"
    return "Excluded", times if excluded else "none", f"replica {named}" if excluded else ""


def _converge_fact(history: History) -> tuple[str, str, str]:
    converges = history.every_converge
    seconds = known(event.converge.seconds for event in converges)
    sent = sum(known(event.converge.bytes for event in converges))
    spent = duration(sum(seconds)) if seconds else "-"
    return "Converging", spent, f"{volume(sent)} in {len(converges):,} converges"
