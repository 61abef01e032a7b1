"""RunLog: what a run reports while it trains: events of its record, warnings and times."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from hdet import _messages
from hdet.knobs.param_groups import Momenta
from hdet.records.events import Event, LRTracePoints
from hdet.records.lr_trace import LRTrace
from hdet.records.writer import Recorder, Timers
from hdet.tensors.timing import Stopwatch


class RunLog:
    """Writes the record on the first process, and says each warning once.

    Args:
        recorder: Writes events; None on all processes but the first, and without a record.
        is_first: Whether this process speaks for the run.
        device: The device whose time is taken.
    """

    def __init__(self, recorder: Recorder | None, *, is_first: bool, device: torch.device) -> None:
        self.recorder, self._is_first, self._device = recorder, is_first, device
        self.is_recording = recorder is not None
        """Whether this process writes a record."""
        self._trace = LRTrace()
        self._warned: set[str] = set()
        self._held: list[tuple[Event, Timers | None, bool]] | None = None
        self._cycle = Stopwatch(device)
        self.probe_timers = Timers()
        """The times of the last probe, and of the training steps before it."""

    # The record --------------------------------------------------------------------------

    def write(self, event: Event, timers: Timers | None = None, *, wait: bool = False) -> None:
        if self.recorder is not None and self._held is not None:
            self._held.append((event, timers, wait))
        elif self.recorder is not None:
            self.recorder.write(event, timers, wait=wait)

    def flush(self) -> None:
        """Write the events whose times are known by now."""
        if self.recorder is not None:
            self.recorder.flush()

    @contextmanager
    def held(self) -> Iterator[list[tuple[Event, Timers | None, bool]]]:
        """Inside, events are kept in the list instead of written: the step may be undone."""
        held: list[tuple[Event, Timers | None, bool]] = []
        self._held = held
        try:
            yield held
        finally:
            self._held = None

    # Learning rates within a cycle -------------------------------------------------------

    def trace(self, step: int, lrs: Sequence[float], momenta: Momenta | None) -> None:
        if self.recorder is not None:
            # A record has the momenta of all groups or of none.
            cycled = [momentum for momentum in momenta or () if momentum is not None]
            self._trace.add(step, lrs, cycled if len(cycled) == len(lrs) else None)

    def traced(self) -> LRTracePoints:
        return LRTracePoints() if self.recorder is None else self._trace.points()

    def clear_trace(self) -> None:
        self._trace.clear()

    # Times ---------------------------------------------------------------------------------

    def start_cycle(self) -> None:
        """Start to take the time of training steps."""
        self._cycle = Stopwatch(self._device)

    @contextmanager
    def timed_probe(self) -> Iterator[None]:
        """Inside, the time counts as that of a probe; before it, as that of training."""
        self._cycle.mark()
        probe = Stopwatch(self._device)
        yield
        probe.mark()
        self.probe_timers = Timers(training=self._cycle, probe=probe)

    # Messages ------------------------------------------------------------------------------

    def info(self, text: str) -> None:
        """Say a decision that changes the run, on the first process."""
        if self._is_first:
            _messages.info(text)

    def say_excluded(self, excluded: Mapping[int, str], step: int) -> None:
        """Say which replicas an average leaves out, and why."""
        for replica, reason in excluded.items():
            self.info(f"replica {replica} was left out of the average at step {step}: {reason}.")

    def warn(self, text: str) -> None:
        """Warn on the first process."""
        if self._is_first:
            _messages.warn(text)

    def warn_once(self, about: str, text: str) -> None:
        """Warn on the first process, once for each topic."""
        if about not in self._warned:
            self._warned.add(about)
            self.warn(text)
