"""The record: one line for each cycle, strict JSON, readable before the end of the run."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.records.events import SCHEMA, ConvergeCost, ConvergeEvent, ResumeEvent
from hdet.records.sinks import JsonLines
from hdet.records.writer import Recorder, Timers
from hdet.tensors.timing import Stopwatch
from tests.processes import Processes
from tests.scheduler.test_hdet import TOTAL, T, Trainer


def record(rank: int, folder: str) -> None:
    trainer = Trainer(rank, record=folder).train(range(10))
    trainer.scheduler.converge()
    trainer.train(range(10, TOTAL))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (folder / "record.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_each_cycle_is_one_complete_line(processes: Processes, tmp_path: Path) -> None:
    processes(3, record, str(tmp_path))
    start, *lines = lines_of(tmp_path)
    assert start["event"] == "run"
    assert start["settings"]["spread"] == 0.3
    assert start["settings"]["controller"]["temperature"] == 0.1
    assert set(start["versions"]) == {"hdet", "python", "torch"}
    assert all(line["schema"] == SCHEMA for line in lines)
    cycles = [line for line in lines if line["event"] == "cycle"]
    assert [line["step"] for line in cycles] == list(range(T, TOTAL + 1, T))
    assert [line["cycle"] for line in cycles] == list(range(len(cycles)))
    assert [line["step"] for line in lines if line["event"] == "converge"] == [10]
    numel = sum(p.numel() for p in Trainer.__init__.__globals__["toy"].toy().parameters())
    for line in cycles:
        assert len(line["losses"]) == 3
        assert line["excluded"] == []
        assert line["converge"]["seconds"] > 0
        assert line["converge"]["bytes"] == 8 * numel
        for knob in line["knobs"]:
            assert len(knob["lrs"]) == 3
            assert {"name", "scale", "velocity", "hypergradient"} < set(knob)
            assert knob["decision"] in ("up", "down", "stay")
            assert knob["reason"]
    assert cycles[0]["knobs"][0]["reason"] == "warm-up until step 8"
    assert sum(cycles[3]["weights"]) == pytest.approx(1)


def test_one_replica_writes_a_record_with_null_for_nan(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = hdet.OneCycleHDET(
        optimizer, 0.1, total_steps=4, sync_every=2, record=tmp_path / "a"
    )
    for loss in (1.0, math.nan, 1.0, 2.0):
        optimizer.step()
        scheduler.step(loss)
    _, *lines = lines_of(tmp_path / "a")
    assert [line["losses"] for line in lines] == [[None], [1.5]]


def test_resumed_run_appends_to_its_record(tmp_path: Path) -> None:
    def run(state: dict[str, Any] | None) -> dict[str, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        scheduler = hdet.OneCycleHDET(optimizer, 0.1, total_steps=8, sync_every=2, record=tmp_path)
        if state:
            scheduler.load_state_dict(state)
        for _ in range(4):
            optimizer.step()
            scheduler.step(1.0)
        return scheduler.state_dict()

    run(run(None))
    events = [line["event"] for line in lines_of(tmp_path)]
    assert events == ["run", "cycle", "cycle", "run", "resume", "cycle", "cycle"]


def test_failing_disk_ends_the_record_but_not_the_run(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "run")
    recorder = Recorder([file])
    file.path.unlink()
    file.path.parent.rmdir()
    with pytest.warns(UserWarning, match="writing the record .* failed"):
        recorder.write(ResumeEvent(step=1))


def test_event_waits_until_its_times_are_known(tmp_path: Path) -> None:
    class Slow(Stopwatch):
        ready = False

        def seconds(self, *, wait: bool = False) -> float | None:
            return 0.5 if self.ready or wait else None

    stopwatch = Slow(torch.device("cpu"))
    recorder = Recorder([JsonLines(tmp_path)])
    event = ConvergeEvent(step=1, converge=ConvergeCost(bytes=1))
    recorder.write(event, Timers(converge=stopwatch))
    recorder.write(ResumeEvent(step=1))
    assert lines_of(tmp_path) == []
    stopwatch.ready = True
    recorder.flush()
    assert [line["event"] for line in lines_of(tmp_path)] == ["converge", "resume"]
    assert lines_of(tmp_path)[0]["converge"] == {"bytes": 1, "seconds": 0.5}


def test_half_written_line_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text('{"event": "cyc')
    Recorder([JsonLines(tmp_path)]).write(ResumeEvent(step=3))
    first, second = (tmp_path / "record.jsonl").read_text().splitlines()
    assert first == '{"event": "cyc'
    assert json.loads(second)["event"] == "resume"


@pytest.mark.parametrize("value", [None, "abc", 10**400, torch.ones(2)])
def test_note_refuses_what_is_not_a_number(value: Any, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = hdet.OneCycleHDET(optimizer, 0.1, total_steps=4, sync_every=2, record=tmp_path)
    with pytest.raises(TypeError, match="`loss` must be a number"):
        scheduler.note(loss=value)
