"""Files, modules, classes and functions that pages, docstrings and comments name exist."""

import ast
import io
import re
import tokenize
from importlib import import_module
from pathlib import Path

import pytest

import hdet
from tests.docs.pages import DOCS, ROOT, prose

SOURCE = ROOT / "src" / "hdet"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
SPAN = re.compile(r"`([^`\n]+)`")
DOTTED = re.compile(r"hdet(?:\.[A-Za-z_]\w*)+")
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
PLACED = re.compile(r"((?:`[A-Za-z_][\w.]*`(?:, | and )?)+) in `([\w/]+\.py)`")
"""Names with the file that holds them: `one` and `Other.member` in `package/module.py`."""
WRITTEN = re.compile(
    r"(?<![\w/.-])(?:benchmarks|docs|examples|src|tests|tools)(?:/[\w-]+)*/[\w.-]+"
    r"\.(?:json|md|py|svg|toml)\b"
)
"""A file of this repository in a docstring or in a comment."""
CODE = [
    path
    for folder in ("benchmarks", "examples", "src", "tests", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
OUTSIDE = {"tests", "tools", "benchmarks", "examples", "experiments", "docs", "src"}
PACKAGES = {path.name for path in SOURCE.iterdir() if path.is_dir()} - {"__pycache__"}


def has_name(dotted: str) -> bool:
    """Whether a name such as hdet.package.module.Class.member leads to something."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return has_members(module, parts[end:])
    return False


def has_members(value: object, members: list[str]) -> bool:
    for member in members:
        if not hasattr(value, member):
            return False
        value = getattr(value, member)
    return True


def is_path(text: str) -> bool:
    """Whether a code span names a file or a folder of this repository."""
    if not FILE.fullmatch(text):
        return False
    first, *rest = text.rstrip("/").split("/")
    is_folder = text.endswith("/") and not rest
    return (bool(rest) or is_folder) and first in PACKAGES | OUTSIDE


def has_path(text: str) -> bool:
    """Whether the path exists in the package or in the repository; modules may lack their .py."""
    places = [SOURCE / text, ROOT / text, SOURCE / f"{text}.py"]
    return any(place.exists() for place in places)


def is_defined(name: str, path: Path) -> bool:
    """Whether a file defines a name: a function, a class, a constant, or a member of a class.

    A member is a method, a field, or what a method of the class assigns to `self`.
    """
    tree: ast.AST = ast.parse(path.read_text())
    *owners, last = name.split(".")
    for owner in owners:
        found = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == owner]
        if not found:
            return False
        tree = found[0]
    return last in defined_names(tree)


def defined_names(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def problems_of(text: str) -> list[str]:
    """The names of a text that lead nowhere."""
    spans = SPAN.findall(text)
    wrong = [span for span in spans if DOTTED.fullmatch(span) and not has_name(span)]
    wrong += [span for span in spans if is_path(span) and not has_path(span)]
    for names, file in PLACED.findall(text):
        path = SOURCE / file if (SOURCE / file).exists() else ROOT / file
        found = SPAN.findall(names)
        wrong += [f"{n} in {file}" for n in found if not path.exists() or not is_defined(n, path)]
    return wrong


def words_of(source: str) -> str:
    """The docstrings and comments of a module."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    texts = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    return "\n".join([*texts, *comments])


def problems_of_code(source: str) -> list[str]:
    """The names in docstrings and comments that lead nowhere."""
    words = words_of(source)
    wrong = [path for path in WRITTEN.findall(words) if not (ROOT / path).exists()]
    spans = SPAN.findall(words)
    return wrong + [span for span in spans if DOTTED.fullmatch(span) and not has_name(span)]


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_docstrings_and_comments_exist(path: Path) -> None:
    assert problems_of_code(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    ['"""See tests/nothing.py."""', "x = 1  # as `hdet.nothing` does", '"""`docs/nothing.md`"""'],
)
def test_a_wrong_name_in_a_docstring_or_comment_is_found(source: str) -> None:
    assert len(problems_of_code(source)) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_of_code_on_a_page_exist(page: Path) -> None:
    assert problems_of(prose(page)) == []


def test_every_equation_of_the_paper_stands_beside_its_function() -> None:
    text = (DOCS / "explanation/method.md").read_text()
    rows = re.findall(r"^\| ([\d, ]+) \|.*\| (.*) \|$", text, re.MULTILINE)
    numbers = {int(number) for equations, _ in rows for number in equations.split(", ")}
    assert numbers == set(range(1, 11))
    assert all(PLACED.search(where) for _, where in rows)


@pytest.mark.parametrize(
    "text",
    [
        "`hdet.Tracked`",
        "`hdet.control.nothing`",
        "`control/nothing.py`",
        "`nothing` in `control/paper.py`",
        "`PaperController.nothing` in `control/paper.py`",
        "`PaperController` and `nothing` in `control/paper.py`",
    ],
)
def test_a_wrong_name_is_found(text: str) -> None:
    assert len(problems_of(text)) == 1


def test_names_of_code_are_told_from_other_words() -> None:
    right = "`hdet.control.paper.PaperController.update` `control/` `tests/docs/pages.py`"
    assert problems_of(f"{right} `runs/a` `record.jsonl` `lr/10` `a/b/`") == []
    assert has_name(f"{hdet.__name__}.Tracker")
