"""The schema of records: an event becomes a line, and the line becomes the same event."""

import json
import math

import pytest

from hdet.records.codec import as_line, modernise, parse
from hdet.records.events import (
    EVENTS,
    ConvergeCost,
    ConvergeEvent,
    CycleEvent,
    Event,
    ExcludedReplica,
    GuardEvent,
    KnobEntry,
    LRTracePoints,
    NoteEvent,
    ReplicaInfo,
    ResumeEvent,
    RunEvent,
    SearchEvent,
    Timing,
    TriedRate,
)

EXAMPLES = [
    RunEvent(
        time=1.5,
        settings={"spread": 0.1, "groups": ["a"]},
        replicas=ReplicaInfo(kind="StackedReplicas", size=2),
        device="cpu",
        versions={"hdet": "0.1.0"},
    ),
    ResumeEvent(step=3),
    CycleEvent(
        step=4,
        excluded=ExcludedReplica.from_reasons({1: "loss is not finite"}),
        converge=ConvergeCost(bytes=8.0, seconds=0.5),
        cycle=0,
        losses=(1.0, None),
        loss_errors=(0.1, None),
        weights=(1.0, 0.0),
        distances=(0.2, 0.3),
        scores=(1.0, 2.0),
        lr_trace=LRTracePoints(steps=(0, 3), lrs=((0.1, 0.2),), momenta=((0.9, 0.8),)),
        knobs=(
            KnobEntry(name="a", values=(0.1, 0.2), is_lr=True, centre=0.15, evidence=1.0),
            KnobEntry(name="dropout", values=(0.1, 0.2), space="logit", decision="up", reason="b"),
        ),
        training=Timing(seconds=3.0),
        probe=Timing(seconds=1.0),
    ),
    ConvergeEvent(step=5, converge=ConvergeCost(bytes=8.0)),
    SearchEvent(
        step=6,
        mid_run=True,
        compared_by="probe",
        points=(TriedRate(factor=1.0, score=None, error=0.1, bad_batch=True),),
        refined=(TriedRate(factor=2.0, score=0.5, error=0.1),),
        noise=2.0,
        reference_lrs={"a": 0.1},
        found=2.0,
        factor=4.0,
        factor_reason="c",
        within=1.5,
        shares={"prior": 0.25, "gains": 0.75},
        lowest_lost=8.0,
        divergence=16.0,
        reason="d",
    ),
    GuardEvent(step=7, reason="e", back_to=4, factor=0.5, scales={"lr": 0.5}),
    NoteEvent(step=8, text="f", measures={"loss": 0.5}),
]


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.kind)
def test_line_is_parsed_to_the_same_event(event: Event) -> None:
    line = json.loads(json.dumps(as_line(event), allow_nan=False))
    assert modernise(line) == line
    assert parse(EVENTS[line["event"]], line) == event


def test_each_event_has_an_example() -> None:
    assert {type(event) for event in EXAMPLES} == set(EVENTS.values())


def test_key_of_the_values_marks_a_learning_rate() -> None:
    first, second = as_line(EXAMPLES[2])["knobs"]
    assert first["lrs"] == [0.1, 0.2]
    assert "values" not in first
    assert second["values"] == [0.1, 0.2]
    assert "lrs" not in second


def test_number_that_is_not_finite_is_written_as_null() -> None:
    line = as_line(NoteEvent(step=1, measures={"loss": math.nan}))
    assert line["measures"] == {"loss": None}


def test_parts_that_do_not_apply_are_left_out() -> None:
    line = as_line(GuardEvent(step=1, back_to=1))
    assert "scales" not in line
    assert line["factor"] is None
