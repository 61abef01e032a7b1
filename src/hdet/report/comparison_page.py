"""The part of a report that compares several runs."""

from collections.abc import Sequence

from hdet.records.history import History
from hdet.report.answer import answer
from hdet.report.figures import comparison, curves
from hdet.report.figures.curves import Labelled
from hdet.report.html_elements import boxed, folded, section, table, text
from hdet.report.html_page import PageBuilder
from hdet.report.plotly import brief
from hdet.report.run_page import (
    MAX_PANELS,
    details,
    knob_title,
    lede,
    notices,
    status_of,
    steps_of,
)


def comparison_body(page: PageBuilder, runs: Sequence[Labelled]) -> str:
    """A table of the runs, their curves laid over each other, then each run."""
    histories = [history for _, history in runs]
    measures = curves.other_measures(histories)
    finished = sum(history.is_finished for history in histories)
    header = (
        f'<header><p class="eyebrow">hdet report</p><h1>{len(runs)} runs compared</h1>'
        f'<p class="lede">{finished} of {len(runs)} finished</p>{_answers(runs)}</header>'
    )
    groups = by_task(runs)
    losses = "".join(_losses(page, group, len(groups) > 1) for group in groups)
    knobs = list(dict.fromkeys(name for history in histories for name in history.knob_names))
    each_run = "".join(
        folded(
            f"{who}: {status_of(history)}",
            lede(history) + details(page, history),
            "run",
        )
        for who, history in runs
    )
    return (
        header
        + "".join(notices(history, f"{who}: ") for who, history in runs)
        + section("Side by side", boxed(_run_table(runs, knobs, measures)))
        + section("Loss", losses)
        + section(knob_title(histories), _compared_knobs(page, runs, knobs))
        + section("Measures", _measures(page, groups, measures))
        + section("Each run", each_run)
    )


def by_task(runs: Sequence[Labelled]) -> list[list[Labelled]]:
    """The runs in groups that can share a plot of losses: those with the same reference."""
    groups: dict[str | None, list[Labelled]] = {}
    for who, history in runs:
        name = None if history.reference is None else history.reference.name
        groups.setdefault(name, []).append((who, history))
    return list(groups.values())


def _answers(runs: Sequence[Labelled]) -> str:
    """What each run came to."""
    entries = [(who, answer(history)) for who, history in runs]
    inside = "".join(f"<dt>{text(who)}</dt><dd>{text(said)}</dd>" for who, said in entries if said)
    return f'<dl class="answers">{inside}</dl>' if inside else ""


def _losses(page: PageBuilder, group: Sequence[Labelled], is_named: bool) -> str:
    size = "half" if is_named else "wide"
    plots = [comparison.measure(group, "loss", size), comparison.mean_losses(group, size)]
    title = f'<h3 class="group">{text(", ".join(who for who, _ in group))}</h3>'
    return (title if is_named else "") + page.grid(plots)


def _measures(page: PageBuilder, groups: Sequence[Sequence[Labelled]], names: Sequence[str]) -> str:
    plots = (comparison.measure(group, name) for name in names for group in groups)
    return page.grid(plots)


def _compared_knobs(page: PageBuilder, runs: Sequence[Labelled], names: Sequence[str]) -> str:
    if len(names) <= MAX_PANELS:
        size = "wide" if len(names) == 1 else "half"
        return page.grid(comparison.knob(runs, name, size) for name in names)
    panels = [(name, page.grid([comparison.knob(runs, name, "wide")])) for name in names]
    return page.picker("Knob", panels)


def _run_table(runs: Sequence[Labelled], knobs: Sequence[str], measures: Sequence[str]) -> str:
    """One row for each run: its status, its last losses and measures, its highest knobs."""

    def last(points: Sequence[tuple[int, float]]) -> str:
        return brief(points[-1][1]) if points else "-"

    def highest(points: Sequence[tuple[int, float]]) -> str:
        return brief(max(value for _, value in points)) if points else "-"

    def row(who: str, history: History) -> list[str]:
        return [
            who,
            "finished" if history.is_finished else "unfinished",
            str(history.num_replicas or "-"),
            steps_of(history),
            last(history.measure("loss")),
            last(curves.mean_loss(history)),
            *(last(history.measure(name)) for name in measures),
            *(highest(curves.centres(history, name)) for name in knobs),
        ]

    head = ["run", "status", "replicas", "steps", "held-out loss", "training loss", *measures]
    rates = {name for _, history in runs for name in history.rate_names}
    head += [f"highest {'learning rate, ' if name in rates else ''}{name}" for name in knobs]
    about = "Losses and measures at the end of each run; of learning rates and other knobs the "
    about += "highest centre of the spread."
    return table(about, head, [row(*run) for run in runs], numbers_from=2)
