"""What a person sees while a run goes on: a live display in a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TextIO

WIDTH = 41
"""Characters on which the learning rates of the replicas are spread out."""


class Score(NamedTuple):
    """How one of the runs stands."""

    name: str
    training_loss: float | None = None
    loss: float | None = None
    """On held-out data, of the consensus."""
    accuracy: float | None = None
    lr: float = 0.0
    """In the centre of the spread."""


class Status(NamedTuple):
    """Where the runs are."""

    step: int
    total: int
    cycle: int
    sync_every: int
    phase: str
    replica_lrs: list[float]
    scores: list[Score]
    remark: str = ""
    """What a person should know of what was before."""

    @property
    def step_of_cycle(self) -> int:
        return (self.step - 1) % self.sync_every + 1 if self.step else 0


class Display(Protocol):
    """Shows a status; `milestone` says whether it is worth a line of its own."""

    def __enter__(self) -> "Display": ...

    def __exit__(self, *error: Any) -> None: ...

    def show(self, status: Status, *, milestone: bool) -> None: ...


def display_for(out: TextIO | None = None) -> Display:
    """The live display if somebody sits at a terminal, plain lines otherwise."""
    out = out or sys.stdout
    return Live() if out.isatty() else Lines(out)


class RemainingTime:
    """How long is left, from the pace since the start."""

    def __init__(self) -> None:
        self._start: tuple[float, int] | None = None

    def left(self, status: Status) -> float | None:
        if self._start is None:
            self._start = (time.monotonic(), status.step)
        began, first = self._start
        done = status.step - first
        if done <= 0:
            return None
        return (time.monotonic() - began) / done * (status.total - status.step)


class Lines:
    """One line for every milestone, for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._clock = RemainingTime()

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *error: Any) -> None:
        self._out.flush()

    def show(self, status: Status, *, milestone: bool) -> None:
        left = self._clock.left(status)
        if not milestone:
            return
        runs = "  ".join(
            f"{s.name}: loss {number(s.loss)} accuracy {number(s.accuracy)} lr {number(s.lr)}"
            for s in status.scores
        )
        lrs = status.replica_lrs
        print(
            f"step {status.step}/{status.total}  cycle {status.cycle}  {runs}  "
            f"replica lrs {number(min(lrs))} to {number(max(lrs))}  {remaining(left)}"
            + (f"  {status.remark}" if status.remark else ""),
            file=self._out,
            flush=True,
        )


class Live:
    """A panel that is drawn over itself, with rich."""

    def __init__(self) -> None:
        from rich.live import Live as RichLive

        self._clock = RemainingTime()
        self._live = RichLive(refresh_per_second=8)

    def __enter__(self) -> "Live":
        self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.stop()

    def show(self, status: Status, *, milestone: bool) -> None:
        self._live.update(panel(status, self._clock.left(status)))


def panel(status: Status, left: float | None) -> Any:
    """The live display as something that rich can print."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    where = Text.assemble(
        ("step ", "dim"), f"{status.step}/{status.total}   ",
        ("cycle ", "dim"), f"{status.cycle}   ",
        (f"{status.phase} ", "bold"),
        ("●" * status.step_of_cycle + "·" * (status.sync_every - status.step_of_cycle), "cyan")
        if status.sync_every <= 40 else f"{status.step_of_cycle}/{status.sync_every}",
        ("   " + remaining(left), "dim"),
    )  # fmt: skip
    spread = Text.assemble(("learning rates  ", "dim"), *spread_line(status.replica_lrs))
    if status.remark:
        spread.append(f"\n{status.remark}", "bold")
    runs = score_table(status.scores, "learning rate", box=None, pad_edge=False)
    bar = ProgressBar(total=status.total, completed=status.step)
    return Panel(Group(where, bar, Text(), spread, Text(), runs), title="hdet demo", padding=(1, 2))


def score_table(scores: Sequence[Score], lr_title: str, **look: Any) -> Any:
    """One row for every run, as something that rich can print."""
    from rich.table import Table

    table = Table(**look)
    for title in ("run", "training loss", "held-out loss", "accuracy", lr_title):
        table.add_column(title, justify="left" if title == "run" else "right")
    for name, *values in scores:
        table.add_row(name, *map(number, values))
    return table


def spread_line(lrs: list[float]) -> list[Any]:
    """The learning rate of every replica at its place between the lowest and the highest."""
    low, high = min(lrs), max(lrs)
    far = low > 0 and high > 10 * low
    places = [" "] * WIDTH
    for replica, lr in enumerate(lrs):
        share = (lr - low) / (high - low) if high > low else 0.5
        if far:
            share = math.log(lr / low) / math.log(high / low)
        place = round(share * (WIDTH - 1))
        places[place] = str(replica % 10) if places[place] == " " else "*"
    row = "".join(places).replace(" ", "─")
    return [f"{number(low)} ", (f"├{row}┤", "green"), f" {number(high)}"]


def number(value: float | None) -> str:
    """Short enough for a table.

    >>> number(0.03), number(None), number(1.5e-5), number(1e30)
    ('0.0300', '-', '1.50e-05', '1.00e+30')
    """
    if value is None:
        return "-"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


def remaining(seconds: float | None) -> str:
    """Time left, for people.

    >>> remaining(75), remaining(None)
    ('1:15 left', 'estimating')
    """
    if seconds is None:
        return "estimating"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    clock = f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
    return f"{clock} left"
