"""Whether a run that has just begun gets anywhere. Plain Python, the same on every process."""

import math
from typing import NamedTuple

MAX_CYCLE, MAX_SHARE_OF_RUN = 10, 3
"""So many cycles are looked at, in the first third of a run: later there is too much to lose."""
PATIENCE, MIN_PROGRESS = 2, 0.01
"""So many cycles in a row that add no more than this share to all that was gained, or no more than
their noise; ..."""
MIN_SIGNIFICANCE = 2.5
"""... or one that is worse by so many standard errors."""
FAR_OFF = 4.0
"""A learning rate is the wrong one if a better one is so many times higher or lower."""


class CycleLoss(NamedTuple):
    """Of one cycle, and its standard error."""

    mean: float
    error: float


class StallDetector:
    """Losses of the first cycles -> whether to start again.

    A learning rate that is far too high need not make a loss explode: a model that has learnt to
    guess stays there, and a guard sees nothing but a calm loss. What gives it away is that the
    loss falls no more while the run has hardly begun.
    """

    def __init__(self) -> None:
        self._past: list[CycleLoss] = []
        """That before the first step, if it is known, and those of all cycles."""
        self._begun = False

    def begin(self, loss: float | None, error: float = 0.0) -> None:
        """The loss before the first step: no cycle should be above it."""
        if not self._begun and loss is not None:
            self._past, self._begun = [CycleLoss(loss, error)], True

    def reason(self, loss: float | None, error: float | None) -> str | None:
        """Why a run is stuck after one cycle more, if it is."""
        self._begun = True
        if loss is None:
            return None
        if not math.isfinite(loss):
            return "the loss is not finite"
        now = CycleLoss(loss, error or 0.0)
        self._past.append(now)
        if len(self._past) == 1:
            return None
        before = min(self._past[:-1])
        if error and loss - before.mean > MIN_SIGNIFICANCE * math.hypot(now.error, before.error):
            return f"loss {loss:.4g} after {before.mean:.4g}"
        if len(self._past) > PATIENCE and self._is_idle():
            return f"loss {loss:.4g} after {before.mean:.4g} hardly falls any more"
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
    """Whether a learning rate is so far from the one that was given that this is the fault.

    >>> is_far_off(0.1), is_far_off(0.5), is_far_off(30.0)
    (True, False, True)
    """
    return not 1 / FAR_OFF < factor < FAR_OFF
