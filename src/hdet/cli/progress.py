"""The progress of the demo: what a display is told, and plain lines for logs and pipes."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TextIO

from hdet.cli.formats import number, percent, ratio, remaining


class ReplicaView(NamedTuple):
    """A replica in one moment.

    Attributes:
        lr: Its learning rate.
        loss: Its mean training loss in this cycle, where it is known.
        distance: How far it is from the average, relative to the weights, where it is known.
    """

    lr: float
    loss: float | None = None
    distance: float | None = None


class Status(NamedTuple):
    """The state of a run after a step.

    Attributes:
        title: What the run is.
        step: The number of steps that are done.
        total: The number of steps of the run.
        cycle: The number of the cycle, counted from 1.
        sync_every: The length of a cycle.
        phase: What the replicas do: `scout`, `train`, `fan out` or `converge`.
        replicas: Each replica; with `converge`, just before the average.
        lr: The learning rate of the average.
        given: The learning rate that the run was given.
        found: The one that the scout found; None before that.
        within: The factor within which the best one probably lies.
        measures: The last measurements on held-out data.
        curve: The held-out loss at each milestone.
        band: The lowest and the highest held-out loss of the best of a sweep.
        price: What that sweep cost.
        number: The number of the run, counted from 1.
        runs: The number of runs.
    """

    title: str
    step: int
    total: int
    cycle: int
    sync_every: int
    phase: str
    replicas: Sequence[ReplicaView]
    lr: float
    given: float
    found: float | None = None
    within: float | None = None
    measures: Mapping[str, float] = {}
    curve: Sequence[tuple[int, float]] = ()
    band: tuple[float, float] | None = None
    price: str = ""
    number: int = 1
    runs: int = 1

    @property
    def step_of_cycle(self) -> int:
        """The steps that are done in the present cycle."""
        return (self.step - 1) % self.sync_every + 1 if self.step else 0

    @property
    def finding(self) -> str:
        """What the scout found; empty before that."""
        if self.found is None:
            return ""
        sure = "" if self.within is None else f", within a factor of {self.within:.2g}"
        return f"found {number(self.found)}, {ratio(self.found / self.given)} x the given one{sure}"

    @property
    def shown_measures(self) -> str:
        """The last measurements on held-out data."""
        if not self.measures:
            return ""
        accuracy = self.measures.get("accuracy")
        named = "" if accuracy is None else f", accuracy {percent(accuracy)}"
        return f"held-out loss {number(self.measures['loss'])}{named}"


class Display(Protocol):
    """Shows the progress of the demo."""

    def __enter__(self) -> "Display": ...

    def __exit__(self, *error: Any) -> None: ...

    def show(self, status: Status, *, milestone: bool) -> None:
        """Show a status. Only a milestone gets a line where lines cannot be drawn over."""


def display_for(out: TextIO | None = None) -> Display:
    """The live display in a terminal, plain lines otherwise."""
    out = out or sys.stdout
    if not out.isatty():
        return Lines(out)
    from hdet.cli.screen import Live

    return Live()


class RemainingTime:
    """Estimates the time that is left of a run, from the time per step so far."""

    def __init__(self) -> None:
        self._run = 0
        self._began, self._first = 0.0, 0

    def left(self, status: Status) -> float | None:
        """The seconds that are left; None before the first step."""
        if status.number != self._run:
            self._run, self._began, self._first = status.number, time.monotonic(), status.step
        done = status.step - self._first
        if done <= 0:
            return None
        return (time.monotonic() - self._began) / done * (status.total - status.step)


class Lines:
    """One line for each milestone, for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._run, self._has_found = 0, False
        self._clock = RemainingTime()

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *error: Any) -> None:
        self._out.flush()

    def show(self, status: Status, *, milestone: bool) -> None:
        left = self._clock.left(status)
        if status.number != self._run:
            self._run, self._has_found = status.number, False
            self._print(f"run {status.number} of {status.runs}: {status.title}")
            if status.band is not None:
                low, high = map(number, status.band)
                self._print(f"  best of a sweep, {status.price}: held-out loss {low} to {high}")
        if status.finding and not self._has_found:
            self._has_found = True
            self._print(f"  given {number(status.given)}, {status.finding}")
        if not milestone:
            return
        self._print(
            f"  step {status.step}/{status.total}  cycle {status.cycle}  {_fan(status)}"
            f"{status.shown_measures}  {remaining(left)}"
        )

    def _print(self, line: str) -> None:
        print(line, file=self._out, flush=True)


def _fan(status: Status) -> str:
    """The learning rates of all replicas, and how far they are apart."""
    lrs = [view.lr for view in status.replicas]
    if max(lrs) <= min(lrs):
        return f"learning rate {number(status.lr)}  "
    distances = [view.distance for view in status.replicas if view.distance is not None]
    apart = f" ended {max(distances):.1e} from their average:" if distances else ""
    return f"learning rates {number(min(lrs))} to {number(max(lrs))}{apart}  "
