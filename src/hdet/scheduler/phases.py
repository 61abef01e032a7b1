"""The phases of a run: it searches for a learning rate, trains in cycles, or has ended."""

from collections.abc import Mapping
from typing import Any

from hdet.scheduler.cycle_end import CycleEnd
from hdet.scheduler.cycle_phase import CyclePhase, EndedPhase
from hdet.scheduler.elastic_sync import ElasticSync
from hdet.scheduler.run import Run
from hdet.scheduler.search_phase import SearchPhase

Phase = SearchPhase | CyclePhase | EndedPhase
"""Each has `step()`, which advances the run by one step.

The next phase is read from the progress of the run instead of returned by `step()`: a checkpoint,
`converge()` and `scout_again()` change it too, between steps.
"""


class Phases:
    """The phases of one run, and what ends its cycles."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.search = SearchPhase(run)
        self.cycle_end = CycleEnd(run, self.search)
        self.elastic_sync: ElasticSync | None = None
        if run.elastic is not None:
            self.elastic_sync = ElasticSync(run, run.elastic, self.cycle_end)
        end = self.elastic_sync or self.cycle_end
        self._cycle, self._ended = CyclePhase(run, end), EndedPhase(run, end)

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved state: in the middle of a search, or in a cycle."""
        run, search = self._run, saved.get("search")
        self.search.start(search)
        if search is not None and run.progress.trial is None and not run.clock.has_scouted:
            run.clock.scouted(run.progress.step)  # the steps of the search are spent all the same
        if self.elastic_sync is not None:
            self.elastic_sync.begin()

    def step(self) -> None:
        """Advance the run by one step. Most steps of a cycle are quiet."""
        progress = self._run.progress
        if self._run.log.is_recording:
            self._run.log.flush()
        if progress.step < progress.quiet_until:
            self._cycle.step_quietly()
        else:
            self.current.step()

    @property
    def current(self) -> Phase:
        """The phase of the next step."""
        if self._run.progress.trial is not None:
            return self.search
        return self._ended if self._run.progress.is_over() else self._cycle
