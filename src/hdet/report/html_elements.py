"""The HTML elements that a report is made of.

All texts are escaped here, since a record may hold anything. Only arguments called `inside`, and
the values of tiles, are HTML already.
"""

import html
from collections.abc import Iterable, Sequence
from typing import Any


def text(value: Any) -> str:
    """A value as text that HTML shows as it is.

    >>> text('"><img src=x>')
    '&quot;&gt;&lt;img src=x&gt;'
    """
    return html.escape(str(value), quote=True)


def section(title: str, inside: str) -> str:
    """A section with a heading; empty if there is nothing inside."""
    return f"<section><h2>{text(title)}</h2>{inside}</section>" if inside else ""


def tiles(facts: Iterable[tuple[str, str, str]]) -> str:
    """Tiles, each from a title, a value in HTML and a remark."""
    inside = "".join(
        f'<div class="tile{" two" * ("<span>" in value)}"><dt>{text(what)}</dt><dd>{value}</dd>'
        + (f"<dd>{text(remark)}</dd>" if remark else "")
        + "</div>"
        for what, value, remark in facts
    )
    return f'<dl class="tiles">{inside}</dl>'


def table(
    about: str, head: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers_from: int | None = 1
) -> str:
    """A table that scrolls inside its box. Cells from column `numbers_from` on are numbers."""

    def mark(column: int) -> str:
        return ' class="n"' if numbers_from is not None and column >= numbers_from else ""

    heads = "".join(f'<th scope="col"{mark(i)}>{text(cell)}</th>' for i, cell in enumerate(head))
    lines = "".join(
        f'<tr><th scope="row">{text(first)}</th>'
        + "".join(f"<td{mark(i)}>{text(cell)}</td>" for i, cell in enumerate(rest, start=1))
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<p class="about">{text(about)}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(about)}"><table>'
        f"<thead><tr>{heads}</tr></thead>"
        f"<tbody>{lines}</tbody></table></div>"
    )


def boxed(inside: str) -> str:
    """A box with a border."""
    return f'<div class="box">{inside}</div>'


def folded(summary: str, inside: str, kind: str = "") -> str:
    """Contents that open when the reader clicks on their summary."""
    return (
        f'<details class="{kind}"><summary>{text(summary)}</summary><div>{inside}</div></details>'
    )


def notice(sentence: str, entries: Iterable[str] = ()) -> str:
    """A warning for the reader, with a list of details."""
    lines = "".join(f"<li>{text(entry)}</li>" for entry in entries)
    return (
        f'<div class="notice" role="note">{text(sentence)}{f"<ul>{lines}</ul>" * bool(lines)}</div>'
    )
