"""What a scout, a probe and a guard ask of torch, counted: small models wait for the host."""

import torch

from benchmarks.learning_rate.methods.bench import N
from benchmarks.systems.cost import counted, launched
from benchmarks.zoo import tasks
from benchmarks.zoo.models import Size
from benchmarks.zoo.tasks import Plan


def test_launched_counts_only_operations_that_compute() -> None:
    a, b = torch.ones(4), torch.ones(4)
    assert launched(lambda: a.view(2, 2).t()) == 0
    assert launched(lambda: torch.empty_like(a)) == 0
    assert launched(lambda: (a + b).sum()) == 2
    assert launched(lambda: torch._foreach_add_([a, b], 1.0)) == 1


def test_scout_and_guard_launch_few_operations_beside_the_steps() -> None:
    """What a scout of 3 % of the steps has besides is mostly the states that eight optimizers make
    anew in every round, and without a probe the forwards that score it; a guard's copy at the end
    of a cycle is a handful of launches."""
    plan = Plan("AdamW", 1500, N, 2e-3, Size(256, 8, 4, 2, 16))
    results = counted(tasks.language(plan, None, torch.device("cpu")), plan)
    assert results["losses_scout_pct"] < 5.0
    assert results["probe_scout_pct"] < 4.5
    assert results["probe_rest_pct"] < 0.1
