"""The walls: sizes of modules, classes and functions, and complete docstrings of public names."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hdet
from hdet.replicas.protocol import (
    AllToAllReplicas,
    ElasticReplicas,
    RecordingReplicas,
    Replicas,
)
from tools import trace_step

SOURCE = Path(hdet.__file__).parent
FILES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}

MODULE_LINES, CLASS_METHODS, HDET_METHODS, FUNCTION_LINES = 350, 25, 40, 40

Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_callables() -> Iterator[tuple[str, Any]]:
    for name in hdet.__all__:
        value = getattr(hdet, name)
        if not callable(value):
            continue
        yield name, value
        if name in ("HDET", "OneCycleHDET"):
            for method, member in vars(value).items():
                if not method.startswith("_") and inspect.isfunction(member):
                    yield f"{name}.{method}", member


PUBLIC = dict(public_callables())


def body_lines(function: Function) -> int:
    """Return the lines of a function without signature and docstring."""
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    if not body:
        return 0
    assert function.end_lineno is not None
    return function.end_lineno - body[0].lineno + 1


def large_parts(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, Function) and body_lines(node) > FUNCTION_LINES:
            yield node.name
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, Function)]
            if len(methods) > (HDET_METHODS if node.name == "HDET" else CLASS_METHODS):
                yield node.name


@pytest.mark.parametrize("name", FILES)
def test_module_class_and_function_sizes_are_below_their_limits(name: str) -> None:
    text = FILES[name].read_text()
    large = {f"{name}:{part}" for part in large_parts(ast.parse(text))}
    if len(text.splitlines()) > MODULE_LINES:
        large.add(name)
    assert not large


def documented(docstring: str, section: str) -> list[str]:
    """Return the names that a section of a Google-style docstring lists.

    >>> documented("Add.\\n\\nArgs:\\n    a: One.\\n        More: of it.\\n    *b: Two.\\n", "Args")
    ['a', 'b']
    """
    match = re.search(rf"^{section}:\n((?:    .*\n?|\n)+)", docstring, re.MULTILINE)
    return [] if match is None else re.findall(r"^    \**(\w+):", match.group(1), re.MULTILINE)


def parameters(function: Callable[..., Any]) -> list[str]:
    names = list(inspect.signature(function).parameters)
    return names[1:] if names[:1] == ["self"] else names


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_of_a_public_name_describes_every_parameter(name: str) -> None:
    value = PUBLIC[name]
    docstring = inspect.getdoc(value)
    assert docstring, name
    if isinstance(value, type) and issubclass(value, BaseException):
        return
    listed = documented(docstring, "Args") or documented(docstring, "Attributes")
    assert listed == parameters(value)


PROTOCOL = {
    name
    for protocol in (Replicas, ElasticReplicas, AllToAllReplicas, RecordingReplicas)
    for name in vars(protocol)
} | {"begin_reduce"}
"""What engines owe to the library: documented at the protocol."""


def public_methods() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in hdet.__all__:
        value = getattr(hdet, name)
        for method, member in vars(value).items() if isinstance(value, type) else ():
            is_owed = hasattr(value, "capabilities") and method in PROTOCOL
            if inspect.isfunction(member) and not method.startswith("_") and not is_owed:
                yield f"{name}.{method}", inspect.unwrap(member)


METHODS = dict(public_methods())


@pytest.mark.parametrize("name", METHODS)
def test_docstring_of_a_public_method_describes_parameters_and_result(name: str) -> None:
    method = METHODS[name]
    docstring = inspect.getdoc(method)
    assert docstring, name
    assert documented(docstring, "Args") == parameters(method)
    if inspect.signature(method).return_annotation is not None:
        assert "Returns:" in docstring or "Yields:" in docstring or "Return the same" in docstring


def test_both_schedulers_declare_shared_options_alike() -> None:
    """Names, order, types and defaults agree, apart from options that only HDET can leave open."""
    ours = inspect.signature(hdet.HDET).parameters
    drop_in = inspect.signature(hdet.OneCycleHDET).parameters
    of_one_cycle = {"total_steps", "steps_per_epoch"}  # OneCycleLR has them in another sense
    shared = [name for name in ours if name in drop_in and name not in of_one_cycle]
    assert shared == [name for name in drop_in if name in ours and name not in of_one_cycle]
    own = {"base", "schedule", "preset", "controller", "design", "lr_bounds"}
    assert set(ours) - set(shared) == own | of_one_cycle
    for name in shared:
        if name not in ("spread", "sync_every", "scout", "guard"):
            assert ours[name] == drop_in[name]


def test_both_schedulers_describe_shared_options_alike() -> None:
    texts = [inspect.getdoc(hdet.HDET), inspect.getdoc(hdet.OneCycleHDET)]
    ours, drop_in = (describe(text or "") for text in texts)
    for name in ("model", "knobs", "probe", "gradients", "optimizer_state", "outer", "overlap"):
        assert ours[name] == drop_in[name]


def describe(docstring: str) -> dict[str, str]:
    """Return the description of each argument in a docstring."""
    match = re.search(r"^Args:\n((?:    .*\n?|\n)+)", docstring, re.MULTILINE)
    assert match is not None
    entries = re.split(r"^    (\w+): ", match.group(1), flags=re.MULTILINE)[1:]
    return dict(zip(entries[::2], entries[1::2], strict=True))


def test_step_within_a_round_of_the_scout_crosses_at_most_fifteen_files() -> None:
    hops = trace_step.steps(4, scout=hdet.Scout(steps=8))[2]
    assert len(set(hops)) <= 15
