"""An ordinary step of a run: the schedule advances, and at the end of a cycle replicas average."""

from collections.abc import Sequence
from typing import Protocol

from hdet.scheduler.run import Run


class EndOfCycle(Protocol):
    """What happens after the last step of a cycle."""

    def close(self, trained_with: Sequence[float]) -> None:
        """End the cycle, whose last step had these base learning rates."""


class CyclePhase:
    """Steps of a run that neither searches for a learning rate nor has ended."""

    def __init__(self, run: Run, end: EndOfCycle) -> None:
        self._run, self._end = run, end

    def step(self) -> None:
        run, progress = self._run, self._run.progress
        step = progress.step + 1
        left = progress.steps_left(step)
        if run.weights.gradient_watch.is_due and run.good_point is not None:
            run.weights.gradient_watch.start()
        trained_with = run.knob_bank.base_lrs(run.base.lrs)
        run.log.trace(progress.step, run.rates.centre, run.base.momenta)
        self._advance_schedule(run.clock.due(step))
        progress.step = step
        progress.has_trained = True
        self._tell_weights(left)
        is_end = left == 0 or self._must_sync()
        if is_end:
            with run.collective_call("the end of a cycle"):
                self._end.close(trained_with)
        run.rates.write(everything=is_end)
        if not is_end:
            progress.quiet_until = self._quiet_until()

    def step_quietly(self) -> None:
        """Make a step that only advances the schedule."""
        run, progress = self._run, self._run.progress
        if run.log.is_recording:
            run.log.trace(progress.step, run.rates.centre, run.base.momenta)
        progress.step += 1
        for _ in range(run.clock.due(progress.step)):
            run.base.advance()
        run.rates.write()

    def _quiet_until(self) -> int:
        """The step before the next one of which more than the schedule must know; 0 without one."""
        run, progress = self._run, self._run.progress
        is_watched = run.elastic is not None or run.settings.outer is not None
        if is_watched or run.base.wants_metric or progress.is_over():
            return 0
        end = progress.step + 1 + progress.steps_left(progress.step + 1)
        first_of_tail = end - max(run.tail_steps - 1, 0)
        due = (progress.forward_due_at, progress.average_due_at)
        stops = [at for at in due if at is not None and at > progress.step]
        return min([first_of_tail, *stops]) - 1

    def _advance_schedule(self, num_steps: int) -> None:
        if not self._run.base.wants_metric:
            for _ in range(num_steps):
                self._run.base.advance()

    def _tell_weights(self, left: int) -> None:
        """Tell the weights of a step that concerns them: a pending average arrives, for example."""
        run, progress, averager = self._run, self._run.progress, self._run.weights.averager
        if run.settings.outer is not None:
            averager.note_step()
        if progress.step in (progress.average_due_at, progress.forward_due_at):
            with run.collective_call("the average of `overlap`"):
                if progress.step == progress.average_due_at:
                    averager.finish_average_()
                else:
                    averager.forward_partial_means_()
        if left < run.tail_steps and run.knob_bank.is_spread():
            run.weights.tail.add()

    def _must_sync(self) -> bool:
        """Whether a replica that has just joined ends the cycle: it has no place in the spread."""
        elastic = self._run.elastic
        return elastic is not None and elastic.must_sync(self._run.progress.step)


class EndedPhase(CyclePhase):
    """Steps beyond `total_steps`: the base schedule keeps its last value, or the step is refused.

    Raises:
        ValueError: If `on_overrun` is "raise".
    """

    def _advance_schedule(self, num_steps: int) -> None:
        run = self._run
        total, choice = run.settings.total_steps, run.settings.on_overrun
        number = run.progress.step + 1
        if choice == "raise":
            raise ValueError(
                f"`step()` must be called at most `total_steps` ({total}) times, got call {number}."
            )
        run.log.warn_once(
            "overrun",
            f"step {number} is beyond `total_steps` ({total}): the base schedule keeps its last "
            f"value (on_overrun={choice!r}). Pass the length of the loop as total_steps=, or "
            "steps_per_epoch= for a schedule that counts epochs.",
        )
