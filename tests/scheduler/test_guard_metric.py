"""`Guard(metric=...)`: the guard judges a number of the user's instead of the training loss."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet.control.guard import Guard
from hdet.control.guard_monitor import GuardMonitor
from tests.processes import Processes
from tests.scheduler.test_rollback import Run, T, results

N = 2


class Returns:
    """Minus the mean return of each cycle: given ones, which differ between processes."""

    def __init__(self, values: list[float | None], shift: float = 0.0) -> None:
        self._values, self._shift, self.num_calls = values, shift, 0

    def __call__(self) -> float | None:
        value = self._values[self.num_calls]
        self.num_calls += 1
        return None if value is None else value + self._shift


GOOD = [None, math.nan, -1.0, -2.1, -2.9, -4.2, -5.0, -6.1]


def rising(
    rank: int, engine: str, values: list[float | None], folder: Path | None
) -> dict[str, Any]:
    """A run whose training loss grows ten times a cycle, and never shows a failure."""
    metric = Returns(values, shift=100.0 * rank)
    run = Run(engine, rank, num=N, guard=Guard(metric=metric), record=folder)
    num = 1 if engine in ("one", "processes") else N
    for cycle in range(len(values)):
        for step in range(T):
            run.optimizer.step()
            run.scheduler.step(torch.full((num,), 10.0**cycle + step))
    return {"knobs": run.scheduler.get_knobs(), "calls": metric.num_calls}


@pytest.mark.parametrize("engine", ["one", "stacked", "processes"])
def test_guard_with_a_metric_rolls_back_by_it_and_not_by_the_loss(
    engine: str, processes: Processes, tmp_path: Path
) -> None:
    """On processes the numbers differ by 100, and their mean over the replicas counts."""
    arguments = (engine, [*GOOD, 90.0, 95.0, -6.2], tmp_path)
    answers = processes(N, rising, *arguments) if engine == "processes" else None
    for answer in answers or [rising(0, *arguments)]:
        assert answer == {"knobs": {"lr/group0": 0.25}, "calls": 11}
    lines = results(tmp_path)
    assert [(line["step"], line["back_to"]) for line in lines] == [(9 * T, 8 * T), (10 * T, 8 * T)]
    level = 45.8 if engine == "processes" else -4.2
    assert lines[0]["reason"].startswith("metric ")
    assert lines[0]["reason"].endswith(f"(best level {level})")


def test_guard_with_a_metric_still_sees_weights_that_are_not_finite(tmp_path: Path) -> None:
    run = Run("stacked", guard=Guard(metric=lambda: 0.0), record=tmp_path)
    run.go(3 * T, {2 * T + 1: math.nan})
    (line,) = results(tmp_path)
    assert line["reason"] == "no replica has finite weights and a finite loss"


def test_metric_of_a_guard_is_in_the_record_by_its_presence_alone(tmp_path: Path) -> None:
    Run("one", guard=Guard(metric=lambda: None), record=tmp_path).go(T)
    first = json.loads((tmp_path / "record.jsonl").read_text().splitlines()[0])
    assert first["settings"]["guard"]["metric"] == "given"


def test_metric_that_is_no_function_or_returns_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match="`metric` must be a function without arguments"):
        hdet.Guard(metric=0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`metric` must be a number, got 'high'"):
        Run("one", guard=Guard(metric=lambda: "high")).go(T)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("slope", [0.0, 5.0])
def test_metric_that_is_noisy_fails_rarely_and_its_collapse_is_seen(slope: float) -> None:
    """Sixty cycles of returns, better by `slope` each, with a deviation of 20."""
    num_false, num_seen = 0, 0
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        noise = (20 * torch.randn(61, generator=draw)).tolist()
        monitor = GuardMonitor(Guard(metric=lambda: None))
        values = [-slope * cycle + noise[cycle] for cycle in range(60)]
        num_false += sum(monitor.check_cycle(value) is not None for value in values)
        num_seen += monitor.check_cycle(500.0 + noise[60]) is not None
    assert num_false <= 1
    assert num_seen == 20
