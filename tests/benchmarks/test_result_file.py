"""Result files: what every one of them says, and how it is read again."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import result_file
from benchmarks.result_file import flat, read_result, word_of, write_result


def written(path: Path, **parts: Any) -> dict[str, Any]:
    return write_result(path, headline={"a": 1.0}, settings={"n": 8}, seeds=[0, 1], **parts)


def test_result_file_has_commit_device_versions_and_settings(tmp_path: Path) -> None:
    results = written(tmp_path / "new" / "a.json", rows=[{"loss": math.nan}, {"loss": 1 / 3}])
    assert results == read_result(tmp_path / "new" / "a.json")
    assert set(results) == {
        *("headline", "commit", "date", "device", "versions", "seeds", "settings", "rows")
    }
    assert set(results["versions"]) == {"python", "torch", "hdet"}
    assert results["rows"] == [{"loss": None}, {"loss": 0.3333333}]


def test_read_result_of_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert read_result(tmp_path / "none.json") == {}


def test_result_with_rows_of_another_commit_has_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"commit": "0123456", "device": "NVIDIA H200; cpu"}
    results = written(tmp_path / "a.json", kept=kept)
    assert results["commit_note"] == result_file.SEVERAL
    assert results["device"].split("; ")[:2] == ["NVIDIA H200", "cpu"]
    again = written(tmp_path / "a.json", kept=results)
    assert again["commit_note"] == result_file.SEVERAL, "its first rows are still older"
    assert again["device"] == results["device"]
    same = written(tmp_path / "a.json", kept={"commit": results["commit"], "device": "cpu"})
    assert "commit_note" not in same


def test_flat_joins_nested_keys_into_identifiers(tmp_path: Path) -> None:
    table = {"ranking, feed: x 1/4": {"median %": 1.0, "lost": 0}, "best": "DoG"}
    assert flat(table) == {
        "ranking_feed_x_1_4_median_pct": 1.0,
        "ranking_feed_x_1_4_lost": 0,
        "best": "DoG",
    }
    assert word_of("3 % fewer, made up") == "3_pct_fewer_made_up"


def test_result_file_has_one_line_per_row(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    written(path, rows=[{"loss": 1}, {"loss": 2}], empty={}, none=[])
    lines = path.read_text().splitlines()
    assert '  {"loss": 1},' in lines
    assert '  "a": 1.0' in lines
    assert json.loads(path.read_text())["empty"] == {}


def test_commit_is_unknown_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_file, "ROOT", tmp_path)
    assert result_file.commit() == "unknown"
