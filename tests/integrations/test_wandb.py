"""What Weights & Biases stores of a run, read from the file of an offline run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from hdet.integrations.wandb import WandbSink
from tests.integrations.features import RECORDS
from tests.integrations.tracked import Points, differing, stored_of, train

HEADER, BLOCK, LAST = 7, 32768, (1, 4)
"""Of the file of an offline run, a log of LevelDB: each record consists of chunks in blocks."""


@pytest.fixture(autouse=True)
def _no_files_at_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any) -> None:
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path_factory.mktemp("data")))


def records(folder: Path) -> Iterator[Any]:
    """The records of the only offline run in a folder."""
    wandb.teardown()  # the process that writes the file may not have ended with the run
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, place, record = path.read_bytes(), HEADER, b""
    while place < len(data):
        if BLOCK - place % BLOCK < HEADER:  # no chunk begins there
            place += BLOCK - place % BLOCK
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        place += HEADER + size
        record += data[place - size : place]
        if kind in LAST:
            yield Record.FromString(record)
            record = b""


def rows(found: list[Any]) -> list[dict[str, Any]]:
    """The rows of the history."""
    return [
        {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in r.history.item
        }
        for r in found
        if r.HasField("history")
    ]


def points(history: list[dict[str, Any]]) -> Points:
    return stored_of(
        [
            (name, row["hdet/step"], value)
            for row in history
            for name, value in row.items()
            if name.startswith("hdet/") and name not in ("hdet/step", "hdet/event")
        ]
    )


@pytest.mark.works("Weights & Biases", RECORDS)
def test_wandb_stores_numbers_alerts_and_the_report(tmp_path: Path) -> None:
    sink = WandbSink(project="digits", mode="offline", dir=tmp_path)
    assert not list(tmp_path.iterdir())  # other processes make a sink as well
    events = train(sink)
    assert wandb.run is None
    found = list(records(tmp_path))
    history = rows(found)
    stored = points(history)
    assert not differing(stored, events.points())
    texts = [row["hdet/event"] for row in history if "hdet/event" in row]
    for text, expected_text in zip(texts, events.texts(), strict=True):
        assert text.startswith(expected_text)
    alerts = [(r.alert.title, r.alert.level) for r in found if r.HasField("alert")]
    assert alerts == [("hdet scout", "INFO"), ("hdet guard", "WARN")]
    (artifact,) = [r.artifact for r in found if r.HasField("artifact")]
    assert artifact.type == "report"
    assert {entry.path for entry in artifact.manifest.contents} == {"record.jsonl", "report.html"}


@pytest.mark.integrations
def test_wandb_logs_to_the_run_of_the_trainer_and_leaves_it_open(tmp_path: Path) -> None:
    with wandb.init(project="digits", mode="offline", dir=tmp_path) as run:
        run.log({"train/loss": 0.5}, step=7)
        train(WandbSink(project="another"))
        run.log({"train/loss": 0.25})  # it would raise if the run had ended
    found = list(records(tmp_path))
    history = rows(found)
    assert [row["train/loss"] for row in history if "train/loss" in row] == [0.5, 0.25]
    assert "hdet/lr/group0/replica7" in points(history)
    metrics = [r.metric for r in found if r.HasField("metric")]
    assert any(m.glob_name == "hdet/*" and m.step_metric == "hdet/step" for m in metrics)


@pytest.mark.integrations
def test_run_goes_on_where_wandb_fails(tmp_path: Path) -> None:
    with wandb.init(project="digits", mode="offline", dir=tmp_path) as run:
        pass
    with pytest.warns(UserWarning, match="record WandbSink failed") as seen:
        events = train(WandbSink(run))
    assert len(seen) == 1
    assert len(events.of("cycle")) == 5
