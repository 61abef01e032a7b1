"""A run: its components, its progress, its learning rates and its log.

One cycle: losses and scores -> exchange -> guard -> controller -> scale x multiplier -> learning
rates, and weights -> averager -> replicas. Nothing flows back: group["lr"] is written, never read.
`phases` decides what a step does.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.control.knob_bank import KnobBank
from hdet.control.one_cycle_bounds import OneCycleBounds
from hdet.control.replica_health import ReplicaHealth, check_health
from hdet.knobs.binding import BindingContext, BoundKnobs
from hdet.knobs.specs import bind_knobs, lr_knobs
from hdet.records.events import ReplicaInfo, RunEvent
from hdet.records.sinks import Record
from hdet.records.writer import Recorder, installed_versions, open_recorder
from hdet.replicas.protocol import Replicas, is_elastic
from hdet.scheduler import state
from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.compatibility import check_compatible, check_knobs
from hdet.scheduler.handshake import check_replicas_agree, describe_replica, report_failure
from hdet.scheduler.learning_rates import LearningRates
from hdet.scheduler.live_runs import check_alone
from hdet.scheduler.progress import Progress
from hdet.scheduler.run_log import RunLog
from hdet.scheduler.schedule_clock import ScheduleClock
from hdet.scheduler.settings import Settings, as_plain_data
from hdet.scheduler.start_warnings import StartWarnings
from hdet.signals.exchange import CycleReport, exchange_reports
from hdet.signals.probe_scoring import score_replicas
from hdet.signals.training_loss import TrainingLoss
from hdet.tensors.joined_optimizer import kinds_of
from hdet.weights.inventory import WEIGHTS, TensorKind
from hdet.weights.replica_weights import ReplicaWeights
from hdet.weights.restore_points import GoodPoint

Prepare = Callable[[Replicas, nn.Module | None, StartWarnings], tuple[BaseSchedule, Settings]]
"""Makes the base schedule and the settings of a run from the user's arguments."""


