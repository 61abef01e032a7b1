"""The package as such: what it exports, what importing it does, how its rooms are kept apart."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

import hdet

SOURCE = Path(hdet.__file__).parent
PURE = [
    "clock", "controller", "course", "design", "fit", "growth", "guard", "history", "scout",
    "space", "spread", "steering", "stuck", "tracker", "validation", "verdict",
]  # fmt: skip


def test_what_is_public_is_listed() -> None:
    public = [
        name
        for name, value in vars(hdet).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    ]
    assert sorted(hdet.__all__) == sorted([*public, "__version__"])


def test_importing_it_does_nothing() -> None:
    script = """
import logging, random, sys, warnings, torch
def state(): return (random.getstate(), torch.get_rng_state().tolist(), warnings.filters[:],
                     logging.root.handlers[:], torch.get_num_threads())
before = state()
import hdet
assert state() == before
frameworks = {"lightning", "accelerate", "transformers", "ray", "torchft", "plotly", "rich"}
assert not frameworks & set(sys.modules), frameworks & set(sys.modules)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


@pytest.mark.parametrize("room", PURE)
def test_rooms_that_decide_know_nothing_of_torch(room: str) -> None:
    tree = ast.parse((SOURCE / f"{room}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("torch") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            assert not module.startswith("torch")
            assert not module.startswith("hdet") or module.removeprefix("hdet.") in PURE


def test_few_rooms_know_of_other_processes() -> None:
    speakers = [
        path.name for path in SOURCE.rglob("*.py") if "torch.distributed" in path.read_text()
    ]
    # One saves, two send, and one knows who is where.
    assert sorted(speakers) == ["checkpoint.py", "elastic.py", "mesh.py", "replicas.py"]


def test_the_drop_in_takes_one_cycle_lrs_arguments_in_their_order() -> None:
    theirs = inspect.signature(OneCycleLR).parameters
    ours = inspect.signature(hdet.OneCycleHDET).parameters
    positional = [p for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert len(positional) == 14
    for mine, original in zip(positional, theirs.values(), strict=False):
        assert (mine.name, mine.default) == (original.name, original.default)
    assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[14:])


def test_it_is_a_torch_schedule() -> None:
    assert issubclass(hdet.OneCycleHDET, hdet.HDET)
    assert issubclass(hdet.HDET, LRScheduler)


def test_it_is_typed() -> None:
    assert (SOURCE / "py.typed").exists()


def test_every_file_says_what_it_is_for() -> None:
    root = SOURCE.parent.parent
    for folder in ("src", "tests", "benchmarks", "examples"):
        for path in (root / folder).rglob("*.py"):
            assert ast.get_docstring(ast.parse(path.read_text())), path


def test_the_scheduler_does_not_know_which_engine_it_has() -> None:
    for room in (
        "scheduler",
        "one_cycle",
        "run",
        "scouting",
        "cycle_end",
        "parameters",
        "roll_call",
    ):
        text = (SOURCE / f"{room}.py").read_text().lower()
        assert "stacked" not in text
        assert "processreplicas" not in text
