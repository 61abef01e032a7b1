"""Why a learning-rate search decided as it did: members for the code, texts for people."""

from collections.abc import Sequence
from enum import StrEnum


class Reason(StrEnum):
    """One reason of a decision. The values are what a saved state holds."""

    # What a sweep or a refinement shows.
    LOWEST_IS_LOST = "lowest_is_lost"
    ALL_EXPLODE = "all_explode"
    ALL_WORSE_THAN_START = "all_worse_than_start"
    NO_GAIN = "no_gain"
    ONLY_NOISE = "only_noise"
    LOWEST_IS_BEST = "lowest_is_best"
    LOWEST_IS_AS_GOOD = "lowest_is_as_good"
    HIGHEST_IS_BEST = "highest_is_best"
    NEARLY_BEST = "nearly_best"
    REFINED = "refined"
    LOWERED_FOR_LONGER_ROUNDS = "lowered_for_longer_rounds"
    # Why a search ends.
    NOTHING_TRIED = "nothing_tried"
    INTERRUPTED = "interrupted"
    NO_TIME = "no_time"
    GIVEN_IS_NOT_HOPELESS = "given_is_not_hopeless"
    RUN_TOO_SHORT_TO_REFINE = "run_too_short_to_refine"
    BEST_NOT_IN_LAST_ROUND = "best_not_in_last_round"
    # Why the run starts with its learning rate.
    FOUND = "found"
    NOTHING_FOUND = "nothing_found"
    BELOW_FLOOR = "below_floor"
    ROUNDS_TOO_SHORT = "rounds_too_short"
    BELOW_LOWEST_LOST = "below_lowest_lost"
    WITHIN_TRIED_RANGE = "within_tried_range"
    GIVEN_IS_KEPT = "given_is_kept"
    # A saved state names a reason that this version does not know.
    UNKNOWN = "unknown"


_TEXTS = {
    Reason.LOWEST_IS_LOST: "the lowest learning rate diverges",
    Reason.ALL_EXPLODE: "every learning rate diverges",
    Reason.ALL_WORSE_THAN_START: "every learning rate is worse than no training",
    Reason.NO_GAIN: "no learning rate improves the score",
    Reason.ONLY_NOISE: "the scores differ by no more than their noise",
    Reason.LOWEST_IS_BEST: "the lowest learning rate is the best",
    Reason.LOWEST_IS_AS_GOOD: "the lowest learning rate is as good as the best",
    Reason.HIGHEST_IS_BEST: "the highest learning rate is the best",
    Reason.NEARLY_BEST: "the lowest learning rate that gains nearly as much as the best",
    Reason.REFINED: "refined",
    Reason.LOWERED_FOR_LONGER_ROUNDS: "lowered, since longer rounds did not fit",
    Reason.NOTHING_TRIED: "no learning rate was tried",
    Reason.INTERRUPTED: "interrupted",
    Reason.NO_TIME: "no steps were left to look further",
    Reason.GIVEN_IS_NOT_HOPELESS: "the given learning rate is not hopeless",
    Reason.RUN_TOO_SHORT_TO_REFINE: "the run is too short for a refinement",
    Reason.BEST_NOT_IN_LAST_ROUND: "the best replica belongs to an earlier round",
    Reason.FOUND: "the best of the search, scaled to the full batch and the schedule",
    Reason.NOTHING_FOUND: "nothing was found",
    Reason.BELOW_FLOOR: "raised to the floor below the divergence threshold",
    Reason.ROUNDS_TOO_SHORT: "lowered, since the rounds were too short to be trusted",
    Reason.BELOW_LOWEST_LOST: ("kept a factor of 2 below the lowest learning rate that diverged"),
    Reason.WITHIN_TRIED_RANGE: "limited to the range that was tried",
    Reason.GIVEN_IS_KEPT: "the given learning rate is kept",
    Reason.UNKNOWN: "another reason",
}

_OLD_TEXTS = {
    Reason.LOWEST_IS_LOST: "the lowest learning rate is lost",
    Reason.ALL_EXPLODE: "every learning rate explodes",
    Reason.ALL_WORSE_THAN_START: "every learning rate is worse than none",
    Reason.NO_GAIN: "no learning rate gains anything",
    Reason.ONLY_NOISE: "the scores do not differ by more than their noise",
    Reason.LOWEST_IS_BEST: "the lowest learning rate is the best",
    Reason.LOWEST_IS_AS_GOOD: "the lowest learning rate is as good as the best",
    Reason.HIGHEST_IS_BEST: "the highest learning rate is the best",
    Reason.NEARLY_BEST: "the lowest that gains nearly as much as the best",
    Reason.REFINED: "tried closely",
    Reason.LOWERED_FOR_LONGER_ROUNDS: "lowered, since there was no time for longer rounds",
    Reason.INTERRUPTED: "interrupted",
    Reason.NO_TIME: "there was no time to look further",
}
"""The texts of a first choice in states that were saved before reasons had values."""


def describe(reasons: Sequence[Reason], *, declined: float | None = None) -> str:
    """The text of reasons, for a record or a warning.

    Args:
        reasons: The reasons, the most important one first.
        declined: The factor that was found where the given learning rate is kept.

    >>> describe([Reason.NEARLY_BEST, Reason.REFINED])
    'the lowest learning rate that gains nearly as much as the best, refined'
    >>> describe([Reason.GIVEN_IS_KEPT], declined=0.5)
    'the given learning rate is kept: 0.5 times it is not far enough off'
    """
    if declined is not None:
        return f"the given learning rate is kept: {declined:.3g} times it is not far enough off"
    return ", ".join(_TEXTS[reason] for reason in reasons)


def reasons_of_state(saved: str | Sequence[str]) -> tuple[Reason, ...]:
    """The reasons that a saved state holds: their values, or one text in an older state.

    >>> reasons_of_state(["only_noise", "something else"])
    (<Reason.ONLY_NOISE: 'only_noise'>, <Reason.UNKNOWN: 'unknown'>)
    >>> reasons_of_state("the lowest learning rate is the best, interrupted")
    (<Reason.LOWEST_IS_BEST: 'lowest_is_best'>, <Reason.INTERRUPTED: 'interrupted'>)
    """
    if isinstance(saved, str):
        return _reasons_of_text(saved)
    known = {reason.value for reason in Reason}
    return tuple(Reason(value) if value in known else Reason.UNKNOWN for value in saved)


def _reasons_of_text(text: str) -> tuple[Reason, ...]:
    places = {reason: text.find(words) for reason, words in _OLD_TEXTS.items()}
    found = sorted((place, reason) for reason, place in places.items() if place >= 0)
    if text and not found:
        return (Reason.UNKNOWN,)
    return tuple(reason for _, reason in found)
