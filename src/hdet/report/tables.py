"""The tables of a report: rollbacks, notes, settings and their changes."""

from collections.abc import Iterator, Mapping
from typing import Any

from hdet.records.history import History
from hdet.report.html_elements import folded, table
from hdet.report.plotly import brief

MAX_DEPTH = 8
"""Tables inside tables beyond this depth are shown by the number of their entries."""


def rollback_table(history: History) -> str:
    """What the guard did; empty if it never acted."""
    if not history.rollbacks:
        return ""
    rows = [(f"{r.step:,}", f"{r.back_to:,}", brief(r.factor), r.reason) for r in history.rollbacks]
    about = (
        "Where the run failed and was taken back to its best weights, and where learning rates "
        "were raised again afterwards."
    )
    return table(about, ["step", "back to", "learning rates times", "why"], rows, numbers_from=None)


def record_tables(history: History) -> str:
    """Notes, changed settings, settings and versions, each folded."""
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
    """Nested settings as rows of a table: the path of each value, and the value.

    >>> flat({"spread": 0.1, "base": {"kind": "WSD"}, "groups": ["a", "b"], "on": [{"x": 1}]})
    [('spread', '0.1'), ('base.kind', 'WSD'), ('groups', 'a, b'), ('on.0.x', '1')]
    """
    lines = []
    for name, value in settings.items():
        inner = _inner(value)
        if inner and above.count(".") < MAX_DEPTH:
            lines += flat(inner, f"{above}{name}.")
        else:
            lines.append((f"{above}{name}", _plain(value)))
    return lines


def _inner(value: Any) -> Mapping[str, Any]:
    """The entries that get rows of their own: those of a table, or of a list with tables in it."""
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
    """Each setting that a later start changed: start, name, value before, value after."""
    for number, (old, new) in enumerate(zip(history.starts, history.starts[1:], strict=False), 2):
        before, after = dict(flat(old.settings)), dict(flat(new.settings))
        for name in dict.fromkeys([*before, *after]):
            if before.get(name) != after.get(name):
                yield number, name, before.get(name, "-"), after.get(name, "-")
