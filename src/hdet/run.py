"""A run: what it consists of, and what all of its chapters do with it.

One cycle: losses -> loss_signal, probe -> roll_call -> guard -> controller -> scale x spread ->
hands, and parameters.converge_ -> replicas. Nothing flows back: group["lr"] is written, never read.
The chapters are `scouting`, `cycle_end` and `meeting`; `scheduler` says when each has its turn.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet import groups, state
from hdet.base import Base
from hdet.body import PARTS
from hdet.clock import Clock
from hdet.course import Course
from hdet.door import Settings, agree, check_knobs, check_together, describe, plain, refuse
from hdet.elastic import TorchftReplicas
from hdet.expedition import Expedition
from hdet.guard import Triage, triage
from hdet.handles import Bench, Hands
from hdet.knobs import bind, explored_rates
from hdet.loss_signal import LossSignal
from hdet.parameters import Parameters
from hdet.probe import score_replicas
from hdet.record import Recorder, Stopwatch
from hdet.refuge import Refuge
from hdet.replicas import Replicas
from hdet.roll_call import RollCall, roll_call
from hdet.steering import Cycle, Knob, Steering

Prepare = Callable[[Replicas], tuple[Base, Settings]]
"""What a run is set to, made of a user's arguments."""


class Run:
    """The parts of a run, as it stands; and the few things that are done to them everywhere."""

    def __init__(
        self,
        prepare: Prepare,
        model: nn.Module | None,
        replicas: Replicas,
        record: str | Path | None,
        takes_over: Callable[[Base], Cycle | None],
    ) -> None:
        """Check everything on all replicas at once, then take the first values."""
        self.replicas = replicas
        self.elastic = replicas if isinstance(replicas, TorchftReplicas) else None
        """Where replicas come and go."""
        try:
            self.base, self.settings = prepare(replicas)
            self.takes_over = takes_over(self.base)
            """The schedule whose decay the controller takes over; in scale form none."""
            self.optimizer: Optimizer = self.base.optimizer
            check_together(self.settings, self.base, replicas, model)
            self.parameters = Parameters(
                self.optimizer, model, replicas, self.settings.outer, self.settings.compress
            )
            self.hands = self._bind_knobs()
            leads = replicas.part == 0 and 0 in replicas.local  # or nobody knows yet
            self.recorder = Recorder(record) if leads and record is not None else None
            mine = describe(self.settings, self._schedule(), self.parameters)
            self._take_first_values()
        except Exception as problem:
            refuse(replicas, problem)
        self.diverged: bool = agree(replicas, mine)
        """Whether replicas may be apart."""
        if self.diverged:
            self.parameters.start_apart()
        self.model = model
        if model is not None:
            replicas.share_gradients(model, self.settings.gradients == "shared")
        self.modules = replicas.modules(model)
        self.course = Course()
        self.signal = LossSignal(len(replicas.local))
        self.cycle_watch = Stopwatch(self.device())
        self.probe_watches: dict[str, Stopwatch] = {}
        self.cut_short = False
        """Whether this cycle began in the middle of one: it has seen less than a whole one."""

    def start_record(self) -> None:
        if self.recorder is not None:
            self.recorder.start(
                {**plain(self.settings), **self._schedule()},
                {"kind": type(self.replicas).__name__, "size": self.replicas.size},
                str(self.device()),
            )

    def _bind_knobs(self) -> Hands:
        bench = Bench(
            self.replicas.optimizers(self.optimizer),
            self.base.names,
            self.device(),
            self.base.momenta,
        )
        replicas = self.replicas  # not by way of this: a run must end with its last reference
        hands = Hands(bind(self.settings.knobs, bench), lambda: replicas.local)
        steers = {"lr", *hands.settings()}
        self.optimizers = self.replicas.optimizers(self.optimizer, steers)
        return hands

    def _take_first_values(self) -> None:
        self._warned: set[str] = set()
        self.held_back: list[tuple[dict[str, Any], Mapping[str, Stopwatch] | None, bool]] | None
        self.held_back = None
        """Lines of a meeting that may yet be undone."""
        self.lands_at: int | None = None
        """The step at which a converge that is under way is applied."""
        self.passes_on_at: int | None = None
        """Half-way there."""
        self.expedition: Expedition | None = None
        self.refuge: Refuge | None = None
        self.clock = Clock(self.base.step, self.settings.total_steps)
        self.steering = self.new_steering()
        probe = self.settings.probe
        self.tail_steps = 0 if probe is None else probe.tail_steps(self.settings.sync_every)
        self.step = self.base.step
        self.steering.start_if_due(self.step, self.base.lrs)
        self.steering.fan_out()
        self.write(everything=True)
        check_knobs(self.settings, self.steering, self.base.names, self.replicas.size)

    def new_steering(self) -> Steering:
        settings = self.settings
        rates = explored_rates(settings.knobs, self.base.names, settings.spread)
        assert settings.design is not None
        return Steering(
            [*rates, *self.hands.explored()],
            num_replicas=self.replicas.size,
            design=settings.design,
            sync_every=self.settings.sync_every,
            seed=self.settings.seed,
            controller=self.settings.controller,
            total_steps=self.settings.total_steps,
            takes_over=self.takes_over,
        )

    def _schedule(self) -> dict[str, Any]:
        """What replicas must have in common beside the settings."""
        return {
            # The user's optimizer may stand for several: what it is made of counts.
            "optimizer": type(self.replicas.optimizers(self.optimizer)[0]).__name__,
            "learning_rates": dict(zip(self.base.names, self.base.lrs, strict=True)),
            "groups": self.parameters.describe_groups(self.hands.settings()),
            "base": self.base.state_dict(),
        }

    # What is counted ------------------------------------------------------------------------

    def counted(self) -> dict[str, Any]:
        """Whatever is counted outside a scout."""
        steering = {**self.steering.state_dict(), **self.clock.state_dict()}
        if self.refuge is not None:
            steering["guard"] = self.refuge.watch.state_dict()
        return state.saved(self.step, self.settings, self.base, steering)

    def count_from(self, told: dict[str, Any]) -> None:
        """The same as it was then, but for the step: the run goes on."""
        self.clock.load_state_dict(told)
        self.base.load_state_dict(told["base"], self.clock.base_step)
        self.steering.load_state_dict(told)
        self.seek_refuge(told.get("guard"))

    def seek_refuge(self, told: Mapping[str, Any] | None = None) -> None:
        guard = self.settings.guard
        if self.refuge is not None:
            self.refuge.close()
        self.refuge = None
        if guard is not None:
            self.refuge = Refuge(guard, self.optimizer, self.model, self.parameters, self.step)
            if told is not None:
                self.refuge.watch.load_state_dict(told)

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
        with self.at_rest():
            rows = score_replicas(
                probe,
                modules,
                self.replicas.pool,
                together=self.parameters.have_lonely,
                sync_every=sync_every,
                cycle=cycle,
                seed=self.settings.seed,
                fresh=fresh,
                alike=alike,
            )
        watch.mark()
        self.probe_watches = {"training": self.cycle_watch, "probe": watch}
        return rows

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Inside, replicas are as they are scored: at the mean of their last weights, if that is
        kept, and without what regularises them."""
        with self.parameters.at_tail(), self.hands.at_rest():
            torch.clear_autocast_cache()  # of a loop that scores inside it: casts of other weights
            try:
                yield
            finally:
                torch.clear_autocast_cache()

    def roll_call(
        self, *compare: str, measures: bool = False, probed: Tensor | None = None
    ) -> RollCall:
        return roll_call(
            self.replicas,
            self.parameters,
            self.signal,
            step=self.step,
            compare=compare,
            measures=measures,
            probed=probed,
        )

    def call_up(self, *compare: str) -> tuple[RollCall, Triage]:
        """Whoever has finite weights, in mid-cycle: losses say nothing yet."""
        call = self.roll_call(*compare)
        nobody = [None] * self.replicas.size
        return call, triage(nobody, call.finite, step=self.step)

    def reseed(self, verdict: Triage) -> int:
        return self.parameters.reseed_state_(verdict.fit[0], tuple(verdict.excluded))

    # Where it stands --------------------------------------------------------------------------

    def come_together(self) -> None:
        """All replicas take the mean of their weights, and nothing else happens."""
        weights = PARTS[:-1]
        call, verdict = self.call_up(*weights)
        self.parameters.meet_(verdict.fit, weights, call.agreed)

    def begin_anew(self, *, cut_short: bool) -> None:
        """No evidence yet, and one model on all replicas."""
        self.signal.clear()
        self.parameters.begin_anew()
        self.cycle_watch = Stopwatch(self.device())
        self.diverged, self.cut_short = self.parameters.are_under_way, cut_short

    def next_cycle(self) -> None:
        self.course.clear()
        self.steering.cycle += 1
        self.steering.start_if_due(self.step, self.base.lrs, self.clock.base_step)
        if self.is_over():
            self.steering.end(close=self.settings.on_overrun == "hold")
        self.begin_anew(cut_short=False)
        self.steering.fan_out()

    def can_diverge(self) -> bool:
        """Whether a step takes the replicas apart."""
        if self.replicas.size == 1:
            return False
        return self.settings.gradients == "local" or self.steering.is_spread()

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
            self._factors = [self.steering.factors_of_groups(place, num) for place in places]
        base = self.steering.base_lrs(self.base.lrs)
        self.centre, *self.lrs = [
            [lr * factor for lr, factor in zip(base, factors, strict=True)]
            for factors in self._factors
        ]
        if self.expedition is not None:
            self.lrs = [self.lrs_of(replica) for replica in self.replicas.local]
        groups.write_learning_rates(
            self.optimizer, self.lrs[0] if len(self.lrs) == 1 else self.centre
        )
        groups.write_momenta(self.optimizer, self.base.momenta)
        for optimizer, lrs in zip(self.optimizers, self.lrs, strict=True):
            if optimizer is not self.optimizer:
                groups.write_learning_rates(optimizer, lrs)
                groups.write_momenta(optimizer, self.base.momenta)
        if everything or self.hands.are_scheduled:
            self.hands.turn(self.other_knobs(), self.step, self.base.momenta, everything=everything)

    def lrs_of(self, replica: int) -> list[float]:
        if self.expedition is None:
            return self.steering.lrs(self.base.lrs, replica)
        explored = {group for knob in self.steering.knobs for group in knob.about.members}
        return [
            self.expedition.lr(group, replica) if group in explored else lr
            for group, lr in enumerate(self.base.lrs)
        ]

    def other_knobs(self) -> list[Knob]:
        """Those beside the learning rates."""
        return [knob for knob in self.steering.knobs if not knob.about.members]

    def write_record(
        self,
        line: dict[str, Any],
        watches: Mapping[str, Stopwatch] | None = None,
        *,
        wait: bool = False,
    ) -> None:
        if self.recorder is not None and self.held_back is not None:
            self.held_back.append((line, watches, wait))
        elif self.recorder is not None:
            self.recorder.write(line, watches, wait=wait)

    def device(self) -> torch.device:
        groups = self.optimizer.param_groups
        device: torch.device = next(p.device for group in groups for p in group["params"])
        return device

    def warn_once(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(text, stacklevel=4)
