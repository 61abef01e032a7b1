"""The consensus on demand: made for a checkpoint, or shown for an evaluation."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from hdet.records.events import ConvergeCost, ConvergeEvent, ExcludedReplica
from hdet.records.writer import Timers
from hdet.replicas.protocol import Interrupted
from hdet.scheduler.phases import Phases
from hdet.scheduler.run import Run
from hdet.tensors.timing import Stopwatch
from hdet.weights.inventory import ALL_KINDS, WEIGHTS


class Consensus:
    """Averages the replicas of a run between the ends of cycles."""

    def __init__(self, run: Run, phases: Phases) -> None:
        self._run, self._phases = run, phases

    def make(self) -> None:
        """Average weights, buffers and optimizer states, and start the cycle again."""
        with self._run.collective_call("`converge()`"):
            self._make()

    def _make(self) -> None:
        run, trial = self._run, self._run.progress.trial
        if self._phases.elastic_sync is not None:
            self._phases.elastic_sync.converge()
            run.rates.write(everything=True)
            return
        if trial is not None:
            self._phases.search.interrupt(trial)  # a checkpoint holds the weights of its start
        if run.replicas.size == 1:
            self._phases.cycle_end.note_first_loss(run.exchange())
            run.start_cycle(is_partial=True)
        else:
            self._average()
        run.rates.write(everything=True)  # the next step counts with its learning rate

    def _average(self) -> None:
        run = self._run
        stopwatch = Stopwatch(run.device())
        run.weights.averager.finish_average_()
        report, health = run.exchange_health(*ALL_KINDS)
        self._phases.cycle_end.note_first_loss(report)  # so that a state that is saved now has it
        kinds = ALL_KINDS if report.optimizer_states_match else WEIGHTS
        num_bytes = run.weights.averager.average_(health.healthy, kinds, report.agreed)
        if health.excluded and not report.optimizer_states_match:
            num_bytes += run.reseed(health)
        run.weights.loss_scale.equalize_(health.healthy)
        stopwatch.mark()
        run.log.say_excluded(health.excluded, run.progress.step)
        run.start_cycle(is_partial=True)
        event = ConvergeEvent(
            step=run.progress.step,
            excluded=ExcludedReplica.from_reasons(health.excluded),
            converge=ConvergeCost(bytes=num_bytes),
        )
        run.log.write(event, Timers(converge=stopwatch), wait=True)

    @contextmanager
    def shown(self) -> Iterator[bool]:
        """Inside, the model has the mean of the replicas.

        Yields:
            Whether the model differs from that of this replica.
        """
        run, elastic = self._run, self._run.elastic
        have_begun = elastic is None or elastic.have_synced or elastic.has_healed
        is_alone = run.replicas.size == 1 and run.progress.trial is None
        if is_alone or not have_begun:
            yield False
            return
        with ExitStack() as inside:
            try:
                with run.collective_call("`consensus()`"):
                    inside.enter_context(self._at_mean())
            except Interrupted as reason:
                run.log.warn(f"consensus() has the weights of this replica only: {reason}.")
            inside.enter_context(
                run.bound_knobs.at_centre(
                    run.rates.other_knobs(), run.progress.step, run.base.momenta
                )
            )
            # Autocast caches casts of weights. The cache must not outlive the weights it is of.
            torch.clear_autocast_cache()
            inside.callback(torch.clear_autocast_cache)
            yield True

    def _at_mean(self) -> AbstractContextManager[None]:
        run, trial = self._run, self._run.progress.trial
        if trial is not None:  # replicas that search have only their start in common
            return run.weights.at_snapshot(trial.start)
        if run.elastic is not None and not run.elastic.are_members_unchanged:
            raise Interrupted("the set of replicas changed since the last average")
        report, health = run.exchange_health(*WEIGHTS)
        run.log.say_excluded(health.excluded, run.progress.step)
        return run.weights.averager.at_average(health.healthy, WEIGHTS, report.agreed)
