"""GuardMonitor: when a run fails, and what ceiling its learning rate gets. Plain Python."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from hdet.control.guard import Guard
from hdet.control.guard_history import state_of_spike_guard
from hdet.control.loss_level import LEVEL_CYCLES, Level, level_of, scatter_of
from hdet.control.replica_health import outliers

NOISE_CYCLES = 20
"""The noise of good cycles is the median of so many."""
MAX_NOISE_RATIO = 3.0
"""The noise of a failing cycle counts up to this many times that of the good ones."""
UNSURE = 1.5
"""A noise that only the differences of cycles show counts this many times."""
UNGAINED_SHARE = 0.02
"""Before the run has gained anything, a failure lies above the first loss by this share of it."""
GAIN_DEVIATIONS = 3.0
"""The run has gained something once a cycle lies below the first loss by this many errors."""
VANISHED_SHARE = 0.5
"""A model that has gained nothing is dead if so many of its tensors have no gradient any more."""
SPARE_EVERY = 20
"""A learning rate that has trained well is spared at its first failure, once in so many cycles."""
PROBATION_CYCLES, MUCH_LOWER = 5, 0.1
"""So many good cycles raise a rate by one step, if it is proven or was lowered by so much. A
failure at a rate that is so much lower than a proven one comes from no rate."""
MAX_POWER = 2
"""The ceiling falls by at most this power of `lower` at one failure."""
NEW_DATA_AFTER, NEW_DATA_TOLERANCE = 3, 0.25
"""After so many rollbacks, a loss that keeps its rise within this share comes from new data."""
RELIEF = "not the learning rate, or not all of it: it is raised again"
ABSTENTION = "the loss rises at much lower learning rates too: the guard abstains until it falls"
TOLERANCE_GROWTH = 4.0
"""The limits grow by this factor each time that the data has changed."""


class GuardMonitor:
    """Judges the cycles of a run, and says what ceiling its learning rate gets.

    Learning rates are in units of those that the user gave.

    Attributes:
        guard: The settings.
        consecutive_rollbacks: Rollbacks since the last good cycle.
        scale_correction: The factor on the scale after a cycle that was called good.
        sees_new_data: Whether the last cycle was called good because its loss comes from no
            learning rate, so the data may have changed.
        is_best: Whether the last cycle has the lowest level so far: its weights are worth a
            snapshot.
        ceiling: The highest learning rate that is left after failures; infinite without one.
        abstains: Whether rises are accepted, since they come from no learning rate, and the run
            has gained nothing that could be lost.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.consecutive_rollbacks = 0
        self.scale_correction = 1.0
        self.sees_new_data = False
        self.is_best = True
        self.ceiling = math.inf
        self.abstains = False
        self._tolerance = 1.0
        self._recent: list[Level] = []
        """The last good cycles."""
        self._best: Level | None = None
        """The lowest level so far."""
        self._lowest_loss = math.inf
        self._first: Level | None = None
        self._has_new_level = False
        """Whether the first loss is no measure any more, since the data has changed."""
        self._last_bad_loss: float | None = None
        """The loss of the last cycle, if that was rolled back and the loss was finite."""
        self._survived = 0.0
        """The highest learning rate of a good cycle."""
        self._trained_with = 0.0
        """The highest learning rate that has led to the lowest loss so far, after a gain."""
        self._was_spared = False
        """Whether the rollbacks in a row began with a learning rate that was spared."""
        self._cycles_since_spared = SPARE_EVERY
        self._lowered_by = 1.0
        """The factor on the scale since the last good cycle."""
        self._lowered_in_all = 1.0
        """The factor on the scale since the start, or since the guard abstained."""
        self._probation: list[float] = []
        """The good cycles that are left of a probation, and the factor that it gives back."""
        self._has_had_probation = False

    def set_first_loss(self, loss: float | None, error: float = 0.0) -> None:
        """Set the loss before the first step, once: the first cycles are compared with it."""
        if self.guard.metric is not None:
            return  # the loss is not what it judges
        if self._first is None and loss is not None and math.isfinite(loss):
            self._first = Level(loss, error)

    def lower_first_error(self, error: float) -> None:
        """Lower the error of the first loss to what a later cycle shows.

        A single replica shows it by how losses differ within a cycle. A cycle that explodes shows
        more noise than there is.
        """
        if self._first is not None and not self._has_new_level:
            self._first = self._first._replace(error=min(error, self._first.error))

    def check_cycle(
        self,
        loss: float | None,
        error: float | None = None,
        *,
        lr: float = 1.0,
        vanished: float = 0.0,
    ) -> str | None:
        """Judge a cycle: why it fails, or None for a good one, which is recorded.

        Args:
            loss: The mean loss of the cycle; None if no loss was observed.
            error: The standard error of the loss; None if not known.
            lr: The highest learning rate of the cycle.
            vanished: The share of tensors whose gradients have vanished since the first step.
        """
        self.scale_correction, self.sees_new_data = 1.0, False
        self.is_best = self._best is None
        if loss is None:
            return None
        reason = self._reason(loss, error, vanished)
        if reason is not None and not self._comes_from_no_rate(loss, lr):
            self.record_failure(reason, lr=lr)
            self._last_bad_loss = loss if math.isfinite(loss) else None
            return reason
        if reason is not None:
            self._accept_new_level(lr)
        self._record_good(Level(loss, self._scatter(loss) if error is None else error), lr)
        return None

    def record_failure(self, reason: str, *, lr: float) -> str:
        """Count a rollback, whatever the loss of the cycle is; returns the reason."""
        self._spare(lr)
        self.consecutive_rollbacks += 1
        self._last_bad_loss = None
        return reason

    def scale_factor(self, lr: float, ahead: float) -> float:
        """The factor on the scale for the current rollback, which sets the ceiling.

        Args:
            lr: The highest learning rate of the cycle that failed.
            ahead: The highest learning rate of the rest of the run, as it is scaled now.
        """
        power = min(self.consecutive_rollbacks - self._was_spared, MAX_POWER)
        if not power or lr <= 0:  # a learning rate of 0 can be lowered no further
            return 1.0
        self.ceiling = min(self.ceiling, lr * self.guard.lower**power)
        factor = min(self.ceiling / ahead, 1.0) if min(ahead, lr) > 0 else 1.0
        self._lowered_by *= factor
        self._lowered_in_all *= factor
        # A false alarm early in a warm-up would cost the whole run.
        deserves_chance = lr <= self._survived or factor < MUCH_LOWER
        gets_chance = deserves_chance and not self._has_had_probation
        self._probation = [PROBATION_CYCLES, self._lowered_by] if gets_chance else []
        return factor

    def end_rollbacks(self) -> float:
        """End the rollbacks: the factor that leaves the scale one step below where it was."""
        raised = self.guard.lower / self._lowered_by
        self._lowered_in_all *= raised
        self._reset_rollbacks()
        return raised

    @property
    def is_out_of_retries(self) -> bool:
        """Whether the run stops instead of another rollback."""
        return self.consecutive_rollbacks > self.guard.retries

    def outliers(
        self, losses: Sequence[float | None], errors: Sequence[float | None]
    ) -> dict[int, str]:
        """The replicas whose losses lie far above those of the others, each with a text."""
        gain = self._gain() if self.guard.metric is None else 0.0
        share = self.guard.share * gain
        return outliers(losses, errors, lambda middle: share or UNGAINED_SHARE * abs(middle))

    def _reason(self, loss: float, error: float | None, vanished: float) -> str | None:
        if not math.isfinite(loss):
            return f"loss is {loss}"
        if self._first is None or self.abstains:
            return None
        if self.guard.metric is not None and len(self._recent) < LEVEL_CYCLES:
            return None  # only the differences of cycles show its noise
        if vanished >= VANISHED_SHARE and not self._has_gained():
            return f"the gradients of {vanished:.0%} of the tensors have vanished"
        limit = self._limit(self._scatter() if error is None else error)
        if loss <= limit:
            return None
        level = self._level(self._first).loss
        judged = "mean loss" if self.guard.metric is None else "metric"
        return f"{judged} {loss:.4g} exceeds the limit {limit:.4g} (best level {level:.4g})"

    def _limit(self, error: float) -> float:
        """The highest loss of a cycle that does not fail."""
        assert self._first is not None
        level = self._level(self._first)
        noise = max(self._noise(), level.error)
        known = math.hypot(level.error, min(max(error, noise), MAX_NOISE_RATIO * noise))
        share = self.guard.share * self._gain()
        if not self._has_gained():
            share = max(share, UNGAINED_SHARE * abs(level.loss))
        return level.loss + self._tolerance * max(self.guard.deviations * known, share)

    def _level(self, first: Level) -> Level:
        """The lowest level so far, unless the first loss shows by now that it was a failure."""
        best = self._best
        if best is None:
            return first
        above = self.guard.deviations * math.hypot(first.error, best.error)
        return best if best.loss <= first.loss + above else first

    def _gain(self) -> float:
        """What the run has gained since its first loss."""
        if self._first is None or self._best is None:
            return 0.0
        return max(self._first.loss - self._best.loss, 0.0)

    def _has_gained(self) -> bool:
        if self._first is None or self._best is None:
            return False
        return self._gain() > GAIN_DEVIATIONS * math.hypot(self._first.error, self._best.error)

    def _noise(self) -> float:
        """The usual error of a good cycle's loss."""
        return median(level.error for level in self._recent) if self._recent else 0.0

    def _scatter(self, *more: float) -> float:
        """The noise of a cycle of one step, by how cycles differ: one loss does not show it."""
        losses = [*(level.loss for level in self._recent), *more]
        first = [] if self._first is None else [self._first.error]
        return UNSURE * max([*first, scatter_of(losses)])

    def _record_good(self, cycle: Level, lr: float) -> None:
        self._first = cycle if self._first is None else self._first
        self._recent = [*self._recent, cycle][-NOISE_CYCLES:]
        level = level_of(self._recent)
        self.is_best = cycle.loss < min(self._lowest_loss, self._first.loss + self._first.error)
        self._lowest_loss = min(self._lowest_loss, cycle.loss)
        if self._best is None or level.loss < self._best.loss:
            self._best = level
        self._survived = max(self._survived, lr)
        if self.is_best and self._has_gained():
            self._trained_with = max(self._trained_with, lr)
        self.abstains = self.abstains and not self._has_gained()
        self._cycles_since_spared += 1
        self._reset_rollbacks()
        self._count_probation()

    def _count_probation(self) -> None:
        """Raise a learning rate that was lowered by one step, after so many good cycles."""
        left, lowered_by = self._probation or (math.inf, 1.0)
        if left > 1:
            self._probation = [left - 1, lowered_by] if self._probation else []
            return
        step = min(1 / self.guard.lower, 1 / lowered_by)
        is_whole = lowered_by * step > 1 - 1e-9
        self.scale_correction *= step
        self._lowered_in_all *= step
        self._has_had_probation = True
        self._probation = [] if is_whole else [PROBATION_CYCLES, lowered_by * step]
        self.ceiling = math.inf if is_whole else self.ceiling * step

    def _spare(self, lr: float) -> None:
        """Spare a learning rate that has trained well, unless it was spared lately."""
        if self.consecutive_rollbacks or self._probation:
            return
        if lr <= self._survived and self._cycles_since_spared >= SPARE_EVERY:
            self._was_spared, self._cycles_since_spared = True, 0

    def _comes_from_no_rate(self, loss: float, lr: float) -> bool:
        """Whether a failure shows that no learning rate is its cause.

        Either a much lower learning rate than a proven one gives back a part of the gain, or many
        in a row fail. But a loss that has fallen with the learning rate comes from it.
        """
        last, first = self._last_bad_loss, self._first
        if not math.isfinite(loss) or first is None:
            return False
        if last is not None:
            rise = abs(last - self._level(first).loss) + self._noise()
            if loss < last - NEW_DATA_TOLERANCE * rise:
                return False
        is_much_lower = self._lowered_in_all < MUCH_LOWER and lr < MUCH_LOWER * self._trained_with
        largest = self._tolerance * TOLERANCE_GROWTH * self._gain()
        explodes = loss - self._level(first).loss > largest
        fails_always = self.consecutive_rollbacks >= NEW_DATA_AFTER and last is not None
        return fails_always or (is_much_lower and not explodes)

    def _accept_new_level(self, lr: float) -> None:
        """Go on from a new level: earlier losses are no measure for it.

        The learning rate returns to where it was before the rollbacks in a row, and further up to
        what has trained well.
        """
        proven = self._trained_with / lr if lr > 0 else math.inf
        raised = max(1 / self._lowered_by, min(1 / self._lowered_in_all, proven))
        self.abstains, self._tolerance = True, self._tolerance * TOLERANCE_GROWTH
        self.scale_correction, self.sees_new_data = raised, True
        self._lowered_in_all *= raised
        self._recent, self._best, self._lowest_loss = [], None, math.inf
        self._first, self._has_new_level = None, True
        self._probation, self.ceiling, self._trained_with = [], math.inf, 0.0

    def _reset_rollbacks(self) -> None:
        self.consecutive_rollbacks, self._last_bad_loss = 0, None
        self._lowered_by, self._was_spared = 1.0, False

    def state_dict(self) -> dict[str, Any]:
        return {
            "recent": [list(level) for level in self._recent],
            "best": None if self._best is None else list(self._best),
            "lowest": self._lowest_loss,
            "first": None if self._first is None else list(self._first),
            "new_level": self._has_new_level,
            "ceiling": self.ceiling,
            "tolerance": [self.abstains, self._tolerance],
            "survived": self._survived,
            "rollbacks": self.consecutive_rollbacks,
            "last_bad": self._last_bad_loss,
            "spared": [self._was_spared, self._cycles_since_spared],
            "lowered_by": self._lowered_by,
            "lowered_in_all": self._lowered_in_all,
            "trained_with": self._trained_with,
            "probation": [[*self._probation], self._has_had_probation],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, also from one of the guard before there was a ceiling."""
        state = state_of_spike_guard(state, SPARE_EVERY) if "good" in state else state
        self._recent = [Level(*level) for level in state["recent"]]
        self._best = None if state["best"] is None else Level(*state["best"])
        self._lowest_loss = state["lowest"]
        self._first = None if state["first"] is None else Level(*state["first"])
        self._has_new_level = state["new_level"]
        self.ceiling, self._survived = state["ceiling"], state["survived"]
        self.abstains, self._tolerance = state["tolerance"]
        self.consecutive_rollbacks, self._last_bad_loss = state["rollbacks"], state["last_bad"]
        self._was_spared, self._cycles_since_spared = state["spared"]
        self._lowered_by = state["lowered_by"]
        self._lowered_in_all = state.get("lowered_in_all", self._lowered_by)
        self._trained_with = state.get("trained_with", 0.0)
        self._probation, self._has_had_probation = state["probation"]