class Run:
    """The components of a run, and what every phase does with them.

    Attributes:
        replicas: The engine that holds the replicas.
        elastic: The same engine if replicas join and leave, otherwise None.
        base: The wrapped schedule.
        settings: The options of the run.
        weights: Averages, snapshots and checks of the replicas' tensors.
        bound_knobs: The knobs beside the learning rate, bound to the optimizers.
        knob_bank: The scale and the multipliers of every knob.
        clock: Where the base schedule is.
        progress: The step of the run, its cycle, its search.
        rates: The learning rates of the replicas.
        training_loss: The losses of this cycle.
        log: The record and the messages.
        warnings: What the construction warns of.
        has_record: Whether a process writes a record, or a replica that joins may.
        good_point: The weights that the guard restores, and its monitor; None without a guard.
    """

    def __init__(
        self,
        prepare: Prepare,
        model: nn.Module | None,
        replicas: Replicas,
        record: Record | Recorder | None,
        one_cycle: Callable[[BaseSchedule], OneCycleBounds | None],
    ) -> None:
        """Check everything on all replicas at once, then write the first values.

        Args:
            prepare: Makes the base schedule and the settings from the user's arguments.
            model: The user's model.
            replicas: The engine.
            record: Where events are written.
            one_cycle: Returns the schedule whose decay the controller takes over; none in scale
                form.
        """
        self.replicas, self.model = replicas, model
        self.elastic = replicas if is_elastic(replicas) else None
        is_first = replicas.part == 0 and 0 in replicas.local
        self.warnings = StartWarnings(speaks=is_first)
        try:
            self.base, self.settings = prepare(replicas, model, self.warnings)
            options = self.settings
            self.one_cycle = one_cycle(self.base)
            self.optimizer: Optimizer = self.base.optimizer
            check_alone(self.optimizer)
            check_compatible(self.settings, self.base, replicas, model, warn=self.warnings)
            self.weights = ReplicaWeights(
                self.optimizer, model, replicas, options.outer, options.compress, options.scaler
            )
            self.bound_knobs = self._bind_knobs()
            recorder = open_recorder(record, is_first=is_first)
            self.log = RunLog(recorder, is_first=is_first, device=self.device())
            records = recorder is not None
            mine = describe_replica(self.settings, self._schedule(), self.weights, records=records)
            self._write_first_values()
        except Exception as problem:
            report_failure(replicas, problem)
        agreement = check_replicas_agree(replicas, mine)
        self.progress.replicas_differ = agreement.weights_differ
        self.has_record = agreement.has_record or self.elastic is not None
        if self.progress.replicas_differ:
            self.weights.averager.note_different_start()
        shared = self.settings.gradients == "shared"
        if model is not None and not replicas.share_gradients(model, shared):
            self.warnings.missing_wrapper()
        self.modules = replicas.modules(model)
        self.training_loss = TrainingLoss(len(replicas.local))

    def release(self) -> None:
        """Undo what the construction has written, so that another run can take its place."""
        if self.progress.trial is not None:
            self.progress.trial.close(shared=self.settings.gradients == "shared")
        if self.good_point is not None:
            self.good_point.close()
        self.rates.write_start()

    def start_record(self) -> None:
        self.log.write(
            RunEvent(
                settings={**as_plain_data(self.settings), **self._schedule()},
                replicas=ReplicaInfo(kind=type(self.replicas).__name__, size=self.replicas.size),
                device=str(self.device()),
                versions=installed_versions(),
            )
        )

    def _bind_knobs(self) -> BoundKnobs:
        context = BindingContext(
            self.replicas.optimizers(self.optimizer),
            self.base.names,
            self.device(),
            self.base.momenta,
        )
        replicas = self.replicas  # a reference to the run itself would keep it alive
        bound_knobs = BoundKnobs(bind_knobs(self.settings.knobs, context), lambda: replicas.local)
        steered = {"lr", *bound_knobs.settings()}
        self.optimizers = self.replicas.optimizers(self.optimizer, steered)
        return bound_knobs

    def _write_first_values(self) -> None:
        settings, base = self.settings, self.base
        self.good_point: GoodPoint | None = None
        self.clock = ScheduleClock(base.step, settings.total_steps)
        self.progress = Progress(base.step, settings.sync_every, settings.total_steps)
        self.knob_bank = self.new_knob_bank()
        self.tail_steps = (
            0 if settings.probe is None else settings.probe.tail_steps(settings.sync_every)
        )
        self.knob_bank.start_if_due(self.progress.step, base.lrs)
        self.knob_bank.fan_out()
        self.rates = LearningRates(
            self.optimizers, base, self.knob_bank, self.bound_knobs, self.replicas, self.progress
        )
        self.rates.write(everything=True)
        check_knobs(settings, self.knob_bank, base.names, self.replicas.size, self.warnings)

    def new_knob_bank(self) -> KnobBank:
        settings = self.settings
        rates = lr_knobs(settings.knobs, self.base.names, settings.spread)
        assert settings.design is not None
        return KnobBank(
            [*rates, *self.bound_knobs.explored()],
            num_replicas=self.replicas.size,
            design=settings.design,
            sync_every=self.settings.sync_every,
            seed=self.settings.seed,
            controller=self.settings.controller,
            total_steps=self.settings.total_steps,
            one_cycle=self.one_cycle,
        )

    def _schedule(self) -> dict[str, Any]:
        """Return what replicas must have in common beside the settings."""
        return {
            # The user's optimizer may stand for those of several replicas.
            "optimizer": kinds_of(self.replicas.optimizers(self.optimizer)[0]),
            "learning_rates": dict(zip(self.base.names, self.base.lrs, strict=True)),
            "groups": self.weights.checks.describe_groups(self.bound_knobs.settings()),
            "base": self.base.state_dict(),
        }

    def collective_call(self, name: str) -> AbstractContextManager[None]:
        """Inside, what replicas exchange belongs to one call, which all processes must make."""
        return self.replicas.collective_call(name, self.progress.step)

    # Progress -------------------------------------------------------------------------------

    def progress_state(self) -> dict[str, Any]:
        """Return the saved form of everything but a search."""
        counted = {**self.knob_bank.state_dict(), **self.clock.state_dict()}
        if self.progress.found_lr is not None:
            counted["found_lr"] = self.progress.found_lr
        if self.good_point is not None:
            counted["guard"] = self.good_point.monitor.state_dict()
        return state.saved(self.progress.step, self.settings, self.base, counted)

    def restore_progress(self, saved: dict[str, Any]) -> None:
        """Restore everything but the step and a search."""
        self.clock.load_state_dict(saved)
        self.progress.found_lr = saved.get("found_lr")
        self.base.load_state_dict(saved["base"], self.clock.base_step)
        self.knob_bank.load_state_dict(saved)
        self.renew_good_point(saved.get("guard"))

    def load_progress(self, saved: dict[str, Any]) -> None:
        """Continue at the step of a saved state, with the length that this run is set to."""
        self.weights.averager.cancel_average()
        self.progress.step = saved["step"]
        self.restore_progress(saved)
        if any(saved[key] != value for key, value in state.length_of(self.settings).items()):
            self.knob_bank.closed = False
            self.knob_bank.set_decays(self.progress.step)
        if self.progress.is_over():
            self.knob_bank.end(close=self.settings.on_overrun == "hold")
        self.start_cycle(is_partial=True)
        self.log.clear_trace()
        self.knob_bank.fan_out()

    def renew_good_point(self, saved: Mapping[str, Any] | None = None) -> None:
        """Let the guard start anew from the present weights, or with a saved monitor."""
        guard = self.settings.guard
        if self.good_point is not None:
            self.good_point.close()
        self.good_point = None
        if guard is not None:
            self.good_point = GoodPoint(
                guard, self.optimizer, self.model, self.weights, self.progress.step
            )
            if saved is not None:
                self.good_point.monitor.load_state_dict(saved)

    def start_cycle(self, *, is_partial: bool) -> None:
        """Start without evidence, from one model on all replicas."""
        self.training_loss.clear()
        self.rates.highest = 0.0
        self.weights.start_cycle()
        self.log.start_cycle()
        self.progress.replicas_differ = self.weights.averager.has_pending_average
        self.progress.has_trained, self.progress.quiet_until = False, 0
        self.progress.is_partial_cycle = is_partial

    def next_cycle(self) -> None:
        self.log.clear_trace()
        self.knob_bank.cycle += 1
        self.knob_bank.start_if_due(self.progress.step, self.base.lrs, self.clock.base_step)
        if self.progress.is_over():
            self.knob_bank.end(close=self.settings.on_overrun == "hold")
        self.start_cycle(is_partial=False)
        self.knob_bank.fan_out()

    def can_diverge(self) -> bool:
        """Whether a step makes the weights of replicas differ."""
        if self.replicas.size == 1:
            return False
        return self.settings.gradients == "local" or self.knob_bank.is_spread()

    def replicas_differ(self) -> bool:
        """Whether the weights of replicas may differ now."""
        progress = self.progress
        return progress.replicas_differ or (progress.has_trained and self.can_diverge())

    # Comparing replicas -----------------------------------------------------------------------

    def probe(
        self, cycle: int, sync_every: int, *, fresh: bool = False, alike: bool = False
    ) -> Tensor | None:
        """Score the local replicas with the probe; None without one.

        At the end of a cycle a single replica has nothing to compare. In a search it has its
        earlier rounds.
        """
        probe = self.settings.probe
        if probe is None or (self.replicas.size == 1 and self.progress.trial is None):
            return None
        modules = [module for module in self.modules if module is not None]
        with self.log.timed_probe(), self.as_scored():
            return score_replicas(
                probe,
                modules,
                self.replicas.gather_parts,
                together=self.weights.has_unreplicated,
                sync_every=sync_every,
                cycle=cycle,
                seed=self.settings.seed,
                fresh=fresh,
                equal=alike,
            )

    @contextmanager
    def as_scored(self) -> Iterator[None]:
        """Inside, replicas have their tail average, and knobs that regularize are off."""
        with self.weights.tail.applied(), self.bound_knobs.without_regularization():
            # Autocast caches casts of weights. The cache must not outlive the weights it is of.
            torch.clear_autocast_cache()
            try:
                yield
            finally:
                torch.clear_autocast_cache()

    def exchange(
        self,
        *compare: TensorKind,
        measures: bool = False,
        scores: Tensor | None = None,
        metric: Tensor | None = None,
    ) -> CycleReport:
        """Exchange losses, scores and fingerprints with all replicas."""
        return exchange_reports(
            self.replicas,
            self.weights,
            self.training_loss,
            step=self.progress.step,
            compare=compare,
            measure_distances=measures,
            scores=scores,
            metric=metric,
        )

    def exchange_health(self, *compare: TensorKind) -> tuple[CycleReport, ReplicaHealth]:
        """Exchange reports in mid-cycle, where only finite weights make a replica healthy."""
        report = self.exchange(*compare)
        without_losses = [None] * self.replicas.size
        return report, check_health(without_losses, report.finite, step=self.progress.step)

    def reseed(self, health: ReplicaHealth) -> int:
        """Give excluded replicas the optimizer state of a healthy one; return the bytes sent."""
        return self.weights.reseed_state_(health.healthy[0], tuple(health.excluded))

    def average_now(self) -> None:
        """Average the weights without an outer step."""
        report, health = self.exchange_health(*WEIGHTS)
        self.log.say_excluded(health.excluded, self.progress.step)
        self.weights.averager.average_without_outer_step_(health.healthy, WEIGHTS, report.agreed)

    def device(self) -> torch.device:
        groups = self.optimizer.param_groups
        device: torch.device = next(p.device for group in groups for p in group["params"])
        return device
