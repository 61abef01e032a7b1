"""Which replicas are fit to be averaged, and when the run is taken back to its last good weights.

Plain Python, the same on every process.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from hdet._validation import check_flag, check_integer, check_positive, check_range

LEVEL_CYCLES = 3
"""The level of the loss is the median of so many good cycles."""
NOISE_CYCLES = 20
"""So many good cycles tell how much the loss varies from one to the next."""
BEND = 3
"""What a loss does between cycles is noise beyond so many differences of it: a curve has none."""
MAX_NOISE_RATIO = 3.0
"""The noise of one cycle counts up to so many times that of the good ones."""
NEW_DATA_AFTER, NEW_DATA_TOLERANCE = 5, 0.25
"""After so many times in a row, at learning rates that move nothing any more, a loss that differs
from the one before by less than this share of the spike is that of the data."""
MIN_REPLICAS_FOR_OUTLIERS = 4
"""With fewer replicas nobody can say which one is the outlier."""
RELIEF = "not the learning rate, or not all of it: it is raised again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Takes a run back to its last good weights when its loss spikes, and lowers the scale.

    The consensus is judged at the end of every cycle by the mean training loss of its replicas.
    The data is not repeated: the run goes on with the next batch, after a large spike at a lower
    learning rate. A small one is undone once in 20 cycles: what comes more often is the data.
    """

    deviations: float = 6.0
    """A spike is so many robust standard deviations above the last good cycles ..."""
    small: float = 0.1
    """... and gives back this share of all that was gained so far; ..."""
    share: float = 0.5
    """... a large one gives back this share."""
    lower: float = 0.5
    """What the scale is multiplied by; twice if the next cycle spikes too, and so on."""
    retries: int = 8
    """In a row, before the run is stopped."""
    offload: bool = False
    """Whether the good weights are kept in the memory of the host."""

    def __post_init__(self) -> None:
        check_positive("deviations", self.deviations)
        check_positive("share", self.share)
        check_range("small", self.small, least=0, below=math.inf)
        check_range("lower", self.lower, least=1e-6, below=1)
        check_integer("retries", self.retries, at_least=1)
        check_flag("offload", self.offload)


