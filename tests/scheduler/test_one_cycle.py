"""When the controller of OneCycleHDET takes over from the schedule."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet


def recorded_warmup_steps(folder: Path, **options: Any) -> int:
    """The steps before the controller takes over, as the record of the run has them."""
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.9)
    hdet.OneCycleHDET(optimizer, 0.1, sync_every=5, record=folder, **options)
    first = json.loads((folder / "record.jsonl").read_text().splitlines()[0])
    steps: int = first["settings"]["controller"]["warmup_steps"]
    return steps


@pytest.mark.parametrize(
    ("options", "top"),
    [
        ({"total_steps": 100}, 30),  # torch's default for `pct_start` is 0.3
        ({"total_steps": 100, "pct_start": 0.45}, 45),
        ({"total_steps": 101}, 31),  # not before the top
        ({"epochs": 5, "steps_per_epoch": 8, "pct_start": 0.5}, 20),
        ({"total_steps": 100, "pct_start": 1.0}, 99),  # before the end
    ],
)
def test_controller_takes_over_at_the_top_of_the_cycle_by_default(
    options: dict[str, Any], top: int, tmp_path: Path
) -> None:
    assert recorded_warmup_steps(tmp_path, **options) == top


def test_given_warm_up_replaces_the_top_of_the_cycle(tmp_path: Path) -> None:
    assert recorded_warmup_steps(tmp_path, total_steps=100, warmup_steps=12) == 12
