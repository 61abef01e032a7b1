"""Reading a record: complete, resumed, unfinished, damaged, of an older schema."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet.records.reader import read
from tests.sample_record import Sample, write_lines, write_sample


def cycle(step: int, **more: Any) -> dict[str, Any]:
    knob = {"name": "all", "lrs": [0.1, 0.2], "decision": "up", "reason": "why"}
    line = {"event": "cycle", "step": step, "cycle": step // 10, "losses": [1.0, 2.0]}
    return {**line, "knobs": [knob], **more}


def raw(folder: Path, *lines: str | bytes) -> Path:
    folder.mkdir(exist_ok=True)
    texts = [line.encode() if isinstance(line, str) else line for line in lines]
    (folder / "record.jsonl").write_bytes(b"\n".join(texts))
    return folder


def test_reader_reads_what_the_recorder_writes(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    ensemble = hdet.StackedReplicas(model, 3)
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    scheduler = hdet.OneCycleHDET(
        optimizer, 0.1, total_steps=12, sync_every=4, warmup_steps=4, model=model,
        replicas=ensemble, gradients="local", record=tmp_path,
    )  # fmt: skip
    for _ in range(12):
        optimizer.zero_grad()
        losses = ensemble.losses(lambda m, x: (m(x) - 1).square().mean(), torch.randn(6, 2))
        losses.sum().backward()
        optimizer.step()
        scheduler.step(losses)
    scheduler.note("the end", loss=0.5, accuracy=0.25)
    results = read(tmp_path)
    assert (results.damaged, results.dropped, results.is_finished) == ((), 0, True)
    assert (results.num_replicas, results.starts[0].replicas.kind) == (3, "StackedReplicas")
    assert (results.starts[0].device, set(results.versions)) == ("cpu", {"hdet", "python", "torch"})
    for cycle in results.cycles:
        assert len(cycle.losses) == len(cycle.loss_errors) == len(cycle.distances) == 3
        assert all(value is not None and value > 0 for value in cycle.distances)
        assert cycle.lr_trace.steps[-1] == cycle.step - 1
    assert results.cycles[-1].knobs[0].hypergradient_error is not None
    assert results.notes[0].text == "the end"
    assert results.measure("accuracy") == [(12, 0.25)]


def test_complete_record_is_read(tmp_path: Path) -> None:
    run = write_sample(tmp_path / "a", cycles=10, excluded={3: 2})
    results = read(run)
    assert results.name == "a"
    assert results == read(run / "record.jsonl")
    assert results.settings["sync_every"] == 25
    assert results.versions["hdet"] == "0.1.0"
    assert results.is_finished
    assert (results.last_step, results.total_steps, results.num_replicas) == (250, 250, 4)
    assert [c.step for c in results.cycles] == list(range(25, 251, 25))
    assert results.knob_names == ["embedding", "blocks"]
    assert results.excluded == [(100, 2, "loss is not finite")]
    assert results.cycles[3].losses[2] is None
    assert [step for step, _ in results.measure("loss")] == [125, 250]
    assert results.measure_names == ["loss", "accuracy"]
    assert (results.damaged, results.dropped) == ((), 0)
    first = results.cycles[0].knobs[0]
    assert len(first.values) == 4
    assert first.decision in ("up", "down", "stay")


def test_early_record_without_times_and_distances_is_read(tmp_path: Path) -> None:
    start = {"event": "run", "settings": {"total_steps": None}, "versions": {}}
    results = read(write_lines(tmp_path, [start, cycle(10)]))
    assert results.damaged == ()
    assert results.total_steps is None
    assert not results.is_finished
    assert results.cycles[0].distances == ()
    assert results.cycles[0].converge.seconds is None


def test_search_is_read(tmp_path: Path) -> None:
    (results,) = read(write_sample(tmp_path, cycles=2, scouted=True)).scouts
    assert results is not None
    assert (results.step, results.found, results.points[-1].score) == (12, 2.0, None)
    assert [point.factor for point in results.points[:2]] == [0.01, 0.04]
    assert (results.refined[0].factor, results.refined[0].score) == (1.0, 3.4)


def test_events_that_a_resume_supersedes_are_dropped_and_counted(tmp_path: Path) -> None:
    note = {"event": "note", "step": 30, "text": "gone", "measures": {}}
    lines = [
        *({"event": "run", "settings": {}}, cycle(10), cycle(20)),
        *({"event": "converge", "step": 20}, cycle(30), note, {"event": "converge", "step": 35}),
        *({"event": "run", "settings": {}}, {"event": "resume", "step": 20}, cycle(30)),
    ]
    results = read(write_lines(tmp_path, lines))
    assert [c.step for c in results.cycles] == [10, 20, 30]
    assert [c.step for c in results.converges] == [20]
    assert results.notes == ()
    assert (results.dropped, results.resumes, len(results.starts)) == (3, (20,), 2)


def test_run_resumed_twice_keeps_the_last_branch(tmp_path: Path) -> None:
    steps = [10, 20, 30, 40]
    lines = [cycle(step) for step in steps]
    lines += [{"event": "resume", "step": 30}, cycle(40)]
    lines += [{"event": "resume", "step": 10}, cycle(20)]
    results = read(write_lines(tmp_path, lines))
    assert [c.step for c in results.cycles] == [10, 20]
    assert (results.resumes, results.dropped) == ((10,), 4)


def test_run_started_over_in_the_same_folder_replaces_the_first(tmp_path: Path) -> None:
    lines = [cycle(10), cycle(20), {"event": "run", "settings": {}}, cycle(10, losses=[5.0, 5.0])]
    results = read(write_lines(tmp_path, lines))
    assert [c.losses for c in results.cycles] == [(5.0, 5.0)]
    assert results.dropped == 2


def test_resume_may_change_the_number_of_replicas(tmp_path: Path) -> None:
    write_lines(tmp_path, Sample(cycles=6, total_cycles=10).lines())
    results = read(write_lines(tmp_path, Sample(cycles=10, replicas=7).lines(first=4)))
    assert [len(c.losses) for c in results.cycles] == [4] * 4 + [7] * 6
    assert (results.num_replicas, results.most_replicas) == (7, 7)
    assert results.is_finished


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("{not json", "not JSON"),
        (b'"\xff"', "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ("{}", "the field event is missing"),
        ("[" * 100_000, "nested too deeply"),
        (json.dumps(cycle(10) | {"step": None}), "the field step is missing"),
        (json.dumps(cycle(10) | {"step": "10"}), "step is not an integer of at least 0"),
        (json.dumps(cycle(10) | {"step": -1}), "step is not an integer of at least 0"),
        (json.dumps(cycle(10) | {"step": True}), "step is not an integer of at least 0"),
        (json.dumps(cycle(10) | {"losses": None}), "the field losses is missing"),
        (json.dumps(cycle(10) | {"losses": 3}), "losses is not a list"),
        (json.dumps(cycle(10) | {"losses": ["a"]}), "losses is not a number"),
        (json.dumps(cycle(10) | {"knobs": [3]}), "knobs holds an entry that is not a JSON object"),
        (json.dumps(cycle(10) | {"knobs": [{"name": 3}]}), "name is not a text"),
        (json.dumps(cycle(10) | {"converge": 3}), "converge is not a JSON object"),
        (json.dumps(cycle(10) | {"excluded": [{}]}), "the field replica is missing"),
        (json.dumps(cycle(10) | {"knobs": cycle(1)["knobs"] * 2}), "two knobs"),
        ('{"event": "resume"}', "the field step is missing"),
        ('{"event": "note", "step": 1, "measures": {"loss": "low"}}', "loss is not a number"),
    ],
)
def test_damaged_line_is_skipped_and_listed(tmp_path: Path, line: str | bytes, cause: str) -> None:
    results = read(raw(tmp_path, json.dumps(cycle(20)), line, json.dumps(cycle(30)), ""))
    assert [c.step for c in results.cycles] == [20, 30]
    ((number, why),) = results.damaged
    assert number == 2
    assert cause in why


def test_half_written_last_line_is_named_as_such(tmp_path: Path) -> None:
    results = read(raw(tmp_path, json.dumps(cycle(10)), json.dumps(cycle(20))[:40]))
    assert [c.step for c in results.cycles] == [10]
    ((number, why),) = results.damaged
    assert (number, why) == (2, "half written: the last line has no end")


def test_complete_last_line_without_newline_is_read(tmp_path: Path) -> None:
    results = read(raw(tmp_path, json.dumps(cycle(10)), json.dumps(cycle(20))))
    assert [c.step for c in results.cycles] == [10, 20]
    assert results.damaged == ()


def test_unicode_line_separator_in_a_text_does_not_end_the_line(tmp_path: Path) -> None:
    note = {"event": "note", "step": 1, "text": "a\u2028b"}
    results = read(raw(tmp_path, json.dumps(note, ensure_ascii=False), ""))
    assert results.notes[0].text == "a\u2028b"


@pytest.mark.parametrize("number", ["null", "NaN", "Infinity", "1e999", "1" + "0" * 400])
def test_number_that_is_not_finite_counts_as_missing(tmp_path: Path, number: str) -> None:
    line = json.dumps(cycle(10)).replace("2.0", number)
    assert read(raw(tmp_path, line)).cycles[0].losses == (1.0, None)


def test_unknown_events_and_fields_are_ignored(tmp_path: Path) -> None:
    results = read(write_lines(tmp_path, [{"event": "eclipse"}, cycle(10, moon="full")]))
    assert len(results.cycles) == 1
    assert results.damaged == ()


def test_note_on_an_earlier_step_is_sorted_in(tmp_path: Path) -> None:
    notes = [{"event": "note", "step": step, "measures": {"loss": step}} for step in (30, 10, 20)]
    results = read(write_lines(tmp_path, notes))
    assert results.measure("loss") == [(10, 10.0), (20, 20.0), (30, 30.0)]
    assert results.last_step == 30


def test_newer_schema_is_refused(tmp_path: Path) -> None:
    run = raw(tmp_path, '{"schema": 3, "event": "run"}')
    with pytest.raises(ValueError, match=r"schema 3; .* reads schema 2"):
        read(run)


def test_names_of_schema_1_are_read(tmp_path: Path) -> None:
    knob = {"name": "all", "lrs": [0.1], "pull": 1.5, "mass": 2.0, "reach": 3.0, "narrow": 0.5}
    course = {"steps": [8, 9], "lrs": [[0.1, 0.1]], "momenta": None}
    lines: list[dict[str, Any]] = [
        {"event": "run", "replicas": {"kind": "OneReplica", "size": 1}},
        {
            "event": "scout",
            "step": 4,
            "late": True,
            "by": "probe",
            "close": [{"factor": 1.0, "score": 2.0, "glitch": True}],
            "peaks": {"close": 0.1},
            "why": "known",
            "edge": 8.0,
            "explosion": 16.0,
        },
        cycle(10, knobs=[knob], course=course),
    ]
    results = read(write_lines(tmp_path, [{"schema": 1, **line} for line in lines]))
    (search,) = results.scouts
    assert results.starts[0].replicas.kind == "SingleReplica"
    assert (search.mid_run, search.compared_by, search.factor_reason) == (True, "probe", "known")
    assert (search.lowest_lost, search.divergence) == (8.0, 16.0)
    assert search.refined[0].bad_batch
    assert search.reference_lrs == {"close": 0.1}  # a group may have any name
    entry = results.cycles[0].knobs[0]
    assert (entry.evidence, entry.evidence_variance) == (1.5, 2.0)
    assert (entry.max_move, entry.spread_share) == (3.0, 0.5)
    assert results.cycles[0].lr_trace.steps == (8, 9)


def test_missing_record_is_an_error_that_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no record at .*record\.jsonl"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match="no record at"):
        read(tmp_path / "nowhere")


def test_empty_record_is_an_empty_history(tmp_path: Path) -> None:
    results = read(raw(tmp_path, ""))
    assert results.is_empty
    assert not results.is_finished
    assert (results.cycles, results.settings, results.num_replicas, results.last_step) == (
        (),
        {},
        None,
        0,
    )


def test_impossible_number_of_replicas_is_damage(tmp_path: Path) -> None:
    line = json.dumps({"event": "run", "replicas": {"size": 2**50}})
    results = read(raw(tmp_path / "a", line, ""))
    assert results.damaged[0].cause.startswith("the number of replicas is not plausible")


def test_error_names_the_runs_below_the_folder(tmp_path: Path) -> None:
    write_sample(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="there are runs in"):
        read(tmp_path)
