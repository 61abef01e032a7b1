"""Searches on made-up response curves, without any training."""

import math
from collections.abc import Callable

import hdet
from hdet.lr_search.constants import BEST_UNDER_PEAK, PRIOR_ERROR
from hdet.lr_search.observations import Observation
from hdet.lr_search.plan import Search
from hdet.lr_search.prior import Prior

BEST = 0.01
"""The best mean learning rate of a run."""
GAINS_MOST = BEST * 10**BEST_UNDER_PEAK
"""The learning rate that gains most in short rounds."""
START_SCORE = 5.0
USUAL = Prior(math.log10(BEST), PRIOR_ERROR)
"""A prior that is right about `curve`, for a given learning rate of 1."""


def curve(lr: float) -> float | None:
    """The score after a few steps; not finite at a thousand times the best learning rate."""
    if lr > 1000 * BEST:
        return None
    return START_SCORE - 3 * math.exp(-(math.log10(lr / GAINS_MOST) ** 2))


def searched(
    score: Callable[[float], float | None] = curve,
    *,
    given: float = 1.0,
    prior: Prior | None = USUAL,
    num_replicas: int = 8,
    total_steps: int | None = 5000,
    start_score: float | None = START_SCORE,
    error: float = 0.001,
    scout: hdet.Scout | None = None,
) -> Search:
    """A search that is over. The score is a function of the absolute learning rate.

    Args:
        score: Learning rate -> score; None if it is not finite.
        given: The given learning rate.
        prior: The usual learning rate, absolute.
        num_replicas: Replicas of the run.
        total_steps: Steps of the run.
        start_score: The score of the weights before the search.
        error: The error of each score.
        scout: The settings.
    """
    relative = None if prior is None else prior._replace(mean=prior.mean - math.log10(given))
    search = Search(
        scout or hdet.Scout(), num_replicas=num_replicas, total_steps=total_steps, prior=relative
    )
    for _ in range(100):
        if search.is_over:
            return search
        points = [Observation(f, score(given * f), error) for f in search.factors]
        search.record_round(points, start_score)
    raise AssertionError("the search never ends")
