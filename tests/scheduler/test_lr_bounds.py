"""`HDET(lr_bounds=...)`: the peaks that the scout may choose."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from tests.processes import Processes
from tests.small_run import SmallRun, batch, loss_of

TOTAL, LR = 800, 1e-3


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def run_of(engine: str = "stacked", rank: int = 0, lr: float = LR, **options: Any) -> SmallRun:
    model = net()
    groups = [
        {"params": list(model[0].parameters()), "lr": lr},
        {"params": list(model[2].parameters()), "lr": lr / 10},
    ]
    settings = {
        "preset": "best",
        "guard": None,
        "probe": hdet.Probe(lambda model: loss_of(model, batch(9, 9)), tail=0.0),
    }
    return SmallRun(
        engine,
        rank,
        4,
        model,
        torch.optim.AdamW(groups),
        lambda optimizer: OneCycleLR(optimizer, [lr, lr / 10], total_steps=TOTAL),
        **{**settings, **options},
    )


def search(run: SmallRun) -> SmallRun:
    while run.scheduler.is_scouting:
        run.step()
    return run


def found_lr(run: SmallRun) -> float:
    found = search(run).scheduler.found_lr
    assert found is not None
    return found


def test_scout_chooses_the_nearest_bound_if_its_estimate_lies_beyond(tmp_path: Path) -> None:
    free = found_lr(run_of())
    assert found_lr(run_of(lr_bounds=(free / 100, free * 100))) == free
    high = run_of(lr_bounds=(3 * free, 100.0), record=tmp_path)
    assert found_lr(high) == pytest.approx(3 * free, rel=1e-12)
    assert found_lr(run_of(lr_bounds=(1e-9, free / 3))) == pytest.approx(free / 3, rel=1e-12)
    line = json.loads((tmp_path / "record.jsonl").read_text().splitlines()[-1])
    assert line["factor_reason"] == "limited by lr_bounds"
    assert line["factor"] * LR == pytest.approx(3 * free, rel=1e-12)


def test_bounds_limit_the_peak_of_the_schedule_and_keep_the_ratio_of_groups() -> None:
    run = search(run_of(lr_bounds=(2e-4, 5e-4)))
    rates = []
    for _ in range(TOTAL - run.scheduler.last_epoch):
        rates.append(run.scheduler.get_base_lr())
        run.step()
    assert max(first for first, _ in rates) == pytest.approx(5e-4, rel=1e-3)
    assert all(second == pytest.approx(first / 10) for first, second in rates)


def test_bounds_do_not_change_what_the_scout_tries() -> None:
    assert run_of(lr_bounds=(1e-3, 2e-3)).scheduler.get_replica_lrs() == (
        run_of().scheduler.get_replica_lrs()
    )


def test_equal_bounds_set_the_learning_rate() -> None:
    assert found_lr(run_of(lr_bounds=(0.0123, 0.0123))) == pytest.approx(0.0123, rel=1e-12)


def test_bounds_apply_to_a_resumed_search() -> None:
    bounds = (2e-4, 5e-4)
    options: Any = {"lr_bounds": bounds, "scout": hdet.Scout(share=0.2)}
    run = run_of(**options)
    run.step()
    run.scheduler.converge()
    other = run_of(**options)
    for module in other.modules():
        module.load_state_dict(copy.deepcopy(run.modules()[0].state_dict()))
    other.scheduler.load_state_dict(run.scheduler.state_dict())
    assert found_lr(other) == pytest.approx(bounds[1], rel=1e-12)
    assert found_lr(run) == pytest.approx(bounds[1], rel=1e-12)


def found_on_processes(rank: int) -> float:
    return found_lr(run_of("processes", rank, lr_bounds=(2e-4, 5e-4)))


def test_all_processes_respect_the_bounds(processes: Processes) -> None:
    found = processes(4, found_on_processes)
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(5e-4, rel=1e-12)


def found_free_on_processes(rank: int) -> tuple[float | None, float]:
    run = run_of("processes", rank)
    before = run.scheduler.found_lr
    return before, found_lr(run)


def test_found_lr_is_equal_on_all_processes_and_unknown_before_the_search_ends(
    processes: Processes,
) -> None:
    (before, found), *others = processes(4, found_free_on_processes)
    assert before is None
    assert others == [(None, found)] * 3
    assert found == pytest.approx(found_lr(run_of()), rel=1e-6)


@pytest.mark.parametrize(
    ("bounds", "error", "words"),
    [
        ((1e-2, 1e-3), ValueError, "`lr_bounds` must be in ascending order, got (0.01, 0.001)."),
        ((0.0, 1.0), ValueError, "`lr_bounds` must be a finite number above 0, got 0.0."),
        ((1e-3, math.inf), ValueError, "`lr_bounds` must be a finite number above 0, got inf."),
        ((1e-3, math.nan), ValueError, "`lr_bounds` must be a finite number above 0, got nan."),
        ((-1.0, 1.0), ValueError, "`lr_bounds` must be a finite number above 0, got -1.0."),
        (0.1, TypeError, "`lr_bounds` must be a pair of numbers, got 0.1."),
        ("ab", TypeError, "`lr_bounds` must be a pair of numbers, got 'ab'."),
        ((1e-3,), TypeError, "`lr_bounds` must be a pair of numbers, got (0.001,)."),
        ((1e-3, 1e-2, 1e-1), TypeError, "`lr_bounds` must be a pair of numbers, got "),
        (("1e-3", 1.0), TypeError, "`lr_bounds` must be "),
        ((None, 1.0), TypeError, "`lr_bounds` must be "),
    ],
)
def test_bad_bounds_are_refused(bounds: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as seen:
        run_of(lr_bounds=bounds)
    assert words in str(seen.value)


@pytest.mark.parametrize("power", [-3, -2, -1, 1, 2, 3])
def test_estimate_does_not_depend_on_the_given_learning_rate(power: int) -> None:
    """With a known optimizer the same learning rates are tried, whatever rate is given."""
    given, other = run_of(lr=LR), run_of(lr=LR * 10**power)
    pairs = zip(given.scheduler.get_replica_lrs(), other.scheduler.get_replica_lrs(), strict=True)
    for ours, theirs in pairs:
        assert ours == pytest.approx(theirs, rel=1e-13)  # 10 ** x is rounded
    assert found_lr(other) == pytest.approx(found_lr(given), rel=1e-10)
    assert other.scheduler.get_base_lr() == pytest.approx(given.scheduler.get_base_lr(), rel=1e-10)
