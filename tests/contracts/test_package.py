"""The package as such: what it exports, what importing it does, how its rooms are kept apart."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

import hdet
from tests.integrations.__main__ import PACKAGES

SOURCE = Path(hdet.__file__).parent
PROJECT = SOURCE.parent.parent / "pyproject.toml"
ADAPTERS = ("transformers", "lightning", "accelerate", "ray", "trackers")
"""The extras of `hdet.integrations`."""
FRAMEWORKS = {
    "accelerate",
    "axolotl",
    "deepspeed",
    "lightning",
    "mlflow",
    "peft",
    "plotly",
    "ray",
    "rich",
    "tensorboard",
    "torchft",
    "torchtitan",
    "trackio",
    "transformers",
    "wandb",
}
PURE = ("hdet._messages", "hdet.control", "hdet.lr_search", "hdet.records.reader")


def test_public_names_are_listed_and_can_be_loaded() -> None:
    assert sorted([*hdet._MODULE_OF, "__version__"]) == sorted(hdet.__all__)
    for name in hdet.__all__:
        assert getattr(hdet, name) is not None
    assert set(hdet.__all__) <= set(dir(hdet))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        hdet.Nothing  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (node.module, alias.name)
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {(module, name) for name, module in hdet._MODULE_OF.items()}


def test_importing_hdet_changes_no_global_state() -> None:
    script = """
import logging, random, sys, warnings, torch
def state(): return (random.getstate(), torch.get_rng_state().tolist(), warnings.filters[:],
                     logging.root.handlers[:], torch.get_num_threads())
before = state()
import hdet
assert state() == before
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_hdet_imports_no_trainer_and_no_tracker() -> None:
    """Not even where every public name is used."""
    script = f"""
import sys
import hdet
for name in hdet.__all__:
    getattr(hdet, name)
import hdet.cli.main, hdet.integrations, hdet.integrations.tracking
assert not {FRAMEWORKS} & set(sys.modules), {FRAMEWORKS} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_every_package_of_an_extra_and_of_the_integrations_is_a_framework() -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    of_extras = {name for extra in ADAPTERS for name in extras[extra]} | set(PACKAGES)
    modules = {re.split(r"[^\w-]", name)[0].removesuffix("-skinny") for name in of_extras}
    assert modules <= FRAMEWORKS


def test_import_hdet_loads_no_module_but_its_version() -> None:
    """So `import torch, hdet` takes hardly longer than `import torch`."""
    script = """
import importlib, sys, typing
before = set(sys.modules)
import hdet
assert set(sys.modules) - before == {"hdet", "hdet._version"}, set(sys.modules) - before
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


@pytest.mark.parametrize("package", PURE)
def test_pure_packages_import_where_torch_is_missing(package: str) -> None:
    script = f"""
import importlib, pkgutil, sys
sys.modules["torch"] = None
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
    importlib.import_module(module.name)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


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


def test_package_has_a_py_typed_file() -> None:
    assert (SOURCE / "py.typed").exists()


def test_every_file_says_what_it_is_for() -> None:
    root = SOURCE.parent.parent
    for folder in ("src", "tests", "benchmarks", "examples"):
        for path in (root / folder).rglob("*.py"):
            assert ast.get_docstring(ast.parse(path.read_text())), path
