"""What a record says happened: RUN/record.jsonl read back, for the report and for exports.

Plain Python, no torch and no plotly. A record is read as it is found: unfinished, resumed, with
lines that are damaged. What cannot be used is listed with its line number, never passed over.
"""

import bisect
import json
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

SCHEMA = 1
MAX_REPLICAS = 65536
FILE_NAME = "record.jsonl"
RENAMED = {"OneReplica": "SingleReplica"}
"""Names in records of earlier versions, and what they are called now."""

Numbers = tuple[float | None, ...]
T = TypeVar("T")


class Exclusion(NamedTuple):
    """A replica that was left out of a converge."""

    step: int
    replica: int
    reason: str


class ConvergeRecord(NamedTuple):
    """What one converge cost."""

    step: int
    num_bytes: float | None
    seconds: float | None
    excluded: tuple[Exclusion, ...] = ()


class KnobRecord(NamedTuple):
    """One knob in one cycle: what the replicas ran with, and what was decided."""

    name: str
    values: Numbers
    centre: float | None
    is_lr: bool
    space: str
    scale: float | None
    velocity: float | None
    hypergradient: float | None
    hypergradient_error: float | None
    slope: float | None
    slope_error: float | None
    decision: str
    reason: str


class CycleRecord(NamedTuple):
    """What one cycle showed. A replica without a number has none."""

    step: int
    number: int
    time: float | None
    losses: Numbers
    loss_errors: Numbers
    weights: Numbers
    distances: Numbers
    converge: ConvergeRecord
    knobs: tuple[KnobRecord, ...]
    steps: tuple[int, ...] = ()
    """Some of its steps, counted from 0."""
    centres: tuple[tuple[float, ...], ...] = ()
    """For each learning rate the centre of the spread at those steps."""
    momenta: tuple[tuple[float, ...], ...] = ()
    """For each learning rate the momentum at those steps, if the base schedule cycles it."""
    scores: Numbers = ()
    """What each replica scored in the probe, lower is better; empty without one."""
    probe_share: float | None = None
    """The share of the cycle's time that the probe took."""


class NoteRecord(NamedTuple):
    """What a person or a loop had to say at a step."""

    step: int
    time: float | None
    text: str
    measures: Mapping[str, float | None]


class SearchRecord(NamedTuple):
    """What a scout has seen when a round was over, and what it found."""

    step: int
    factors: Numbers
    """In units of the learning rate that was given."""
    scores: Numbers
    """Lower is better; none for what was lost."""
    peaks: Mapping[str, float | None]
    """The learning rate that was given, for each group."""
    found: float | None
    """For the batch of one replica."""
    factor: float | None
    """What the run begins with."""
    reason: str
    why: str = ""
    """Why the run begins with that, and not with what was found."""
    close: tuple[tuple[float | None, float | None], ...] = ()
    """Factors and scores around the first choice, in longer rounds."""
    late: bool = False
    """Whether it set out in mid-run, around the learning rate of that moment."""
    by: str = ""
    """What replicas were compared by."""


class GuardRecord(NamedTuple):
    """A guard has taken the run back to its last good weights."""

    step: int
    back_to: int
    factor: float | None
    """What the learning rates were multiplied by."""
    reason: str


class StartRecord(NamedTuple):
    """One beginning of the run: the first, or one that a resume followed."""

    time: float | None
    settings: Mapping[str, Any]
    versions: Mapping[str, Any]
    num_replicas: int | None
    kind: str | None
    device: str | None


