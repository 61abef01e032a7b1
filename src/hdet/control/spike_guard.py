"""Guard: when a run is taken back to its last good weights. Plain Python, the same everywhere."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from hdet._validation import check_flag, check_integer, check_positive, check_range

LEVEL_CYCLES = 3
"""The level of the loss is the median of this many good cycles."""
NOISE_CYCLES = 20
"""This many good cycles show how much the loss varies from one to the next."""
CURVE_ORDER = 3
"""Differences of this order of the losses are noise: a smooth curve has none."""
MAX_NOISE_RATIO = 3.0
"""The noise of one cycle counts up to this many times that of the good ones."""
NEW_DATA_AFTER, NEW_DATA_TOLERANCE = 5, 0.25
"""After this many rollbacks in a row the learning rate moves nothing any more. A loss that then
differs from the one before by less than this share of the spike is that of new data."""
MIN_REPLICAS_FOR_OUTLIERS = 4
"""Fewer replicas do not show which one is the outlier."""
MAD_TO_DEVIATION = 1.4826
"""The standard deviation over the median absolute deviation, of a normal distribution."""
RELIEF = "not the learning rate, or not all of it: it is raised again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Takes a run back to its last good weights when its loss spikes, and lowers the scale.

    The guard judges the mean training loss of all replicas at the end of every cycle. After a
    rollback the run goes on with the next batch; data is not repeated. A large spike lowers the
    learning rates. A small spike lowers nothing, and is rolled back once in 20 cycles: what
    happens more often comes from the data.

    Args:
        deviations: A spike lies at least this many robust standard deviations above the last good
            cycles.
        small: A small spike gives back at least this share of the gain of the run so far.
        share: A large spike gives back at least this share of it.
        lower: The factor on the scale after a large spike. It counts twice if the next cycle spikes
            as well, three times after that, and so on.
        retries: Rollbacks in a row before the run stops with `ReplicasLost`.
        offload: Whether the good weights are kept in the memory of the host.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A number is out of its range.

    >>> Guard(retries=3).lower
    0.5
    """

    deviations: float = 6.0
    small: float = 0.1
    share: float = 0.5
    lower: float = 0.5
    retries: int = 8
    offload: bool = False

    def __post_init__(self) -> None:
        check_positive("deviations", self.deviations)
        check_positive("share", self.share)
        check_range("small", self.small, least=0, below=math.inf)
        check_range("lower", self.lower, least=1e-6, below=1)
        check_integer("retries", self.retries, at_least=1)
        check_flag("offload", self.offload)


