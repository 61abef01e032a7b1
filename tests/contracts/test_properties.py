"""Properties that hold for all N, groups, spreads, T, S and losses; hypothesis draws the values."""

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hdet
from hdet.control.assignment import assignment, multipliers
from hdet.control.knob_bank import KnobBank
from hdet.control.knob_state import KnobInfo
from hdet.control.one_cycle_bounds import OneCycleBounds
from hdet.control.space import Space

NUM_REPLICAS = st.integers(1, 64)
SPREADS = st.floats(0, 1, exclude_max=True)
LOSSES = st.floats(allow_nan=False, allow_infinity=False)


@given(NUM_REPLICAS, SPREADS)
def test_multipliers_have_mean_one_and_stay_within_the_spread(num: int, spread: float) -> None:
    fan = multipliers(num, spread)
    assert math.isclose(math.fsum(fan) / num, 1, rel_tol=1e-12)
    assert all(m > 0 and 1 - spread - 1e-12 <= m <= 1 + spread + 1e-12 for m in fan)


@given(NUM_REPLICAS, st.integers(0, 2**40), st.integers(0, 10**9), st.text(max_size=20))
def test_assignment_is_a_permutation_of_the_replicas(
    num: int, seed: int, cycle: int, knob: str
) -> None:
    order = assignment(num, seed=seed, cycle=cycle, knob=knob)
    assert sorted(order) == list(range(num))


@st.composite
def steerings(draw: st.DrawFn) -> tuple[KnobBank, int, int, list[float], int]:
    num = draw(st.integers(2, 8))
    total = draw(st.integers(2, 60))
    sync_every = draw(st.integers(1, total))
    names = [f"group{i}" for i in range(draw(st.integers(1, 4)))]
    peaks = [draw(st.floats(1e-8, 1e3)) for _ in names]
    shrink = draw(st.floats(1.0, 1e8))
    spread = draw(SPREADS)
    space = Space("log", 1e-9, 1e9)
    knob_bank = KnobBank(
        [KnobInfo(f"lr/{name}", space, spread, 1.0, (i,)) for i, name in enumerate(names)],
        num_replicas=num,
        design="permutation",
        sync_every=sync_every,
        seed=draw(st.integers(0, 9)),
        controller=hdet.PaperController(
            warmup_steps=draw(st.integers(0, total - 1)),
            momentum=draw(st.floats(0, 0.999)),
            temperature=draw(st.floats(1e-6, 1e3)),
            step_size=draw(st.floats(1e-3, 10)),
        ),
        total_steps=total,
        one_cycle=OneCycleBounds(peaks, [p / shrink for p in peaks])
        if draw(st.booleans())
        else None,
    )
    return knob_bank, total, sync_every, peaks, num


@settings(deadline=None, max_examples=150)
@given(steerings(), st.data())
def test_learning_rates_stay_positive_and_finite_for_any_finite_losses(
    drawn: tuple[KnobBank, int, int, list[float], int], data: st.DataObject
) -> None:
    knob_bank, total, sync_every, peaks, num = drawn
    knob_bank.start_if_due(0, peaks)
    knob_bank.fan_out()
    for step in range(sync_every, total + 1, sync_every):
        losses = data.draw(st.lists(LOSSES, min_size=num, max_size=num))
        fit = sorted(data.draw(st.sets(st.integers(0, num - 1), min_size=1)))
        knob_bank.move_knobs(losses, fit)
        knob_bank.cycle += 1
        knob_bank.start_if_due(step, peaks)
        knob_bank.fan_out()
        for replica in range(num):
            rates = knob_bank.lrs(peaks, replica)
            assert all(math.isfinite(rate) and rate > 0 for rate in rates), rates
        for knob in knob_bank.knobs:
            assert math.isclose(math.fsum(knob.multipliers) / num, 1, rel_tol=1e-12)


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 40), st.integers(1, 45), st.integers(1, 4), st.integers(0, 40), st.booleans())
def test_scheduler_state_round_trips_through_load_state_dict(
    total: int, sync_every: int, num_groups: int, steps: int, cycle_momentum: bool
) -> None:
    def make() -> tuple[hdet.OneCycleHDET, torch.optim.Optimizer]:
        parameters = [{"params": [nn.Parameter(torch.ones(1))]} for _ in range(num_groups)]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        optimizer._opt_called = True  # type: ignore[attr-defined]
        scheduler = hdet.OneCycleHDET(
            optimizer, 0.1, total_steps=total, pct_start=0.37, cycle_momentum=cycle_momentum,
            sync_every=sync_every,
        )  # fmt: skip
        return scheduler, optimizer

    def values(optimizer: torch.optim.Optimizer) -> list[Any]:
        return [(group["lr"], group["momentum"]) for group in optimizer.param_groups]

    scheduler, optimizer = make()
    for _ in range(min(steps, total)):
        optimizer.step()
        scheduler.step(1.0)
    again, fresh = make()
    again.load_state_dict(scheduler.state_dict())
    assert again.state_dict() == scheduler.state_dict()
    assert values(fresh) == values(optimizer)
