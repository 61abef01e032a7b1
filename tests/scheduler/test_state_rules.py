"""Saved states with damaged fields are refused before anything changes; sound ones are taken."""

import copy
import json
import math
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
    (put("found_lr", -1.0), "a finite number above 0 as `found_lr`, got -1.0"),
    (put("knobs", 3), "a list as `knobs`, got 3"),
    (put("knobs", []), "must hold the knobs"),
    (put("knobs", 0, "scale", math.nan), r"a finite number above 0 as `knobs\[0\].scale`, got nan"),
    (put("knobs", 0, "scale", -1.0), r"a finite number above 0 as `knobs\[0\].scale`, got -1.0"),
    (put("knobs", 0, "scale", "1"), r"a number as `knobs\[0\].scale`, got '1'"),
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


@pytest.mark.filterwarnings("ignore:the state is saved in the middle of a cycle")
def test_sound_states_of_a_search_are_taken() -> None:
    options = {"scout": hdet.Scout(share=0.5), "preset": "best", "guard": None}
    run = started(cosine, **options)
    for _ in range(20):
        run.step()
        if run.scheduler.is_scouting:
            state = copy.deepcopy(run.scheduler.state_dict())  # with tensors of held-out batches
            again = started(cosine, **options)
            again.scheduler.load_state_dict(state)
            assert again.scheduler.last_epoch == run.scheduler.last_epoch
    fields = {"used": -1, "points": [[0, "x", 1.0]], "ways": [1.5], "held_out": {"left": -1}}
    for field, value in fields.items():
        damaged = {**state, "search": {**state["search"], field: value}}
        with pytest.raises(ValueError, match=f"`search.{field}"):
            again.scheduler.load_state_dict(damaged)
    late = {"late": {"scout": {"share": 2}, "total_steps": 60}}
    with pytest.raises(ValueError, match="the options of a Scout"):
        again.scheduler.load_state_dict({**state, "search": {**state["search"], **late}})