class SpikeMonitor:
    """What a guard remembers: the losses of good cycles, and how often it had to step in."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._good: list[float] = []
        self._errors: list[float] = []
        """The standard errors of the last good losses."""
        self._first: float | None = None
        self._first_error = 0.0
        self.num_consecutive = 0
        self._last: float | None = None
        """The loss of the cycle before, if it was not good but finite."""
        self._undone_small = 0
        """How many of them left the scale as it was: the first, if it was small."""
        self._calm = NOISE_CYCLES
        """How many good cycles there were since the last small spike."""
        self._lowered = 1.0
        """What the scale was multiplied by since the last good cycle."""
        self._owed = 1.0
        """What it may be raised by again, if nothing spikes."""
        self.scale_correction = 1.0
        """What the scale is multiplied by after a cycle that was called good."""
        self.sees_new_data = False
        """Whether that cycle was called good because the data has changed."""

    def begin(self, loss: float | None, error: float = 0.0) -> None:
        """The loss before the first step: what a first cycle is compared with."""
        if self._first is None and loss is not None and math.isfinite(loss):
            self._first, self._first_error = loss, error

    def spiked(self, loss: float | None, error: float | None = None) -> str | None:
        """Why a cycle is not good, if it is not; a good one is remembered.

        `error` is the standard error of its loss, if that is known.
        """
        self.scale_correction, self.sees_new_data = 1.0, False
        if loss is None:
            return None  # nothing was observed: nothing can be said
        reason = self._reason(loss, error)
        if reason is not None and not self._is_new_data(loss):
            if loss <= self._limit(self._guard.share, error or 0.0):
                self._undone_small, self._calm = 1, 0
            told = self.lost(reason)
            self._last = loss if math.isfinite(loss) else None
            return told
        if reason is not None:  # a new level: what was good before is no measure any more
            self._good, self._owed = [], 1 / self._lowered
            self.scale_correction, self.sees_new_data = self._owed, True
        else:
            self._raise_again()
        self._owed /= self.scale_correction
        self._good = [*self._good, loss][-NOISE_CYCLES:]
        self._errors = [*self._errors, self._noise() if error is None else error][-LEVEL_CYCLES:]
        self._first = loss if self._first is None else self._first
        self._end_streak()
        self._calm += 1
        return None

    def _raise_again(self) -> None:
        """Several steps down in a row were too many: up again to the first, one at a time."""
        if self.num_consecutive:
            self._owed = max(self._guard.lower / self._lowered, 1.0)
        self.scale_correction = min(1 / self._guard.lower, self._owed)

    def lost(self, reason: str) -> str:
        """A cycle that is not good, whatever its loss."""
        self.num_consecutive += 1
        self._last, self._owed = None, 1.0
        self._lowered *= self.factor()
        return reason

    def give_up(self) -> float:
        """The run stops; what its scale is multiplied by to be one step below what it was."""
        raised = self._guard.lower * self.factor() / self._lowered
        self._end_streak()
        return raised

    def _end_streak(self) -> None:
        self.num_consecutive, self._undone_small, self._last, self._lowered = 0, 0, None, 1.0

    def _reason(self, loss: float, error: float | None) -> str | None:
        if not math.isfinite(loss):
            return f"loss is {loss}"
        if self._first is None:
            return None
        # One loss alone does not know its noise.
        is_sure = self._calm >= NOISE_CYCLES and error is not None
        limit = self._limit(self._guard.small if is_sure else self._guard.share, error or 0.0)
        if loss <= limit:
            return None
        return f"loss {loss:.4g} after {self._level():.4g}, above {limit:.4g}"

    def outliers(
        self, losses: Sequence[float | None], errors: Sequence[float | None]
    ) -> dict[int, str]:
        """The replicas whose losses lie far above those of the others, and why they are none."""
        known = {r: loss for r, loss in enumerate(losses) if loss is not None}
        known = {r: loss for r, loss in known.items() if math.isfinite(loss)}
        if len(known) < MIN_REPLICAS_FOR_OUTLIERS:
            return {}
        middle = median(known.values())
        scatter = 1.4826 * median(abs(loss - middle) for loss in known.values())
        own = median([error for error in errors if error is not None] or [0.0])
        limit = middle + max(
            self._guard.deviations * max(scatter, own), self._gain_so_far(self._guard.small, middle)
        )
        return {
            replica: f"loss {loss:.4g}, the others {middle:.4g}"
            for replica, loss in known.items()
            if loss > limit
        }

    def _limit(self, share: float, error: float) -> float:
        """What a loss may rise to, if it gives back no more than this share of what was gained."""
        noise = self._guard.deviations * self._deviation(error)
        return self._level() + max(noise, self._gain_so_far(share, self._level()))

    def _gain_so_far(self, share: float, level: float) -> float:
        """This share of what was gained so far; if nothing was, the loss itself is the measure."""
        first = level if self._first is None else self._first
        gained = first - min(self._good, default=first)
        return share * gained if gained > 0 else self._guard.share * abs(level)

    def _level(self) -> float:
        """What a good cycle would have now; a loss that rises steadily goes on rising."""
        assert self._first is not None
        if not self._good:
            return self._first
        rises = [b - a for a, b in pairwise(self._good[-2 * LEVEL_CYCLES :])]
        pace = max(median(rises), 0.0) if rises else 0.0
        return median(self._good[-LEVEL_CYCLES:]) + 2 * pace  # their middle is two cycles ago

    def _is_new_data(self, loss: float) -> bool:
        """Whether good weights that hardly move any more lose the same again and again."""
        if self.num_consecutive < NEW_DATA_AFTER or self._last is None or not math.isfinite(loss):
            return False
        return abs(loss - self._last) <= NEW_DATA_TOLERANCE * abs(self._last - self._level())

    def _deviation(self, error: float) -> float:
        """By how far a cycle lies from a curve through its neighbours: a fall that slows down is no
        noise. Or what the losses within a cycle tell of it, in this one within reason: a spike
        varies much."""
        bends = self._good
        for _ in range(BEND):
            bends = [b - a for a, b in pairwise(bends)]
        scale = math.sqrt(math.comb(2 * BEND, BEND))  # of such a difference, if all is noise
        between = 1.4826 * median(map(abs, bends)) / scale if bends else 0.0
        return max(between, self._noise(), min(error, MAX_NOISE_RATIO * self._noise()))

    def _noise(self) -> float:
        """Of a cycle's loss; as long as there are few, at least that of the very first."""
        known = median(self._errors) if self._errors else 0.0
        return known if len(self._good) >= LEVEL_CYCLES else max(known, self._first_error)

    def factor(self) -> float:
        """What the scale is multiplied by now."""
        return float(self._guard.lower ** (self.num_consecutive - self._undone_small))

    @property
    def gives_up(self) -> bool:
        return self.num_consecutive > self._guard.retries

    def state_dict(self) -> dict[str, Any]:
        return {
            "good": list(self._good),
            "errors": list(self._errors),
            "first": self._first,
            "first_error": self._first_error,
            "in_a_row": self.num_consecutive,
            "spared": self._undone_small,
            "calm": self._calm,
            "last": self._last,
            "lowered": self._lowered,
            "debt": self._owed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._good, self._first = list(state["good"]), state["first"]
        self.num_consecutive, self._undone_small = state["in_a_row"], state.get("spared", 0)
        self._calm = state.get("calm", NOISE_CYCLES)
        self._errors = list(state.get("errors", []))
        self._first_error = state.get("first_error", 0.0)
        self._last, self._lowered = state.get("last"), state.get("lowered", 1.0)
        self._owed = state.get("debt", 1.0)
