"""Optimizers that communicate in their step: a scout stops, and a run with a spread is refused."""

import math
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.tensors.dtensor import local
from hdet.weights.replica_weights import ReplicaWeights
from tests.processes import Processes, warns_on_first

S, LR, CYCLE = 400, 0.02, 10
STOPS = "scout stopped: the step of {} sends updates from one replica to another: '{}' is equal"


class DistributedMuon(torch.optim.Optimizer):
    """Orthogonal updates of matrices: each process computes a share, and all get all of them.

    Other parameters are stepped by the sign of their gradients, on each process alone.
    """

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.ndim == 2]
            for place, p in enumerate(matrices):
                owner = place % dist.get_world_size()
                if owner == dist.get_rank():
                    buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    p.sub_(orthogonal(buffer), alpha=group["lr"])
                dist.broadcast(p, owner)
            for p in group["params"]:
                if p.ndim != 2:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix, by Newton's iteration."""
    x = matrix / matrix.norm()
    for _ in range(5):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "muon":
        return DistributedMuon(model.parameters(), LR)
    if kind == "zero":
        with warnings.catch_warnings():  # torch itself uses what it deprecates
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR)
    return torch.optim.AdamW(model.parameters(), lr=LR)


class Run:
    def __init__(self, rank: int, kind: str, **options: Any) -> None:
        self.rank, self.bare = rank, network()
        self.model = DistributedDataParallel(self.bare)
        self.optimizer = optimizer_of(kind, self.bare)
        base = OneCycleLR(self.optimizer, LR, total_steps=S, cycle_momentum=False)
        settings = {"model": self.model, "sync_every": CYCLE, **options}
        self.scheduler = hdet.HDET(base, **settings)

    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.bare.parameters()).detach().clone()

    def step(self, scale: float = 1.0) -> None:
        draw = torch.Generator().manual_seed(1000 * self.scheduler.last_epoch + self.rank)
        x = torch.randn(16, 4, generator=draw, dtype=torch.float64)
        self.optimizer.zero_grad()
        loss = scale * (self.model(x) - x.flip(1)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step(loss)


def score(model: Any) -> Tensor:
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4)
    return (model(x) - x.flip(1)).square().mean(1)


def scouted(rank: int, kind: str) -> dict[str, Any]:
    run = Run(rank, kind, scout=hdet.Scout(steps=4), probe=score)
    start = run.weights()
    name = {"muon": "DistributedMuon", "zero": "ZeroRedundancyOptimizer"}.get(kind)
    stops = warns_on_first(rank, STOPS.format(name, "module.0.weight"))
    with stops if name else nullcontext():
        run.step()
    is_back = bool(torch.equal(run.weights(), start))
    scouts, found = run.scheduler.is_scouting, run.scheduler.found_lr
    lr = run.scheduler.get_last_lr()[0]
    if kind == "zero":  # the guard must restore the optimizer inside of the optimizer, too
        while run.scheduler.last_epoch < 35:
            run.step()
        run.step(math.nan)
    while run.scheduler.last_epoch < (47 if kind == "zero" else 8):  # in the middle of a cycle
        run.step()
    return {
        "back": is_back,
        "scouts": scouts,
        "found": found,
        "lr": lr,
        "end": run.weights(),
    }


def explored(rank: int, kind: str) -> str:
    run = Run(rank, kind, preset="paper", spread=0.2)
    with pytest.raises(ValueError, match="must step every replica by itself") as error:
        run.step()
    return str(error.value)


def misused(rank: int) -> list[str]:
    """A loop that sets learning rates, and one that calls `step()` once in a while."""
    run = Run(rank, "adamw", scout=hdet.Scout(steps=4), probe=score)
    run.step()
    run.optimizer.param_groups[0]["lr"] = 1e-5
    with pytest.raises(RuntimeError, match="must be set by hdet alone") as error:
        run.step()
    run = Run(rank, "adamw", scout=None)
    for _ in range(2):
        for _ in range(4):
            run.optimizer.step()
        with warns_on_first(rank, "made 5 steps") if run.scheduler.last_epoch else nullcontext():
            run.step()
    return [str(error.value)]


