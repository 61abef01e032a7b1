"""The progress of the demo: a live display in a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TextIO

WIDTH = 41
"""The width in characters of the line that shows the learning rates of the replicas."""


class Score(NamedTuple):
    """The last measurements of a run.

    Attributes:
        name: The name of the run.
        training_loss: The mean loss of the last step.
        loss: The loss of the consensus on held-out data.
        accuracy: The accuracy of the consensus on held-out data.
        lr: The learning rate in the centre of the spread.
    """

    name: str
    training_loss: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    lr: float = 0.0


class Status(NamedTuple):
    """The state of both runs after a step.

    Attributes:
        step: The number of steps that are done.
        total: The number of steps of the run.
        cycle: The number of cycles that are done.
        sync_every: The length of a cycle.
        phase: What the replicas do: `scouting` or `training`.
        replica_lrs: The learning rate of each replica.
        scores: The last measurements of each run.
        remark: What the search found; empty before that.
    """

    step: int
    total: int
    cycle: int
    sync_every: int
    phase: str
    replica_lrs: list[float]
    scores: list[Score]
    remark: str = ""

    @property
    def step_of_cycle(self) -> int:
        """The steps that are done in the present cycle."""
        return (self.step - 1) % self.sync_every + 1 if self.step else 0


class Display(Protocol):
    """Shows the progress of the demo."""

    def __enter__(self) -> "Display": ...

    def __exit__(self, *error: Any) -> None: ...

    def show(self, status: Status, *, milestone: bool) -> None:
        """Show a status. Only a milestone gets a line where lines cannot be drawn over."""


def display_for(out: TextIO | None = None) -> Display:
    """The live display in a terminal, plain lines otherwise."""
    out = out or sys.stdout
    return Live() if out.isatty() else Lines(out)


class RemainingTime:
    """Estimates the time that is left, from the time per step so far."""

    def __init__(self) -> None:
        self._start: tuple[float, int] | None = None

    def left(self, status: Status) -> float | None:
        """The seconds that are left; none before the first step."""
        if self._start is None:
            self._start = (time.monotonic(), status.step)
        began, first = self._start
        done = status.step - first
        if done <= 0:
            return None
        return (time.monotonic() - began) / done * (status.total - status.step)


class Lines:
    """One line for each milestone, for logs and pipes."""

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
    """A panel that is redrawn in place, with rich."""

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
    """The live display, as an object that rich prints."""
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
    """A table with one row for each run, as an object that rich prints."""
    from rich.table import Table

    table = Table(**look)
    for title in ("run", "training loss", "held-out loss", "accuracy", lr_title):
        table.add_column(title, justify="left" if title == "run" else "right")
    for name, *values in scores:
        table.add_row(name, *map(number, values))
    return table


def spread_line(lrs: list[float]) -> list[Any]:
    """A line with each replica at the place of its learning rate, from lowest to highest."""
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
    """A number that is short enough for a table.

    >>> number(0.03), number(None), number(1.5e-5), number(1e30)
    ('0.0300', '-', '1.50e-05', '1.00e+30')
    """
    if value is None:
        return "-"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


def remaining(seconds: float | None) -> str:
    """The time that is left, as text.

    >>> remaining(75), remaining(None)
    ('1:15 left', 'estimating')
    """
    if seconds is None:
        return "estimating"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    clock = f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
    return f"{clock} left"
