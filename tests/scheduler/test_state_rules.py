"""Saved states with damaged fields are refused before anything changes; sound ones are taken."""

import copy
import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_schedules

import hdet
from tests import small_run


def started(base: Callable[[Any], Any], **options: Any) -> small_run.SmallRun:
    torch.manual_seed(0)
    model = nn.Linear(3, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    settings = {"guard": hdet.Guard(), "sync_every": 5, "total_steps": 60, **options}
    return small_run.SmallRun("stacked", 0, 2, model, optimizer, base, **settings)


def cosine(optimizer: Any) -> Any:
    return torch_schedules.CosineAnnealingLR(optimizer, 60)


def trained(base: Callable[[Any], Any] = cosine, **options: Any) -> small_run.SmallRun:
    run = started(base, **options)
    for _ in range(12):
        run.step()
    run.scheduler.converge()
    return run


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one field: its path, and last its new value."""
    *keys, last, value = path

    def change(state: dict[str, Any]) -> None:
        place: Any = state
        for key in keys:
            place = place[key]
        place[last] = value

    return change


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.pop(key)


DAMAGES = [
    (put("step", "12"), "an integer of at least 0 as `step`, got '12'"),
    (put("step", math.nan), "an integer of at least 0 as `step`, got nan"),
    (put("step", -5), "an integer of at least 0 as `step`, got -5"),
    (put("step", True), "an integer of at least 0 as `step`, got True"),
    (put("sync_every", 0), "an integer of at least 1 as `sync_every`, got 0"),
    (put("total_steps", "60"), "an integer of at least 0 as `total_steps`, got '60'"),
    (put("cycle", "2"), "an integer of at least 0 as `cycle`, got '2'"),
    (put("started", 1), "True or False as `started`, got 1"),
    (put("held", [0.1, 0.1]), "a list of 1 values as `held`"),
    (put("noise", [0.0]), "a list of 2 values as `noise`"),
    (put("base_step", None), "an integer of at least 0 as `base_step`, got None"),
    (put("base_step", 13), "an integer of at most 12 as `base_step`, got 13"),
    (put("base_step", 10**30), "an integer of at most 10+ as `base_step`"),
    (put("cycle", 10**30), "an integer of at most 10+ as `cycle`"),
    (put("base", "momenta", "x"), "a list as `base.momenta`, got 'x'"),
    (put("hdet", torch.ones(2)), "must have version 2, got tensor"),
    (put("found_lr", -1.0), "a finite number above 0 as `found_lr`, got -1.0"),
    (put("knobs", 3), "a list as `knobs`, got 3"),
    (put("knobs", []), "must hold the knobs"),
    (put("knobs", 0, "scale", math.nan), r"a finite number above 0 as `knobs\[0\].scale`, got nan"),
    (put("knobs", 0, "scale", -1.0), r"a finite number above 0 as `knobs\[0\].scale`, got -1.0"),
    (put("knobs", 0, "scale", "1"), r"a number as `knobs\[0\].scale`, got '1'"),
    (put("knobs", 0, "scale", 1e300), r"a number of at most 3e\+06 as `knobs\[0\].scale`"),
    (put("knobs", 0, "scale", 1e6), None),  # a learning rate of 1e4
    (put("knobs", 0, "felt", None), r"a list as `knobs\[0\].felt`, got None"),
    (put("guard", "best", [math.nan, 0.1]), r"a finite number as `guard.best\[0\]`, got nan"),
    (put("guard", "rollbacks", "x"), "an integer of at least 0 as `guard.rollbacks`, got 'x'"),
    (put("guard", {"good": "abc"}), "must be complete, got one without 'guard.first'"),
    (put("guard", []), r"a dict as `guard`, got \[\]"),
    (put("search", {"grid": []}), "must be complete, got one without 'search.used'"),
    (put("base", {"kind": "CosineAnnealingLR"}), "got one without 'base.schedule'"),
    (put("base", "schedule", "last_epoch", "x"), "a number as `base.schedule.last_epoch`, got 'x'"),
    (put("base", "schedule", "last_epoch", 1.5), "an integer of at least -1 as `base.schedule"),
    (
        put("base", "schedule", "base_lrs", [math.inf]),
        r"a finite number as `base.schedule.base_lrs",
    ),
    (put("base", "schedule", "T_max", math.nan), "a number as `base.schedule.T_max`, got nan"),
    (put("base", "schedule", "step", 3), "no entry 'step' as `base.schedule`, got 3"),
    (put("base", "schedule", "optimizer", 3), "no entry 'optimizer' as `base.schedule`, got 3"),
    (without("guard"), None),
    (without("noise"), "must be complete, got one without 'noise'"),
    (put("new in a later version", 3), None),
]


@pytest.fixture(scope="module")
def sound() -> str:
    return json.dumps(trained().scheduler.state_dict())


@pytest.mark.parametrize(("damage", "why"), DAMAGES)
def test_damaged_field_is_refused_and_nothing_changes(
    damage: Any, why: str | None, sound: str
) -> None:
    state = json.loads(sound)
    damage(state)
    run = started(cosine)
    run.step()
    run.scheduler.converge()
    before = copy.deepcopy(run.scheduler.state_dict())
    if why is None:
        run.scheduler.load_state_dict(state)
        assert run.scheduler.last_epoch == 12
        return
    with pytest.raises(ValueError, match=why):
        run.scheduler.load_state_dict(state)
    assert run.scheduler.state_dict() == before
    run.step()


@pytest.mark.parametrize("state", [[1], None, {}, {"last_epoch": "3"}, {1: 2}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="`state_dict` must"):
        started(cosine).scheduler.load_state_dict(state)


def chained(optimizer: Any) -> Any:
    first = torch_schedules.LinearLR(optimizer, total_iters=5)
    second = torch_schedules.MultiStepLR(optimizer, [8, 10])
    return torch_schedules.SequentialLR(optimizer, [first, second], milestones=[5])


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "plateau": lambda one: torch_schedules.ReduceLROnPlateau(one, patience=1),
    "cyclic": lambda one: torch_schedules.CyclicLR(one, 0.001, 0.1, step_size_up=4),
    "one cycle": lambda one: torch_schedules.OneCycleLR(one, 0.1, total_steps=60),
    "lambda": lambda one: torch_schedules.LambdaLR(one, lambda step: 0.9**step),
    "restarts": lambda one: torch_schedules.CosineAnnealingWarmRestarts(one, 7),
    "sequential": chained,
    "constant": lambda one: torch_schedules.ConstantLR(one, total_iters=3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_sound_state_of_every_schedule_is_taken(name: str) -> None:
    run = trained(SCHEDULES[name])
    state = run.scheduler.state_dict()
    again = started(SCHEDULES[name])
    again.scheduler.load_state_dict(state)
    assert again.scheduler.state_dict() == state
    plain = SCHEDULES[name](torch.optim.SGD([torch.zeros(1)], lr=0.01, momentum=0.9))
    again.scheduler.load_state_dict(plain.state_dict())


OPTIONS = {"scout": hdet.Scout(share=0.5), "preset": "best", "guard": None}
MID_CYCLE = "ignore:the state is saved in the middle of a cycle"


@pytest.fixture(scope="module")
def searching() -> dict[str, Any]:
    """The last state of a search, with tensors of held-out batches."""
    run = started(cosine, **OPTIONS)
    for _ in range(20):
        run.step()
        if run.scheduler.is_scouting:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="the state is saved in the middle")
                state: dict[str, Any] = copy.deepcopy(run.scheduler.state_dict())
    assert state["search"]["points"] and state["search"]["held_out"]["calls"]
    return state


SEARCH_DAMAGES = [
    (put("used", -1), "an integer of at least 0 as `search.used`, got -1"),
    *((without(key), f"got one without 'search.{key}'") for key in ("first", "round", "ways")),
    *((without(key), f"got one without 'search.{key}'") for key in ("points", "start_scores")),
    (put("grid", []), r"a list of 2 values as `search.grid`, got \[\]"),
    (put("grid", 0, "x"), r"a number as `search.grid\[0\]`, got 'x'"),
    (put("grid", 1, torch.ones(2)), r"an integer of at least 1 as `search.grid\[1\]`"),
    (put("grid", 1, 10**400), r"an integer of at most 1000000 as `search.grid\[1\]`"),
    (put("grid", 2, math.inf), r"a finite number of at least -300 as `search.grid\[2\]`, got inf"),
    (put("round", 10**6), "an integer of at most 3 as `search.round`, got 1000000"),
    (put("first", 10**6), "an integer of at most 18 as `search.first`, got 1000000"),
    (put("ways", [1.5]), r"an integer of at least -1 as `search.ways\[0\]`, got 1.5"),
    (put("points", []), "an entry for each learning rate that was tried as `search.points`"),
    (put("points", 0, 0, 24), r"an integer of at most 23 as `search.points\[0\]\[0\]`, got 24"),
    (put("points", 0, 1, "x"), r"a number as `search.points\[0\]\[1\]`, got 'x'"),
    (put("points", 0, 3, None), r"a number as `search.points\[0\]\[3\]`, got None"),
    (put("points", 0, [0, 0.1]), r"a list of 3 values as `search.points\[0\]`, got \[0, 0.1\]"),
    (put("points", 0, [0] * 6), r"a list of 5 values as `search.points\[0\]`"),
    (put("start_scores", [math.nan]), r"a finite number as `search.start_scores\[0\]`, got nan"),
    (put("by", 3), "a text as `search.by`, got 3"),
    (put("late", {"scout": {"share": 2}, "total_steps": 60}), "the options of a Scout"),
    (put("held_out", "left", -1), "an integer of at least 0 as `search.held_out.left`, got -1"),
    (put("held_out", {"calls": []}), "got one without 'search.held_out.left'"),
    (put("held_out", "calls", 0, [3]), r"a dict as `search.held_out.calls\[0\]\[0\]`, got 3"),
    (put("held_out", "calls", 0, 0, {}), r"without 'search.held_out.calls\[0\]\[0\].parts'"),
    (
        put("held_out", "calls", 0, 0, "parts", "x"),
        r"a list as `search.held_out.calls\[0\]\[0\].pa",
    ),
    (put("held_out", "calls", 0, 0, "losses", 1.0), "a tensor of losses as `search.held_out.calls"),
    (put("held_out", "calls", 0, 0, "autocast", "x"), "a dtype of torch as `search.held_out.calls"),
    (put("held_out", "calls", 0, 0, "training", [1]), "True or False as `search.held_out.calls"),
    (put("held_out", {"batches": [[3]]}), r"a list as `search.held_out.batches\[0\]\[0\]`, got 3"),
]


@pytest.mark.filterwarnings(MID_CYCLE)
@pytest.mark.parametrize(("damage", "why"), SEARCH_DAMAGES)
def test_damaged_search_is_refused_and_nothing_changes(
    damage: Any, why: str, searching: dict[str, Any]
) -> None:
    state = copy.deepcopy(searching)
    damage(state["search"])
    run = started(cosine, **OPTIONS)
    with pytest.raises(ValueError, match=why):
        run.scheduler.load_state_dict(state)
    assert run.scheduler.last_epoch == 0
    run.step()
    run.scheduler.load_state_dict(searching)
    assert run.scheduler.last_epoch == searching["step"]


@pytest.mark.filterwarnings(MID_CYCLE)
def test_search_of_hdet_0_1_starts_anew_after_the_steps_that_it_has_taken(
    searching: dict[str, Any],
) -> None:
    """Its grid has two entries, and its rounds are others."""
    state = {**searching, "search": {"grid": [4.0, 2], "used": 4, "points": "unknown"}}
    run = started(cosine, **OPTIONS)
    run.scheduler.load_state_dict(state)
    assert run.scheduler.is_scouting
    assert run.scheduler.state_dict()["search"]["round"] == 0


@pytest.mark.filterwarnings(MID_CYCLE)
def test_held_out_batches_of_other_losses_are_left_out(searching: dict[str, Any]) -> None:
    state = copy.deepcopy(searching)
    for calls in state["search"]["held_out"]["calls"]:
        calls[0]["parts"].append(torch.ones(2))
    run = started(cosine, **OPTIONS)
    run.scheduler.load_state_dict(state)
    with pytest.warns(UserWarning, match="batches of the checkpoint do not fit this loop"):
        for _ in range(12):
            run.step()
    assert not run.scheduler.is_scouting


@pytest.mark.filterwarnings(MID_CYCLE)
def test_sound_states_of_a_search_are_taken() -> None:
    run = started(cosine, **OPTIONS)
    for _ in range(20):
        run.step()
        if run.scheduler.is_scouting:
            state = copy.deepcopy(run.scheduler.state_dict())
            again = started(cosine, **OPTIONS)
            again.scheduler.load_state_dict(state)
            assert again.scheduler.last_epoch == run.scheduler.last_epoch


def test_state_of_a_plain_schedule_says_that_the_run_goes_on_without_a_scout() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4000)
    for _ in range(3):
        optimizer.step()
        plain.step()
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    base = torch.optim.lr_scheduler.OneCycleLR(fresh, 0.1, total_steps=4000)
    scheduler = hdet.HDET(base, model=model)
    with pytest.warns(UserWarning, match=r"a plain schedule at step 3, .* Call `scout_again\(\)`"):
        scheduler.load_state_dict(plain.state_dict())
    assert not scheduler.is_scouting
