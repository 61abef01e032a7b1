"""The history of a run: the events of its record, without those that a resume superseded.

Plain Python, no torch and no plotly. `reader.read` makes a history; the report, the export and the
commands ask it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hdet.records.events import (
    ConvergeEvent,
    CycleEvent,
    GuardEvent,
    KnobEntry,
    NoteEvent,
    RunEvent,
    SearchEvent,
)
from hdet.records.reference import Reference

FILE_NAME = "record.jsonl"
"""The name of the record in the folder of a run."""


class Exclusion(NamedTuple):
    """A replica that was left out of an average, and at which step."""

    step: int
    replica: int
    reason: str


class DamagedLine(NamedTuple):
    """A line that the reader skipped, counted from 1, and why."""

    line: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class History:
    """A run as its record describes it.

    Attributes:
        path: The file that was read.
        starts: Each start of the run: the first, and one for each resume.
        resumes: The steps from which the run was resumed.
        cycles: The ends of cycles, in the order of their steps.
        converges: The averages on demand, between the ends of cycles.
        notes: The remarks and measurements of the user, in the order of their steps.
        scouts: Each learning-rate search, as it was after its last round.
        rollbacks: The actions of the guard.
        damaged: The lines that were skipped.
        dropped: The number of lines that a resume, or a new start in the same folder, superseded.
        reference: What the run is compared with, from a file beside the record.
    """

    path: Path
    starts: tuple[RunEvent, ...] = ()
    resumes: tuple[int, ...] = ()
    cycles: tuple[CycleEvent, ...] = ()
    converges: tuple[ConvergeEvent, ...] = ()
    notes: tuple[NoteEvent, ...] = ()
    scouts: tuple[SearchEvent, ...] = ()
    rollbacks: tuple[GuardEvent, ...] = ()
    damaged: tuple[DamagedLine, ...] = ()
    dropped: int = 0
    reference: Reference | None = None

    @property
    def name(self) -> str:
        """The name of the run's folder, or of the file if it is called otherwise."""
        path = self.path.resolve()
        return path.parent.name if path.name == FILE_NAME else path.stem

    @property
    def is_empty(self) -> bool:
        """Whether the record holds nothing to show."""
        return not (self.starts or self.cycles or self.converges or self.notes or self.scouts)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the last start."""
        return self.starts[-1].settings if self.starts else {}

    @property
    def versions(self) -> Mapping[str, Any]:
        """The versions of the last start."""
        return self.starts[-1].versions if self.starts else {}

    @property
    def total_steps(self) -> int | None:
        """The length of the run, if it is known."""
        total = self.settings.get("total_steps")
        return total if isinstance(total, int) and not isinstance(total, bool) else None

    @property
    def last_step(self) -> int:
        """The last step that the record mentions."""
        ends = [events[-1].step for events in (self.cycles, self.converges, self.notes) if events]
        return max([0, *self.resumes, *ends])

    @property
    def is_finished(self) -> bool:
        """Whether the run reached its last step."""
        return self.total_steps is not None and self.last_step >= self.total_steps > 0

    @property
    def num_replicas(self) -> int | None:
        """The number of replicas at the end; a resume may change it."""
        if self.cycles:
            return len(self.cycles[-1].losses)
        return self.starts[-1].replicas.size if self.starts else None

    @property
    def most_replicas(self) -> int:
        """The largest number of replicas in any cycle."""
        return max((len(cycle.losses) for cycle in self.cycles), default=self.num_replicas or 0)

    @property
    def knob_names(self) -> list[str]:
        """The names of all knobs, learning rates included."""
        return list(dict.fromkeys(knob.name for cycle in self.cycles for knob in cycle.knobs))

    @property
    def rate_names(self) -> list[str]:
        """The names of the learning rates: one for each parameter group."""
        knobs = [knob for cycle in self.cycles for knob in cycle.knobs if knob.is_lr]
        return list(dict.fromkeys(knob.name for knob in knobs))

    @property
    def measure_names(self) -> list[str]:
        """The names of all measures that were noted."""
        return list(dict.fromkeys(name for note in self.notes for name in note.measures))

    @property
    def every_converge(self) -> list[ConvergeEvent]:
        """All averages, at the ends of cycles and on demand, in the order of their steps."""
        return sorted([*self.cycles, *self.converges], key=lambda event: event.step)

    @property
    def excluded(self) -> list[Exclusion]:
        """All replicas that were left out of an average."""
        return [
            Exclusion(event.step, entry.replica, entry.reason)
            for event in self.every_converge
            for entry in event.excluded
        ]

    def knob(self, name: str) -> list[tuple[int, KnobEntry]]:
        """The entries of one knob, each with the step at the end of its cycle."""
        return [(c.step, knob) for c in self.cycles for knob in c.knobs if knob.name == name]

    def measure(self, name: str) -> list[tuple[int, float]]:
        """The values of one measure, each with its step."""
        pairs = [(note.step, note.measures.get(name)) for note in self.notes]
        return [(step, value) for step, value in pairs if value is not None]

    def last(self, name: str) -> float | None:
        """The last value of one measure; None if there is none."""
        points = self.measure(name)
        return points[-1][1] if points else None
