"""What the sinks of all trackers share: a late start, the report, and an end that is in time."""

import atexit
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hdet.integrations.tracking import scalars_of, step_of, text_of
from hdet.records.sinks import JsonLines
from hdet.report import build

RECORD = "hdet"
"""The folder of the report in a tracker."""


class TrackerSink(ABC):
    """Sends the events of a run to a tracker, and at the end the report about them.

    It starts the tracker at the first event that has something to show. All processes of a run may
    make one, and only the first process writes; a trainer's own run of the tracker exists by then.
    """

    def __init__(self) -> None:
        self._kept: TemporaryDirectory[str] | None = None
        self._is_started = self._has_failed = False

    def write(self, event: Mapping[str, Any]) -> None:
        """Send the numbers and the text of one event."""
        self._keep(event)
        numbers, text, step = scalars_of(event), text_of(event), step_of(event)
        try:
            if event["event"] == "resume":
                self._resume(step)
            if (numbers or text) and not self._is_started:
                self._start()
                self._is_started = True
                # Later than the tracker's own, so before it: the report must reach an open run.
                # The tracker then ends the run itself, as it knows whether the script failed.
                atexit.register(self._close_record)
            if numbers:
                self._log(numbers, step)
            if text:
                self._tell(event["event"], text, step)
        except Exception:
            self._has_failed = True
            raise

    def close(self) -> None:
        """Store the report, and end what this sink has started. A second call does nothing."""
        is_started = self._is_started
        try:
            self._close_record()
        finally:
            if is_started:
                self._end()

    def _close_record(self) -> None:
        atexit.unregister(self._close_record)
        kept, self._kept = self._kept, None
        is_started, self._is_started = self._is_started, False
        if kept is not None:
            with kept:
                if is_started and not self._has_failed:
                    self._store(_with_report(Path(kept.name) / RECORD))

    def _keep(self, event: Mapping[str, Any]) -> None:
        """Add the event to the record that the report is made from."""
        if self._kept is None:
            self._kept, self._has_failed = TemporaryDirectory(), False
        JsonLines(Path(self._kept.name) / RECORD).write(event)

    @abstractmethod
    def _start(self) -> None:
        """Find the run of the tracker, or start one."""

    @abstractmethod
    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        """Plot the numbers."""

    @abstractmethod
    def _tell(self, kind: str, text: str, step: int) -> None:
        """Show what an event of this kind decided."""

    @abstractmethod
    def _store(self, folder: Path) -> None:
        """Store the files of a folder with the run."""

    @abstractmethod
    def _end(self) -> None:
        """End the run, if `_start` started it."""

    def _resume(self, step: int) -> None:  # noqa: B027  # most trackers have nothing to do
        """The run goes on from this step: what was sent of later ones is superseded."""


def _with_report(folder: Path) -> Path:
    """The folder of a record, with the report in it where plotly is installed."""
    with suppress(ModuleNotFoundError):
        build.write([folder], folder / "report.html")
    return folder