class DamagedLine(NamedTuple):
    """A line that was skipped, and why."""

    line: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class History:
    """A run as its record tells it, without what a resume has superseded."""

    path: Path
    starts: tuple[StartRecord, ...] = ()
    resumes: tuple[int, ...] = ()
    cycles: tuple[CycleRecord, ...] = ()
    converges: tuple[ConvergeRecord, ...] = ()
    """Those on demand, between the cycles."""
    notes: tuple[NoteRecord, ...] = ()
    scouts: tuple[SearchRecord, ...] = ()
    """Every search, by what it had seen in the end."""
    rollbacks: tuple[GuardRecord, ...] = ()
    damaged: tuple[DamagedLine, ...] = ()
    dropped: int = 0
    """Lines of an abandoned branch: the run was resumed from a step before them."""

    @property
    def name(self) -> str:
        path = self.path.resolve()
        return path.parent.name if path.name == FILE_NAME else path.stem

    @property
    def is_empty(self) -> bool:
        return not (self.starts or self.cycles or self.converges or self.notes or self.scouts)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Those of the last start."""
        return self.starts[-1].settings if self.starts else {}

    @property
    def versions(self) -> Mapping[str, Any]:
        return self.starts[-1].versions if self.starts else {}

    @property
    def total_steps(self) -> int | None:
        total = self.settings.get("total_steps")
        return total if isinstance(total, int) and not isinstance(total, bool) else None

    @property
    def last_step(self) -> int:
        ends = [events[-1].step for events in (self.cycles, self.converges, self.notes) if events]
        return max([0, *self.resumes, *ends])

    @property
    def is_finished(self) -> bool:
        return self.total_steps is not None and self.last_step >= self.total_steps > 0

    @property
    def num_replicas(self) -> int | None:
        """As many as the run has now; a resume may have changed it."""
        if self.cycles:
            return len(self.cycles[-1].losses)
        return self.starts[-1].num_replicas if self.starts else None

    @property
    def most_replicas(self) -> int:
        return max((len(cycle.losses) for cycle in self.cycles), default=self.num_replicas or 0)

    @property
    def knob_names(self) -> list[str]:
        return list(dict.fromkeys(knob.name for cycle in self.cycles for knob in cycle.knobs))

    @property
    def rate_names(self) -> list[str]:
        """The knobs that are learning rates: one for each parameter group."""
        knobs = [knob for cycle in self.cycles for knob in cycle.knobs if knob.is_lr]
        return list(dict.fromkeys(knob.name for knob in knobs))

    @property
    def measure_names(self) -> list[str]:
        return list(dict.fromkeys(name for note in self.notes for name in note.measures))

    @property
    def every_converge(self) -> list[ConvergeRecord]:
        """At the end of a cycle or on demand, in the order of their steps."""
        return sorted([*(c.converge for c in self.cycles), *self.converges], key=lambda c: c.step)

    @property
    def excluded(self) -> list[Exclusion]:
        return [gone for converge in self.every_converge for gone in converge.excluded]

    def knob(self, name: str) -> list[tuple[int, KnobRecord]]:
        """The steps at which a knob was decided on, and the knob there."""
        return [(c.step, knob) for c in self.cycles for knob in c.knobs if knob.name == name]

    def measure(self, name: str) -> list[tuple[int, float]]:
        """The steps at which a measure was noted, and its values."""
        pairs = [(note.step, note.measures.get(name)) for note in self.notes]
        return [(step, value) for step, value in pairs if value is not None]


def read(run: str | Path) -> History:
    """Read the record of a run: its folder, or the file itself."""
    path = Path(run)
    path = path / FILE_NAME if path.is_dir() else path
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        below = sorted(found.parent for found in path.parent.glob(f"*/{FILE_NAME}"))
        hint = f"; there are runs in {', '.join(map(str, below))}" if below else ""
        raise FileNotFoundError(
            f"no record at {path}: a run folder with {FILE_NAME} in it is needed, or the file{hint}"
        ) from None
    reading = _Reading()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            reading.take(line, number, is_last=number == len(lines))
    return reading.history(path)


@dataclass
class _Reading:
    """A record on its way to a history."""

    starts: list[StartRecord] = field(default_factory=list)
    resumes: list[int] = field(default_factory=list)
    cycles: list[CycleRecord] = field(default_factory=list)
    converges: list[ConvergeRecord] = field(default_factory=list)
    notes: list[NoteRecord] = field(default_factory=list)
    scouts: list[SearchRecord] = field(default_factory=list)
    rollbacks: list[GuardRecord] = field(default_factory=list)
    damaged: list[DamagedLine] = field(default_factory=list)
    dropped: int = 0

    def take(self, line: bytes, number: int, *, is_last: bool) -> None:
        try:
            event = _parsed(line)
        except ValueError as error:
            cause = "half written: the last line has no end" if is_last else str(error)
            self.damaged.append(DamagedLine(number, cause))
            return
        _refuse_newer(event, number)
        try:
            self._file(event)
        except ValueError as error:
            self.damaged.append(DamagedLine(number, str(error)))

    def _file(self, event: Mapping[str, Any]) -> None:
        match event.get("event"):
            case "run":
                self.starts.append(_start(event))
            case "resume":
                step = _whole(event, "step")
                self._drop(after=step)
                self.resumes.append(step)
            case "cycle":
                cycle = _cycle(event)
                # Steps that go back without a resume: the run was started over in this folder.
                self._drop(after=cycle.step, cycles_after=cycle.step - 1)
                self.cycles.append(cycle)
            case "converge":
                converge = _converge(event)
                self._drop(after=converge.step)
                self.converges.append(converge)
            case "note":
                # A note may be of an earlier step: a person's remark on what was seen.
                bisect.insort(self.notes, _note(event), key=lambda note: note.step)
            case "scout":
                self._take_scout(_scouted(event))
            case "guard":
                self.rollbacks.append(_rollback(event))
            case None:
                raise ValueError("no event")

    def _take_scout(self, seen: SearchRecord) -> None:
        """Rounds of one search are one; those of a run that was started over here are gone."""
        last = self.scouts[-1] if self.scouts else None
        if last is not None and seen.step <= last.step:
            _cut(self.scouts, seen.step - 1)
        elif last is not None and last.factor is None and last.late == seen.late:
            self.scouts.pop()
        self.scouts.append(seen)

    def _drop(self, after: int, cycles_after: int | None = None) -> None:
        before = len(self.cycles) + len(self.converges) + len(self.notes)
        _cut(self.cycles, after if cycles_after is None else cycles_after)
        _cut(self.converges, after)
        _cut(self.notes, after)
        _cut(self.rollbacks, after)
        _cut(self.scouts, after)
        self.dropped += before - len(self.cycles) - len(self.converges) - len(self.notes)
        self.resumes = [step for step in self.resumes if step <= after]

    def history(self, path: Path) -> History:
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
        )


def _cut(events: list[Any], after: int) -> None:
    """Take away the events after a step; they are in order, so that only the end is looked at."""
    while events and events[-1].step > after:
        events.pop()


def _parsed(line: bytes) -> Mapping[str, Any]:
    try:
        event = json.loads(line.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None
    if not isinstance(event, dict):
        raise ValueError("not a JSON object")
    return event


def _refuse_newer(event: Mapping[str, Any], number: int) -> None:
    schema = event.get("schema", SCHEMA)
    if isinstance(schema, (int, float)) and schema > SCHEMA:
        raise ValueError(
            f"line {number} has schema {schema}; this version of hdet reads schema {SCHEMA}: "
            "update hdet to read this record"
        )


def _start(event: Mapping[str, Any]) -> StartRecord:
    replicas = _table(event, "replicas")
    return StartRecord(
        time=_number(event, "time"),
        settings=_table(event, "settings"),
        versions=_table(event, "versions"),
        num_replicas=_replicas(replicas),
        kind=RENAMED.get(_text(replicas, "kind"), _text(replicas, "kind")) or None,
        device=_text(event, "device") or None,
    )


def _replicas(replicas: Mapping[str, Any]) -> int | None:
    size = _whole(replicas, "size") if "size" in replicas else None
    if size is not None and size > MAX_REPLICAS:
        raise ValueError(f"size of the replicas is too large to be true: {size}")
    return size


def _cycle(event: Mapping[str, Any]) -> CycleRecord:
    knobs = _each(event, "knobs", _knob, needed=True)
    if len({knob.name for knob in knobs}) < len(knobs):
        raise ValueError("two knobs have the same name")
    return CycleRecord(
        step=_whole(event, "step"),
        number=_whole(event, "cycle"),
        time=_number(event, "time"),
        losses=_numbers(event, "losses", needed=True),
        loss_errors=_numbers(event, "loss_errors"),
        weights=_numbers(event, "weights"),
        distances=_numbers(event, "distances"),
        converge=_converge(event),
        knobs=knobs,
        scores=_numbers(event, "scores"),
        probe_share=_probe_share(event),
        **_course(event, sum(knob.is_lr for knob in knobs)),
    )


def _probe_share(event: Mapping[str, Any]) -> float | None:
    probe = _number(_table(event, "probe"), "seconds")
    training = _number(_table(event, "training"), "seconds")
    if probe is None or training is None or probe + training <= 0:
        return None
    return probe / (probe + training)


def _course(event: Mapping[str, Any], num_knobs: int) -> dict[str, Any]:
    """The learning rates inside the cycle; older records have none."""
    course = _table(event, "course")
    steps = [_count(value, "steps") for value in _list(course, "steps")]
    if not steps:
        return {}
    rows = {"centres": _rows(course, "lrs"), "momenta": _rows(course, "momenta")}
    if len(rows["centres"]) != num_knobs or len(rows["momenta"]) not in (0, num_knobs):
        raise ValueError("course has not one row for each knob")
    if any(len(row) != len(steps) for table in rows.values() for row in table):
        raise ValueError("course has not one value for each step")
    if steps != sorted(set(steps)):
        raise ValueError("steps of the course are not in order")
    return {"steps": tuple(steps), **rows}


def _rows(course: Mapping[str, Any], name: str) -> tuple[tuple[float, ...], ...]:
    rows = []
    for row in _list(course, name):
        values = _numbers({name: row}, name, needed=True)
        known = tuple(value for value in values if value is not None)
        if len(known) < len(values):
            raise ValueError(f"{name} of the course is not a number")
        rows.append(known)
    return tuple(rows)


def _knob(entry: Mapping[str, Any]) -> KnobRecord:
    is_lr = "values" not in entry
    return KnobRecord(
        name=_text(entry, "name", needed=True),
        values=_numbers(entry, "lrs" if is_lr else "values", needed=True),
        centre=_number(entry, "centre"),
        is_lr=is_lr,
        space=_text(entry, "space") or "log",
        scale=_number(entry, "scale"),
        velocity=_number(entry, "velocity"),
        hypergradient=_number(entry, "hypergradient"),
        hypergradient_error=_number(entry, "hypergradient_error"),
        slope=_number(entry, "slope"),
        slope_error=_number(entry, "slope_error"),
        decision=_text(entry, "decision"),
        reason=_text(entry, "reason"),
    )


def _converge(event: Mapping[str, Any]) -> ConvergeRecord:
    step, cost = _whole(event, "step"), _table(event, "converge")

    def exclusion(entry: Mapping[str, Any]) -> Exclusion:
        return Exclusion(step, _whole(entry, "replica"), _text(entry, "reason"))

    excluded = _each(event, "excluded", exclusion)
    return ConvergeRecord(step, _number(cost, "bytes"), _number(cost, "seconds"), excluded)


def _note(event: Mapping[str, Any]) -> NoteRecord:
    measures = _table(event, "measures")
    return NoteRecord(
        step=_whole(event, "step"),
        time=_number(event, "time"),
        text=_text(event, "text"),
        measures={name: _number(measures, name) for name in measures},
    )


def _scouted(event: Mapping[str, Any]) -> SearchRecord:
    def point(entry: Mapping[str, Any]) -> tuple[float | None, float | None]:
        return _number(entry, "factor"), _number(entry, "score")

    points = _each(event, "points", point)
    peaks = _table(event, "peaks")
    return SearchRecord(
        step=_whole(event, "step"),
        factors=tuple(factor for factor, _ in points),
        scores=tuple(score for _, score in points),
        peaks={name: _number(peaks, name) for name in peaks},
        found=_number(event, "found"),
        factor=_number(event, "factor"),
        reason=_text(event, "reason"),
        why=_text(event, "why") if "why" in event else "",
        close=_each(event, "close", point),
        late=bool(event.get("late", False)),
        by=_text(event, "by") if "by" in event else "",
    )


def _rollback(event: Mapping[str, Any]) -> GuardRecord:
    return GuardRecord(
        step=_whole(event, "step"),
        back_to=_whole(event, "back_to"),
        factor=_number(event, "factor"),
        reason=_text(event, "reason"),
    )


def _plain_number(value: Any, name: str) -> float | None:
    """A finite number, or none: what is not finite counts as missing."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is not a number: {reprlib.repr(value)}")
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _number(entry: Mapping[str, Any], name: str) -> float | None:
    return _plain_number(entry.get(name), name)


