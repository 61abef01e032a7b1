"""Presets: the options that hdet chooses when the user gives none."""

import math
import warnings
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
)

import hdet
from hdet.lr_search.constants import MIN_ROUND_STEPS, SWEEP_POINTS
from hdet.records import reader
from hdet.scheduler.presets import (
    NUM_CYCLES,
    ChosenOptions,
    GivenOptions,
    choose_options,
    without_scout,
)
from tests.processes import Processes
from tests.small_run import SmallRun, batch, loss_of

STEPS = 1600


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)


def one_cycle(optimizer: Any) -> LRScheduler:
    return OneCycleLR(optimizer, 1e-5, total_steps=STEPS, cycle_momentum=False)


def stacked(num: int = 8, base: Any = one_cycle, **options: Any) -> hdet.HDET:
    model, optimizer = small()
    ensemble = hdet.StackedReplicas(model, num)
    schedule = base(ensemble.optimizer(optimizer))
    return hdet.HDET(schedule, model=model, replicas=ensemble, **options)


@pytest.mark.parametrize("num_replicas", [1, 8])
def test_best_preset_sets_scout_guard_zero_spread_and_cycle_length(num_replicas: int) -> None:
    def chosen(total_steps: int | None) -> ChosenOptions:
        return choose_options(
            "best", GivenOptions(), total_steps=total_steps, num_replicas=num_replicas
        )

    assert chosen(3000) == (0.0, 3000 // NUM_CYCLES, None, hdet.Scout(), hdet.Guard(offload=True))
    lengths = [chosen(total).sync_every for total in (None, 10**6, 7)]
    assert lengths == [1000, 1000, 7]


def test_cycles_of_a_run_that_explores_are_twice_as_long() -> None:
    given = [GivenOptions(), GivenOptions(spread=0.2), GivenOptions(controller=hdet.Tracker())]
    chosen = [choose_options("best", g, total_steps=3000, num_replicas=8) for g in given]
    assert [options.sync_every for options in chosen] == [50, 100, 100]


def test_run_with_one_replica_has_a_scout_and_a_guard_by_default() -> None:
    model, optimizer = small()
    scheduler = hdet.HDET(one_cycle(optimizer), model=model)
    assert scheduler._run.settings.scout == hdet.Scout()
    assert scheduler.is_scouting
    assert scheduler._run.settings.guard == hdet.Guard(offload=True)
    assert scheduler._run.settings.sync_every == STEPS // NUM_CYCLES
    assert scheduler._run.good_point is not None


def test_best_preset_without_scout_tracks_the_learning_rate() -> None:
    given = GivenOptions(knobs=(hdet.lr(),), scout=None)
    chosen = choose_options("best", given, total_steps=3000, num_replicas=8)
    assert chosen.controller == hdet.Tracker()


def test_dropped_scout_turns_a_relative_tracker_into_an_absolute_tracker() -> None:
    assert without_scout(hdet.Tracker(relative=True)) == hdet.Tracker()
    assert without_scout(None) is None


def test_paper_preset_sets_the_options_of_the_paper() -> None:
    chosen = choose_options("paper", GivenOptions(), total_steps=3000, num_replicas=8)
    assert chosen == (1 / 9, 1000, hdet.PaperController(), None, None)


@pytest.mark.parametrize(
    "given",
    [
        GivenOptions(spread=0.2),
        GivenOptions(knobs=(hdet.lr(),)),
        GivenOptions(knobs=(hdet.weight_decay(),)),
    ],
)
def test_best_preset_with_spread_or_knobs_adds_a_tracker(given: GivenOptions) -> None:
    chosen = choose_options("best", given, total_steps=3000, num_replicas=8)
    has_rates = given.knobs is None or isinstance(given.knobs[0], type(hdet.lr()))
    assert chosen.controller == hdet.Tracker(relative=has_rates)  # the scout sets the level
    assert chosen.spread == (given.spread or 1 / 9)
    assert (chosen.scout is not None) == (chosen.guard is not None) == has_rates


@pytest.mark.parametrize("preset", ["best", "paper"])
def test_given_options_override_the_preset(preset: str) -> None:
    given = GivenOptions(0.0, 17, hdet.PaperController(), None, hdet.Guard(retries=2))
    assert choose_options(preset, given, total_steps=100, num_replicas=4) == given[:5]


def train(run: SmallRun) -> float:
    """Train to the end and return the mean loss of the last 20 steps."""
    losses = []
    for step in range(STEPS):
        run.optimizer.zero_grad()
        loss = run.backward(step)
        run.optimizer.step()
        run.scheduler.step(loss)
        losses.append(float(loss.mean()))
    return fmean(losses[-20:])


def on_processes(rank: int) -> tuple[float, float]:
    model, optimizer = small()
    run = SmallRun("processes", rank, 4, model, optimizer, one_cycle, preset="best")
    return train(run), run.scheduler.get_knobs()["lr/group0"]


def test_best_preset_finds_a_learning_rate_from_a_far_too_low_start(processes: Processes) -> None:
    """The loss of a plain run hardly falls at this learning rate."""
    (loss, factor), *others = processes(4, on_processes)
    assert all(other[1] == factor for other in others)
    assert factor > 30
    model, optimizer = small()
    first = float(loss_of(model, batch(0, 0)).detach())
    plain = SmallRun("one", 0, 1, model, optimizer, one_cycle, scout=None, guard=None)
    assert train(plain) > 0.8 * first
    assert loss < 0.3 * first


def test_best_preset_without_scout_and_guard_equals_the_base_schedule() -> None:
    model, optimizer = small()
    options = {"preset": "best", "scout": None, "guard": None}
    train(SmallRun("one", 0, 1, model, optimizer, one_cycle, **options))
    other, optimizer = small()
    schedule = one_cycle(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(other, batch(step, 0)).backward()
        optimizer.step()
        if step < STEPS - 1:
            schedule.step()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def least_steps(num_replicas: int) -> int:
    """The steps of the shortest run that has a scout by default."""
    num_rounds = math.ceil(SWEEP_POINTS / num_replicas)
    return math.ceil(num_rounds * MIN_ROUND_STEPS / hdet.Scout().share)


def no_scout(words: str) -> Any:
    return pytest.warns(UserWarning, match=f"scout disabled: .*{words}.* learning rate is kept")


def test_warning_says_why_a_run_has_no_scout() -> None:
    optimizer = small()[1]
    without_model = hdet.HDET(one_cycle(optimizer))
    optimizer.step()
    with no_scout("needs `model=`, got None"):
        without_model.step(1.0)
    assert not without_model.is_scouting
    with no_scout("must fit in its `share`"):
        short = least_steps(8) - 1
        stacked(base=lambda o: OneCycleLR(o, 1e-5, total_steps=short, cycle_momentum=False))
    with no_scout("length of the run is unknown.*total_steps="):
        stacked(base=lambda o: ConstantLR(o, 1.0))
    assert stacked(base=lambda o: ConstantLR(o, 1.0), total_steps=STEPS).is_scouting
    with no_scout("ReduceLROnPlateau"):
        stacked(base=ReduceLROnPlateau, total_steps=STEPS)
    with no_scout("averages 0.003 of the given learning rate.*Noam"):
        stacked(base=lambda o: LambdaLR(o, lambda _: 0.003), total_steps=STEPS)
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):  # the user asks for a scout
        stacked(base=ReduceLROnPlateau, total_steps=STEPS, scout=hdet.Scout())


def test_missing_replicas_argument_raises_and_missing_losses_warn() -> None:
    model, optimizer = small()
    several = hdet.StackedReplicas(model, 8).optimizer(optimizer)
    with pytest.raises(ValueError, match="must be the StackedReplicas that made this optimizer"):
        hdet.HDET(one_cycle(several), model=model, scout=None)
    silent = stacked(scout=None, sync_every=2)
    silent.optimizer.step()
    silent.step()
    with pytest.warns(UserWarning, match="the guard is inactive"):
        silent.step()


def test_scout_warns_when_no_steps_are_left_to_try_more_learning_rates() -> None:
    """The best of these learning rates is the highest, and a second sweep does not fit."""
    model, optimizer = small()
    ensemble = hdet.StackedReplicas(model, 8)
    schedule = OneCycleLR(
        ensemble.optimizer(optimizer), 1e-4, total_steps=least_steps(8), cycle_momentum=False
    )
    scheduler = hdet.HDET(
        schedule,
        model=model,
        replicas=ensemble,
        scout=hdet.Scout(decades=0.5),
        probe=lambda m: loss_of(m, batch(9, 9)),
    )
    with pytest.warns(UserWarning, match="at the end of the range"):
        for step in range(8):
            losses = ensemble.losses(loss_of, torch.cat([batch(step, r) for r in range(8)]))
            losses.sum().backward()
            schedule.optimizer.step()
            scheduler.step(losses.detach())
    assert not scheduler.is_scouting


@pytest.mark.parametrize(
    ("num", "probe"),
    [(8, True), (8, False), (4, True), (4, False), (2, True), (1, False)],
)
def test_scout_starts_only_in_runs_with_a_minimum_number_of_steps(num: int, probe: bool) -> None:
    """The limits depend on the number of replicas. A probe is not needed."""
    least = least_steps(num)

    def started(total: int) -> hdet.HDET:
        return stacked(
            num,
            lambda o: OneCycleLR(o, 1e-5, total_steps=total, cycle_momentum=False),
            probe=(lambda model: loss_of(model, batch(9, 9))) if probe else None,
        )

    assert started(least).is_scouting
    with no_scout(""):
        assert not started(least - 1).is_scouting


def outside_ddp(rank: int) -> list[str]:
    model, optimizer = small()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.step()
        hdet.HDET(one_cycle(optimizer)).step(1.0)
        hdet.HDET(one_cycle(optimizer), model=model, gradients="local")
    model, optimizer = small()
    with warnings.catch_warnings(record=True) as also:
        warnings.simplefilter("always")
        optimizer.step()
        hdet.HDET(one_cycle(optimizer), model=model).step(1.0)
    return [str(warning.message) for warning in [*seen, *also]]


def test_no_scout_when_gradient_sharing_cannot_be_switched(processes: Processes) -> None:
    first, *others = [
        [text for text in texts if text.startswith("scout disabled")]
        for texts in processes(4, outside_ddp)
    ]
    assert "needs `model=`" in first[0]
    assert "wrapped in DDP" in first[1]
    assert len(first) == 2
    assert others == [[]] * 3  # the first process speaks for all


def test_no_scout_for_a_schedule_that_has_already_stepped() -> None:
    model, optimizer = small()
    schedule = one_cycle(optimizer)
    optimizer.step()
    schedule.step()
    assert not hdet.HDET(schedule).is_scouting
    assert not hdet.HDET(schedule, model=model).is_scouting


def test_best_preset_with_a_given_controller_uses_the_default_spread() -> None:
    chosen = choose_options(
        "best", GivenOptions(controller=hdet.Tracker()), total_steps=900, num_replicas=8
    )
    assert chosen.spread == 1 / 9


def test_total_steps_must_be_an_integer() -> None:
    for wrong in (300.0, "300"):
        with pytest.raises(TypeError, match="`total_steps` must be"):
            stacked(total_steps=wrong)


def test_run_resumed_without_its_scout_still_ends_its_schedule() -> None:
    """The steps of the unfinished search stay used."""
    model, optimizer = small()
    begun = SmallRun("stacked", 0, 4, model, optimizer, one_cycle, preset="best")
    for _ in range(10):
        begun.step()
    assert begun.scheduler.is_scouting
    begun.scheduler.converge()
    model, optimizer = small()
    resumed = SmallRun("one", 0, 1, model, optimizer, one_cycle, scout=None, guard=None)
    resumed.scheduler.load_state_dict(begun.scheduler.state_dict())
    for _ in range(10, STEPS):
        resumed.step()
    assert resumed.scheduler.get_base_lr()[0] < 1e-10


def test_unknown_preset_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"`preset` must be one of .*'best', 'paper'.*got 'good'"):
        stacked(preset="good")


def test_record_holds_the_settings_of_the_best_preset(tmp_path: Any) -> None:
    stacked(record=tmp_path)
    settings = reader.read(tmp_path).settings
    assert settings["scout"]["share"] == 0.03
    assert settings["guard"]["offload"] is True
    assert settings["spread"] == 0.0


def test_knobs_without_total_steps_and_sync_every_warn() -> None:
    given = GivenOptions(knobs=[hdet.weight_decay()])
    with pytest.warns(UserWarning, match="length of the run is unknown: cycles have 1000"):
        choose_options("best", given, total_steps=None, num_replicas=4)
    choose_options("best", given._replace(sync_every=20), total_steps=None, num_replicas=4)
    choose_options("best", GivenOptions(), total_steps=None, num_replicas=4)  # no knob explores
