"""Links between pages lead somewhere, in the repository as on the site."""

import re
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

import hdet
from tests.docs.pages import DOCS, ROOT, pages, prose

LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#+\s+(.*?)(?:\s+\{#([\w-]+)\})?\s*$", re.MULTILINE)
PLACE = re.compile(r'<a id="([\w-]+)"></a>')
DIRECTIVE = re.compile(r"^::: (\S+)", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The places on a page that a link may name."""
    text = prose(page)
    found = {own or slugify(plain(title), "-") for title, own in HEADING.findall(text)}
    return found | set(DIRECTIVE.findall(text)) | set(PLACE.findall(text))


def plain(title: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")


def has_anchor(page: Path, anchor: str) -> bool:
    """Members of a documented class have anchors of their own."""
    names = anchors(page)
    return anchor in names or any(anchor.startswith(f"{name}.") for name in names)


def problem_of(page: Path, link: str) -> str | None:
    """Why a link leads nowhere; none if it does not."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return f"{link}: there is no such file"
    if anchor and target.suffix == ".md" and not has_anchor(target, anchor):
        return f"{link}: there is no such heading"
    if DOCS in page.parents and DOCS not in target.parents and target != DOCS:
        return f"{link}: it leaves the site"
    return None


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(prose(page)) if "://" not in link]
    problems = [problem for link in links if (problem := problem_of(page, link)) is not None]
    assert not problems


def test_reference_lists_every_public_name_once() -> None:
    reference = [page for page in pages() if page.parent.name == "reference"]
    listed = [name for page in reference for name in DIRECTIVE.findall(page.read_text())]
    public = {f"hdet.{name}" for name in hdet.__all__} - {"hdet.__version__"}
    assert sorted(listed) == sorted(public)
