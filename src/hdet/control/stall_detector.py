"""StallDetector: whether a young run makes progress. Plain Python, the same everywhere."""

import math
from typing import NamedTuple

MAX_CYCLE, MAX_SHARE_OF_RUN = 10, 3
"""A run restarts in its first cycles, at most this many, and in its first third: later it loses too
much."""
PATIENCE, MIN_PROGRESS = 2, 0.01
"""A run stalls if this many cycles in a row add no more than this share of the gain so far, or no
more than their noise."""
MIN_RISE_IN_ERRORS = 2.5
"""A run stalls as well if one cycle is worse by this many standard errors."""
FAR_OFF_RATIO = 4.0
"""A learning rate is the cause if a better one is this many times higher or lower."""


class CycleLoss(NamedTuple):
    """The mean loss of one cycle, and its standard error."""

    mean: float
    error: float


class StallDetector:
    """Tells from the losses of the first cycles whether a run stalls.

    A learning rate that is far too high does not always make the loss explode: a model that has
    learnt to guess stays there, and a guard sees a calm loss. Such a run shows a loss that does not
    fall any more although the run has hardly started.
    """

    def __init__(self) -> None:
        self._past: list[CycleLoss] = []
        """The loss before the first step, if it is known, and those of all cycles."""
        self._has_started = False

    def set_first_loss(self, loss: float | None, error: float = 0.0) -> None:
        """Set the loss before the first step, unless a cycle has ended."""
        if not self._has_started and loss is not None:
            self._past, self._has_started = [CycleLoss(loss, error)], True

    def reason(self, loss: float | None, error: float | None) -> str | None:
        """Record a cycle: why the run stalls, or None if it does not."""
        self._has_started = True
        if loss is None:
            return None
        if not math.isfinite(loss):
            return "the loss is not finite"
        now = CycleLoss(loss, error or 0.0)
        self._past.append(now)
        if len(self._past) == 1:
            return None
        before = min(self._past[:-1])
        if error and loss - before.mean > MIN_RISE_IN_ERRORS * math.hypot(now.error, before.error):
            return f"loss {loss:.4g} is higher than {before.mean:.4g} before"
        if len(self._past) > PATIENCE and self._is_idle():
            return f"loss {loss:.4g} hardly falls any more ({before.mean:.4g} before)"
        return None

    def _is_idle(self) -> bool:
        before, lately = min(self._past[:-PATIENCE]), min(self._past[-PATIENCE:])
        gained = self._past[0].mean - min(before, lately).mean
        noise = math.hypot(before.error, lately.error)
        return before.mean - lately.mean <= max(MIN_PROGRESS * gained, noise)


def is_too_late_to_restart(cycle: int, step: int, total_steps: int | None) -> bool:
    """Whether a run has come too far to start again.

    >>> is_too_late_to_restart(2, 300, 1000), is_too_late_to_restart(2, 400, 1000)
    (False, True)
    >>> is_too_late_to_restart(MAX_CYCLE, 300, None)
    True
    """
    return cycle >= MAX_CYCLE or (total_steps is not None and MAX_SHARE_OF_RUN * step > total_steps)


def is_far_off(factor: float) -> bool:
    """Whether a better learning rate is so far from the given one that the given one is the cause.

    >>> is_far_off(0.1), is_far_off(0.5), is_far_off(30.0)
    (True, False, True)
    """
    return not 1 / FAR_OFF_RATIO < factor < FAR_OFF_RATIO
