"""Sinks: objects of the user that receive the events of a run."""

import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.records.sinks import Record
from tests.processes import Processes


class Memory:
    """Keeps the events, and whether it was closed."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.is_closed = False

    def write(self, event: Mapping[str, Any]) -> None:
        self.events.append(dict(event))

    def close(self) -> None:
        self.is_closed = True


class Failing(Memory):
    """Raises at the second event."""

    def write(self, event: Mapping[str, Any]) -> None:
        super().write(event)
        if len(self.events) == 2:
            raise RuntimeError("the tracker is down")


def train(record: Record | None, steps: int = 6) -> hdet.HDET:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = hdet.OneCycleHDET(optimizer, 0.1, total_steps=6, sync_every=2, record=record)
    for step in range(steps):
        optimizer.step()
        scheduler.step(1.0 + step)
    scheduler.note("the end", loss=0.5)
    return scheduler


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]


def test_sink_receives_all_events_as_plain_data() -> None:
    sink = Memory()
    train(sink)
    assert [event["event"] for event in sink.events] == ["run", "cycle", "cycle", "cycle", "note"]
    assert sink.events[1]["losses"] == [1.5]
    assert sink.events[-1]["measures"] == {"loss": 0.5}
    assert json.loads(json.dumps(sink.events, allow_nan=False)) == sink.events


def test_folder_and_sink_receive_the_same_events(tmp_path: Path) -> None:
    sink = Memory()
    train([tmp_path, sink])
    assert lines_of(tmp_path) == sink.events


def test_sink_that_raises_ends_alone(tmp_path: Path) -> None:
    failing, sink = Failing(), Memory()
    with pytest.warns(UserWarning, match="record Failing failed.*: the tracker is down") as seen:
        train([failing, sink, tmp_path])
    assert len(seen) == 1
    assert len(failing.events) == 2
    assert failing.is_closed
    assert lines_of(tmp_path) == sink.events
    assert len(sink.events) == 5


def test_sink_is_closed_when_its_run_is_gone() -> None:
    sink = Memory()
    scheduler = train(sink)
    assert not sink.is_closed
    del scheduler
    gc.collect()
    assert sink.is_closed


@pytest.mark.parametrize("record", [3, [3], Memory, object(), ["runs/a", None]])
def test_record_must_be_folders_or_sinks(record: Any) -> None:
    with pytest.raises(TypeError, match="`record` must be a folder, an object with"):
        train(record)


def events_of_this_process(rank: int) -> int:
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    sink = Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = hdet.OneCycleHDET(
        optimizer, 0.1, total_steps=4, sync_every=2, model=model, gradients="local", record=sink
    )
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2).double()).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
    return len(sink.events)


def test_only_the_first_process_writes(processes: Processes) -> None:
    assert processes(2, events_of_this_process) == [3, 0]


class Changing(Memory):
    """Changes the events that it receives."""

    def write(self, event: Mapping[str, Any]) -> None:
        dict.clear(event)  # type: ignore[arg-type]


def test_sink_that_changes_its_events_leaves_the_other_sinks_alone(tmp_path: Path) -> None:
    train([Changing(), tmp_path])
    assert [line["event"] for line in lines_of(tmp_path)] == ["run", *["cycle"] * 3, "note"]


@pytest.mark.parametrize("record", [b"runs", "", 3])
def test_record_that_names_no_folder_is_refused(record: Any) -> None:
    with pytest.raises(TypeError, match="`record` must be a folder"):
        train(record)
