"""The pages of the documentation, and the parts of them that tests look at."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(
    r"(?:<!--\s*setup:\s*(?P<setup>\w+)\s*-->\s*\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^[ ]*```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """One fenced block of code."""

    page: Path
    line: int
    language: str
    code: str
    setup: str | None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """The README and all pages of the site that exist."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    found = [DOCS / name for name in _names(settings["nav"])]
    return [ROOT / "README.md", *(page for page in found if page.exists())]


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page that are written in one of the languages."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        if match["language"] not in languages:
            continue
        indent = len(match["indent"])
        code = "\n".join(line[indent:] for line in match["code"].splitlines())
        line = text.count("\n", 0, match.start("code"))
        found.append(Block(page, line, match["language"], code, match["setup"]))
    return found


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text())


def _names(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [name for part in parts for name in _names(part)]
