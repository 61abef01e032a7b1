"""The benchmark of what compares replicas under DDP, on real processes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.spawn import start_processes

from benchmarks.learning_rate import held_out_ddp
from benchmarks.zoo.small.curve import best_lr

TASK = "mlp_digits_adam"
"""A task whose data comes with scikit-learn."""


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_scout_of_each_way_finds_a_learning_rate(tmp_path: Path) -> None:
    jobs = [
        {"processes": 2, "task": TASK, "seed": 0, "way": way, "start": 0.01}
        for way in held_out_ddp.WAYS
    ]
    path = tmp_path / "rows"
    port = held_out_ddp.free_port()
    start_processes(held_out_ddp.work, (2, port, jobs, partial(append, path)), nprocs=2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["way"] for row in rows] == list(held_out_ddp.WAYS)
    assert all(0.03 < row["chosen"] < 30 and row["pct"] < 20 for row in rows)


def test_price_is_nothing_at_the_best() -> None:
    assert held_out_ddp.judged(TASK, best_lr(TASK)) == pytest.approx({"chosen": 1.0, "pct": 0.0})
