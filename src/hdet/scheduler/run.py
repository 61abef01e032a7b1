"""A run: what it consists of, and what all of its chapters do with it.

One cycle: losses -> loss_signal, probe -> roll_call -> guard -> controller -> scale x spread ->
hands, and averager.average_ -> replicas. Nothing flows back: group["lr"] is written, never read.
The chapters are `scouting`, `cycle_end` and `meeting`; `scheduler` says when each has its turn.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.control.knob_bank import KnobBank
from hdet.control.knob_state import KnobState
from hdet.control.one_cycle_bounds import OneCycleBounds
from hdet.control.replica_health import ReplicaHealth, check_health
from hdet.knobs import param_groups
from hdet.knobs.binding import BindingContext, BoundKnobs
from hdet.knobs.specs import bind_knobs, lr_knobs
from hdet.records.events import Event, ReplicaInfo, RunEvent
from hdet.records.lr_trace import LRTrace
from hdet.records.sinks import Record
from hdet.records.writer import Timers, installed_versions, open_recorder
from hdet.replicas.protocol import Replicas, is_elastic
from hdet.scheduler import state
from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.compatibility import check_compatible, check_knobs
from hdet.scheduler.handshake import check_replicas_agree, describe_replica, report_failure
from hdet.scheduler.schedule_clock import ScheduleClock
from hdet.scheduler.search_trial import SearchTrial
from hdet.scheduler.settings import Settings, as_plain_data
from hdet.signals.exchange import CycleReport, exchange_reports
from hdet.signals.probe_scoring import score_replicas
from hdet.signals.training_loss import TrainingLoss
from hdet.tensors.timing import Stopwatch
from hdet.weights.inventory import WEIGHTS, TensorKind
from hdet.weights.replica_weights import ReplicaWeights
from hdet.weights.restore_points import GoodPoint

Prepare = Callable[[Replicas], tuple[BaseSchedule, Settings]]
"""What a run is set to, made of a user's arguments."""


