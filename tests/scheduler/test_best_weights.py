"""What the guard would restore survives a resume, where a checkpoint holds it."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ConstantLR

import hdet
from tests.processes import Processes
from tests.scheduler.test_rollback import Run, T
from tests.small_run import batch, loss_of


class Sharded:
    """A run with FSDP2: one replica in two processes."""

    def __init__(self, rank: int, **options: Any) -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.bare = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        fully_shard(self.bare, mesh=mesh)
        self.rank, self.optimizer = rank, torch.optim.Adam(self.bare.parameters(), lr=0.02)
        self.scheduler = hdet.HDET(
            ConstantLR(self.optimizer, factor=1.0),
            model=self.bare,
            replicas=hdet.ProcessReplicas(mesh["replicate"]),
            scout=None,
            sync_every=T,
            **options,
        )

    def modules(self) -> list[nn.Module]:
        return [self.bare]

    def go(self, steps: int, strikes: dict[int, float] | None = None) -> "Sharded":
        for _ in range(steps):
            with torch.no_grad():
                for parameter in self.bare.parameters():
                    parameter.mul_((strikes or {}).get(self.scheduler.last_epoch, 1.0))
            self.optimizer.zero_grad()
            loss = self.backward(self.scheduler.last_epoch)
            self.optimizer.step()
            self.scheduler.step(loss)
        return self

    def backward(self, step: int) -> Tensor:
        loss = loss_of(self.bare, batch(step, self.rank))
        loss.backward()
        return loss.detach()

    def state(self) -> list[Tensor]:
        named = self.bare.state_dict()
        assert all(isinstance(tensor, DTensor) for tensor in named.values())
        states = self.optimizer.state_dict()["state"].values()
        tensors = [*named.values(), *(value for state in states for value in state.values())]
        whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
        return [tensor.detach().clone() for tensor in whole]


def parts_of(run: Any) -> dict[str, Any]:
    """What a checkpoint holds of model and optimizer."""
    return copy.deepcopy({"model": run.bare.state_dict(), "optimizer": run.optimizer.state_dict()})


def load(run: Any, parts: dict[str, Any]) -> None:
    run.bare.load_state_dict(parts["model"])
    run.optimizer.load_state_dict(copy.deepcopy(parts["optimizer"]))


def resumed(make: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """A run that has worsened a little is saved with its best weights, resumed, and struck."""
    run = make().go(5 * T)
    best, num = run.state(), len(run.bare.state_dict())
    level = run.scheduler.state_dict()["guard"]["lowest"]
    for step in range(T):
        run.backward(step)
        run.optimizer.step()
        run.scheduler.step(torch.full((len(run.modules()),), level + 1e-6))
    run.scheduler.converge()
    before = run.state()
    with run.scheduler.best_weights_shown() as step:
        shown, kept = run.state(), parts_of(run)
    unchanged = all(map(torch.equal, run.state(), before))
    other = make()
    load(other, parts_of(run))
    other.scheduler.load_state_dict(run.scheduler.state_dict())
    with other.scheduler.best_weights_loaded(step):
        load(other, kept)
    unchanged = unchanged and all(map(torch.equal, other.state(), before))
    other.go(T, {6 * T + 1: 1e4})
    told = {
        "step": step,
        "shown": all(map(torch.equal, shown[:num], best[:num])),
        "unchanged": unchanged,
        "restored": all(map(torch.equal, other.state(), shown)),
        "worse before": not all(map(torch.equal, before, shown)),
    }
    return told, shown


WANT = {
    "step": 5 * T,
    "shown": True,
    "unchanged": True,
    "restored": True,
    "worse before": True,
}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_resumed_run_goes_back_to_the_best_weights_of_the_saved_run(
    engine: str, offload: bool
) -> None:
    assert resumed(lambda: Run(engine, guard=hdet.Guard(offload=offload)))[0] == WANT


def on_processes(rank: int) -> list[tuple[dict[str, Any], list[Tensor]]]:
    guard = hdet.Guard(offload=True)
    return [
        resumed(lambda: Run("processes", rank, guard=guard, gradients="local")),
        resumed(lambda: Sharded(rank, guard=guard)),
    ]


def test_resumed_run_on_processes_goes_back_to_one_average_of_the_best_cycle(
    processes: Processes,
) -> None:
    """With DDP and local gradients, where optimizer states differ, and with FSDP2."""
    first, second = processes(2, on_processes)
    for mine, theirs in zip(first, second, strict=True):
        assert mine[0] == theirs[0] == WANT
        assert all(map(torch.equal, mine[1], theirs[1]))


def test_best_weights_are_not_shown_without_a_guard_or_where_they_are_the_present_ones() -> None:
    for run in (Run("stacked", guard=None).go(T), Run("stacked").go(T)):
        before = run.state()
        with run.scheduler.best_weights_shown() as step:
            assert step is None
            assert all(map(torch.equal, run.state(), before))


def test_snapshot_of_the_guard_stays_where_loading_the_best_weights_fails() -> None:
    run = Run("one").go(2 * T)
    before = run.state()
    with pytest.raises(OSError, match="no disk"), run.scheduler.best_weights_loaded(3):
        run.strike(0.0)
        raise OSError("no disk")
    assert all(map(torch.equal, run.state(), before))
    good_point = run.scheduler._run.good_point
    assert good_point is not None
    assert good_point.step == 2 * T


def test_size_and_place_of_the_snapshot_are_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    run = Run("one", guard=hdet.Guard(offload=True)).go(3 * T)
    own = [*run.bare.state_dict().values()]
    own += [value for state in run.optimizer.state.values() for value in state.values()]
    size = sum(t.numel() * t.element_size() for t in own) / 2**20
    line = f"hdet: guard keeps a snapshot of {size:.3g} MiB in host memory of each process.\n"
    assert capfd.readouterr().err.count(line) == 1
