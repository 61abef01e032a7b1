"""Adapters stay short: what several share is in modules of its own."""

from pathlib import Path

import pytest

from tests.integrations.launch import ROOT

TRACKERS = {"mlflow", "tensorboard", "trackio", "wandb"}
ADAPTERS = sorted((ROOT / "src/hdet/integrations").glob("*.py"))


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_adapter_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= (60 if path.stem in TRACKERS else 150)


def test_sizes_of_all_trackers_are_tested() -> None:
    assert {path.stem for path in ADAPTERS} >= TRACKERS
