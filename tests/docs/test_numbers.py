"""Pages say what result files say: the tool that copies numbers, and the pages themselves."""

import json
from pathlib import Path

import pytest

from tools import fill_numbers as numbers

ROOT = Path(__file__).parent.parent.parent
CLAIMS = ("README.md", "docs/explanation/results.md", "docs/explanation/limits.md")
META = ("commit", "date", "device", "versions", "seeds", "settings", "headline")
RESULTS = sorted(numbers.RESULTS.glob("*.json"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One result file."""
    result = {
        "headline": {"regret_pct": 0.2419, "runs": 270, "worst_pct": None, "device": "cpu"},
        "rows": [{"loss": 1.5}, {"loss": 1.25}],
        "tables": {"tasks": [["task", "regret"], ["feed", "0.8"]]},
    }
    (tmp_path / "a.json").write_text(json.dumps(result))
    return tmp_path


def page_with(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


# The pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    list(numbers.pages_of([ROOT / "README.md", ROOT / "docs"])),
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_marker_agrees_with_its_file(page: Path) -> None:
    assert [str(wrong) for wrong in numbers.wrong_on(page)] == []


@pytest.mark.parametrize("name", CLAIMS)
def test_pages_with_results_have_no_number_without_a_marker(name: str) -> None:
    assert numbers.stray_numbers((ROOT / name).read_text()) == []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_every_result_file_says_how_it_was_made(path: Path) -> None:
    outcome = json.loads(path.read_text())
    assert set(META) <= set(outcome)
    assert {"python", "torch", "hdet"} <= set(outcome["versions"])
    assert outcome["headline"]
    for key, value in outcome["headline"].items():
        assert key.replace("_", "").isalnum() and key.islower(), key
        assert value is None or isinstance(value, (int, float, str)), key


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_every_result_file_has_a_script(path: Path) -> None:
    script = numbers.script_of(path)
    assert script is not None
    assert path.name in (ROOT / script).read_text().splitlines()[0]


# The tool -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("marker", "right"),
    [
        ("a.json:headline.regret_pct .2f", "0.24"),
        ("a.json:headline.runs", "270"),
        ("a.json:headline.runs d", "270"),
        ("a.json:headline.worst_pct .1f", "infinite"),
        ("a.json:headline.device s", "cpu"),
        ("a.json:rows.1.loss", "1.25"),
    ],
)
def test_a_marker_is_filled_in(folder: Path, marker: str, right: str) -> None:
    text = f"It ends <!--n {marker}-->?<!--/n--> % behind."
    filled = numbers.filled(text, folder)
    assert filled == f"It ends <!--n {marker}-->{right}<!--/n--> % behind."
    assert numbers.wrong_on(page_with(folder, filled), folder) == []


def test_a_wrong_number_is_found_with_its_line(folder: Path) -> None:
    page = page_with(folder, "One.\n\n<!--n a.json:headline.regret_pct .2f-->0.25<!--/n--> %\n")
    (wrong,) = numbers.wrong_on(page, folder)
    assert (wrong.line, wrong.shown, wrong.expected) == (3, "0.25", "0.24")


@pytest.mark.parametrize(
    "marker",
    [
        "b.json:headline.runs",
        "a.json:headline.none",
        "a.json:rows.7.loss",
        "a.json:headline",
        "a.json:headline.device .2f",
    ],
)
def test_a_marker_without_a_value_is_wrong(folder: Path, marker: str) -> None:
    page = page_with(folder, f"<!--n {marker}-->1<!--/n-->")
    assert len(numbers.wrong_on(page, folder)) == 1


def test_a_marker_without_an_end_is_wrong(folder: Path) -> None:
    page = page_with(folder, "<!--n a.json:headline.runs-->270 runs")
    assert len(numbers.wrong_on(page, folder)) == 1


def test_a_marker_in_code_is_an_example(folder: Path) -> None:
    text = "Write `<!--n a.json:none-->1<!--/n-->`.\n\n```\n<!--n b.json:x-->1<!--/n-->\n```\n"
    assert numbers.filled(text, folder) == text
    assert numbers.wrong_on(page_with(folder, text), folder) == []


def test_a_table_is_filled_in(folder: Path) -> None:
    text = "<!--t a.json:tables.tasks-->\n<!--/t-->\n"
    filled = numbers.filled(text, folder)
    table = "| task | regret |\n|---|---|\n| feed | 0.8 |"
    assert filled == f"<!--t a.json:tables.tasks-->\n{table}\n<!--/t-->\n"
    assert numbers.filled(filled, folder) == filled
    assert numbers.wrong_on(page_with(folder, filled), folder) == []
    wrong = page_with(folder, filled.replace("0.8", "0.9"))
    assert len(numbers.wrong_on(wrong, folder)) == 1


def test_numbers_without_a_marker_are_found() -> None:
    text = "\n".join(
        [
            "It ends 0.24 % behind, in 97 % of the runs.",
            "<!--n a.json:headline.regret_pct .2f-->0.24<!--/n--> % is held by its file.",
            "So are `lr=0.1`, [0.5](docs/x0.5.md), torch 2.6, hdet 0.1.0 and arXiv 2302.11208.",
            "```",
            "lr = 0.01",
            "```",
            "A spread of 1/9, 270 runs and one of them are no claims.",
            "It is found in 56 of 60 runs, and lost in one of 120 and two of five.",
        ]
    )
    counts = ["8: 56 of 60", "8: one of 120", "8: two of five"]
    assert numbers.stray_numbers(text) == ["1: 0.24", "1: 97 %", *counts]


def test_the_command_fails_where_a_page_is_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = page_with(folder, "<!--n a.json:headline.runs-->271<!--/n--> runs")
    monkeypatch.setattr(numbers, "RESULTS", folder)
    monkeypatch.setattr("sys.argv", ["fill_numbers.py", "--check", str(page)])
    assert numbers.main() == 1
    assert f"{page}:1: a.json:headline.runs" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["fill_numbers.py", "--write", str(page)])
    assert numbers.main() == 0
    assert "-->270<!--/n--> runs" in page.read_text()


def test_the_age_of_a_file_is_told() -> None:
    lines = [numbers.age_of(path) for path in RESULTS]
    assert all("older than" in line or "as old as" in line for line in lines)
