"""Scripts of trainers and trackers are short, and stand on their pages word for word."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

MOST_LINES = 60
FILE = re.compile(r"^<!-- file: (?P<file>\S+) -->\n(?P<rest>.*)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"```python\n(?P<code>.*?)```\n", re.DOTALL)
OUTPUT = re.compile(r"^```text\n.+?^```$", re.MULTILINE | re.DOTALL)


def shown_on(page: Path) -> list[tuple[str, str]]:
    """The files that a page names, each with the text behind the name."""
    found, text = [], page.read_text()
    while match := FILE.search(text):
        found.append((match["file"], match["rest"]))
        text = match["rest"]
    return found


def problem_of(name: str, rest: str) -> str | None:
    """Why a page does not show a file as it must; none if it does."""
    path = ROOT / name
    if not path.exists():
        return "there is no such file"
    code = CODE.match(rest)
    if code is None or code["code"] != path.read_text():
        return "the page does not show it word for word"
    if len(path.read_text().splitlines()) > MOST_LINES:
        return f"it has more than {MOST_LINES} lines"
    if OUTPUT.search(rest) is None:
        return "its output is missing"
    return None


def with_script(folder: Path, script: str, page: str) -> str | None:
    """What is wrong with a page about a script, where both are written here."""
    path = folder / "script.py"
    path.write_text(script)
    (folder / "page.md").write_text(f"# A page\n\n<!-- file: {path} -->\n{page}")
    ((name, rest),) = shown_on(folder / "page.md")
    return problem_of(name, rest)


SHOWN = [
    pytest.param(name, rest, id=f"{page.stem}: {name}")
    for page in sorted(DOCS.rglob("*.md"))
    for name, rest in shown_on(page)
]


@pytest.mark.parametrize(("name", "rest"), SHOWN)
def test_page_shows_a_short_script_word_for_word_with_its_output(name: str, rest: str) -> None:
    assert problem_of(name, rest) is None


def test_script_of_the_trackers_page_is_found() -> None:
    assert "examples/trackers.py" in [name for name, _ in shown_on(DOCS / "how-to/trackers.md")]


@pytest.mark.parametrize(
    ("script", "page", "problem"),
    [
        ("x = 1\n", "```python\nx = 1\n```\n\n```text\nhello\n```\n", None),
        ("x = 1\n", "```python\nx = 2\n```\n\n```text\nhello\n```\n", "word for word"),
        ("x = 1\n", "\n```python\nx = 1\n```\n", "word for word"),
        ("x = 1\n", "```python\nx = 1\n```\n", "output"),
        ("x = 1\n" * 61, "```python\n" + "x = 1\n" * 61 + "```\n", "60 lines"),
    ],
)
def test_wrong_script_on_a_page_is_found(
    tmp_path: Path, script: str, page: str, problem: str | None
) -> None:
    assert (problem or "None") in str(with_script(tmp_path, script, page))


def test_missing_script_is_found() -> None:
    assert problem_of("examples/nothing.py", "```python\n```\n") == "there is no such file"
