"""A run with several optimizers: its schedules, knobs, states and what it refuses."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
)

import hdet
from hdet.lr_search.constants import ADAM_PRIOR, SGD_MOMENTUM_PRIOR
from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.joined_schedule import JoinedSchedule, wrap_schedules
from hdet.scheduler.search_result import prior_of_run

S = 40


def pair(rates: tuple[float, float] = (0.1, 0.001)) -> tuple[nn.Module, list[Optimizer]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    sgd = torch.optim.SGD(model[0].parameters(), lr=rates[0], momentum=0.9)
    return model, [sgd, torch.optim.AdamW(model[2].parameters(), lr=rates[1])]


def cycles(optimizers: list[Optimizer], total: int = S) -> list[LRScheduler]:
    sgd, adamw = optimizers
    return [
        OneCycleLR(sgd, sgd.param_groups[0]["lr"], total_steps=total, cycle_momentum=False),
        OneCycleLR(adamw, adamw.param_groups[0]["lr"], total_steps=total),
    ]


def step(model: nn.Module, optimizers: list[Optimizer], scheduler: Any, number: int) -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    if scheduler is not None:
        scheduler.step(loss)


def values(optimizers: list[Optimizer]) -> list[Any]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [(group["lr"], group.get("betas"), group.get("momentum")) for group in groups]


def test_one_replica_without_scout_and_guard_is_exactly_the_plain_schedules() -> None:
    """Only AdamW cycles its momentum, so the loop may set that of SGD by hand."""
    (model, optimizers), (plain, others) = pair(), pair()
    scheduler = hdet.HDET(cycles(optimizers), model=model, scout=None, guard=None)
    schedules = cycles(others)
    for number in range(S):
        optimizers[0].param_groups[0]["momentum"] = 0.5 + number / 100
        others[0].param_groups[0]["momentum"] = 0.5 + number / 100
        assert values(optimizers) == values(others)
        step(model, optimizers, scheduler, number)

        step(plain, others, None, number)
        for schedule in schedules if number < S - 1 else ():
            schedule.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_scale_of_the_common_factor_multiplies_all_learning_rates() -> None:
    model, optimizers = pair()
    scheduler = hdet.HDET(cycles(optimizers), model=model, scout=None)
    assert scheduler.get_knobs() == {"lr": 1.0}
    given = scheduler.get_last_lr()
    scheduler._run.knob_bank.rescale(3.0)
    scheduler._run.rates.write(everything=True)
    assert [lr for lr, *_ in values(optimizers)] == pytest.approx([3 * lr for lr in given])


def test_lr_knob_gives_each_optimizer_a_factor_of_its_own() -> None:
    model, optimizers = pair()
    scheduler = hdet.HDET(cycles(optimizers), model=model, scout=None, knobs=[hdet.lr()])
    assert list(scheduler.get_knobs()) == ["lr/group0", "lr/group1"]


def test_scout_finds_a_common_factor_for_learning_rates_that_are_far_too_low() -> None:
    model, optimizers = pair((1e-5, 1e-6))
    held = torch.randn(64, 4)

    def probe(model: nn.Module) -> Tensor:
        return (model(held) - held.sum(1, keepdim=True)).square().mean(1)

    scheduler = hdet.HDET(cycles(optimizers, 800), model=model, probe=probe)
    number = 0
    while scheduler.is_scouting:
        step(model, optimizers, scheduler, number)
        number += 1
    assert scheduler.found_lr is not None and scheduler.found_lr > 1e-4
    factor = scheduler.get_knobs()["lr"]
    assert scheduler.found_lr == pytest.approx(1e-5 * factor)
    # The search has restored both optimizers: neither has a state.
    assert not any(optimizer.state_dict()["state"] for optimizer in optimizers)


def test_prior_of_the_factor_is_a_mean_over_the_optimizers_by_parameters() -> None:
    """40 parameters under SGD with momentum at 0.1, and 9 under AdamW at 0.001."""
    model, optimizers = pair()
    scheduler = hdet.HDET(cycles(optimizers), model=model, scout=None)
    found = prior_of_run(scheduler._run, [0.1, 0.001])
    factors = SGD_MOMENTUM_PRIOR + 1, ADAM_PRIOR + 3
    assert found is not None
    assert found.mean == pytest.approx((40 * factors[0] + 9 * factors[1]) / 49)


def test_saved_run_continues_exactly_and_loads_as_plain_data() -> None:
    model, optimizers = pair()
    scheduler = hdet.HDET(cycles(optimizers), model=model, scout=None, sync_every=5)
    for number in range(20):
        step(model, optimizers, scheduler, number)
    file = io.BytesIO()
    parts: list[Any] = [model, *optimizers, scheduler]
    torch.save([part.state_dict() for part in parts], file)
    states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    other, others = pair()
    resumed = hdet.HDET(cycles(others), model=other, scout=None, sync_every=5)
    parts = [other, *others, resumed]
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    for number in range(20, S):
        assert values(others) == values(optimizers)
        step(model, optimizers, scheduler, number)
        step(other, others, resumed, number)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_state_of_a_single_schedule_or_of_other_schedules_is_refused() -> None:
    model, optimizers = pair()
    bases = cycles(optimizers)
    scheduler = hdet.HDET(bases, model=model, scout=None)
    with pytest.raises(ValueError, match="must come from hdet for a run with several optimizers"):
        scheduler.load_state_dict(bases[0].state_dict())
    state = scheduler.state_dict()
    other, others = pair()
    schedules = [CosineAnnealingLR(optimizer, S) for optimizer in others]
    mixed = hdet.HDET(schedules, model=other, scout=None, total_steps=S)
    with pytest.raises(ValueError, match=r"CosineAnnealingLR \+ CosineAnnealingLR, got that of a "):
        mixed.load_state_dict(state)


def test_plateaus_step_with_the_mean_loss_of_a_cycle() -> None:
    model, optimizers = pair()
    bases = [ReduceLROnPlateau(optimizer, factor=0.5, patience=0) for optimizer in optimizers]
    scheduler = hdet.HDET(bases, model=model, scout=None, guard=None, sync_every=2)
    for number in range(6):
        for optimizer in optimizers:
            optimizer.step()
        scheduler.step(1.0 + number)
    assert [lr for lr, *_ in values(optimizers)] == pytest.approx([0.025, 0.00025])


def test_shares_are_means_over_all_groups() -> None:
    _, (sgd, adamw) = pair()
    joined = wrap_schedules([ExponentialLR(sgd, 0.9), ExponentialLR(adamw, 1.1)])
    shares = joined.shares(3)
    assert shares is not None
    assert shares.mean == pytest.approx((1 + 0.9 + 0.81 + 1 + 1.1 + 1.21) / 6)
    assert shares.highest == pytest.approx(1.21)
    assert joined.shares(None) is None
    assert joined.total_steps is None


def test_length_of_the_run_is_the_one_that_a_schedule_knows() -> None:
    _, (sgd, adamw) = pair()
    both = [ExponentialLR(sgd, 0.9), OneCycleLR(adamw, 0.1, total_steps=S)]
    assert wrap_schedules(both).total_steps == S
    assert isinstance(wrap_schedules(both), JoinedSchedule)
    assert type(wrap_schedules(both[0])) is BaseSchedule


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda a, b: [], "got an empty list"),
        (
            lambda a, b: [ExponentialLR(a, 0.9), ExponentialLR(b, 0.9), ExponentialLR(a, 0.9)],
            "one schedule for each optimizer, got two for one SGD",
        ),
        (
            lambda a, b: [
                ExponentialLR(a, 0.9),
                ExponentialLR(torch.optim.Adam(a.param_groups[0]["params"]), 0.9),
            ],
            r"got one of shape \(8, 4\) in SGD and Adam",
        ),
        (
            lambda a, b: [OneCycleLR(a, 0.1, total_steps=5), OneCycleLR(b, 0.1, total_steps=6)],
            r"must hold schedules that have the same length, got \[5, 6\]",
        ),
        (
            lambda a, b: [ExponentialLR(a, 0.9), ReduceLROnPlateau(b)],
            "be ReduceLROnPlateau all or none",
        ),
        (lambda a, b: [stepped(ExponentialLR(a, 0.9)), ExponentialLR(b, 0.9)], r"got \[1, 0\]"),
    ],
)
def test_schedules_that_do_not_fit_together_are_refused(make: Any, words: str) -> None:
    model, optimizers = pair()
    with pytest.raises(ValueError, match=words):
        hdet.HDET(make(*optimizers), model=model)


def stepped(schedule: LRScheduler) -> LRScheduler:
    schedule.optimizer.step()
    schedule.step()
    return schedule


def test_optimizers_in_the_place_of_schedules_keep_their_learning_rates() -> None:
    model, optimizers = pair()
    scheduler = hdet.HDET(optimizers, model=model, total_steps=4, scout=None, guard=None)
    given = scheduler.get_last_lr()
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == given


def test_one_function_for_several_optimizers_is_refused() -> None:
    model, optimizers = pair()
    with pytest.raises(ValueError, match="`schedule` must be None beside a list"):
        hdet.HDET(optimizers, schedule=lambda step: 0.1, total_steps=4, model=model)


def test_an_optimizer_without_momentum_may_stand_beside_one_that_cycles_it() -> None:
    model, (_, adamw) = pair()
    adagrad = torch.optim.Adagrad(model[0].parameters(), lr=0.1)  # type: ignore[index]
    both = [ExponentialLR(adagrad, 0.9), OneCycleLR(adamw, 0.001, total_steps=S)]
    scheduler = hdet.HDET(both, model=model, scout=None)
    before = adamw.param_groups[0]["betas"][0]
    step(model, [adagrad, adamw], scheduler, 0)
    assert adamw.param_groups[0]["betas"][0] < before
    assert "momentum" not in adagrad.param_groups[0]


def test_momentum_knob_follows_the_schedule_of_the_groups_that_cycle_it() -> None:
    model, (sgd, _) = pair()
    other = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.8)  # type: ignore[index]
    knobs = [hdet.momentum(spread=0.2)]
    ensemble = hdet.StackedReplicas(model, 2)
    stacked = [ensemble.optimizer(optimizer) for optimizer in (sgd, other)]
    scheduler = hdet.HDET(
        cycles(list(stacked)), model=model, replicas=ensemble, knobs=knobs, scout=None, guard=None
    )
    for _ in range(5):
        for one in stacked:
            one.step()
        scheduler.step(torch.ones(2))
    cycled = scheduler._run.base.momenta
    assert cycled is not None and cycled[0] is None and cycled[1] is not None
    for constant, scheduled in zip(*(one.each for one in stacked), strict=True):
        # A logit space: the odds of both groups have the same factor.
        used = constant.param_groups[0]["momentum"], scheduled.param_groups[0]["momentum"]
        odds = [m / (1 - m) for m in (used[0], 0.9, used[1], cycled[1])]
        assert odds[0] / odds[1] == pytest.approx(odds[2] / odds[3], rel=1e-4)


def test_momentum_knob_for_groups_that_keep_it_in_different_places_is_refused() -> None:
    model, optimizers = pair()
    with pytest.raises(ValueError, match=r"needs an optimizer with 'momentum' .*SGD \+ AdamW"):
        hdet.HDET(cycles(optimizers), model=model, scout=None, knobs=[hdet.momentum()])


# One run at a time ------------------------------------------------------------------------------


def test_second_scheduler_of_an_optimizer_needs_the_first_to_be_deleted() -> None:
    model, optimizers = pair()
    scheduler = hdet.HDET(cycles(optimizers), model=model, scout=None)
    step(model, optimizers, scheduler, 0)
    words = r"another one trains with SGD \+ AdamW, now at step 1\. .*`del scheduler`"
    with pytest.raises(ValueError, match=words):
        hdet.HDET(cycles(optimizers), model=model, scout=None)
    with pytest.raises(ValueError, match=words):  # also for one of the optimizers alone
        hdet.HDET(ExponentialLR(optimizers[0], 0.9), scout=None)
    del scheduler
    scheduler = hdet.HDET(cycles(optimizers), model=model, scout=None)
    assert scheduler.last_epoch == 0


def test_scheduler_of_a_run_that_is_over_does_not_hold_its_optimizers() -> None:
    model, optimizers = pair()
    first = hdet.HDET(cycles(optimizers, 4), model=model, scout=None, guard=None)
    for number in range(4):
        step(model, optimizers, first, number)
    second = hdet.HDET(cycles(optimizers, 4), model=model, scout=None, guard=None)
    assert second.last_epoch == 0


def test_scheduler_that_could_not_be_made_does_not_hold_its_optimizers() -> None:
    model, optimizers = pair()
    for _ in range(2):
        with pytest.raises(ValueError, match="sync_every"):
            hdet.HDET(cycles(optimizers), model=model, sync_every=0)


def test_runs_of_two_models_stand_side_by_side() -> None:
    (model, optimizers), (other, others) = pair(), pair()
    first = hdet.HDET(cycles(optimizers), model=model, scout=None)
    second = hdet.HDET(cycles(others), model=other, scout=None)
    assert first.get_last_lr() == second.get_last_lr()
