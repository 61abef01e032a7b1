"""Record files of today stay readable: their summary, their report and their exported schedule."""

from pathlib import Path

import pytest

from hdet.cli import main as cli
from tests.contracts import comparison
from tests.contracts.frozen_runs import (
    RECORDS,
    export_of,
    frozen_path,
    record_folder,
    summary_of,
)
from tests.contracts.training import lines_of

EVENTS = {"run", "scout", "guard", "cycle", "converge", "note", "resume"}


def test_one_record_has_all_kinds_of_events() -> None:
    assert {line["event"] for line in lines_of(record_folder("everything"))} == EVENTS


@pytest.mark.parametrize("name", RECORDS)
def test_record_is_read_without_damage(name: str) -> None:
    results = summary_of(record_folder(name))
    assert results["damaged"] == []
    comparison.check(comparison.read(frozen_path("record", name)), results)


@pytest.mark.parametrize("name", RECORDS)
def test_report_is_built(name: str, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "report.html"
    assert cli.main(["report", str(record_folder(name)), "--out", str(page)]) == 0
    assert "<html" in page.read_text(encoding="utf-8")[:1000]


@pytest.mark.parametrize("name", RECORDS)
def test_schedule_is_exported_and_played(name: str, tmp_path: Path) -> None:
    results = export_of(record_folder(name), tmp_path / "schedule.json")
    comparison.check(comparison.read(frozen_path("export", name)), results)