class SpikeMonitor:
    """Detects spikes from the losses of cycles, and counts rollbacks.

    Attributes:
        consecutive_rollbacks: Rollbacks since the last good cycle.
        scale_correction: The factor on the scale after a cycle that was called good.
        sees_new_data: Whether the last cycle was called good because the data has changed.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.consecutive_rollbacks = 0
        self.scale_correction = 1.0
        self.sees_new_data = False
        self._good_losses: list[float] = []
        self._good_errors: list[float] = []
        """The standard errors of the last good losses."""
        self._first_loss: float | None = None
        self._first_error = 0.0
        self._last_bad_loss: float | None = None
        """The loss of the last cycle, if that was rolled back and the loss was finite."""
        self._num_small_spikes = 0
        """Rollbacks in a row that left the scale as it was: 1 if the first spike was small."""
        self._cycles_since_small_spike = NOISE_CYCLES
        self._lowered_by = 1.0
        """The factor on the scale since the last good cycle."""
        self._raise_left = 1.0
        """The factor by which the scale may still be raised again, if nothing spikes."""

    def set_first_loss(self, loss: float | None, error: float = 0.0) -> None:
        """Set the loss before the first step, which the first cycle is compared with."""
        if self._first_loss is None and loss is not None and math.isfinite(loss):
            self._first_loss, self._first_error = loss, error

    def check_cycle(self, loss: float | None, error: float | None = None) -> str | None:
        """Judge a cycle: why it spikes, or None for a good one, which is recorded.

        Args:
            loss: The mean loss of the cycle; None if no loss was observed.
            error: The standard error of the loss; None if not known.
        """
        self.scale_correction, self.sees_new_data = 1.0, False
        if loss is None:
            return None
        reason = self._reason(loss, error)
        if reason is not None and not self._is_new_data(loss):
            if loss <= self._limit(self._guard.share, error or 0.0):
                self._num_small_spikes, self._cycles_since_small_spike = 1, 0
            self.record_failure(reason)
            self._last_bad_loss = loss if math.isfinite(loss) else None
            return reason
        if reason is not None:  # a new level: earlier losses are no measure for it
            self._good_losses, self._raise_left = [], 1 / self._lowered_by
            self.scale_correction, self.sees_new_data = self._raise_left, True
        else:
            self._plan_raise()
        self._raise_left /= self.scale_correction
        self._good_losses = [*self._good_losses, loss][-NOISE_CYCLES:]
        self._good_errors = [*self._good_errors, self._noise() if error is None else error][
            -LEVEL_CYCLES:
        ]
        self._first_loss = loss if self._first_loss is None else self._first_loss
        self._reset_rollbacks()
        self._cycles_since_small_spike += 1
        return None

    def _plan_raise(self) -> None:
        """Raise the scale again after several rollbacks in a row, one step per good cycle.

        The first of the steps down stays.
        """
        if self.consecutive_rollbacks:
            self._raise_left = max(self._guard.lower / self._lowered_by, 1.0)
        self.scale_correction = min(1 / self._guard.lower, self._raise_left)

    def record_failure(self, reason: str) -> str:
        """Count a rollback, whatever the loss of the cycle is; returns the reason."""
        self.consecutive_rollbacks += 1
        self._last_bad_loss, self._raise_left = None, 1.0
        self._lowered_by *= self.scale_factor()
        return reason

    def end_rollbacks(self) -> float:
        """End the rollbacks: the factor that leaves the scale one step below where it was."""
        raised = self._guard.lower * self.scale_factor() / self._lowered_by
        self._reset_rollbacks()
        return raised

    def _reset_rollbacks(self) -> None:
        (
            self.consecutive_rollbacks,
            self._num_small_spikes,
            self._last_bad_loss,
            self._lowered_by,
        ) = 0, 0, None, 1.0

    def _reason(self, loss: float, error: float | None) -> str | None:
        if not math.isfinite(loss):
            return f"loss is {loss}"
        if self._first_loss is None:
            return None
        # A single loss does not show its noise.
        is_sure = self._cycles_since_small_spike >= NOISE_CYCLES and error is not None
        limit = self._limit(self._guard.small if is_sure else self._guard.share, error or 0.0)
        if loss <= limit:
            return None
        return (
            f"mean loss {loss:.4g} exceeds the limit {limit:.3g} (recent level {self._level():.3g})"
        )

    def outliers(
        self, losses: Sequence[float | None], errors: Sequence[float | None]
    ) -> dict[int, str]:
        """The replicas whose losses lie far above those of the others, each with a text."""
        known = {r: loss for r, loss in enumerate(losses) if loss is not None}
        known = {r: loss for r, loss in known.items() if math.isfinite(loss)}
        if len(known) < MIN_REPLICAS_FOR_OUTLIERS:
            return {}
        middle = median(known.values())
        scatter = MAD_TO_DEVIATION * median(abs(loss - middle) for loss in known.values())
        own = median([error for error in errors if error is not None] or [0.0])
        limit = middle + max(
            self._guard.deviations * max(scatter, own), self._gain_so_far(self._guard.small, middle)
        )
        return {
            replica: f"loss {loss:.4g} lies far above {middle:.4g}, that of the others"
            for replica, loss in known.items()
            if loss > limit
        }

    def _limit(self, share: float, error: float) -> float:
        """The highest loss that gives back no more than this share of the gain."""
        noise = self._guard.deviations * self._deviation(error)
        return self._level() + max(noise, self._gain_so_far(share, self._level()))

    def _gain_so_far(self, share: float, level: float) -> float:
        """This share of the gain so far; without a gain a share of the loss itself."""
        first = level if self._first_loss is None else self._first_loss
        gained = first - min(self._good_losses, default=first)
        return share * gained if gained > 0 else self._guard.share * abs(level)

    def _level(self) -> float:
        """The expected loss of a good cycle now. A steady rise goes on."""
        assert self._first_loss is not None
        if not self._good_losses:
            return self._first_loss
        rises = [b - a for a, b in pairwise(self._good_losses[-2 * LEVEL_CYCLES :])]
        pace = max(median(rises), 0.0) if rises else 0.0
        return (
            median(self._good_losses[-LEVEL_CYCLES:]) + 2 * pace
        )  # their middle is two cycles ago

    def _is_new_data(self, loss: float) -> bool:
        """Whether weights that hardly move any more have the same high loss again and again."""
        if (
            self.consecutive_rollbacks < NEW_DATA_AFTER
            or self._last_bad_loss is None
            or not math.isfinite(loss)
        ):
            return False
        return abs(loss - self._last_bad_loss) <= NEW_DATA_TOLERANCE * abs(
            self._last_bad_loss - self._level()
        )

    def _deviation(self, error: float) -> float:
        """The deviation of a cycle's loss from a smooth curve through its neighbours.

        At least the error that the losses within cycles show. The error of the current cycle is
        limited, since losses vary much in a spike.
        """
        differences = self._good_losses
        for _ in range(CURVE_ORDER):
            differences = [b - a for a, b in pairwise(differences)]
        scale = math.sqrt(
            math.comb(2 * CURVE_ORDER, CURVE_ORDER)
        )  # of such a difference, if all is noise
        between = MAD_TO_DEVIATION * median(map(abs, differences)) / scale if differences else 0.0
        return max(between, self._noise(), min(error, MAX_NOISE_RATIO * self._noise()))

    def _noise(self) -> float:
        """The error of a good cycle's loss; at first at least that of the very first loss."""
        known = median(self._good_errors) if self._good_errors else 0.0
        return known if len(self._good_losses) >= LEVEL_CYCLES else max(known, self._first_error)

    def scale_factor(self) -> float:
        """The factor on the scale for the current rollback."""
        return float(self._guard.lower ** (self.consecutive_rollbacks - self._num_small_spikes))

    @property
    def is_out_of_retries(self) -> bool:
        """Whether the run stops instead of another rollback."""
        return self.consecutive_rollbacks > self._guard.retries

    def state_dict(self) -> dict[str, Any]:
        return {
            "good": list(self._good_losses),
            "errors": list(self._good_errors),
            "first": self._first_loss,
            "first_error": self._first_error,
            "in_a_row": self.consecutive_rollbacks,
            "spared": self._num_small_spikes,
            "calm": self._cycles_since_small_spike,
            "last": self._last_bad_loss,
            "lowered": self._lowered_by,
            "debt": self._raise_left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._good_losses, self._first_loss = list(state["good"]), state["first"]
        self.consecutive_rollbacks, self._num_small_spikes = (
            state["in_a_row"],
            state.get("spared", 0),
        )
        self._cycles_since_small_spike = state.get("calm", NOISE_CYCLES)
        self._good_errors = list(state.get("errors", []))
        self._first_error = state.get("first_error", 0.0)
        self._last_bad_loss, self._lowered_by = state.get("last"), state.get("lowered", 1.0)
        self._raise_left = state.get("debt", 1.0)
