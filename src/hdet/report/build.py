"""`hdet report`: the page that shows what a run did, or how several runs compare.

Composes `hdet.history` (what happened), `hdet.figures` (how it looks as a plot) and `hdet.page`
(the HTML around it). The page is one file that asks nothing of the network.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hdet.records.history import History
from hdet.records.reader import read
from hdet.report.figures import comparison as comparison_figures
from hdet.report.figures import knobs as knobs_figures
from hdet.report.figures import plot as plot_figures
from hdet.report.figures import run as run_figures
from hdet.report.figures import search as search_figures
from hdet.report.figures.plot import Labelled, Plot
from hdet.report.html_page import PageBuilder, boxed, folded, notice, table, text, tiles
from hdet.report.plotly import brief, duration, known, mean, shortened, volume

MOST_PANELS = 4
"""Knobs that are shown side by side; of more, one is picked."""
DEEPEST = 8


def render(histories: Sequence[History]) -> str:
    """One self-contained HTML page: a run, or a comparison of several."""
    if not histories:
        raise ValueError("`histories` must hold at least one run, got none.")
    sheet = PageBuilder()
    runs = list(zip(labels(histories), histories, strict=True))
    if len(runs) == 1:
        (who, history) = runs[0]
        body, title = _header(who, history) + _details(sheet, history), who
    else:
        title = f"{len(runs)} runs compared"
        body = _comparison(sheet, runs)
    foot = "<footer>Made by hdet report from the records of the runs. Nothing on this page comes "
    foot += "from the network.</footer>"
    return sheet.html(f"{title} - hdet report", body + foot)


def write(runs: Sequence[str | Path], path: str | Path) -> list[History]:
    """Read the records of some runs and write the page; gives back what was read."""
    histories = [read(run) for run in runs]
    page = render(histories)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(page, encoding="utf-8")
    return histories


def labels(histories: Sequence[History]) -> list[str]:
    """A name for every run: that of its folder, with as many parents as it takes to tell them."""
    names = [history.name or "run" for history in histories]
    folders = [history.path.resolve().parent.parts for history in histories]
    for depth in range(2, max(len(parts) for parts in folders) + 1):
        twice = {name for name, count in Counter(names).items() if count > 1}
        if not twice:
            break
        names = [
            "/".join(part.strip("/") for part in parts[-depth:]) if name in twice else name
            for name, parts in zip(names, folders, strict=True)
        ]
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        seen[name] += 1
        names[index] = f"{name} ({seen[name]})" if seen[name] > 1 else name
    return names


# One run -------------------------------------------------------------------------------------


def _header(who: str, history: History) -> str:
    return (
        f'<header><p class="eyebrow">hdet report</p><h1>{text(who)}</h1>{_lede(history)}'
        f'<div class="status">{_pill(history)}</div></header>'
    )


def _lede(history: History) -> str:
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


def _controller(settings: Mapping[str, Any]) -> str | None:
    controller = settings.get("controller")
    kind = controller.get("kind") if isinstance(controller, dict) else None
    return kind if isinstance(kind, str) else None


def _moment(time: float | None) -> str | None:
    if time is None:
        return None
    try:
        return f"{datetime.fromtimestamp(time, timezone.utc):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, OSError, ValueError):
        return None


def _status(history: History) -> str:
    if history.is_empty:
        return "nothing recorded yet"
    if history.is_finished:
        return "finished"
    if history.total_steps is None:
        return f"step {history.last_step:,}, length not recorded"
    return f"unfinished: step {_steps(history)}"


def _steps(history: History) -> str:
    last, total = history.last_step, history.total_steps
    return f"{last:,}" if history.is_finished or not total else f"{last:,} of {total:,}"


def _pill(history: History) -> str:
    done, status = " done" * history.is_finished, text(_status(history))
    bar = ""
    if history.total_steps and not history.is_finished:
        bar = f'<progress max="{history.total_steps}" value="{history.last_step}">{status}'
        bar += "</progress>"
    return f'<span class="pill{done}">{status}</span>{bar}'


def _details(sheet: PageBuilder, history: History) -> str:
    """Everything about one run, but for its name."""
    sections = [_notices(history)]
    if not history.is_empty:
        sections.append(tiles(_facts(history)))
    sections.append(_section("Guard", _rollbacks(history)))
    sections.append(_section("Scout", sheet.grid(search_figures.scouts(history))))
    if history.cycles or history.notes:
        sections += [
            _section(
                "Losses", sheet.grid([run_figures.losses(history)]) or _none("No loss recorded.")
            ),
            _section(_knob_title([history]), _knobs(sheet, history)),
            _section("Sensitivity", sheet.grid([knobs_figures.sensitivity(history)])),
            _section("Measures", _measures(sheet, history)),
            _section("Replicas", _replicas(sheet, history)),
        ]
    sections.append(_section("Record", _tables(history)))
    return "".join(sections)


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{text(title)}</h2>{inside}</section>" if inside else ""


def _knob_title(histories: Sequence[History]) -> str:
    others = any(set(h.knob_names) - set(h.rate_names) for h in histories)
    return "Learning rates and knobs" if others else "Learning rates"


def _none(sentence: str) -> str:
    return f'<p class="box none">{text(sentence)}</p>'


def _notices(history: History, whose: str = "") -> str:
    """What the reader must know before trusting the curves."""
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


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'} {'was' if number == 1 else 'were'}"


def _facts(history: History) -> Iterator[tuple[str, str, str]]:
    sizes = list(dict.fromkeys(len(cycle.losses) for cycle in history.cycles))
    sizes = sizes or [history.num_replicas] if history.num_replicas is not None else sizes
    device = history.starts[-1].device if history.starts else None
    held_out, training = history.measure("loss"), plot_figures.mean_loss(history)
    if held_out:
        yield "Held-out loss", brief(held_out[-1][1]), f"of the consensus, step {held_out[-1][0]:,}"
    elif training:
        remark = "mean of the replicas" if history.most_replicas > 1 else "no held-out loss noted"
        yield "Training loss", brief(training[-1][1]), remark
    if history.knob_names:
        yield _lr_fact(history)
    moves = Counter(knob.decision for cycle in history.cycles for knob in cycle.knobs)
    if moves:
        arrows = f"▲&nbsp;{moves['up']:,} ▼&nbsp;{moves['down']:,}"
        rest = f"up and down; {moves['stay']:,} stayed"
        rest += f", {moves['abstain']:,} abstained" if moves["abstain"] else ""
        yield "Moves", arrows, rest
    every = history.settings.get("sync_every")
    yield "Cycles", f"{len(history.cycles):,}", f"of {every:,} steps" if type(every) is int else ""
    yield (
        "Replicas",
        " → ".join(str(size) for size in sizes) or "-",
        f"on {device}" if device else "",
    )
    yield _excluded_fact(history)
    yield _converge_fact(history)
    shares = known(cycle.probe_share for cycle in history.cycles)
    if shares:
        yield "Probing", f"{100 * mean(shares):.2g} %", "of the time of a cycle, on average"


def _lr_fact(history: History) -> tuple[str, str, str]:
    names = history.knob_names
    if len(names) > 2:
        return "Knobs", f"{len(names)} knobs", "each in the table below"
    ways = {name: _way(history, name) for name in names}
    title = "Learning rate" if history.rate_names else "Knob"
    if len(names) == 1:
        return title, ways[names[0]], "centre: first, highest, last cycle"
    both = "<br>".join(
        f"{way} <small>{text(shortened(name, 18))}</small>" for name, way in ways.items()
    )
    title = "Learning rates" if len(history.rate_names) == 2 else "Knobs"
    return title, both, "centre: first, highest, last cycle"


def _way(history: History, name: str) -> str:
    """First, highest and last centre; the highest only where it is another."""
    values = [value for _, value in plot_figures.centres(history, name)]
    if not values:
        return "-"
    first, top, last = values[0], max(values), values[-1]
    shown = (first, top, last) if top > max(first, last) else (first, last)
    return f"<span>{' → '.join(map(brief, shown))}</span>"


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


def _knobs(sheet: PageBuilder, history: History) -> str:
    names = history.knob_names
    if not names:
        return _none("No knob was recorded.")
    if len(names) <= MOST_PANELS:
        sizes = ("wide", "wide") if len(names) == 1 else ("most", "rest")
        shown = sheet.grid(plot for name in names for plot in _panel(history, name, *sizes))
    else:
        panels = [(name, sheet.grid(_panel(history, name, "wide", "wide"))) for name in names]
        shown = sheet.grid([knobs_figures.scales(history)]) + sheet.picker("Knob", panels)
    return shown + (boxed(_knob_table(history)) if len(names) > 1 else "")


def _panel(history: History, name: str, *sizes: str) -> list[Plot | None]:
    """A row of the grid: what a knob did, and beside or below it what it was told."""
    kinds = (knobs_figures.knob, knobs_figures.hypergradient)
    return [kind(history, name, size) for kind, size in zip(kinds, sizes, strict=True)]


def _knob_table(history: History) -> str:
    def row(name: str) -> list[Any]:
        points = plot_figures.centres(history, name)
        first, last = (points[0][1], points[-1][1]) if points else (None, None)
        ratio = f"x {brief(last / first)}" if first and last is not None else "-"
        moves = Counter(knob.decision for _, knob in history.knob(name))
        stayed = moves["stay"] + moves["abstain"]
        return [name, brief(first), brief(last), ratio, moves["up"], moves["down"], stayed]

    head = ["knob", "first cycle", "last cycle", "change", "up", "down", "stayed"]
    about = "The centre of each knob, and the moves of the controller."
    return table(about, head, map(row, history.knob_names))


def _measures(sheet: PageBuilder, history: History) -> str:
    names = plot_figures.other_measures([history])
    return sheet.grid(comparison_figures.measure([("", history)], name) for name in names)


def _replicas(sheet: PageBuilder, history: History) -> str:
    plots = [
        run_figures.distances(history),
        run_figures.exclusions(history),
        run_figures.converge_cost(history),
    ]
    excluded = "" if history.excluded else _none("No replica was excluded.")
    return sheet.grid(plots, excluded)


def _rollbacks(history: History) -> str:
    if not history.rollbacks:
        return ""
    rows = [(f"{r.step:,}", f"{r.back_to:,}", brief(r.factor), r.reason) for r in history.rollbacks]
    about = (
        "Where the loss spiked or hardly fell, and the run was taken back to its last good weights "
        "or to its first; and where learning rates were raised again afterwards."
    )
    return table(about, ["step", "back to", "learning rates times", "why"], rows, numbers_from=None)


def _tables(history: History) -> str:
    folds = []
    if history.notes:
        rows = [(f"{n.step:,}", n.text, _noted(n.measures)) for n in history.notes]
        about = "What was noted, and at which step."
        notes = table(about, ["step", "note", "measures"], rows, numbers_from=None)
        folds.append(folded(f"Notes ({len(rows):,})", notes))
    changes = list(_changes(history))
    if changes:
        about = "Settings that a later start of the run changed."
        head = ["start", "setting", "before", "after"]
        inside = table(about, head, changes, numbers_from=None)
        folds.append(folded(f"Changed settings ({len(changes):,})", inside))
    for title, values in (("Settings", history.settings), ("Versions", history.versions)):
        if values:
            about = f"{title} of the last start of the run."
            inside = table(about, ["name", "value"], flat(values), numbers_from=None)
            folds.append(folded(title, inside))
    return "".join(folds)


def _noted(measures: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {brief(value)}" for name, value in measures.items())


def flat(settings: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    """Nested settings as lines of a table.

    >>> flat({"spread": 0.1, "base": {"kind": "WSD"}, "groups": ["a", "b"], "on": [{"x": 1}]})
    [('spread', '0.1'), ('base.kind', 'WSD'), ('groups', 'a, b'), ('on.0.x', '1')]
    """
    lines = []
    for name, value in settings.items():
        inner = _inner(value)
        if inner and above.count(".") < DEEPEST:
            lines += flat(inner, f"{above}{name}.")
        else:
            lines.append((f"{above}{name}", _plain(value)))
    return lines


def _inner(value: Any) -> Mapping[str, Any]:
    """What is to be listed line by line: a table, or a list of more than plain values."""
    if isinstance(value, list) and any(isinstance(entry, (list, dict)) for entry in value):
        return {str(place): entry for place, entry in enumerate(value)}
    return value if isinstance(value, dict) else {}


def _plain(value: Any) -> str:
    if _inner(value):
        return f"{len(value)} entries"
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    return "none" if value is None or value == {} else str(value)


def _changes(history: History) -> Iterator[tuple[int, str, str, str]]:
    for number, (old, new) in enumerate(zip(history.starts, history.starts[1:], strict=False), 2):
        before, after = dict(flat(old.settings)), dict(flat(new.settings))
        for name in dict.fromkeys([*before, *after]):
            if before.get(name) != after.get(name):
                yield number, name, before.get(name, "-"), after.get(name, "-")


# Several runs --------------------------------------------------------------------------------


def _comparison(sheet: PageBuilder, runs: Sequence[Labelled]) -> str:
    histories = [history for _, history in runs]
    measures = plot_figures.other_measures(histories)
    finished = sum(history.is_finished for history in histories)
    header = (
        f'<header><p class="eyebrow">hdet report</p><h1>{len(runs)} runs compared</h1>'
        f'<p class="lede">{finished} of {len(runs)} finished</p></header>'
    )
    held_out = comparison_figures.measure(runs, "loss", "wide")
    knobs = list(dict.fromkeys(name for history in histories for name in history.knob_names))
    details = "".join(
        folded(
            f"{who}: {_status(history)}",
            _lede(history) + _details(sheet, history),
            "run",
        )
        for who, history in runs
    )
    return (
        header
        + "".join(_notices(history, f"{who}: ") for who, history in runs)
        + _section("Side by side", boxed(_run_table(runs, knobs, measures)))
        + _section("Loss", sheet.grid([held_out, comparison_figures.mean_losses(runs)]))
        + _section(_knob_title(histories), _compared_knobs(sheet, runs, knobs))
        + _section(
            "Measures", sheet.grid(comparison_figures.measure(runs, name) for name in measures)
        )
        + _section("Each run", details)
    )


def _compared_knobs(sheet: PageBuilder, runs: Sequence[Labelled], names: Sequence[str]) -> str:
    if len(names) <= MOST_PANELS:
        size = "wide" if len(names) == 1 else "half"
        return sheet.grid(comparison_figures.knobs_of(runs, name, size) for name in names)
    panels = [
        (name, sheet.grid([comparison_figures.knobs_of(runs, name, "wide")])) for name in names
    ]
    return sheet.picker("Knob", panels)


def _run_table(runs: Sequence[Labelled], knobs: Sequence[str], measures: Sequence[str]) -> str:
    def last(points: Sequence[tuple[int, float]]) -> str:
        return brief(points[-1][1]) if points else "-"

    def highest(points: Sequence[tuple[int, float]]) -> str:
        return brief(max(value for _, value in points)) if points else "-"

    def row(who: str, history: History) -> list[str]:
        return [
            who,
            "finished" if history.is_finished else "unfinished",
            str(history.num_replicas or "-"),
            _steps(history),
            last(history.measure("loss")),
            last(plot_figures.mean_loss(history)),
            *(last(history.measure(name)) for name in measures),
            *(highest(plot_figures.centres(history, name)) for name in knobs),
        ]

    head = ["run", "status", "replicas", "steps", "held-out loss", "training loss", *measures]
    rates = {name for _, history in runs for name in history.rate_names}
    head += [f"highest {'learning rate, ' if name in rates else ''}{name}" for name in knobs]
    about = "Losses and measures at the end of each run; of learning rates and other knobs the "
    about += "highest centre of the spread."
    return table(about, head, [row(*run) for run in runs], numbers_from=2)
