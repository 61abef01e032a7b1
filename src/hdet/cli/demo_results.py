"""What the demo came to: one row for each run that searched."""

from pathlib import Path
from typing import Any, NamedTuple

from hdet.cli.demo_acts import Act
from hdet.cli.demo_sweep import sweep_of
from hdet.cli.formats import number, percent
from hdet.records import reader
from hdet.records.history import FILE_NAME, History


class Row(NamedTuple):
    """A run in the table, beside the best of the sweep."""

    task: str
    given: str
    found: str
    within: str
    result: str
    best: str
    price: str
    scout: str


TITLES = Row(
    "task",
    "given",
    "found",
    "within",
    "held-out\nresult",
    "best of\na sweep",
    "price of\nthe sweep",
    "steps of\nthe scout",
)


def histories_of(everything: list[Act], folder: Path) -> list[tuple[Act, History]]:
    """The runs of the demo that have a record."""
    return [
        (act, reader.read(folder / act.name))
        for act in everything
        if (folder / act.name / FILE_NAME).exists()
    ]


def row_of(act: Act, history: History) -> Row:
    """The row of a run."""
    search = history.scouts[0] if history.scouts else None
    factor = None if search is None else search.factor
    within = None if search is None else search.within
    sweep = sweep_of(act.task.name)
    return Row(
        task=act.task.title.replace(", ", "\n"),
        given=number(act.lr),
        found="-" if factor is None else number(act.lr * factor),
        within="-" if within is None else f"{within:.2g} x",
        result=_result(history.last("loss"), history.last("accuracy"), "\n"),
        best=_result(_middle(sweep.loss), _middle(sweep.accuracy), "\n"),
        price=sweep.price,
        scout="-" if search is None else f"{search.step} of {act.steps}",
    )


def results_table(runs: list[tuple[Act, History]], title: str) -> Any:
    """The table of all runs that searched, as an object that rich prints."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, show_lines=True)
    for name in TITLES:
        is_task = name == TITLES.task
        table.add_column(name, justify="left" if is_task else "right", no_wrap=is_task)
    for act, history in runs:
        if not act.is_paper:
            table.add_row(*row_of(act, history))
    return table


def paper_line(runs: list[tuple[Act, History]]) -> str:
    """What the run with the paper's method came to; empty without one."""
    for act, history in runs:
        if act.is_paper and history.cycles:
            result = _result(history.last("loss"), history.last("accuracy"), ", ")
            return (
                f"the paper's method: {history.num_replicas} replicas, {len(history.cycles)} "
                f"converges: held-out loss {result}"
            )
    return ""


def _middle(ends: tuple[float, float] | None) -> float | None:
    return None if ends is None else sum(ends) / 2


def _result(loss: float | None, accuracy: float | None, between: str) -> str:
    return number(loss) + ("" if accuracy is None else f"{between}{percent(accuracy)}")
