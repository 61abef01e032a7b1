"""The page about troubleshooting has every message that hdet can raise or warn."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.pages import DOCS, ROOT

SOURCE = ROOT / "src/hdet"
PAGE = " ".join((DOCS / "how-to/troubleshoot.md").read_text().split())
WARNINGS = ("warn", "warn_once", "_warn_once")
PASSED_THROUGH = {
    "module 'hdet' has no attribute",  # the words of Python itself
}
"""Messages that need no entry."""


class Message(NamedTuple):
    """A text of the source: its constant parts, in order."""

    place: str
    parts: tuple[str, ...]

    @property
    def longest(self) -> str:
        return max(self.parts, key=len).strip(" .:;,(")


def texts(node: ast.AST) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Each string of an expression with its line. A default inside of an f-string is a value."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
        yield node.lineno, tuple(str(part) for part in parts)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.lineno, (node.value,)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return  # such as ", ".join(names): its arguments are values
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def names_in(node: ast.AST) -> set[str]:
    """The names of variables and functions in an expression."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def sources(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """For each name of a module the values that it is assigned, or returns as a function."""
    found: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.FunctionDef):
            inner = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
            found.setdefault(node.name, []).extend(each.value for each in inner if each.value)
    return found


def raised(tree: ast.Module) -> Iterator[ast.AST]:
    """The expressions of a module that end in an error, a warning or the message of a rule."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from node.exc.args
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in WARNINGS:
                yield from node.args[-1:]  # the first argument of `warn_once` is a key
            elif name == "Rule":
                yield from (word.value for word in node.keywords if word.arg == "message")


def messages(path: Path) -> Iterator[Message]:
    """The messages of a module, also those that come from its variables and functions."""
    tree = ast.parse(path.read_text())
    known = sources(tree)
    expressions = list(raised(tree))
    for expression in expressions:  # it grows
        for name in sorted(names_in(expression)):
            expressions += known.pop(name, [])
        for line, parts in texts(expression):
            message = Message(f"{path.relative_to(SOURCE)}:{line}", parts)
            if parts and " " in message.longest:
                yield message


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_page_has_every_message_of_a_module(path: Path) -> None:
    missing = [
        f"{message.place}: {message.longest}"
        for message in messages(path)
        if message.longest not in PAGE and message.longest not in PASSED_THROUGH
    ]
    assert not missing


def test_messages_are_found_in_raises_warnings_rules_and_helpers() -> None:
    found = {message.longest for path in FILES for message in messages(path)}
    assert "` must be True or False, got" in found  # an error
    assert "replicas run one after another, which is slower: vmap cannot run this model" in found
    assert "`probe` needs `model=`, got None" in found  # a rule
    assert "but not on replica" in found  # the part of an error that a function makes
    assert len(found) > 150