def _numbers(entry: Mapping[str, Any], name: str, *, needed: bool = False) -> Numbers:
    return tuple(_plain_number(value, name) for value in _list(entry, name, needed=needed))


def _whole(entry: Mapping[str, Any], name: str) -> int:
    value = entry.get(name)
    if value is None:
        raise ValueError(f"no {name}")
    return _count(value, name)


def _count(value: Any, name: str) -> int:
    # Beyond this a page could not place it: a double holds no larger whole number exactly.
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise ValueError(f"{name} is not a whole number from 0 on: {reprlib.repr(value)}")
    return value


def _text(entry: Mapping[str, Any], name: str, *, needed: bool = False) -> str:
    value = entry.get(name)
    if value is None and not needed:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a text: {reprlib.repr(value)}")
    return value


def _table(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = entry.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a table: {reprlib.repr(value)}")
    return value


def _list(entry: Mapping[str, Any], name: str, *, needed: bool = False) -> Sequence[Any]:
    value = entry.get(name)
    if value is None and not needed:
        return []
    if not isinstance(value, list):
        raise ValueError(
            f"no {name}" if value is None else f"{name} is not a list: {reprlib.repr(value)}"
        )
    return value


def _each(
    entry: Mapping[str, Any],
    name: str,
    make: Callable[[Mapping[str, Any]], T],
    *,
    needed: bool = False,
) -> tuple[T, ...]:
    """One thing made of every table in a list."""
    tables = _list(entry, name, needed=needed)
    if not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{name} holds something that is not a table: {reprlib.repr(tables)}")
    return tuple(make(table) for table in tables)
