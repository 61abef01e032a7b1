#!/usr/bin/env python3
"""Copy numbers from result files into Markdown, and check that pages and files agree.

    python tools/fill_numbers.py --check README.md docs  exit 1 if a page and a file disagree
    python tools/fill_numbers.py --write README.md docs  fill in what the files say
    python tools/fill_numbers.py --age                   which result files are older than the code

A number on a page stands between two comments, and a table as well:

    <!--n settle.json:headline.median_regret_pct .2f-->0.24<!--/n-->
    <!--t settle.json:tables.methods-->
    | ... |
    <!--/t-->

The first comment names a file in benchmarks/results, the keys or list places that lead to the value
(separated by dots), and a Python format, which may be left out. A value that is not finite is
`null` in the file and "infinite" on the page. A table is a list of rows, of which the first is the
head.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NUMBER = re.compile(
    r"<!--n (?P<file>\S+?):(?P<path>\S+?)(?: (?P<format>[^<>]+?))?-->(?P<text>.*?)<!--/n-->"
)
TABLE = re.compile(r"<!--t (?P<file>\S+?):(?P<path>\S+?)-->\n(?P<text>.*?)\n?<!--/t-->", re.DOTALL)
OPENING = re.compile(r"<!--/?[nt](?=[\s>-])")
CODE = re.compile(r"^(```|~~~).*?^\1[^\n]*$|`[^`\n]+`", re.DOTALL | re.MULTILINE)


class Wrong(NamedTuple):
    """A place on a page that does not say what its file says."""

    page: Path
    line: int
    marker: str
    shown: str
    expected: str

    def __str__(self) -> str:
        where = f"{self.page}:{self.line}"
        return f"{where}: {self.marker}: shows {self.shown!r}, expected {self.expected!r}"


# Values ---------------------------------------------------------------------------------------


@cache
def result(name: str, folder: Path) -> Any:
    return json.loads((folder / name).read_text())


def value_at(name: str, path: str, folder: Path = RESULTS) -> Any:
    """The value that a marker names.

    Raises:
        KeyError: No file, key or place has this name.
    """
    if not (folder / name).is_file():
        raise KeyError(f"there is no file {name}")
    found = result(name, folder)
    for key in path.split("."):
        try:
            found = found[int(key)] if isinstance(found, list) else found[key]
        except (KeyError, IndexError, ValueError, TypeError):
            raise KeyError(f"{name} has no {path!r}: {key!r} is missing") from None
    return found


def shown(value: Any, form: str) -> str:
    """A value as it stands on a page.

    >>> shown(0.2419, ".2f"), shown(-0.04, ".1f"), shown(None, ".1f"), shown("cpu", "")
    ('0.24', '0.0', 'infinite', 'cpu')
    """
    if value is None:
        return "infinite"
    text = format(value, form)
    return text.lstrip("-") if re.fullmatch(r"-0(\.0*)?%?", text) else text


def table_of(rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; the first row is its head."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def expected(match: re.Match[str], folder: Path) -> str:
    """What belongs between the comments of a marker."""
    value = value_at(match["file"], match["path"], folder)
    if match.re is TABLE:
        return table_of(value)
    if isinstance(value, (dict, list)):
        raise KeyError(f"{match['path']!r} of {match['file']} is no single value")
    return shown(value, match["format"] or "")


# Pages ----------------------------------------------------------------------------------------


def pages_of(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(path.rglob("*.md")) if path.is_dir() else [path]


def markers_of(text: str) -> list[re.Match[str]]:
    """All markers outside code, in their order."""
    bare = without_code(text)
    found = [match for form in (NUMBER, TABLE) for match in form.finditer(bare)]
    return sorted(found, key=lambda match: match.start())


def without_code(text: str) -> str:
    """The text with blanks for its code, so that places stay what they are."""
    return CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def wrong_on(page: Path, folder: Path = RESULTS) -> list[Wrong]:
    """All markers of a page that disagree with their files, or that cannot be read."""
    text = page.read_text()
    found, markers = [], markers_of(text)
    for match in markers:
        line = text.count("\n", 0, match.start()) + 1
        name = f"{match['file']}:{match['path']}"
        try:
            right = expected(match, folder)
        except (KeyError, ValueError) as error:
            found.append(Wrong(page, line, name, match["text"], f"a readable marker: {error}"))
            continue
        if match["text"] != right:
            found.append(Wrong(page, line, name, match["text"], right))
    if len(OPENING.findall(without_code(text))) != 2 * len(markers):
        found.append(Wrong(page, 1, "all markers", "an open comment", "one end for each marker"))
    return found


def filled(text: str, folder: Path = RESULTS) -> str:
    """The text with what the files say in all its markers that name a value."""
    for match in reversed(markers_of(text)):
        try:
            right = expected(match, folder) + ("\n" if match.re is TABLE else "")
        except (KeyError, ValueError):
            continue  # wrong_on() lists it
        begin, end = match.start("text"), match.end() - len("<!--/n-->")
        text = text[:begin] + right + text[end:]
    return text


# Numbers without a marker -----------------------------------------------------------------------

LINK = re.compile(r"!?\[[^\]]*\]\([^)]*\)|<https?://[^>]*>|https?://\S+")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
COUNT = r"\d+|one|two|three|four|five|six|seven|eight|nine|ten"
CLAIM = re.compile(rf"(?i)\d+\.\d+|\d+\s?%|\b(?:{COUNT})\s+of\s+(?:{COUNT})\b")
ALLOWED = (
    re.compile(r"(?i)\b(python|torch|pytorch|hdet|version|cuda)\s+v?\d+(\.\d+)+\+?"),
    re.compile(r"\bv?\d+\.\d+\.\d+\b"),
    re.compile(r"(?i)\barxiv:?\s*\d{4}\.\d{4,5}"),
    re.compile(r"\bApache-2\.0\b"),
)
"""Versions and identifiers: numbers that no benchmark measures."""


def stray_numbers(text: str) -> list[str]:
    """Decimal numbers, percentages and counts that no marker holds, with their lines.

    >>> stray_numbers("It needs torch 2.6. It ends 0.24 % behind, in 3 of 10 runs.")
    ['1: 0.24', '1: 3 of 10']
    """
    bare = without_code(text)
    for form in (NUMBER, TABLE, COMMENT, LINK, *ALLOWED):
        bare = form.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), bare)
    return [f"{bare.count(chr(10), 0, m.start()) + 1}: {m[0]}" for m in CLAIM.finditer(bare)]


# Age ------------------------------------------------------------------------------------------


def age_of(path: Path) -> str:
    """A line about a result file: its commit, its date, and what has changed since."""
    told: Mapping[str, Any] = json.loads(path.read_text())
    script = script_of(path)
    code = changed_since(told["commit"], "src/hdet")
    own = changed_since(told["commit"], (script or "benchmarks").split("/")[0], script)
    since = "unknown commit" if code is None else f"{code} files of src/hdet"
    mine = "" if not own or script is None else f", {script}"
    state = "as old as the code" if code == 0 and not own else f"older than {since}{mine}"
    return f"{path.name:<18}{told['commit']:<12}{told['date']:<12}{state}"


def script_of(path: Path) -> str | None:
    """The benchmark or the folder of tests that writes a result file."""
    name = path.name.split(".")[0]
    found = sorted((ROOT / "benchmarks").glob(f"*/{name}.py"))
    folder, _, script = name.partition("_")  # as replication_table1
    found += (ROOT / "benchmarks" / folder).glob(f"{script}.py")
    found += (ROOT / "tests").glob(f"{name}/__main__.py")
    return str(found[0].relative_to(ROOT)) if found else None


def changed_since(commit: str, folder: str, only: str | None = None) -> int | None:
    """How many Python files of a folder changed, without those that only moved."""
    words = ["git", "diff", "--name-status", "-M", commit.rstrip("+"), "HEAD", "--", folder]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    changed = [row[-1] for row in rows if row[0] != "R100" and row[-1].endswith(".py")]
    return len([name for name in changed if only is None or name == only])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="list what disagrees")
    what.add_argument("--write", action="store_true", help="fill in what the files say")
    what.add_argument("--age", action="store_true", help="what changed since each result file")
    parser.add_argument("pages", nargs="*", type=Path, help="Markdown files and folders")
    options = parser.parse_args()
    if options.age:
        print("\n".join(age_of(path) for path in sorted(RESULTS.glob("*.json"))))
        return 0
    pages = list(pages_of(options.pages or [ROOT / "README.md", ROOT / "docs"]))
    if options.write:
        for page in pages:
            text = page.read_text()
            if (right := filled(text, RESULTS)) != text:
                page.write_text(right)
    wrong = [one for page in pages for one in wrong_on(page, RESULTS)]
    for one in wrong:
        print(one)
    num = sum(len(markers_of(page.read_text())) for page in pages)
    print(f"{num} markers on {len(pages)} pages, {len(wrong)} disagree with their files")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
