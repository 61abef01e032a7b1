"""Whether a run that has just begun gets anywhere. Plain Python, the same on every process."""

import math

EARLY, SOON = 10, 3
"""So many cycles are looked at, in the first third of a run: later there is too much to lose."""
PATIENCE, LITTLE = 2, 0.01
"""So many cycles in a row that add no more than this share to all that was gained; ..."""
BEYOND_DOUBT = 2.5
"""... or one that is worse by so many standard errors."""
FAR = 4.0
"""A learning rate is the wrong one if a better one is so many times higher or lower."""


class Stuck:
    """Losses of the first cycles -> whether to start again.

    A learning rate that is far too high need not make a loss explode: a model that has learnt to
    guess stays there, and a guard sees nothing but a calm loss. What gives it away is that the
    loss falls no more while the run has hardly begun.
    """

    def __init__(self) -> None:
        self._num = self._idle = 0
        self._first: float | None = None
        self._lowest, self._error = math.inf, 0.0

    def begin(self, loss: float | None, error: float = 0.0) -> None:
        """The loss before the first step: no cycle should be above it."""
        if self._num == 0 and loss is not None:
            self._first, self._lowest, self._error = loss, loss, error

    def reason(self, loss: float | None, error: float | None) -> str | None:
        """Why a run is stuck after one cycle more, if it is."""
        self._num += 1
        if loss is None:
            return None
        if not math.isfinite(loss):
            return "the loss is not finite"
        rise, doubt = loss - self._lowest, math.hypot(error or 0.0, self._error)
        before = self._lowest
        if rise < 0:
            self._lowest, self._error = loss, error or 0.0
        gained = 0.0 if self._first is None else self._first - self._lowest
        self._idle = self._idle + 1 if rise >= -LITTLE * gained else 0
        if error and rise > BEYOND_DOUBT * doubt:
            return f"loss {loss:.4g} after {before:.4g}"
        if self._idle >= PATIENCE:
            return f"loss {loss:.4g} after {before:.4g} hardly falls any more"
        return None


def is_late(cycle: int, step: int, total_steps: int | None) -> bool:
    """Whether a run has come too far to start again.

    >>> is_late(2, 300, 1000), is_late(2, 400, 1000), is_late(EARLY, 300, None)
    (False, True, True)
    """
    return cycle >= EARLY or (total_steps is not None and SOON * step > total_steps)


def is_far(factor: float) -> bool:
    """Whether a learning rate is so far from the one that was given that this is the fault.

    >>> is_far(0.1), is_far(0.5), is_far(30.0)
    (True, False, True)
    """
    return not 1 / FAR < factor < FAR
