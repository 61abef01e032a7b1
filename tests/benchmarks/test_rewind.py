"""What the steps of a scout cost: schedules that make up for them, runs that go on from them."""

from itertools import pairwise

import pytest
import torch

import hdet
from benchmarks.learning_rate import confirm, rewind
from benchmarks.learning_rate.methods.schedules import RowPlan
from hdet.lr_search.observations import Observation
from hdet.lr_search.plan import Search
from tests.benchmarks.test_methods import bench


@pytest.mark.parametrize("how", rewind.CATCHING_UP)
def test_schedule_after_a_scout_ends_with_the_run(how: str) -> None:
    played = rewind.CATCHING_UP[how](300, 9)
    assert len(played) == 291
    assert played[-1] == 299
    assert all(later >= one for one, later in pairwise(played))
    assert played[0] == (9 if how == "not at all" else 0)


def test_trained_continues_from_the_given_weights() -> None:
    """From what a scout has destroyed a run ends elsewhere; from nothing it is the plain one."""
    legs = [RowPlan(0, (0.01,), 9), RowPlan(0, (0.01,), 9)]
    plain = rewind.trained(bench("AdamW"), legs)
    assert plain[0] == plain[1]
    fleet = bench("AdamW").fleet([0])
    results = [tensor[0].clone() for tensor in rewind.tensors_of(fleet, bench("AdamW").rule(fleet))]
    same = rewind.trained(bench("AdamW"), legs, [results, None])
    assert same == plain
    other = rewind.trained(
        bench("AdamW"), legs, [[torch.zeros_like(results[0]), *results[1:]], None]
    )
    assert other[0] != plain[0]
    assert other[1] == plain[1]


def test_run_goes_on_from_a_replica_that_gained_in_the_search() -> None:
    search = Search(hdet.Scout(), num_replicas=8, total_steps=1500)
    while not search.is_over:
        points = [Observation(f, 2.0 - min(f, 3.0) + (f / 10) ** 2) for f in search.factors]
        search.record_round(points, 2.0)
    gains = rewind.gained(search)
    assert set(gains) <= set(range(8))
    assert all(gain > 0 for gain in gains.values())
    best = rewind.GOING_ON["from the best replica"](search, gains)
    assert best == [max(gains, key=gains.__getitem__)]
    (chosen,) = rewind.chosen_by(search, gains)
    assert search.last_factors[chosen] <= search.estimate().factor
    assert rewind.GOING_ON["back to the weights of before"](search, gains) == []


def test_confirm_headline_compares_with_the_best_fixed_lr() -> None:
    rows = [
        {"method": "OneCycleLR", "start": 1.0, "live": {"loss": 2.0}},
        {"method": "OneCycleLR", "start": 3.0, "live": {"loss": 4.0}},
        {"method": "hdet", "start": 0.01, "live": {"loss": 2.1}},
    ]
    results = confirm.headline(rows, middle=1e-3)
    assert results == {
        "best_fixed_loss": 2.0,
        "regret_from_1e5_pct": pytest.approx(5.0),
        "worst_regret_pct": pytest.approx(5.0),
        "num_seeds": 1,
        "num_fixed_lrs": 2,
    }
