"""What TensorBoard stores of a run."""

import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hdet.integrations.tensorboard import TensorBoardSink
from hdet.records.codec import as_line
from hdet.records.events import NoteEvent, ResumeEvent
from tests.integrations.features import RECORDS
from tests.integrations.launch import ROOT, launch
from tests.integrations.tracked import Points, TrackedEvents, differing, train
from tests.processes import run_program


def read(folder: Path) -> EventAccumulator:
    """Everything that TensorBoard shows of a folder."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def points(found: EventAccumulator) -> Points:
    return {
        name: [(point.step, point.value) for point in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


def texts(found: EventAccumulator) -> list[str]:
    stored = found.Tensors("hdet/events/text_summary")
    return [point.tensor_proto.string_val[0].decode() for point in stored]


@pytest.mark.works("TensorBoard", RECORDS)
def test_tensorboard_stores_scalars_texts_charts_and_the_report(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    sink = TensorBoardSink(folder)
    assert not folder.exists()  # other processes make a sink as well
    events = train(sink)
    found = read(folder)
    stored = points(found)
    assert not differing(stored, events.points())
    for text, expected_text in zip(texts(found), events.texts(), strict=True):
        assert text.startswith(expected_text)
    charts = found.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    assert b"learning rates" in charts and b"hdet/lr/.*" in charts
    lines = (folder / "hdet/record.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == events.all
    assert "54.7" in (folder / "hdet/report.html").read_text()


def note(step: int) -> NoteEvent:
    return NoteEvent(step=step, measures={"loss": 1.0 + step})


@pytest.mark.parametrize("is_new_process", [False, True])
def test_tensorboard_hides_steps_that_a_resume_superseded(
    tmp_path: Path, is_new_process: bool
) -> None:
    sink = TensorBoardSink(tmp_path)
    for step in (10, 20, 30):
        sink.write(as_line(note(step)))
    if is_new_process:
        sink.close()
        sink = TensorBoardSink(tmp_path)
    sink.write(as_line(ResumeEvent(step=20)))
    sink.write(as_line(note(25)))
    sink.close()
    assert points(read(tmp_path))["hdet/note/loss"] == [(10, 11.0), (20, 21.0), (25, 26.0)]


@pytest.mark.integrations
def test_first_process_alone_writes_the_numbers_of_all_replicas(tmp_path: Path) -> None:
    made = launch("tests.integrations.tracker_runs:ddp", folder=str(tmp_path))
    assert made == [True, False]
    stored = points(read(tmp_path / "0"))
    assert stored["hdet/scout/factor"][0][1] > 30
    lrs = [[lr for _, lr in stored[f"hdet/lr/group0/replica{replica}"]] for replica in (0, 1)]
    assert len(lrs[0]) == len(lrs[1]) >= 10
    assert (tmp_path / "0/hdet/report.html").exists()


@pytest.mark.integrations
def test_script_of_the_page_logs_to_tensorboard(tmp_path: Path) -> None:
    script = str(ROOT / "examples/trackers.py")
    done = run_program(sys.executable, script, "tensorboard", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.startswith("hdet: scout chose")
    assert points(read(tmp_path / "runs/trackers"))["hdet/note/test_loss"][0][1] < 0.5


@pytest.mark.filterwarnings("ignore:the scout:UserWarning")
def test_run_goes_on_where_tensorboard_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="record TensorBoardSink failed") as seen:
        events: TrackedEvents = train(TensorBoardSink(tmp_path / "file"))
    assert len(seen) == 1
    assert len(events.of("cycle")) == 5
