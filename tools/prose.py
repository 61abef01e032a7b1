#!/usr/bin/env python3
"""Measures how readable the prose of Markdown files is.

    tools/prose.py README.md docs            one row a page; exit 1 if a page breaks a limit
    tools/prose.py --worst 5 docs/index.md   also the longest sentences

It counts words, words a sentence, the longest sentence and the longest paragraph. Code blocks,
tables, headings, HTML and link targets do not count. A list item is a paragraph of its own.
Limits: mean <= 18 words, at most 5 % of the sentences over 30 words, none over 40, no paragraph
over 110 words, README at most 900 words of prose.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

LIMITS = {"mean": 18, "over30": 0.05, "longest": 40, "paragraph": 110, "readme": 900}
SKIPPED = ("#", "|", "![", "<", ":::", "===", "!!!", "???")


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs and list items of a page, without code and tables."""
    text = re.sub(r"^---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"(```|~~~).*?\1", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        bare = line.strip()
        if not bare or bare.startswith(SKIPPED) or re.match(r"^[-=*_]{3,}$", bare):
            found.append([])
            continue
        item = re.match(r"^([-*+]|\d+[.)])\s+(.*)", bare)
        if item:
            found.append([item.group(2)])
        else:
            found[-1].append(bare.lstrip("> "))
    return [" ".join(lines) for lines in found if lines]


def plain(text: str) -> str:
    """Return a text without images, link targets, code and emphasis."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    return re.sub(r"[*_]{1,3}", "", text)


def sentences(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph that have at least three words."""
    short = r"\b(e\.g|i\.e|etc|vs|cf|et al|eq|eqs|fig|approx)\."
    text = re.sub(short, r"\1", plain(paragraph), flags=re.IGNORECASE)
    parts = re.split(r"(?<=[.!?:;])[\"')\]]*\s+(?=[\"'(\[A-Z0-9`*])", text)
    return [part for part in parts if len(words(part)) > 2]


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return re.findall(r"[A-Za-z0-9][A-Za-z0-9'.,/%+-]*", text)


class Measures(NamedTuple):
    """What is measured of a page."""

    total: int
    mean: float
    over30: float
    longest: int
    paragraph: int
    sentences: list[tuple[int, str]]

    def broken(self, *, is_readme: bool) -> list[str]:
        """Return the names of the limits that the page breaks."""
        names = ("mean", "over30", "longest", "paragraph")
        found = [name for name in names if getattr(self, name) > LIMITS[name]]
        return [*found, "readme"] if is_readme and self.total > LIMITS["readme"] else found


def measure(text: str) -> Measures | None:
    """Measure a page; None for a page without sentences."""
    blocks = paragraphs(text)
    found = [(len(words(each)), each) for block in blocks for each in sentences(block)]
    if not found:
        return None
    counts = [number for number, _ in found]
    return Measures(
        total=sum(counts),
        mean=sum(counts) / len(counts),
        over30=sum(number > 30 for number in counts) / len(counts),
        longest=max(counts),
        paragraph=max(len(words(plain(block))) for block in blocks),
        sentences=found,
    )


def check(page: Path, worst: int) -> bool:
    """Print the row of a page; whether the page is within the limits."""
    measured = measure(page.read_text())
    if measured is None:
        return True
    is_readme = page.name == "README.md" and page.parent == Path()
    broken = measured.broken(is_readme=is_readme)
    print(
        f"{str(page)[-44:]:44} {measured.total:6} {measured.mean:5.1f} {measured.over30:5.0%} "
        f"{measured.longest:7} {measured.paragraph:9}  {' '.join(broken)}"
    )
    for number, sentence in sorted(measured.sentences, reverse=True)[:worst]:
        print(f"    {number}: {sentence[:200]}")
    return not broken


def main() -> int:
    """Measure the pages of the command line; 1 if one breaks a limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--worst", type=int, default=0, help="longest sentences to print")
    options = parser.parse_args()
    pages: list[Path] = []
    for path in options.paths:
        pages += sorted(path.rglob("*.md")) if path.is_dir() else [path]
    print(f"{'page':44} {'words':>6} {'mean':>5} {'>30':>5} {'longest':>7} {'paragraph':>9}")
    within = [check(page, options.worst) for page in pages]
    return int(not all(within))


if __name__ == "__main__":
    sys.exit(main())
