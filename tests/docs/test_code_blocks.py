"""Every block of Python on a page runs, or at least calls hdet as hdet can be called."""

import ast
import builtins
import gc
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from tests.docs import setups
from tests.docs.pages import Block, blocks, pages, prose

KNOWN = {"scheduler": hdet.HDET, "schedule": hdet.HDET, "ensemble": hdet.StackedReplicas}
"""Variables that have the same meaning on every page."""
PROCESSES = ("torch.distributed", "torchft", "init_device_mesh", "init_process_group")
"""Blocks with one of these need other processes: they are checked and not run."""


def python_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks(page, "python", "diff")]


def source_of(block: Block) -> str:
    """The code of a block; of a diff the code that it leads to."""
    return applied(block.code, drop="-") if block.language == "diff" else block.code


def applied(diff: str, *, drop: str) -> str:
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(drop))


def can_run(block: Block) -> bool:
    """Whether a block names its set-up, or needs none."""
    source = source_of(block)
    if any(word in source for word in PROCESSES):
        return False
    return block.setup is not None or not missing_names(source)


def missing_names(source: str) -> set[str]:
    """The names that a block reads and never binds."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    imported = [a for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names]
    bound |= {(alias.asname or alias.name).split(".")[0] for alias in imported}
    return {node.id for node in names} - bound - set(dir(builtins)) - {"..."}


def target_of(call: ast.Call) -> tuple[str, Any, bool] | None:
    """The name of what is called, what it is, and whether it is a method; none if not of hdet."""
    function = call.func
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        return None
    owner, name = function.value.id, function.attr
    if owner == "hdet":
        return f"hdet.{name}", getattr(hdet, name, None), False
    if owner in KNOWN:
        return f"{owner}.{name}", getattr(KNOWN[owner], name, None), True
    return None


def problem_of(call: ast.Call) -> str | None:
    """Why a call cannot be made as it is written; none if it can."""
    target = target_of(call)
    if target is None:
        return None
    name, function, is_method = target
    if function is None:
        return f"{name} does not exist"
    given = [a for a in call.args if not isinstance(a, ast.Starred) and not is_ellipsis(a)]
    is_whole = len(given) == len(call.args) and all(k.arg for k in call.keywords)
    signature = inspect.signature(function)
    bind = signature.bind if is_whole else signature.bind_partial
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    try:
        bind(*[None] * (is_method + len(given)), **keywords)
    except TypeError as problem:
        return f"{name}: {problem}"
    return None


def is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def attributes_of_hdet(source: str) -> set[str]:
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "hdet"
    }


def inline_calls(page: Path) -> list[ast.Call]:
    """Calls of the schedulers in the text or in a table, such as `HDET(base, model=model)`."""
    texts = re.findall(r"`(?:hdet\.)?((?:OneCycle)?HDET\([^`]+\))`", prose(page))
    parsed = [ast.parse(f"hdet.{text}", mode="eval").body for text in texts]
    return [call for call in parsed if isinstance(call, ast.Call)]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_calls_in_the_text_of_a_page_follow_their_signatures(page: Path) -> None:
    assert not [problem for call in inline_calls(page) if (problem := problem_of(call))]


@pytest.mark.parametrize("block", python_blocks(), ids=lambda block: block.name)
def test_block_calls_hdet_as_its_signatures_allow(block: Block) -> None:
    if block.language == "diff":
        compile(applied(block.code, drop="+"), block.name, "exec")
    source = source_of(block)
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    problems = [problem for call in calls if (problem := problem_of(call)) is not None]
    assert not problems
    assert attributes_of_hdet(source) <= set(hdet.__all__)


@pytest.mark.parametrize(
    "block", [block for block in python_blocks() if can_run(block)], ids=lambda block: block.name
)
@pytest.mark.filterwarnings("ignore:scout disabled:UserWarning")
def test_block_runs(
    block: Block,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = getattr(setups, block.setup)() if block.setup else {}
    exec(compile(source_of(block), block.name, "exec"), {"__name__": "page", **names})


def test_most_blocks_of_the_readme_and_the_tutorials_run() -> None:
    shown = [block for block in python_blocks() if "how-to" not in block.page.parts]
    shown = [b for b in shown if b.page.name == "README.md" or "tutorials" in b.page.parts]
    assert all(map(can_run, shown))
    assert len(shown) >= 5


def test_a_wrong_call_is_found() -> None:
    call = ast.parse("hdet.HDET(base, modle=model)").body[0]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    assert "modle" in str(problem_of(call.value))


def test_sink_of_the_how_to_page_logs_losses_rates_and_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    (block,) = [b for b in python_blocks() if b.setup == "tracked_loop"]
    names = setups.tracked_loop()
    exec(compile(block.code, block.name, "exec"), names)
    tracker = names["wandb"]
    assert [sorted(values) for values in tracker.logged] == 3 * [["group0", "loss"]] + [
        ["accuracy"]
    ]
    assert not tracker.is_finished
    names.clear()  # the scheduler is gone
    gc.collect()
    assert tracker.is_finished
