"""The estimate as a pure function: from observations alone it decides as a whole search does."""

import math

import pytest

import hdet
from hdet.lr_search.estimator import Conclusion, SearchContext, estimate
from hdet.lr_search.observations import Observation, Observations
from hdet.lr_search.plan import Search
from hdet.lr_search.reasons import Reason
from hdet.lr_search.transfer import GradientNorms


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("best", [0.03, 0.3, 3.0])
@pytest.mark.parametrize("total_steps", [800, 1500, 100_000])
def test_observations_alone_give_the_estimate_of_the_search(
    total_steps: int, best: float, optimizer: str
) -> None:
    search = Search(hdet.Scout(), num_replicas=8, total_steps=total_steps, optimizer=optimizer)
    lengths = []
    while not search.is_over:
        lengths.append(search.num_steps)
        gains = [math.exp(-(math.log(factor / best) ** 2) / 4) for factor in search.factors]
        points = [
            Observation(factor, 2 - gain + (factor / best / 30) ** 2, 0.01)
            for factor, gain in zip(search.factors, gains, strict=True)
        ]
        search.record_round(points, GradientNorms(2.0, 1.0), 2.0)
    observed = Observations(search.points, search.refined_observations, 2.0, search.noise)
    context = SearchContext(
        8, optimizer, sweep_steps=lengths[0], refine_steps=lengths[-1], peak=2.0
    )
    assert estimate(observed, context) == search.estimate(peak=2.0)


@pytest.mark.parametrize(
    ("lowest_lost", "factor", "reason"),
    [(None, 10.0, Reason.WITHIN_TRIED_RANGE), (12.0, 6.0, Reason.BELOW_LOWEST_LOST)],
)
def test_limited_estimate_names_the_limit_that_applies(
    lowest_lost: float | None, factor: float, reason: Reason
) -> None:
    observed = Observations([Observation(f, 2.0) for f in (0.1, 1.0, 10.0)])
    done = Conclusion(5.0, lowest_lost, divergence=None, reasons=(Reason.NEARLY_BEST,))
    found = estimate(observed, SearchContext(8, batch_rule="linear", conclusion=done))
    assert found.factor == factor
    assert found.reason is reason
