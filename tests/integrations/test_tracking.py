"""What trackers and loggers of trainers get of a run."""

from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.integrations.tracking import scalars_now, scalars_of, text_of
from hdet.records.codec import as_line
from hdet.records.events import (
    CycleEvent,
    Event,
    ExcludedReplica,
    GuardEvent,
    KnobEntry,
    NoteEvent,
    SearchEvent,
    TriedRate,
)


def test_learning_rates_of_now_have_a_name_for_each_group_and_replica() -> None:
    model = nn.Linear(2, 1)
    groups: list[dict[str, Any]] = [
        {"params": [model.weight], "name": "weight"},
        {"params": [model.bias], "lr": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    scheduler = hdet.HDET(optimizer, model=model, total_steps=60, scout=None)
    assert scalars_now(scheduler) == {
        "hdet/lr/weight": 0.1,
        "hdet/lr/weight/replica0": 0.1,
        "hdet/lr/group1": 0.5,
        "hdet/lr/group1/replica0": 0.5,
        "hdet/scouting": 0.0,
    }


CYCLE = CycleEvent(
    step=20,
    cycle=1,
    losses=(0.5, None),
    loss_errors=(0.1, None),
    scores=(0.25, 0.75),
    distances=(0.01, 0.02),
    excluded=(ExcludedReplica(replica=1, reason="its loss is not finite"),),
    knobs=(
        KnobEntry(name="group0", is_lr=True, values=(0.1, 0.4), centre=0.2, scale=2.0),
        KnobEntry(name="dropout", values=(0.0, 0.5), centre=0.25, scale=0.3, hypergradient=-1.0),
    ),
)


def test_numbers_of_a_cycle_have_a_name_for_each_replica_and_knob() -> None:
    assert scalars_of(as_line(CYCLE)) == {
        "hdet/loss/replica0": 0.5,
        "hdet/loss_error/replica0": 0.1,
        "hdet/score/replica0": 0.25,
        "hdet/score/replica1": 0.75,
        "hdet/distance/replica0": 0.01,
        "hdet/distance/replica1": 0.02,
        "hdet/lr/group0": 0.2,
        "hdet/lr/group0/replica0": 0.1,
        "hdet/lr/group0/replica1": 0.4,
        "hdet/scale/group0": 2.0,
        "hdet/knob/dropout": 0.25,
        "hdet/knob/dropout/replica0": 0.0,
        "hdet/knob/dropout/replica1": 0.5,
        "hdet/scale/dropout": 0.3,
        "hdet/hypergradient/dropout": -1.0,
    }


def test_numbers_of_other_events_are_named_by_the_event() -> None:
    tried = (TriedRate(factor=1.0, score=2.0), TriedRate(factor=8.0))
    scout = SearchEvent(step=12, points=tried, factor=8.0, within=2.0, divergence=64.0)
    assert scalars_of(as_line(scout)) == {
        "hdet/scout/tried": 2.0,
        "hdet/scout/factor": 8.0,
        "hdet/scout/within": 2.0,
        "hdet/scout/divergence": 64.0,
    }
    guard = GuardEvent(step=30, back_to=20, factor=0.5)
    assert scalars_of(as_line(guard)) == {"hdet/guard/back_to": 20.0, "hdet/guard/factor": 0.5}
    note = NoteEvent(step=40, text="the end", measures={"loss": 0.5, "accuracy": None})
    assert scalars_of(as_line(note)) == {"hdet/note/loss": 0.5}


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (CYCLE, "replica 1 left out: its loss is not finite"),
        (
            SearchEvent(step=12, factor=8.0, within=2.0, compared_by="held out"),
            "scout: 8 times the given learning rate, within a factor of 2. Compared by held out.",
        ),
        (SearchEvent(step=6), ""),
        (
            GuardEvent(step=30, back_to=20, factor=0.5, reason="the loss spiked"),
            "guard: weights of step 20, learning rates times 0.5. the loss spiked",
        ),
        (
            GuardEvent(step=30, back_to=30, factor=0.5, reason="its ceiling"),
            "guard: learning rates times 0.5. its ceiling",
        ),
        (GuardEvent(step=30, back_to=30, factor=1.0, reason="blind"), "guard: no change. blind"),
        (NoteEvent(step=40, text="the end"), "the end"),
        (NoteEvent(step=40, measures={"loss": 0.5}), ""),
    ],
)
def test_text_says_what_an_event_decided(event: Event, text: str) -> None:
    assert text_of(as_line(event)) == text