def all_runs(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {kind: scouted(rank, kind) for kind in ("muon", "zero", "adamw")}
    results["spread"] = explored(rank, "muon")
    plain = Run(rank, "adamw", preset="paper", spread=0.2)
    for _ in range(3):
        plain.step()
    results["watched"] = plain.scheduler._loop._updates
    results["misused"] = misused(rank)
    return results


def test_an_optimizer_that_communicates_ends_the_scout_and_the_guard_still_works(
    processes: Processes,
) -> None:
    first, second = processes(2, all_runs)
    for result in (first, second):
        for kind in ("muon", "zero"):
            run = result[kind]
            assert run["back"]
            assert not run["scouts"]
            assert run["found"] is None
            assert run["lr"] == pytest.approx(LR / 25)  # the start of OneCycleLR
            assert run["end"].isfinite().all()
        assert not result["adamw"]["back"]
        assert result["adamw"]["scouts"]
        assert result["watched"] is None
        assert "DistributedMuon sends updates" in result["spread"]
        assert "Pass another optimizer, or `spread=0`" in result["spread"]
    assert first["spread"] == second["spread"]
    assert torch.equal(first["zero"]["end"], second["zero"]["end"])


# What counts as mixing ---------------------------------------------------------------------------


class Case:
    """One step of SGD on two groups, and what the watch finds after it."""

    def __init__(self, rank: int, size: int = 32) -> None:
        self.rank = rank
        self.one, self.other = (nn.Parameter(torch.ones(size)) for _ in range(2))
        groups = [{"params": [p], "lr": 0.1} for p in (self.one, self.other)]
        self.optimizer = torch.optim.SGD(groups, lr=0.1)
        watch = ReplicaWeights(self.optimizer, None, hdet.ProcessReplicas()).watch_updates()
        assert watch is not None
        self.watch = watch

    def step(
        self,
        lrs: tuple[float, float] = (0.1, 0.2),
        gradients: tuple[float, float] = (1.0, 0.0),
        mixes: bool = False,
        other_lrs: tuple[float, float] | None = None,
    ) -> tuple[str | None, bool]:
        rows = list(zip(lrs, other_lrs or lrs, strict=True))
        for group, lr in zip(self.optimizer.param_groups, rows[self.rank], strict=True):
            group["lr"] = lr
        for p, gradient in zip((self.one, self.other), gradients, strict=True):
            p.grad = torch.full_like(p, gradient)
        self.optimizer.step()
        if mixes:
            dist.broadcast(self.one.data, 0)
        mixed = self.watch.find(rows)
        return None if mixed is None else mixed.text, self.watch.is_over


def cases(rank: int) -> dict[str, tuple[str | None, bool]]:
    frozen = Case(rank)
    frozen.one.requires_grad_(False)
    nan, tiny = (math.nan, math.nan), (1e-12, 1e-11)
    found = {
        "mixed": Case(rank).step(mixes=True),
        "equal gradients": Case(rank).step(),
        "no gradient": Case(rank).step(gradients=(0.0, 0.0)),
        "frozen": frozen.step(),
        "lost in rounding": Case(rank).step(lrs=tiny),
        "not finite": Case(rank).step(gradients=nan, mixes=True),
        "equal learning rates": Case(rank).step(lrs=(0.1, 0.1), mixes=True),
        "too small": Case(rank, size=4).step(mixes=True),
        "in the other group": Case(rank).step(lrs=(0.1, 0.1), other_lrs=(0.1, 0.2), mixes=True),
    }
    later, silent = Case(rank), Case(rank)
    found["first skipped"] = later.step(gradients=(0.0, 0.0))
    found["then mixed"] = later.step(mixes=True)
    steps = [silent.step(gradients=(0.0, 0.0)) for _ in range(32)]
    assert steps == [(None, False)] * 31 + [(None, True)]  # it does not watch for ever
    assert not silent.optimizer._optimizer_step_pre_hooks
    return found


def test_only_a_change_that_is_equal_at_different_learning_rates_counts(
    processes: Processes,
) -> None:
    first, second = processes(2, cases)
    assert first == second
    text = (
        "\"param_groups[0]['params'][0]\" is equal on the replicas 0 and 1 after a step with the "
        "learning rates 0.1 and 0.2"
    )
    assert first.pop("mixed") == first.pop("then mixed") == (text, True)
    assert first.pop("equal gradients") == (None, True)
    assert all(result == (None, False) for result in first.values())


def sharded(rank: int) -> tuple[str | None, bool]:
    """Two replicas of two shards each; only the second shards are mixed over the replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replicas = hdet.ProcessReplicas(mesh["replicate"])
    watch = ReplicaWeights(optimizer, model, replicas).watch_updates()
    assert watch is not None
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + replicas.local[0])
    model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    shard = local(next(model.parameters())).detach()
    if mesh.get_local_rank("shard") == 1:
        dist.broadcast(shard, 1, group=mesh["replicate"].get_group())
    mixed = watch.find([[0.1], [0.2]])
    return None if mixed is None else mixed.text, watch.is_over


def test_processes_of_one_replica_decide_alike(processes: Processes) -> None:
    results = processes(4, sharded)
    text = "'0.weight' is equal on the replicas 0 and 1 after a step with the learning rates"
    assert results == [(f"{text} 0.1 and 0.2", True)] * 4
