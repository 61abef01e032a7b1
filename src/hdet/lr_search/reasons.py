"""Why a learning-rate search decided as it did: members for the code, texts for people."""

from collections.abc import Sequence
from enum import StrEnum


class Reason(StrEnum):
    """One reason of a decision. The values are what a saved state holds."""

    # Why a search ends.
    SWEPT = "swept"
    INTERRUPTED = "interrupted"
    NO_TIME = "no_time"
    BEST_NOT_IN_LAST_ROUND = "best_not_in_last_round"
    # Why the run starts with its learning rate.
    FOUND = "found"
    MOSTLY_USUAL = "mostly_usual"
    NOTHING_FOUND = "nothing_found"
    BELOW_DIVERGENCE = "below_divergence"
    WITHIN_BOUNDS = "within_bounds"
    GIVEN_IS_KEPT = "given_is_kept"
    # A saved state names a reason that this version does not know.
    UNKNOWN = "unknown"


_TEXTS = {
    Reason.SWEPT: "the range was swept",
    Reason.INTERRUPTED: "interrupted",
    Reason.NO_TIME: "no steps were left to look further",
    Reason.BEST_NOT_IN_LAST_ROUND: "the best replica belongs to an earlier round",
    Reason.FOUND: "decided mostly by what short rounds showed",
    Reason.MOSTLY_USUAL: "decided mostly by what is usual for this optimizer",
    Reason.NOTHING_FOUND: "nothing was found, and the given learning rate is kept",
    Reason.BELOW_DIVERGENCE: "kept a factor of 2 below the lowest learning rate that diverged",
    Reason.WITHIN_BOUNDS: "limited by lr_bounds",
    Reason.GIVEN_IS_KEPT: "the given learning rate is kept",
    Reason.UNKNOWN: "another reason",
}


def describe(reasons: Sequence[Reason], *, declined: float | None = None) -> str:
    """The text of reasons, for a record or a warning.

    Args:
        reasons: The reasons, the most important one first.
        declined: The factor that was found where the given learning rate is kept.

    >>> describe([Reason.SWEPT, Reason.NO_TIME])
    'the range was swept, no steps were left to look further'
    >>> describe([Reason.GIVEN_IS_KEPT], declined=0.5)
    'the given learning rate is kept: 0.5 times it is not far enough off'
    """
    if declined is not None:
        return f"the given learning rate is kept: {declined:.3g} times it is not far enough off"
    return ", ".join(_TEXTS[reason] for reason in reasons)
