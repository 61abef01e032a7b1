"""Writes the events of a run to its sinks, in order, as soon as their times are known."""

import platform
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from hdet._messages import warn
from hdet._version import __version__
from hdet.records.codec import as_line
from hdet.records.events import Event, Timing
from hdet.records.sinks import Record, Sink, check_record, open_sink
from hdet.tensors.timing import Stopwatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Timers:
    """The stopwatches of the parts of an event, each under the field that gets its seconds."""

    converge: Stopwatch | None = None
    training: Stopwatch | None = None
    probe: Stopwatch | None = None

    def running(self) -> Iterator[tuple[str, Stopwatch]]:
        """The parts that are timed, and their stopwatches."""
        for field in fields(self):
            stopwatch = getattr(self, field.name)
            if stopwatch is not None:
                yield field.name, stopwatch


class Recorder:
    """Writes events to sinks. A sink that fails ends with a warning, and the run goes on.

    Args:
        sinks: The sinks, in the order in which each event is written to them.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)
        self._waiting: deque[tuple[Event, Timers]] = deque()
        # Sinks must end with the run, also where the interpreter exits first.
        self._close = weakref.finalize(self, _close_all, self._sinks)

    def write(self, event: Event, timers: Timers | None = None, *, wait: bool = False) -> None:
        """Queue an event. It is written as soon as the times of its parts are known."""
        stamped = replace(event, time=round(time.time(), 3))
        self._waiting.append((stamped, timers or Timers()))
        self.flush(wait=wait)

    def flush(self, *, wait: bool = False) -> None:
        """Write the events that are ready, in order; with `wait`, wait for the device first."""
        while self._waiting:
            event, timers = self._waiting[0]
            for part, stopwatch in timers.running():
                seconds = stopwatch.seconds(wait=wait)
                if seconds is None:
                    return
                event = _with_seconds(event, part, seconds)
            self._waiting.popleft()
            self._send(event)

    def close(self) -> None:
        """Write what is left and close the sinks. Happens by itself at the end of the run."""
        self.flush(wait=True)
        self._close()

    def _send(self, event: Event) -> None:
        if not self._sinks:
            return
        for sink in tuple(self._sinks):
            try:
                sink.write(as_line(event))  # its own: a sink may change the event
            except Exception as error:  # whatever a sink raises: training must not end with it
                self._sinks.remove(sink)
                _close_all([sink])
                warn(
                    f"writing the record {_name(sink)} failed, and its later lines are lost: "
                    f"{error}"
                )


def open_recorder(record: Record | Recorder | None, *, is_first: bool) -> Recorder | None:
    """Check `record` on every process, and open it on the first one, which alone writes.

    Args:
        record: A folder, a sink, or a sequence of them; none for a run without a record. Or the
            open recorder of a run whose place another run takes.
        is_first: Whether this process is the one that writes.

    Raises:
        TypeError: `record` holds something that is neither a path nor a sink.
        OSError: A file cannot be written.
    """
    if isinstance(record, Recorder):
        return record
    targets = check_record(record)
    return Recorder(map(open_sink, targets)) if targets and is_first else None


def installed_versions() -> dict[str, str]:
    """The versions of hdet, Python and torch."""
    return {
        "hdet": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _with_seconds(event: Any, part: str, seconds: float) -> Event:
    """The same event with the time that one of its parts took."""
    known = getattr(event, part) or Timing()
    timed: Event = replace(event, **{part: replace(known, seconds=seconds)})
    return timed


def _close_all(sinks: Iterable[Sink]) -> None:
    for sink in sinks:
        try:
            sink.close()
        except Exception as error:
            warn(
                f"closing the record {_name(sink)} failed, and its last lines may be lost: {error}"
            )


def _name(sink: Sink) -> str:
    """The path of a file, the class of any other sink."""
    return type(sink).__name__ if type(sink).__str__ is object.__str__ else str(sink)
