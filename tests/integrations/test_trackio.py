"""What trackio stores of a run, read from its database."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.features import RECORDS
from tests.integrations.launch import launch
from tests.integrations.tracked import Points, differing, stored_of


def said_by(function: str, folder: Path) -> dict[str, Any]:
    """What a process said in which trackio stores its files in a folder."""
    environment = {"TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1"}
    (said,) = launch(f"tests.integrations.trackio_runs:{function}", 1, environment=environment)
    return said


def rows(folder: Path, project: str, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / f"{project}.db") as database:
        return database.execute(query).fetchall()


def points(folder: Path, project: str) -> Points:
    found = rows(folder, project, "SELECT step, metrics FROM metrics ORDER BY id")
    return stored_of([(n, step, v) for step, row in found for n, v in json.loads(row).items()])


@pytest.mark.works("trackio", RECORDS)
def test_trackio_stores_numbers_alerts_and_the_report(tmp_path: Path) -> None:
    said, folder = said_by("own", tmp_path), tmp_path
    stored = points(folder, "own")
    assert not differing(stored, said["points"])
    alerts = rows(folder, "own", "SELECT title, text, level, step FROM alerts ORDER BY id")
    assert [(title, level, step) for title, _, level, step in alerts] == [
        ("hdet scout", "info", 3),
        ("hdet guard", "warn", 100),
        ("hdet note", "info", 100),
    ]
    for (_, text, _, _), expected_text in zip(alerts, said["texts"], strict=True):
        assert text.startswith(expected_text.split(": ")[-1])
    ((kind, manifest),) = rows(
        folder,
        "own",
        "SELECT type, manifest FROM artifacts JOIN artifact_versions ON artifact_id = artifacts.id",
    )
    assert kind == "report"
    assert {file["path"] for file in json.loads(manifest)} == {"record.jsonl", "report.html"}
    assert said["is_ended"]


@pytest.mark.integrations
def test_trackio_logs_to_the_run_of_the_trainer_and_goes_on_where_trackio_fails(
    tmp_path: Path,
) -> None:
    said = said_by("others", tmp_path)
    assert said["is_left_open"]
    assert not (tmp_path / "another.db").exists()
    stored = points(tmp_path, "trainers")
    assert [value for _, value in stored["train/loss"]] == [0.5, 0.25]
    assert "hdet/lr/group0/replica7" in stored
    (warning,) = said["warnings"]
    assert "record TrackioSink failed" in warning
    assert said["cycles"] == 5
