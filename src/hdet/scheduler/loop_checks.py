"""LoopChecks: what a training loop and its optimizer do between two calls of `step()`.

A learning rate that the loop writes is an error. A loop that does not call `step()` once for each
optimizer step gets a warning, because the schedule, the scout and the cycles count those steps.
"""

import math
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hdet.scheduler.mixing_optimizer import find_mixed, mixing_error
from hdet.scheduler.run import Run
from hdet.scheduler.run_log import RunLog
from hdet.signals.exchange import CycleReport
from hdet.tensors.joined_optimizer import members_of
from hdet.weights.update_watch import UpdateWatch

MANY_STEPS = 32
"""More optimizer steps than this without a `step()` are no warm-up. It is also the number of calls
of `step()` that must be seen before steps can be missing: GradScaler may skip the first ones."""


class LoopChecks:
    """The checks of one run at each call of `step()`."""

    def __init__(self, run: Run) -> None:
        self._run, self._written = run, run.rates.written
        counted = list(filter(_can_be_counted, members_of(run.optimizer)))
        self._watch = StepWatch(counted, run.log) if counted else None
        self._hooks = self._check_before_first_step() if len(run.replicas.local) > 1 else []
        # A search has a watch of its own, and replicas that join have no step in common.
        explores = run.knob_bank.is_spread() and run.progress.trial is None and run.elastic is None
        self._updates = run.weights.watch_updates() if explores else None
        self.is_over = False
        """Whether the loop has shown that it is right."""

    def check(self) -> None:
        """Check the loop, at the beginning of `step()`, until it is over.

        Raises:
            ValueError: If replicas explore learning rates and the optimizer mixes them.
        """
        self._run.warnings.say_waiting()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._watch is not None and self._watch.sees_call():
            self._watch = None
        if self._updates is not None:
            self._check_updates(self._updates)
        self.is_over = self._watch is None and self._updates is None

    def _check_before_first_step(self) -> list[RemovableHandle]:
        """Check the optimizers of stacked replicas too, which the first step writes over."""
        weakly = weakref.ref(self._written)  # a hook must not keep the run alive

        def check(*_: Any) -> None:
            if (written := weakly()) is not None:
                written.check()

        members = members_of(self._run.optimizer)
        return [optimizer.register_step_pre_hook(check) for optimizer in members]

    def _check_updates(self, updates: UpdateWatch) -> None:
        mixed = find_mixed(self._run, updates)
        if updates.is_over:
            self._updates = None
        if mixed is not None:
            raise mixing_error(self._run, mixed)


class StepWatch:
    """Counts optimizer steps between two calls of `step()`, until it is sure of a loop.

    Two calls in a row with one optimizer step before each show that the loop is right. Of several
    optimizers, one may step more often than the others, as in a GAN: then too many steps are those
    of the optimizer that makes the fewest, and too few those of the one that makes the most.
    """

    def __init__(self, optimizers: Sequence[Optimizer], log: RunLog) -> None:
        self._log = log
        self._nums = [0] * len(optimizers)
        """The steps of each optimizer since the last call."""
        self._num_before = 0
        """The fewest before the last call."""
        self._num_calls, self._totals = 0, [0] * len(optimizers)
        weakly = weakref.ref(self)  # a hook must not keep the run alive

        def count(place: int, *_: Any) -> None:
            if (watch := weakly()) is not None:
                watch._sees_step(place)

        self._hooks = [
            optimizer.register_step_post_hook(partial(count, place))
            for place, optimizer in enumerate(optimizers)
        ]

    def sees_call(self) -> bool:
        """Count a call of `step()`; return whether the watch is over."""
        before, now = self._num_before, min(self._nums)
        self._num_before, self._nums = now, [0] * len(self._nums)
        self._num_calls += 1
        if before > 1 and now > 1:
            self._warn_of_many(now)
        elif self._num_calls >= MANY_STEPS and 2 * max(self._totals) <= self._num_calls:
            self._warn_of_few(max(self._totals))
        is_over = before == now == 1 or self._num_calls >= MANY_STEPS or now > MANY_STEPS
        if is_over:
            for hook in self._hooks:
                hook.remove()
        return is_over

    def _sees_step(self, place: int) -> None:
        self._nums[place] += 1
        self._totals[place] += 1
        if self._nums[place] == min(self._nums) == MANY_STEPS + 1:
            self._warn_of_many(MANY_STEPS + 1)

    def _warn_of_many(self, num: int) -> None:
        self._log.warn_once(
            "steps",
            f"the optimizer made {num} steps without a `step()` of the scheduler, so the schedule, "
            "the scout and the cycles count wrongly. Call `scheduler.step(loss)` after every "
            "optimizer step. If the base schedule counts epochs, pass `steps_per_epoch=` to HDET.",
        )

    def _warn_of_few(self, num: int) -> None:
        self._log.warn_once(
            "steps",
            f"`step()` was called {self._num_calls} times, and the optimizer made "
            f"{num} steps, so the schedule, the scout and the cycles count wrongly. "
            "Call `scheduler.step(loss)` once after every optimizer step. For a micro-batch call "
            "`scheduler.observe(loss)`. With Accelerate, leave the scheduler out of `prepare`.",
        )


def warn_without_losses(run: Run, report: CycleReport) -> None:
    """Warn at the end of a cycle or of a round of the scout that nobody gave a loss."""
    if run.good_point is not None and all(loss is None for loss in report.losses):
        run.log.warn_once(
            "guard",
            "the guard is inactive, so the run is not protected from divergence: no loss was "
            f"observed up to step {run.progress.step}. Call `scheduler.step(loss)`.",
        )


def warn_of_equal_losses(run: Run, report: CycleReport) -> None:
    """Warn at the end of a round of the scout that all replicas gave the same loss."""
    first = report.losses[0]
    if len(report.losses) > 1 and first and math.isfinite(first) and len({*report.losses}) == 1:
        run.log.warn_once(
            "equal losses",
            "the losses of all replicas are equal, though their learning rates are not, so the "
            "scout compares nothing. Give each replica's own loss to `step(loss)`, and not a mean "
            "over all processes.",
        )


def _can_be_counted(optimizer: Optimizer) -> bool:
    """Whether Python sees every step. A compiled or captured one runs without its hooks."""
    return not any(
        isinstance(group["lr"], Tensor) or group.get("capturable")
        for group in optimizer.param_groups
    )