class Run:
    """The parts of a run, as it stands; and the few things that are done to them everywhere."""

    def __init__(
        self,
        prepare: Prepare,
        model: nn.Module | None,
        replicas: Replicas,
        record: Record | None,
        one_cycle: Callable[[BaseSchedule], OneCycleBounds | None],
    ) -> None:
        """Check everything on all replicas at once, then take the first values."""
        self.replicas = replicas
        self.elastic = replicas if is_elastic(replicas) else None
        """Where replicas come and go."""
        try:
            self.base, self.settings = prepare(replicas)
            self.one_cycle = one_cycle(self.base)
            """The schedule whose decay the controller takes over; in scale form none."""
            self.optimizer: Optimizer = self.base.optimizer
            check_compatible(self.settings, self.base, replicas, model)
            self.parameters = ReplicaWeights(
                self.optimizer, model, replicas, self.settings.outer, self.settings.compress
            )
            self.bound_knobs = self._bind_knobs()
            leads = replicas.part == 0 and 0 in replicas.local  # or nobody knows yet
            self.recorder = open_recorder(record, is_first=leads)
            mine = describe_replica(self.settings, self._schedule(), self.parameters)
            self._take_first_values()
        except Exception as problem:
            report_failure(replicas, problem)
        self.diverged: bool = check_replicas_agree(replicas, mine)
        """Whether replicas may be apart."""
        if self.diverged:
            self.parameters.averager.note_different_start()
        self.model = model
        if model is not None:
            replicas.share_gradients(model, self.settings.gradients == "shared")
        self.modules = replicas.modules(model)
        self.lr_trace = LRTrace()
        self.training_loss = TrainingLoss(len(replicas.local))
        self.cycle_watch = Stopwatch(self.device())
        self.probe_watches: dict[str, Stopwatch] = {}
        self.is_partial = False
        """Whether this cycle began in the middle of one: it has seen less than a whole one."""

    def start_record(self) -> None:
        if self.recorder is not None:
            self.recorder.write(
                RunEvent(
                    settings={**as_plain_data(self.settings), **self._schedule()},
                    replicas=ReplicaInfo(
                        kind=type(self.replicas).__name__, size=self.replicas.size
                    ),
                    device=str(self.device()),
                    versions=installed_versions(),
                )
            )

    def _bind_knobs(self) -> BoundKnobs:
        bench = BindingContext(
            self.replicas.optimizers(self.optimizer),
            self.base.names,
            self.device(),
            self.base.momenta,
        )
        replicas = self.replicas  # not by way of this: a run must end with its last reference
        bound_knobs = BoundKnobs(bind_knobs(self.settings.knobs, bench), lambda: replicas.local)
        steers = {"lr", *bound_knobs.settings()}
        self.optimizers = self.replicas.optimizers(self.optimizer, steers)
        return bound_knobs

    def _take_first_values(self) -> None:
        self._warned: set[str] = set()
        self.held_lines: list[tuple[Event, Timers | None, bool]] | None
        self.held_lines = None
        """Lines of a meeting that may yet be undone."""
        self.average_due_at: int | None = None
        """The step at which a converge that is under way is applied."""
        self.forward_due_at: int | None = None
        """Half-way there."""
        self.trial: SearchTrial | None = None
        self.good_point: GoodPoint | None = None
        self.clock = ScheduleClock(self.base.step, self.settings.total_steps)
        self.knob_bank = self.new_knob_bank()
        probe = self.settings.probe
        self.tail_steps = 0 if probe is None else probe.tail_steps(self.settings.sync_every)
        self.step = self.base.step
        self.knob_bank.start_if_due(self.step, self.base.lrs)
        self.knob_bank.fan_out()
        self.write(everything=True)
        check_knobs(self.settings, self.knob_bank, self.base.names, self.replicas.size)

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
        """What replicas must have in common beside the settings."""
        return {
            # The user's optimizer may stand for several: what it is made of counts.
            "optimizer": type(self.replicas.optimizers(self.optimizer)[0]).__name__,
            "learning_rates": dict(zip(self.base.names, self.base.lrs, strict=True)),
            "groups": self.parameters.checks.describe_groups(self.bound_knobs.settings()),
            "base": self.base.state_dict(),
        }

    # What is counted ------------------------------------------------------------------------

    def progress_state(self) -> dict[str, Any]:
        """Whatever is counted outside a scout."""
        knob_bank = {**self.knob_bank.state_dict(), **self.clock.state_dict()}
        if self.good_point is not None:
            knob_bank["guard"] = self.good_point.monitor.state_dict()
        return state.saved(self.step, self.settings, self.base, knob_bank)

    def restore_progress(self, told: dict[str, Any]) -> None:
        """The same as it was then, but for the step: the run goes on."""
        self.clock.load_state_dict(told)
        self.base.load_state_dict(told["base"], self.clock.base_step)
        self.knob_bank.load_state_dict(told)
        self.renew_good_point(told.get("guard"))

    def renew_good_point(self, told: Mapping[str, Any] | None = None) -> None:
        guard = self.settings.guard
        if self.good_point is not None:
            self.good_point.close()
        self.good_point = None
        if guard is not None:
            self.good_point = GoodPoint(
                guard, self.optimizer, self.model, self.parameters, self.step
            )
            if told is not None:
                self.good_point.monitor.load_state_dict(told)

    # What replicas say ------------------------------------------------------------------------

    def probe(
        self, cycle: int, sync_every: int, *, fresh: bool = False, alike: bool = False
    ) -> Tensor | None:
        """What every local replica scores, if they are compared by a probe."""
        probe = self.settings.probe
        if probe is None or self.replicas.size == 1:
            return None
        modules = [module for module in self.modules if module is not None]
        self.cycle_watch.mark()
        watch = Stopwatch(self.device())
        with self.without_regularization():
            rows = score_replicas(
                probe,
                modules,
                self.replicas.gather_parts,
                together=self.parameters.has_unreplicated,
                sync_every=sync_every,
                cycle=cycle,
                seed=self.settings.seed,
                fresh=fresh,
                equal=alike,
            )
        watch.mark()
        self.probe_watches = {"training": self.cycle_watch, "probe": watch}
        return rows

    @contextmanager
    def without_regularization(self) -> Iterator[None]:
        """Inside, replicas are as they are scored: at the mean of their last weights, if that is
        kept, and without what regularises them."""
        with self.parameters.tail.applied(), self.bound_knobs.without_regularization():
            torch.clear_autocast_cache()  # of a loop that scores inside it: casts of other weights
            try:
                yield
            finally:
                torch.clear_autocast_cache()

    def exchange(
        self, *compare: TensorKind, measures: bool = False, probed: Tensor | None = None
    ) -> CycleReport:
        return exchange_reports(
            self.replicas,
            self.parameters,
            self.training_loss,
            step=self.step,
            compare=compare,
            measure_distances=measures,
            scores=probed,
        )

    def exchange_health(self, *compare: TensorKind) -> tuple[CycleReport, ReplicaHealth]:
        """Whoever has finite weights, in mid-cycle: losses say nothing yet."""
        call = self.exchange(*compare)
        nobody = [None] * self.replicas.size
        return call, check_health(nobody, call.finite, step=self.step)

    def reseed(self, verdict: ReplicaHealth) -> int:
        return self.parameters.reseed_state_(verdict.fit[0], tuple(verdict.excluded))

    # Where it stands --------------------------------------------------------------------------

    def average_now(self) -> None:
        """All replicas take the mean of their weights, and nothing else happens."""
        call, verdict = self.exchange_health(*WEIGHTS)
        self.parameters.averager.average_without_outer_step_(verdict.fit, WEIGHTS, call.agreed)

    def start_cycle(self, *, is_partial: bool) -> None:
        """No evidence yet, and one model on all replicas."""
        self.training_loss.clear()
        self.parameters.start_cycle()
        self.cycle_watch = Stopwatch(self.device())
        self.diverged, self.is_partial = self.parameters.averager.has_pending_average, is_partial

    def next_cycle(self) -> None:
        self.lr_trace.clear()
        self.knob_bank.cycle += 1
        self.knob_bank.start_if_due(self.step, self.base.lrs, self.clock.base_step)
        if self.is_over():
            self.knob_bank.end(close=self.settings.on_overrun == "hold")
        self.start_cycle(is_partial=False)
        self.knob_bank.fan_out()

    def can_diverge(self) -> bool:
        """Whether a step takes the replicas apart."""
        if self.replicas.size == 1:
            return False
        return self.settings.gradients == "local" or self.knob_bank.is_spread()

    def steps_left(self, step: int) -> int:
        """Until the end of the cycle; the last one may be short."""
        left = -step % self.settings.sync_every
        total = self.settings.total_steps
        return left if total is None or total < step else min(left, total - step)

    def is_over(self) -> bool:
        total = self.settings.total_steps
        return total is not None and self.step >= total

    # Hands ------------------------------------------------------------------------------------

    def write(self, *, everything: bool = False) -> None:
        """Learning rates at every step; other knobs where they are scheduled, or all of them."""
        if everything:  # within a cycle only the base schedule moves
            num = len(self.base.lrs)
            places = [None, *self.replicas.local]
            self._factors = [self.knob_bank.factors_of_groups(place, num) for place in places]
        base = self.knob_bank.base_lrs(self.base.lrs)
        self.centre, *self.lrs = [
            [lr * factor for lr, factor in zip(base, factors, strict=True)]
            for factors in self._factors
        ]
        if self.trial is not None:
            self.lrs = [self.lrs_of(replica) for replica in self.replicas.local]
        param_groups.write_learning_rates(
            self.optimizer, self.lrs[0] if len(self.lrs) == 1 else self.centre
        )
        param_groups.write_momenta(self.optimizer, self.base.momenta)
        for optimizer, lrs in zip(self.optimizers, self.lrs, strict=True):
            if optimizer is not self.optimizer:
                param_groups.write_learning_rates(optimizer, lrs)
                param_groups.write_momenta(optimizer, self.base.momenta)
        if everything or self.bound_knobs.are_scheduled:
            self.bound_knobs.write(
                self.other_knobs(), self.step, self.base.momenta, everything=everything
            )

    def lrs_of(self, replica: int) -> list[float]:
        if self.trial is None:
            return self.knob_bank.lrs(self.base.lrs, replica)
        explored = {group for knob in self.knob_bank.knobs for group in knob.info.groups}
        return [
            self.trial.lr(group, replica) if group in explored else lr
            for group, lr in enumerate(self.base.lrs)
        ]

    def other_knobs(self) -> list[KnobState]:
        """Those beside the learning rates."""
        return [knob for knob in self.knob_bank.knobs if not knob.info.groups]

    def write_record(
        self, event: Event, timers: Timers | None = None, *, wait: bool = False
    ) -> None:
        if self.recorder is not None and self.held_lines is not None:
            self.held_lines.append((event, timers, wait))
        elif self.recorder is not None:
            self.recorder.write(event, timers, wait=wait)

    def device(self) -> torch.device:
        groups = self.optimizer.param_groups
        device: torch.device = next(p.device for group in groups for p in group["params"])
        return device

    def warn_once(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(text, stacklevel=4)
