"""Checkpoints of several processes: a failure of one of them is an error on all, and none hangs."""

import errno
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.checkpoint import manifest, save
from tests import small_run
from tests.processes import Processes


def run() -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    base = OneCycleLR(optimizer, 0.02, total_steps=40)
    scheduler = hdet.HDET(base, model=model, scout=None, sync_every=5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(rank: int, parts: dict[str, Any], num: int) -> None:
    for _ in range(num):
        parts["optimizer"].zero_grad()
        batch = small_run.batch(parts["scheduler"].last_epoch, rank)
        loss = small_run.loss_of(parts["model"], batch)
        loss.backward()
        parts["optimizer"].step()
        parts["scheduler"].step(loss.detach())


@contextmanager
def broken(owner: Any, name: str, *, if_on: bool) -> Iterator[None]:
    """Inside, a function finds no space on the disk of this process, if it is that one."""
    before = getattr(owner, name)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if if_on:
        setattr(owner, name, full)
    try:
        yield
    finally:
        setattr(owner, name, before)


def said(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def scenarios(rank: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    parts, last = run(), rank == 1
    train(rank, parts, 3)
    torch.manual_seed(rank)
    random.seed(rank)
    good = hdet.save_checkpoint(folder, **parts, extra={"rank": rank})
    drawn = torch.rand(1).item(), random.random()
    weights = [p.detach().clone() for p in parts["model"].parameters()]
    train(rank, parts, 3)

    def save_now(where: str = folder, **options: Any) -> Path:
        return hdet.save_checkpoint(where, **{**parts, **options})

    # A full disk, on one process alone; while tensors, own files and the manifest are written.
    with broken(filesystem, "_write_item", if_on=last):
        results["tensors"] = said(OSError, save_now)
    with broken(save, "write_file", if_on=last):
        results["own file"] = said(OSError, save_now)
    with broken(Path, "rename", if_on=rank == 0):
        results["rename"] = said(OSError, save_now)
    results["no common disk"] = said(
        OSError, lambda: save_now(f"{folder}/{rank}" if last else folder)
    )
    results["argument"] = said(ValueError, lambda: save_now(keep=0 if last else 2))
    results["good one"] = hdet.latest_checkpoint(folder) == good

    # Loading: the file is damaged that only the other process verifies; then another checkpoint.
    other = save_now()
    names = sorted(manifest.read_manifest(other).files)
    if rank == 0:
        (other / names[1]).write_bytes(b"")
    torch.distributed.barrier()
    before = [p.detach().clone() for p in parts["model"].parameters()]
    results["damaged"] = said(ValueError, lambda: hdet.load_checkpoint(other, **parts))
    results["two paths"] = said(
        ValueError, lambda: hdet.load_checkpoint(other if last else good, **parts)
    )
    now = parts["model"].parameters()
    results["unchanged"] = all(p.equal(kept) for p, kept in zip(now, before, strict=True))
    results["extra"] = hdet.load_checkpoint(good, **parts)
    results["drawn"] = (torch.rand(1).item(), random.random()) == drawn
    now = parts["model"].parameters()
    results["loaded"] = all(p.equal(kept) for p, kept in zip(now, weights, strict=True))
    return results


def run_with_loss_parameter() -> tuple[dict[str, Any], nn.Parameter]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 3).double())
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.AdamW([*model.parameters(), weight], lr=0.02)
    base = OneCycleLR(optimizer, 0.02, total_steps=40)
    scheduler = hdet.HDET(base, model=model, scout=None, sync_every=5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}, weight


def parameter_of_a_loss(rank: int, folder: str) -> list[float]:
    """DDP does not average its gradient, so that it differs between processes in a cycle."""
    parts, weight = run_with_loss_parameter()
    for _ in range(3):
        parts["optimizer"].zero_grad()
        (
            weight * (-1) ** rank + small_run.loss_of(parts["model"], small_run.batch(0, 0))
        ).backward()
        parts["optimizer"].step()
        parts["scheduler"].step()
    before = weight.item()
    path = hdet.save_checkpoint(folder, **parts)
    again, loaded = run_with_loss_parameter()
    with torch.no_grad():
        loaded.fill_(9.0)
    hdet.load_checkpoint(path, **again)
    return [before, weight.item(), loaded.item()]


def test_parameter_of_a_loss_is_saved_as_the_mean_of_the_processes(
    processes: Processes, tmp_path: Path
) -> None:
    first, second = processes(2, parameter_of_a_loss, str(tmp_path))
    assert first[0] < 0 < second[0]
    mean = (first[0] + second[0]) / 2
    assert first[1:] == second[1:] == pytest.approx([mean, mean])


@pytest.fixture(scope="module")
def found(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return processes(2, scenarios, str(tmp_path_factory.mktemp("saved")))


@pytest.mark.parametrize("where", ["tensors", "own file", "rename"])
def test_full_disk_of_one_process_is_an_error_on_all(
    found: list[dict[str, Any]], where: str
) -> None:
    for each in found:
        assert "the checkpoint of step 6 could not be written to" in each[where]
        assert "No space left on device" in each[where]
        assert "The earlier checkpoints are as they were." in each[where]
        assert each["good one"]
    if where != "rename":
        assert "process 1 failed" in found[0][where]


def test_hosts_without_a_common_disk_are_told_so(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert "this process does not see the files of the first one" in each["no common disk"]
        assert each["good one"]


def test_argument_that_one_process_refuses_is_refused_on_all(found: list[dict[str, Any]]) -> None:
    assert found[1]["argument"] == "`keep` must be at least 1, got 0."
    assert found[0]["argument"] == "process 1 failed: `keep` must be at least 1, got 0."


def test_damage_that_one_process_finds_is_refused_on_all(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert "is damaged: the file" in each["damaged"] or "step-00000006" in each["damaged"]
        assert each["unchanged"]


def test_processes_must_load_the_same_checkpoint(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert "every process must load the same checkpoint" in each["two paths"]


def test_each_process_gets_its_own_extra_and_random_numbers(found: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(found):
        assert each["extra"] == {"rank": rank}
        assert each["drawn"] and each["loaded"]
