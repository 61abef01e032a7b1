"""A found schedule, exported and played back without replicas."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import hdet
from hdet.records import reader, schedule_export

STEPS, T = 60, 10


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": [model.get_parameter("weight")], "name": "weights"}]
    groups += [{"params": [model.get_parameter("bias")], "name": "biases"}]
    return torch.optim.AdamW(groups, lr=0.1)


def recorded(folder: Path, steps: int = STEPS, base: str = "one_cycle") -> list[list[float]]:
    """The learning rates of the consensus at every step of a run of three replicas."""
    model = nn.Linear(2, 1)
    ensemble = hdet.StackedReplicas(model, 3)
    optimizer = ensemble.optimizer(optimizer_of(model))
    common: dict[str, Any] = {
        "sync_every": T,
        "replicas": ensemble,
        "record": folder,
        "spread": 0.3,
    }
    if base == "one_cycle":
        scheduler: hdet.HDET = hdet.OneCycleHDET(
            optimizer, [0.1, 0.02], total_steps=STEPS, temperature=0.01, model=model, **common
        )
    else:
        cosine = CosineAnnealingLR(optimizer, T_max=STEPS)
        scheduler = hdet.HDET(cosine, total_steps=STEPS, model=model, **common, preset="paper")
    seen = []
    for step in range(steps):
        seen.append(scheduler.get_base_lr())
        optimizer.zero_grad()
        x = torch.randn(6, 2, generator=torch.Generator().manual_seed(step))
        losses = ensemble.losses(lambda m, x: (m(x) - 1).square().mean(), x)
        losses.sum().backward()
        optimizer.step()
        scheduler.step(losses)
    return seen


def exported(folder: Path) -> Path:
    path = folder / "schedule.json"
    path.write_text(schedule_export.found(reader.read(folder)).to_json())
    return path


def played(path: Path, steps: int, **options: Any) -> list[list[float]]:
    optimizer = optimizer_of(nn.Linear(2, 1))
    scheduler = hdet.Replay(optimizer, path, **options)
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("base", ["one_cycle", "cosine"])
def test_replay_sets_the_learning_rates_of_the_run(tmp_path: Path, base: str) -> None:
    want = recorded(tmp_path, base=base)
    got = played(exported(tmp_path), STEPS)
    assert torch.tensor(got).allclose(torch.tensor(want), rtol=1e-9)


def test_schedule_with_jumps_is_replayed_step_by_step(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = optimizer_of(model)
    base = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7)
    scheduler = hdet.HDET(base, sync_every=30, total_steps=60, record=tmp_path, preset="paper")
    want = []
    for _ in range(60):
        want.append(scheduler.get_base_lr())
        optimizer.step()
        scheduler.step(1.0)
    got = played(exported(tmp_path), 60)
    assert torch.tensor(got).allclose(torch.tensor(want), rtol=1e-4, atol=1e-6)


def test_state_of_a_replay_with_another_length_is_loaded(tmp_path: Path) -> None:
    recorded(tmp_path)
    path = exported(tmp_path)
    short = hdet.Replay(optimizer_of(nn.Linear(2, 1)), path)
    long = hdet.Replay(optimizer_of(nn.Linear(2, 1)), path, total_steps=2 * STEPS)
    long.load_state_dict(short.state_dict())
    assert long.total_steps == 2 * STEPS


def test_replay_sets_the_momentum(tmp_path: Path) -> None:
    recorded(tmp_path)
    ours, theirs = optimizer_of(nn.Linear(2, 1)), optimizer_of(nn.Linear(2, 1))
    replay = hdet.Replay(ours, exported(tmp_path))
    cycle = OneCycleLR(theirs, 0.1, total_steps=STEPS)
    for _ in range(STEPS - 1):
        for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True):
            assert mine["betas"] == pytest.approx(other["betas"])
        for scheduler, optimizer in ((replay, ours), (cycle, theirs)):
            optimizer.step()
            scheduler.step()


def test_replay_stretches_and_shortens_the_schedule(tmp_path: Path) -> None:
    want = recorded(tmp_path, base="cosine")
    path = exported(tmp_path)
    longer = played(path, 2 * STEPS - 1, total_steps=2 * STEPS - 1)
    assert torch.tensor(longer[::2]).allclose(torch.tensor(want), rtol=1e-9)
    assert played(path, 30, total_steps=30)[-1] == pytest.approx(want[-1])


def test_last_value_holds_after_the_end_of_the_schedule(tmp_path: Path) -> None:
    want = recorded(tmp_path)
    assert played(exported(tmp_path), STEPS + 5)[-1] == pytest.approx(want[-1])


def test_unfinished_run_is_exported_up_to_its_last_cycle(tmp_path: Path) -> None:
    recorded(tmp_path, steps=35)
    found = schedule_export.found(reader.read(tmp_path))
    assert (found.finished, found.total_steps) == (False, 30)


def test_replay_resumes_from_its_state(tmp_path: Path) -> None:
    recorded(tmp_path)
    path = exported(tmp_path)
    want = played(path, STEPS)
    optimizer = optimizer_of(nn.Linear(2, 1))
    scheduler = hdet.Replay(optimizer, path)
    for _ in range(7):
        optimizer.step()
        scheduler.step()
    states = json.loads(json.dumps(scheduler.state_dict())), optimizer.state_dict()
    optimizer = optimizer_of(nn.Linear(2, 1))
    scheduler = hdet.Replay(optimizer, path)
    optimizer.load_state_dict(states[1])
    scheduler.load_state_dict(states[0])
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == want[8]


def test_replay_refuses_an_optimizer_with_other_groups(tmp_path: Path) -> None:
    recorded(tmp_path)
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"must have the parameter groups \['weights', 'biases'\]"):
        hdet.Replay(optimizer, exported(tmp_path))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "must be a schedule from `hdet export`"),
        ("[]", "must be a schedule from `hdet export`"),
        ('{"format": "hdet schedule", "version": 9}', "version 1, got 9"),
        ('{"format": "hdet schedule", "version": 1}', "complete schedule"),
        (
            '{"format": "hdet schedule", "version": 1, "total_steps": 2, '
            '"groups": {"a": {"steps": [1, 0], "lrs": [1, 2]}}}',
            "not in order",
        ),
    ],
)
def test_replay_refuses_a_damaged_file(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        hdet.Replay(optimizer_of(nn.Linear(2, 1)), path)


def test_early_record_without_lr_trace_can_be_exported(tmp_path: Path) -> None:
    recorded(tmp_path)
    record = tmp_path / "record.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    for line in lines:
        line.pop("lr_trace", None)
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = schedule_export.found(reader.read(tmp_path))
    assert found.groups["weights"].steps == [9, 19, 29, 39, 49, 59]


def test_record_without_a_cycle_has_no_schedule(tmp_path: Path) -> None:
    recorded(tmp_path, steps=5)
    with pytest.raises(ValueError, match="no cycle yet"):
        schedule_export.found(reader.read(tmp_path))
