"""The part of a report that is about one run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from hdet.records.history import History
from hdet.report.answer import answer
from hdet.report.facts import facts_of
from hdet.report.figures import comparison, curves, knobs, run, search
from hdet.report.html_elements import boxed, notice, section, table, text, tiles
from hdet.report.html_page import PageBuilder
from hdet.report.plot import Plot
from hdet.report.plotly import brief
from hdet.report.tables import record_tables, rollback_table

MAX_PANELS = 4
"""The number of knobs that are shown side by side; of more knobs, the reader picks one."""


def header(who: str, history: History) -> str:
    """The name of the run, how it was set up, and how far it is."""
    return (
        f'<header><p class="eyebrow">hdet report</p><h1>{text(who)}</h1>{answered(history)}'
        f"{lede(history)}"
        f'<div class="status">{_pill(history)}</div></header>'
    )


def details(page: PageBuilder, history: History) -> str:
    """Everything about one run, without its name."""
    sections = [notices(history)]
    if not history.is_empty:
        sections.append(tiles(facts_of(history)))
    sections.append(section("Guard", rollback_table(history)))
    sections.append(section("Scout", page.grid(search.searches(history))))
    if history.cycles or history.notes:
        sections += [
            section("Losses", page.grid([run.losses(history)]) or _none("No loss recorded.")),
            section(knob_title([history]), _knobs(page, history)),
            section("Sensitivity", page.grid([knobs.sensitivity(history)])),
            section("Measures", _measures(page, history)),
            section("Replicas", _replicas(page, history)),
        ]
    sections.append(section("Record", record_tables(history)))
    return "".join(sections)


def notices(history: History, whose: str = "") -> str:
    """What the reader must know before trusting the curves; `whose` names one of several runs."""
    notices = []
    if history.is_empty:
        notices.append(notice(f"{whose}This record is empty: no run has written to it yet."))
    if history.damaged:
        first = [f"line {line}: {cause}" for line, cause in history.damaged[:8]]
        rest = len(history.damaged) - len(first)
        first += [f"and {rest:,} more"] if rest else []
        lines = _count(len(history.damaged), "damaged line")
        notices.append(notice(f"{whose}{lines} skipped.", first))
    if history.dropped:
        lines = _count(history.dropped, "line")
        why = "the run was resumed or started over from a step before."
        notices.append(notice(f"{whose}{lines} left out: {why}"))
    return "".join(notices)


def answered(history: History) -> str:
    """What the run came to, in one paragraph."""
    paragraph = answer(history)
    return f'<p class="answer">{text(paragraph)}</p>' if paragraph else ""


def lede(history: History) -> str:
    """One line: optimizer, controller, engine, start and resumes."""
    settings, start = history.settings, history.starts[-1] if history.starts else None
    parts = [
        settings.get("optimizer"),
        _controller(settings),
        start.replicas.kind if start else None,
    ]
    if history.starts and (moment := _moment(history.starts[0].time)):
        parts.append(f"started {moment}")
    if history.resumes:
        steps = ", ".join(f"{step:,}" for step in history.resumes[-6:])
        parts.append(f"resumed at step {steps} (dotted lines)")
    sentence = " · ".join(part for part in parts if isinstance(part, str) and part)
    return f'<p class="lede">{text(sentence)}</p>' if sentence else ""


def status_of(history: History) -> str:
    """Whether the run is finished, or how far it is."""
    if history.is_empty:
        return "nothing recorded yet"
    if history.is_finished:
        return "finished"
    if history.total_steps is None:
        return f"step {history.last_step:,}, length not recorded"
    return f"unfinished: step {steps_of(history)}"


def steps_of(history: History) -> str:
    """The last step, with the total of an unfinished run."""
    last, total = history.last_step, history.total_steps
    return f"{last:,}" if history.is_finished or not total else f"{last:,} of {total:,}"


def knob_title(histories: Sequence[History]) -> str:
    """The title of the section on knobs."""
    others = any(set(h.knob_names) - set(h.rate_names) for h in histories)
    return "Learning rates and knobs" if others else "Learning rates"


def _controller(settings: Mapping[str, Any]) -> str | None:
    controller = settings.get("controller")
    kind = controller.get("kind") if isinstance(controller, dict) else None
    return kind if isinstance(kind, str) else None


def _moment(time: float | None) -> str | None:
    if time is None:
        return None
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, OSError, ValueError):
        return None


def _pill(history: History) -> str:
    """The status, with a progress bar for an unfinished run."""
    done, status = " done" * history.is_finished, text(status_of(history))
    bar = ""
    if history.total_steps and not history.is_finished:
        bar = f'<progress max="{history.total_steps}" value="{history.last_step}">{status}'
        bar += "</progress>"
    return f'<span class="pill{done}">{status}</span>{bar}'


def _none(sentence: str) -> str:
    return f'<p class="box none">{text(sentence)}</p>'


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'} {'was' if number == 1 else 'were'}"


def _knobs(page: PageBuilder, history: History) -> str:
    names = history.knob_names
    if not names:
        return _none("No knob was recorded.")
    if len(names) <= MAX_PANELS:
        sizes = ("wide", "wide") if len(names) == 1 else ("most", "rest")
        shown = page.grid(plot for name in names for plot in _panel(history, name, *sizes))
    else:
        panels = [(name, page.grid(_panel(history, name, "wide", "wide"))) for name in names]
        shown = page.grid([knobs.scales(history)]) + page.picker("Knob", panels)
    return shown + (boxed(_knob_table(history)) if len(names) > 1 else "")


def _panel(history: History, name: str, *sizes: str) -> list[Plot | None]:
    """A row of the grid: the values of a knob, and beside or below them its hypergradient."""
    kinds = (knobs.knob, knobs.hypergradient)
    return [kind(history, name, size) for kind, size in zip(kinds, sizes, strict=True)]


def _knob_table(history: History) -> str:
    def row(name: str) -> list[Any]:
        points = curves.centres(history, name)
        first, last = (points[0][1], points[-1][1]) if points else (None, None)
        ratio = f"x {brief(last / first)}" if first and last is not None else "-"
        moves = Counter(knob.decision for _, knob in history.knob(name))
        stayed = moves["stay"] + moves["abstain"]
        return [name, brief(first), brief(last), ratio, moves["up"], moves["down"], stayed]

    head = ["knob", "first cycle", "last cycle", "change", "up", "down", "stayed"]
    about = "The centre of each knob, and the moves of the controller."
    return table(about, head, map(row, history.knob_names))


def _measures(page: PageBuilder, history: History) -> str:
    names = curves.other_measures([history])
    return page.grid(comparison.measure([("", history)], name) for name in names)


def _replicas(page: PageBuilder, history: History) -> str:
    plots = [
        run.distances(history),
        run.exclusions(history),
        run.converge_cost(history),
    ]
    excluded = "" if history.excluded else _none("No replica was excluded.")
    return page.grid(plots) + excluded
