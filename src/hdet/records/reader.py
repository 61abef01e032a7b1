"""Reads the record of a run back as a `History`, for the report and for exports.

Plain Python, no torch and no plotly. A record may be unfinished, resumed or damaged. Lines that
cannot be used are listed with their numbers.
"""

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdet.records.codec import modernise, parse, parse_json
from hdet.records.events import (
    EVENTS,
    SCHEMA,
    ConvergeEvent,
    CycleEvent,
    Event,
    GuardEvent,
    LRTracePoints,
    NoteEvent,
    ResumeEvent,
    RunEvent,
    SearchEvent,
)
from hdet.records.history import FILE_NAME, DamagedLine, History
from hdet.records.reference import read_reference

MAX_REPLICAS = 65536
"""A larger number of replicas is taken for damage: a report would draw a line for each."""


def read(run: str | Path) -> History:
    """Read the record of a run.

    Args:
        run: The folder of the run, or the file itself.

    Raises:
        FileNotFoundError: There is no record.
        ValueError: A newer version of hdet wrote the record.
    """
    path = Path(run)
    path = path / FILE_NAME if path.is_dir() else path
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        below = sorted(found.parent for found in path.parent.glob(f"*/{FILE_NAME}"))
        hint = f"; there are runs in {', '.join(map(str, below))}" if below else ""
        raise FileNotFoundError(
            f"no record at {path}. Pass a run folder with {FILE_NAME} in it, or that file{hint}"
        ) from None
    reading = _Reading()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            reading.add_line(line, number, is_last=number == len(lines))
    return reading.history(path)


@dataclass
class _Reading:
    """The events so far, without those that are superseded."""

    starts: list[RunEvent] = field(default_factory=list)
    resumes: list[int] = field(default_factory=list)
    cycles: list[CycleEvent] = field(default_factory=list)
    converges: list[ConvergeEvent] = field(default_factory=list)
    notes: list[NoteEvent] = field(default_factory=list)
    scouts: list[SearchEvent] = field(default_factory=list)
    rollbacks: list[GuardEvent] = field(default_factory=list)
    damaged: list[DamagedLine] = field(default_factory=list)
    dropped: int = 0

    def add_line(self, line: bytes, number: int, *, is_last: bool) -> None:
        """Add the event of a line, or list the line as damaged."""
        try:
            table = parse_json(line)
        except ValueError as error:
            cause = "half written: the last line has no end" if is_last else str(error)
            self.damaged.append(DamagedLine(number, cause))
            return
        _refuse_newer(table, number)
        try:
            event = _event(table)
        except ValueError as error:
            self.damaged.append(DamagedLine(number, str(error)))
            return
        if event is not None:
            self._add(event)

    def _add(self, event: Event) -> None:
        match event:
            case RunEvent():
                self.starts.append(event)
            case ResumeEvent():
                self._drop(after=event.step)
                self.resumes.append(event.step)
            case CycleEvent():
                # Steps that go back without a resume: the run was started over in this folder.
                self._drop(after=event.step, cycles_after=event.step - 1)
                self.cycles.append(event)
            case ConvergeEvent():
                self._drop(after=event.step)
                self.converges.append(event)
            case NoteEvent():
                # A note may be about an earlier step.
                bisect.insort(self.notes, event, key=lambda note: note.step)
            case SearchEvent():
                self._add_search(event)
            case GuardEvent():
                self.rollbacks.append(event)

    def _add_search(self, event: SearchEvent) -> None:
        """Keep the last round of each search; drop those of a run that was started over here."""
        last = self.scouts[-1] if self.scouts else None
        if last is not None and event.step <= last.step:
            _cut(self.scouts, event.step - 1)
        elif last is not None and last.factor is None and last.mid_run == event.mid_run:
            self.scouts.pop()
        self.scouts.append(event)

    def _drop(self, after: int, cycles_after: int | None = None) -> None:
        """Drop the events after a step, which other events supersede."""
        before = len(self.cycles) + len(self.converges) + len(self.notes)
        _cut(self.cycles, after if cycles_after is None else cycles_after)
        _cut(self.converges, after)
        _cut(self.notes, after)
        _cut(self.rollbacks, after)
        _cut(self.scouts, after)
        self.dropped += before - len(self.cycles) - len(self.converges) - len(self.notes)
        self.resumes = [step for step in self.resumes if step <= after]

    def history(self, path: Path) -> History:
        """The history of all lines so far."""
        return History(
            path=path,
            starts=tuple(self.starts),
            resumes=tuple(self.resumes),
            cycles=tuple(self.cycles),
            converges=tuple(self.converges),
            notes=tuple(self.notes),
            scouts=tuple(self.scouts),
            rollbacks=tuple(self.rollbacks),
            damaged=tuple(self.damaged),
            dropped=self.dropped,
            reference=read_reference(path.parent),
        )


def _cut(events: list[Any], after: int) -> None:
    """Remove the events after a step. They are sorted, so only the end of the list is checked."""
    while events and events[-1].step > after:
        events.pop()


def _refuse_newer(table: Mapping[str, Any], number: int) -> None:
    schema = table.get("schema", SCHEMA)
    if isinstance(schema, (int, float)) and schema > SCHEMA:
        raise ValueError(
            f"line {number} has schema {schema}; this version of hdet reads schema {SCHEMA}: "
            "update hdet to read this record"
        )


def _event(table: Mapping[str, Any]) -> Event | None:
    """The event of a line; none if it is of a kind that this version does not know."""
    name = table.get("event")
    if name is None:
        raise ValueError("the field event is missing")
    kind = EVENTS.get(name) if isinstance(name, str) else None
    if kind is None:
        return None
    event = parse(kind, modernise(table))
    if isinstance(event, RunEvent):
        _check_start(event)
    elif isinstance(event, CycleEvent):
        _check_cycle(event)
    return event


def _check_start(event: RunEvent) -> None:
    size = event.replicas.size
    if size is not None and size > MAX_REPLICAS:
        raise ValueError(f"the number of replicas is not plausible: {size}")


def _check_cycle(event: CycleEvent) -> None:
    if len({knob.name for knob in event.knobs}) < len(event.knobs):
        raise ValueError("two knobs have the same name")
    if event.lr_trace.steps:
        _check_trace(event.lr_trace, sum(knob.is_lr for knob in event.knobs))


def _check_trace(trace: LRTracePoints, num_rates: int) -> None:
    momenta = trace.momenta or ()
    if len(trace.lrs) != num_rates or len(momenta) not in (0, num_rates):
        raise ValueError("the learning-rate trace does not have one row for each learning rate")
    if any(len(row) != len(trace.steps) for row in (*trace.lrs, *momenta)):
        raise ValueError("the learning-rate trace does not have one value for each step")
    if list(trace.steps) != sorted(set(trace.steps)):
        raise ValueError("the steps of the learning-rate trace are not in order")
