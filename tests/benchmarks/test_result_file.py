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


def test_a_result_says_how_it_was_made(tmp_path: Path) -> None:
    results = written(tmp_path / "new" / "a.json", rows=[{"loss": math.nan}, {"loss": 1 / 3}])
    assert results == read_result(tmp_path / "new" / "a.json")
    assert set(results) == {
        *("headline", "commit", "date", "device", "versions", "seeds", "settings", "rows")
    }
    assert set(results["versions"]) == {"python", "torch", "hdet"}
    assert results["rows"] == [{"loss": None}, {"loss": 0.3333333}]


def test_there_is_nothing_in_a_file_that_does_not_exist(tmp_path: Path) -> None:
    assert read_result(tmp_path / "none.json") == {}


def test_rows_of_another_commit_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"commit": "0123456", "device": "NVIDIA H200; cpu"}
    results = written(tmp_path / "a.json", kept=kept)
    assert results["commit_note"] == result_file.SEVERAL
    assert results["device"].split("; ")[:2] == ["NVIDIA H200", "cpu"]
    same = written(tmp_path / "a.json", kept={**results, "commit": results["commit"]})
    assert "commit_note" not in same


def test_a_headline_is_flat_and_its_keys_are_words(tmp_path: Path) -> None:
    table = {"ranking, feed: x 1/4": {"median %": 1.0, "lost": 0}, "best": "DoG"}
    assert flat(table) == {
        "ranking_feed_x_1_4_median_pct": 1.0,
        "ranking_feed_x_1_4_lost": 0,
        "best": "DoG",
    }
    assert word_of("3 % fewer, made up") == "3_pct_fewer_made_up"


def test_a_file_has_a_line_for_each_row(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    written(path, rows=[{"loss": 1}, {"loss": 2}], empty={}, none=[])
    lines = path.read_text().splitlines()
    assert '  {"loss": 1},' in lines
    assert '  "a": 1.0' in lines
    assert json.loads(path.read_text())["empty"] == {}


def test_a_folder_without_git_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_file, "ROOT", tmp_path)
    assert result_file.commit() == "unknown"
