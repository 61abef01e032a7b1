"""A replica that is several processes: FSDP2 and tensor parallelism on a mesh, hdet over it."""

import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

import hdet
from hdet.control.assignment import assignment
from hdet.replicas.device_mesh import _parameter_groups
from hdet.signals.columns import merge_parts
from hdet.tensors.dtensor import local, whole
from tests import reference, small_run, toy
from tests.contracts.test_reference_parity import check_cycle
from tests.processes import Processes, warns_on_first
from tests.torch_version import IS_OLDEST

N, T, S, WARMUP = 2, 3, 72, 12
PEAKS = [0.03, 0.01, 0.02, 0.05]
SETTINGS = {"spread": 0.25, "temperature": 0.05, "step_size": 0.7, "momentum": 0.8}
NAMES = ["embedding", "no_decay", "non_embedding", "transformer"]
EIGHT = "3d, eight processes"


def sharded(model: toy.Toy, mesh: DeviceMesh) -> nn.Module:
    # In two groups of parameters, as larger models are. On a CPU, torch 2.6 gathers the weights of
    # an inner group only once in each step: a second time fails in its backward.
    fully_shard(model.norm, mesh=mesh, reshard_after_forward=not IS_OLDEST)
    fully_shard(model, mesh=mesh)
    return model


def split(model: toy.Toy, mesh: DeviceMesh) -> toy.Toy:
    plan = {"transformer": ColwiseParallel(), "head": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    return model


def laid_out(kind: str) -> tuple[nn.Module, DeviceMesh]:
    """A toy over four processes, two for each replica, or over eight; and the mesh it lies on."""
    model = toy.toy()
    if kind in ("hsdp", "fsdp"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return sharded(model, mesh if kind == "hsdp" else mesh["shard"]), mesh
    if kind in ("3d", EIGHT):
        shape = (2, 2 if kind == EIGHT else 1, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))
        return sharded(split(model, mesh["tp"]), mesh["replicate", "shard"]), mesh
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tp"))
    split(model, mesh["tp"])
    if kind == "ddp and tp":
        return DistributedDataParallel(model, device_mesh=mesh["replicate"]), mesh
    return model, mesh


def loss_of(
    model: nn.Module, step: int, replica: int, kind: str, part: int | None = None
) -> Tensor:
    """Parts that share the data of a replica have half of it each; those that share its model have
    all of it."""
    if kind not in ("hsdp", "fsdp", EIGHT):
        return toy.loss_of(model, step, replica)
    if part is not None:
        return toy.loss_of(model, step, 2 * replica + part)
    return (toy.loss_of(model, step, 2 * replica) + toy.loss_of(model, step, 2 * replica + 1)) / 2


OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def train(
    rank: int, kind: str, gradients: str, name: str, folder: str, total: int = S
) -> list[Tensor]:
    model, mesh = laid_out(kind)
    named = dict(model.named_parameters())  # DDP hides those of tensor parallelism after a forward
    optimizer = toy.OPTIMIZERS[name](model)
    scheduler = hdet.OneCycleHDET(
        optimizer,
        PEAKS,
        total_steps=total,
        cycle_momentum=False,
        sync_every=T,
        warmup_steps=WARMUP,
        model=model,
        gradients="shared" if gradients == "shared" else "local",
        outer=OUTER if gradients == "outer" else None,
        replicas=hdet.ProcessReplicas(mesh["replicate"]),
        record=folder,
        seed=5,
        **SETTINGS,  # type: ignore[arg-type]
    )
    for step in range(total):
        optimizer.zero_grad()
        replica, part = (rank // 4, rank // 2 % 2) if kind == EIGHT else (rank // 2, rank % 2)
        loss = loss_of(model, step, replica, kind, part)
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
    return [p.detach() for p in gathered(named, mesh)]


class FirstHalf(nn.Module):
    """A stage of a pipeline; the other half of the toy is the second."""

    def __init__(self, model: toy.Toy) -> None:
        super().__init__()
        self.embedding, self.norm = model.embedding, model.norm

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.embedding(tokens))


class SecondHalf(nn.Module):
    def __init__(self, model: toy.Toy) -> None:
        super().__init__()
        self.transformer, self.head = model.transformer, model.head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(torch.tanh(self.transformer(hidden)).mean(1))


def pipelined(rank: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "stage"))
    replica, place = divmod(rank, 2)
    model = FirstHalf(toy.toy()) if place == 0 else SecondHalf(toy.toy())
    stage = PipelineStage(model, place, 2, torch.device("cpu"), group=mesh["stage"].get_group())
    pipeline = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = hdet.OneCycleHDET(
        optimizer,
        PEAKS[0],
        total_steps=S,
        cycle_momentum=False,
        sync_every=T,
        warmup_steps=WARMUP,
        model=model,
        gradients="local",
        replicas=hdet.ProcessReplicas(mesh["replicate"]),
        seed=5,
        **SETTINGS,  # type: ignore[arg-type]
    )
    for step in range(S):
        optimizer.zero_grad()
        tokens, labels = toy.batch(step, replica)
        losses: list[Tensor] = []
        if place == 0:
            pipeline.step(tokens)
        else:
            pipeline.step(target=labels, losses=losses)
        if IS_OLDEST:  # its pipeline adds up the gradients of microbatches
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(2)
        optimizer.step()
        # Only the last stage knows a loss.
        scheduler.step(torch.stack(losses).mean() if losses else None)
    return [p.detach() for p in model.parameters()]


def test_stages_of_a_pipeline_equal_the_reference(processes: Processes) -> None:
    want = reference.run(
        toy.toy(),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1.0),
        lambda model, step, replica: toy.loss_of(model, step, replica),
        lambda group, cycle: assignment(N, seed=5, cycle=cycle, knob="lr/group0"),
        num_replicas=N,
        peaks=PEAKS[:1],
        total_steps=S,
        sync_every=T,
        warmup_steps=WARMUP,
        alpha=0.25,
        beta=0.8,
        sigma=0.05,
        lam=0.7,
        shared=False,
    )
    results = processes(4, pipelined)
    for replica in (0, 1):
        weights = [*results[2 * replica], *results[2 * replica + 1]]
        for mine, theirs in zip(weights, want.parameters[replica], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_pipeline_stage_without_a_loss_does_not_count_in_the_mean() -> None:
    """Mean, number, error, step, finite, bad buffers, size of the state, first loss, vanished."""
    silent = [0.0, 0.0, 0.0, 5.0, 1.0, 0.0, 7.0, math.nan, 0.75]
    heard = [2.0, 4.0, 0.5, 5.0, 1.0, 0.0, 9.0, 3.0, 0.5]
    other = [4.0, 4.0, 0.5, 5.0, 1.0, 0.0, 9.0, 5.0, 0.25]
    pooled = torch.tensor([[silent, heard], [heard, other]], dtype=torch.float64)
    alone, both = merge_parts(pooled).tolist()
    assert alone == [2.0, 4.0, 0.5, 5.0, 1.0, 0.0, 16.0, 3.0, 0.5]
    error = math.sqrt(0.5**2 + 0.5**2) / 2
    assert both == pytest.approx([3.0, 4.0, error, 5.0, 1.0, 0.0, 18.0, 4.0, 0.25], rel=1e-15)


def gathered(named: dict[str, nn.Parameter], mesh: DeviceMesh) -> list[Tensor]:
    """The whole parameters, wherever their shards are."""
    found: list[Tensor] = []
    for name, p in named.items():
        if hasattr(p, "full_tensor"):
            found.append(p.full_tensor())
        elif name in ("module.transformer.weight", "module.transformer.bias"):
            found.append(joined(p, 0, mesh["tp"]))
        elif name == "module.head.weight":
            found.append(joined(p, 1, mesh["tp"]))
        else:
            found.append(p)
    return found


def joined(shard: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """DDP has made plain tensors of the shards."""
    everyone = [torch.empty_like(shard) for _ in range(mesh.size())]
    dist.all_gather(everyone, shard.detach().contiguous(), group=mesh.get_group())
    return torch.cat(everyone, dim)


def expected(kind: str, gradients: str, name: str, total: int = S) -> reference.Run:
    return reference.run(
        toy.toy(),
        toy.OPTIMIZERS[name],
        lambda model, step, replica: loss_of(model, step, replica, kind),
        lambda group, cycle: assignment(N, seed=5, cycle=cycle, knob=f"lr/{NAMES[group]}"),
        num_replicas=N,
        peaks=PEAKS,
        total_steps=total,
        sync_every=T,
        warmup_steps=WARMUP,
        alpha=0.25,
        beta=0.8,
        sigma=0.05,
        lam=0.7,
        shared=gradients == "shared",
        outer=(0.7, 0.9) if gradients == "outer" else None,
    )


CASES = [
    ("hsdp", "shared", "adamw"),
    ("hsdp", "local", "sgd"),
    ("hsdp", "outer", "adamw"),
    ("fsdp", "local", "adamw"),
    ("3d", "shared", "sgd"),
    ("3d", "local", "adamw"),
    ("tp", "local", "adamw"),
    ("tp", "outer", "sgd"),
    ("ddp and tp", "shared", "adamw"),
]


class Told(NamedTuple):
    """What a process says: the weights of every case, and why a checkpoint is refused."""

    weights: list[list[Tensor]]
    said: str


class Trained(NamedTuple):
    results: list[Told]
    folder: Path


def train_all(rank: int, folder: str) -> Told:
    # Of tensor parallelism under FSDP2; no output is changed in place here.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    # In one call: tensor parallelism keeps the groups of a mesh by name.
    runs = [train(rank, *case, f"{folder}/{number}") for number, case in enumerate(CASES)]
    return Told(runs, hidden(rank))


@pytest.fixture(scope="module")
def fresh() -> Iterator[Processes]:
    """Processes of our own: torch keeps the groups of a mesh by name, also after they are gone."""
    pool = Processes()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def trained(fresh: Processes, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("meshes")
    return Trained(fresh(4, train_all, str(folder)), folder)


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_a_sharded_replica_equals_the_reference_on_the_whole_model(
    trained: Trained, case: tuple[str, str, str]
) -> None:
    number, want = CASES.index(case), expected(*case)
    for process, results in enumerate(trained.results):
        pairs = zip(results.weights[number], want.parameters[process // 2], strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    record = trained.folder / str(number) / "record.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    cycles = [line for line in lines if line["event"] == "cycle"]
    held = want.cycles[WARMUP // T - 1].centres
    assert len(cycles) == len(want.cycles)  # one process of all has written them
    for line, cycle in zip(cycles, want.cycles, strict=True):
        check_cycle(line, cycle, held)


def train_on_eight(rank: int, folder: str) -> list[Tensor]:
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    return train(rank, EIGHT, "local", "sgd", folder, total=24)


@pytest.mark.skipif(
    IS_OLDEST, reason="FSDP2 of torch 2.6 has no uneven shards of tensor-parallel weights"
)
def test_replica_with_fsdp2_and_tensor_parallelism_equals_the_reference(tmp_path: Path) -> None:
    want = expected(EIGHT, "local", "sgd", total=24).parameters
    pool = Processes(most=8)
    trained = pool(8, train_on_eight, str(tmp_path))
    pool.close()
    for process, weights in enumerate(trained):
        for ours, theirs in zip(weights, want[process // 4], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


# What else happens to a run, beside the same on one device ----------------------------------------

STEPS, WIDE = 160, 8
HELD = small_run.batch(10**6, 0)


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, WIDE), nn.Tanh(), nn.Linear(WIDE, 3)).double()


def score(model: Any) -> Tensor:
    return (model(HELD) - HELD.flip(1)).square().mean(1)


def sample(step: int, replica: int) -> Tensor:
    """Of a replica, 16 in all; for two cycles they are too large by far, and one is spared."""
    x = small_run.batch(step, replica)
    return 300 * x if 100 <= step < 120 else x


SCOUT = hdet.Scout(decades=2, share=0.2)
OPTIONS: dict[str, dict[str, Any]] = {
    "scout": {"scout": SCOUT, "probe": score, "spread": 0.0},
    "scout by losses": {"scout": SCOUT, "spread": 0.0},
    # Goes on from the best replica, so all others take its weights and optimizer state.
    "best replica": {"scout": replace(SCOUT, rewind=False), "probe": score, "spread": 0.0},
    "guard": {
        "guard": hdet.Guard(offload=True),
        "gradients": "local",
        "optimizer_state": "average",
    },
    "knobs": {"knobs": [hdet.weight_decay(bounds=(1e-4, 1.0))], "probe": score},
}


def small(rank: int | None, what: str) -> tuple[list[Tensor], dict[str, float]]:
    """A run over a mesh of two by two processes, or (without a rank) of two stacked replicas."""
    model = net()
    ensemble: hdet.StackedReplicas | None = None
    replicas: Any
    if rank is None:
        replicas = ensemble = small_run.Unheard(model, 2)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        replicas = hdet.ProcessReplicas(mesh["replicate"])
    own = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01)
    optimizer: Any = own if ensemble is None else ensemble.optimizer(own)
    scheduler = hdet.HDET(
        OneCycleLR(optimizer, 0.02, total_steps=STEPS),
        model=model,
        replicas=replicas,
        sync_every=10,
        preset="paper",
        controller=hdet.Tracker() if what == "knobs" else None,
        **OPTIONS[what],
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        if ensemble is None:
            assert rank is not None
            loss = small_run.loss_of(model, sample(step, rank // 2).chunk(2)[rank % 2])
        else:
            x = torch.cat([sample(step, replica) for replica in range(2)])
            loss = ensemble.losses(small_run.loss_of, x)
        loss.sum().backward()
        optimizer.step()
        scheduler.step(loss.detach())
        if step == 42:  # evaluated in between: no trace of it must stay
            with scheduler.consensus(), torch.no_grad():
                score(model)
    return [whole(p).detach() for p in model.parameters()], scheduler.get_knobs()


def small_ones(rank: int) -> dict[str, tuple[list[Tensor], dict[str, float]]]:
    return {what: small(rank, what) for what in OPTIONS}


@pytest.mark.parametrize("what", OPTIONS)
def test_sharded_run_with_all_features_equals_an_unsharded_one(
    what: str, alike: list[dict[str, tuple[list[Tensor], dict[str, float]]]]
) -> None:
    want, knobs = small(None, what)
    assert what == "knobs" or knobs["lr/group0"] != 1
    for results in alike:
        got, found = results[what]
        if what == "scout by losses":  # halves of a batch show the error of its loss otherwise
            assert found == pytest.approx(knobs, rel=0.2)
            assert found == alike[0][what][1]
            continue
        assert found == pytest.approx(knobs, rel=1e-8)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.fixture(scope="module")
def alike(fresh: Processes) -> list[dict[str, tuple[list[Tensor], dict[str, float]]]]:
    return fresh(4, small_ones)


# One shard, one name, one process -----------------------------------------------------------------


def mesh_of_four() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def started(model: nn.Module, replicas: hdet.ProcessReplicas | None, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    base = OneCycleLR(optimizer, 0.01, total_steps=40, cycle_momentum=False)
    given = {"sync_every": 2, "gradients": "local", "preset": "paper", **options}
    return optimizer, hdet.HDET(base, model=model, replicas=replicas, **given)


def two_steps(rank: int, model: nn.Module, optimizer: Any, scheduler: hdet.HDET) -> None:
    for step in range(2):
        optimizer.zero_grad()
        loss = small_run.loss_of(model, small_run.batch(step, rank))
        loss.backward()
        optimizer.step()
        if step == 1 and rank == 1 and isinstance(model, FSDPModule):
            local(next(model.parameters())).fill_(math.nan)  # a shard of replica 0
        scheduler.step(loss)


class Bag(nn.Module):
    """A table whose rows are shared out over all processes, and one that each has for itself."""

    def __init__(self, table: Tensor, rank: int) -> None:
        super().__init__()
        self.body = net()
        self.across = nn.Parameter(table)
        self.experts = nn.ParameterDict({"own": nn.Parameter(torch.full((2,), float(rank)))})

    def forward(self, x: Tensor) -> Tensor:
        ours = local(self.across).sum() + self.experts["own"].sum()
        return self.body(x) + 0 * ours


def in_short(
    rank: int, mesh: DeviceMesh, replicas: hdet.ProcessReplicas, kind: str | None
) -> list[Tensor]:
    """What a run ends with whose converges are compressed, or are not."""
    model = net()
    fully_shard(model, mesh=mesh)
    optimizer, scheduler = started(model, replicas, compress=kind)
    for step in range(8):
        optimizer.zero_grad()
        loss = small_run.loss_of(model, small_run.batch(step, rank))
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
    return [whole(p).detach() for p in model.parameters()]


def one_of_all(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    mesh = mesh_of_four()
    replicas = hdet.ProcessReplicas(mesh["replicate"])
    results["place"] = (replicas.size, list(replicas.local), replicas.parts, replicas.part)

    model: nn.Module = net()
    fully_shard(model, mesh=mesh)
    two_steps(rank, model, *started(model, replicas))
    results["after nan"] = [whole(p).detach() for p in model.parameters()]

    model = net()
    fully_shard(model, mesh=mesh)
    hdet.perturb_(model, 0.1, replicas=replicas, seed=7)
    results["perturbed"] = [whole(p).detach() for p in model.parameters()]
    started(model, replicas)

    results["in short"] = in_short(rank, mesh, replicas, "int8")
    results["at length"] = in_short(rank, mesh, replicas, None)

    everywhere = init_device_mesh("cpu", (4,))
    table = distribute_tensor(torch.arange(8.0), everywhere, [Shard(0)])
    bag = Bag(table, rank)
    named = hdet.ProcessReplicas(mesh["replicate"], keep_out=["experts.*"])
    optimizer, scheduler = started(bag, named)
    local(bag.across).add_(rank)
    two_steps(rank, bag, optimizer, scheduler)
    results["kept out"] = (local(bag.across).tolist(), bag.experts["own"].tolist())
    del scheduler

    model = net()
    fully_shard(model, mesh=everywhere)
    results["refused"] = []
    for case in (
        lambda: started(model, hdet.ProcessReplicas()),
        lambda: started(bag, hdet.ProcessReplicas(mesh["replicate"], keep_out=["nobody.*"])),
        lambda: started(net(), replicas, sync_every=3 if rank == 3 else 2),
        lambda: hdet.ProcessReplicas(mesh["replicate"], keep_out="experts"),
    ):
        with pytest.raises((ValueError, TypeError)) as error:
            case()
        results["refused"].append(str(error.value))
    return results


@pytest.fixture(scope="module")
def results(fresh: Processes) -> list[dict[str, Any]]:
    return fresh(4, one_of_all)


def test_process_knows_its_replica_and_part(results: list[dict[str, Any]]) -> None:
    places = [each["place"] for each in results]
    assert places == [(2, [r], 2, part) for r in (0, 1) for part in (0, 1)]


def test_compressed_average_of_shards_is_close_to_the_exact_one(
    results: list[dict[str, Any]],
) -> None:
    first = [p.detach() for p in net().parameters()]
    for each in results:
        for mine, same, exact, begun in zip(
            each["in short"], results[0]["in short"], each["at length"], first, strict=True
        ):
            assert mine.equal(same)
            assert not mine.equal(exact)
            assert float((mine - exact).norm()) < 0.02 * float((exact - begun).norm())


def test_a_replica_with_one_bad_shard_is_left_out_on_all_of_its_processes(
    results: list[dict[str, Any]],
) -> None:
    for tensors in zip(*(each["after nan"] for each in results), strict=True):
        assert all(tensor.isfinite().all() and tensor.equal(tensors[0]) for tensor in tensors)


def test_a_sharded_model_is_perturbed_like_a_whole_one(results: list[dict[str, Any]]) -> None:
    ensemble = hdet.StackedReplicas(net(), 2)
    hdet.perturb_(ensemble.modules(None)[0], 0.1, replicas=ensemble, seed=7)
    for process, each in enumerate(results):
        want = list(ensemble.modules(None)[process // 2].parameters())
        for ours, theirs in zip(each["perturbed"], want, strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)


def test_parameters_in_keep_out_are_not_averaged(results: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(results):
        assert each["kept out"] == ([2.0 * rank + rank, 2.0 * rank + 1 + rank], [rank, rank])


def test_layouts_that_do_not_fit_are_refused_on_all_processes(
    results: list[dict[str, Any]],
) -> None:
    for each in results:
        whole_world, pattern, mismatch, no_list = each["refused"]
        assert "is sharded over the replicas" in whole_world
        assert pattern.startswith("`keep_out` must match parameters of `model`") or (
            "could not start: ValueError: `keep_out`" in pattern
        )
        assert "`sync_every` is 2 on replica 0 and 3 on replica 1" in mismatch
        assert no_list == "`keep_out` must be a list of names, got 'experts'."


# Saved and loaded ---------------------------------------------------------------------------------


def run_on(model: nn.Module, replicas: Any) -> tuple[nn.Module, Any, hdet.HDET]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    base = OneCycleLR(optimizer, 0.02, total_steps=40)
    scheduler = hdet.HDET(
        base,
        model=model,
        replicas=replicas,
        sync_every=5,
        preset="paper",
        gradients="local",
        outer=OUTER,
    )
    return model, optimizer, scheduler


def steps(rank: int, run: tuple[nn.Module, Any, hdet.HDET], num: int) -> list[Tensor]:
    model, optimizer, scheduler = run
    for _ in range(num):
        optimizer.zero_grad()
        loss = small_run.loss_of(model, small_run.batch(scheduler.last_epoch, rank))
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
    return [whole(p).detach().clone() for p in model.parameters()]


def names(run: tuple[nn.Module, Any, hdet.HDET]) -> dict[str, Any]:
    return dict(zip(("model", "optimizer", "scheduler"), run, strict=True))


def hybrid() -> tuple[nn.Module, Any, hdet.HDET]:
    mesh, model = mesh_of_four(), net()
    fully_shard(model, mesh=mesh)
    return run_on(model, hdet.ProcessReplicas(mesh["replicate"]))


def saved_and_loaded(rank: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    first = hybrid()
    apart = steps(rank, first, 12)  # in the middle of a cycle
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, apart)
    results["apart"] = everyone
    path = hdet.save_checkpoint(folder, **names(first))
    results["saved"] = [whole(p).detach().clone() for p in first[0].parameters()]
    results["moments"] = moments(first[1]), moments(first[2].outer)
    results["goes on"] = steps(rank, first, 13)

    again = hybrid()
    hdet.load_checkpoint(path, **names(again))
    results["resumed"] = steps(rank, again, 13)

    # On four replicas, none of them sharded; then on one that is sharded over all.
    four = run_on(DistributedDataParallel(net()), hdet.ProcessReplicas())
    hdet.load_checkpoint(path, **names(four))
    results["on four"] = [p.detach().clone() for p in four[0].parameters()]
    assert four[2].outer is not None
    results["moments on four"] = moments(four[1]), moments(four[2].outer)
    steps(rank, four, 8)
    results["step"] = four[2].last_epoch

    # An outer optimizer may be new.
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    optimizer.load_state_dict(four[1].state_dict())
    plain = hdet.HDET(
        OneCycleLR(optimizer, 0.02, total_steps=40),
        model=model,
        sync_every=5,
        preset="paper",
        gradients="local",
    )
    run: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": plain}
    hdet.load_checkpoint(hdet.save_checkpoint(f"{folder}/plain", **run), **names(four))
    results["nothing old"] = not four[2].outer.state

    bag = Bag(distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (4,)), [Shard(0)]), rank)
    mesh = mesh_of_four()
    lonely = hdet.ProcessReplicas(mesh["replicate"], keep_out=["experts.*"])
    optimizer, scheduler = started(bag, lonely)
    with pytest.raises(ValueError, match="exist once in each process as plain tensors"):
        hdet.save_checkpoint(folder, model=bag, optimizer=optimizer, scheduler=scheduler)
    return results


def moments(optimizer: Any) -> list[Tensor]:
    key = "exp_avg" if isinstance(optimizer, torch.optim.AdamW) else "momentum_buffer"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [whole(optimizer.state[p][key]).clone() for p in parameters]


@pytest.fixture(scope="module")
def kept(fresh: Processes, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return fresh(4, saved_and_loaded, str(tmp_path_factory.mktemp("dcp")))


def test_checkpoint_within_a_cycle_holds_one_model_and_resumes_exactly(
    kept: list[dict[str, Any]],
) -> None:
    one, other = kept[0]["apart"][0], kept[0]["apart"][2]
    assert not any(a.equal(b) for a, b in zip(one, other, strict=True))  # replicas were apart
    for each in kept:
        for ours, first in zip(each["saved"], kept[0]["saved"], strict=True):
            assert ours.equal(first)
        for ours, want in zip(each["resumed"], each["goes on"], strict=True):
            assert ours.equal(want)


def test_checkpoint_loads_on_another_mesh(kept: list[dict[str, Any]]) -> None:
    for each in kept:
        for ours, want in zip(each["on four"], kept[0]["saved"], strict=True):
            assert ours.equal(want)
        for ours, want in zip(each["moments on four"], kept[0]["moments"], strict=True):
            assert all(a.equal(b) for a, b in zip(ours, want, strict=True))
        assert each["step"] == 20
        assert each["nothing old"]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.02),
    "fused": partial(torch.optim.AdamW, lr=0.02, fused=True),
    "capturable": partial(torch.optim.AdamW, lr=0.02, capturable=True),
    "adafactor": partial(torch.optim.Adafactor, lr=0.02),
}


def one_replica(model: nn.Module, kind: str) -> tuple[nn.Module, Any, hdet.HDET]:
    optimizer = OPTIMIZERS[kind](model.parameters())
    base = LambdaLR(optimizer, lambda _: 1.0)
    return model, optimizer, hdet.HDET(base, model=model, sync_every=5, scout=None, guard=None)


def wrapped() -> nn.Module:
    """The same network, with names that torch.compile and activation checkpointing have changed."""
    layers = net()
    layers[0] = checkpoint_wrapper(layers[0])
    layers[2] = cast(nn.Module, torch.compile(layers[2], backend="eager"))
    return cast(nn.Module, torch.compile(layers, backend="eager"))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_checkpoint_resumes_every_optimizer(kind: str, tmp_path: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "capturable" and device == "cpu":
        pytest.skip("torch makes such steps on a device only")
    first, again = (one_replica(net().to(device), kind) for _ in range(2))
    few_steps(first)
    hdet.load_checkpoint(hdet.save_checkpoint(tmp_path, **names(first)), **names(again))
    for run in (first, again):
        few_steps(run)
    for ours, want in zip(again[0].parameters(), first[0].parameters(), strict=True):
        assert ours.equal(want)


def few_steps(run: tuple[nn.Module, Any, hdet.HDET]) -> None:
    model, optimizer, scheduler = run
    for step in range(3):
        optimizer.zero_grad()
        batch = small_run.batch(step, 0).to(next(model.parameters()).device)
        loss = small_run.loss_of(model, batch)
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())


@pytest.mark.parametrize("makes", [(net, wrapped), (wrapped, net)])
def test_checkpoint_names_do_not_depend_on_wrappers(makes: Any, tmp_path: Path) -> None:
    first, again = (one_replica(make(), "adamw") for make in makes)
    few_steps(first)
    hdet.load_checkpoint(hdet.save_checkpoint(tmp_path, **names(first)), **names(again))
    for ours, want in zip(moments(again[1]), moments(first[1]), strict=True):
        assert ours.equal(want) and want.any()


def test_checkpoint_that_does_not_fit_is_refused_without_changes(tmp_path: Path) -> None:
    first = one_replica(net(), "adamw")
    few_steps(first)
    path = hdet.save_checkpoint(tmp_path, **names(first))
    model = net()
    model[2].requires_grad_(False)  # the first optimizer does not have it
    before = [p.detach().clone() for p in model.parameters()]
    adamw = torch.optim.AdamW
    constant: Callable[[Any], Any] = partial(LambdaLR, lr_lambda=lambda _: 1.0)
    stairs: Callable[[Any], Any] = partial(StepLR, step_size=5)
    for optimizer, make, why in [
        (adamw(model[0].parameters()), constant, r"got \[\['0.bias', '0.weight'\]\]"),
        (
            torch.optim.SGD(model.parameters()),
            constant,
            "same type as the saved one, AdamW, got SGD",
        ),
        (adamw(model.parameters()), stairs, "must be of a StepLR, got that of a LambdaLR"),
    ]:
        scheduler = hdet.HDET(make(optimizer), model=model, sync_every=5, scout=None, guard=None)
        with pytest.raises(ValueError, match=why):
            hdet.load_checkpoint(path, model=model, optimizer=optimizer, scheduler=scheduler)
        assert all(p.equal(kept) for p, kept in zip(model.parameters(), before, strict=True))
        assert not optimizer.state
        del scheduler
    shorter = one_replica(model[:2], "adamw")
    with pytest.raises(ValueError, match=r"it lacks \['2.bias', '2.weight'\]"):
        hdet.load_checkpoint(path, **names(shorter))


def test_optimizer_state_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    run = one_replica(net(), "adamw")
    few_steps(run)
    run[1].state[run[0][0].weight]["history"] = [torch.ones(2)]  # type: ignore[index]
    with pytest.raises(TypeError, match="cannot save a AdamW"):
        hdet.save_checkpoint(tmp_path, **names(run))


# Wires that cross, and moments that are odd -------------------------------------------------------


def run_with(model: nn.Module, replicas: Any, num: int, rank: int, **options: Any) -> hdet.HDET:
    optimizer, scheduler = started(model, replicas, **options)
    steps(rank, (model, optimizer, scheduler), num)
    return scheduler


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def alike_inside(model: nn.Module, group: Any) -> bool:
    """Whether all processes of a group have the same weights."""
    mine = torch.cat([local(p).detach().flatten() for p in model.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return all(other.equal(mine) for other in everyone)


def crossed(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    dist.new_group([0])  # a process in more groups than others must not block them
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "data"))
    replicas = hdet.ProcessReplicas(mesh["replicate"])
    inside, across = mesh["data"].get_group(), mesh["replicate"].get_group()

    # DDP inside a replica goes on where gradients are local to it.
    model: nn.Module = DistributedDataParallel(net(), process_group=inside)
    run_with(model, replicas, 5, rank, sync_every=4)
    results["inside"] = alike_inside(model, inside), alike_inside(model, across)
    with warns_on_first(rank, "each replica steps with its own gradients"):
        alone = DistributedDataParallel(net(), process_group=inside)
        two_steps(rank, alone, *started(alone, replicas, gradients="shared"))
    world = DistributedDataParallel(net())
    results["both"] = refusal(lambda: started(world, replicas))
    started(world, replicas, gradients="shared")

    # Whoever comes second finds the gradients as they were.
    model = net()
    fully_shard(model, mesh=mesh)
    started(model, replicas)
    started(model, hdet.ProcessReplicas(mesh["replicate"]), gradients="shared")
    model(HELD).square().mean().backward()
    (group,) = _parameter_groups(model)
    results["again"] = hasattr(group.mesh_info, "replicate_process_group")

    # A replica that hdet takes for smaller than it is would fall apart.
    results["by group"] = refusal(lambda: started(model, hdet.ProcessReplicas(across)))
    results["by default"] = refusal(lambda: started(split(toy.toy(), mesh["data"]), None))
    everyone = init_device_mesh("cpu", (4,))
    results["over all"] = refusal(lambda: started(split(toy.toy(), everyone), None))

    odd = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("replicate", "data"))
    results["odd"] = refusal(lambda: hdet.ProcessReplicas(odd["replicate"]))

    # A process may have nothing of a model at all.
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=mesh)
    optimizer, scheduler = started(model, replicas)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(small_run.batch(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
    results["nearly nothing"] = bool(whole(model.weight).isfinite().all())

    model = net()
    fully_shard(model, mesh=mesh)
    results["perturb"] = refusal(lambda: hdet.perturb_(model))

    def other_batches(scored: Any) -> Tensor:
        return score(lambda x: scored(x + (rank == 3)))

    optimizer, scheduler = started(
        model, replicas, gradients="shared", probe=other_batches, controller=hdet.Tracker()
    )
    results["probe"] = refusal(lambda: steps(rank, (model, optimizer, scheduler), 2))
    return results


def hidden(rank: int) -> str:
    model, mesh = laid_out("ddp and tp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = hdet.HDET(
        OneCycleLR(optimizer, 0.01, total_steps=9, cycle_momentum=False),
        model=model,
        replicas=hdet.ProcessReplicas(mesh["replicate"], keep_out=["head.bias"]),
        preset="paper",
        sync_every=3,
    )
    for step in range(3):  # what was kept out is remembered, also where it is hidden
        optimizer.zero_grad()
        loss = toy.loss_of(model, step, rank // 2)
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
    return refusal(
        lambda: hdet.save_checkpoint("x", model=model, optimizer=optimizer, scheduler=scheduler)
    )


def test_save_checkpoint_refuses_parameters_that_ddp_hides(trained: Trained) -> None:
    for results in trained.results:
        assert (
            "exist once" in results.said or "DDP over tensor parallelism hides them" in results.said
        )


def test_gradient_averaging_inside_a_replica_stays_on(fresh: Processes) -> None:
    for results in fresh(4, crossed):
        assert results["inside"] == (True, False)
        assert "processes [0, 1, 2, 3] average them both" in results["both"]
        assert results["again"] and results["nearly nothing"]
        assert "this replica has" in results["by group"]
        assert "sharded inside one replica or over all replicas" in results["by default"]
        assert "is sharded over the replicas" in results["over all"]
        assert results["odd"].startswith("the ranks of a device mesh must be in rising order")
        assert results["perturb"] == "`perturb_` needs `replicas=` for a sharded model, got None."
        assert results["probe"].startswith("`probe` must score the same batches on all replicas")


def unflattened(rank: int) -> tuple[int, list[Tensor], list[Tensor]]:
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    mesh = world._unflatten(0, (2, 2), ("replicate", "shard"))
    model, replicas = net(), hdet.ProcessReplicas(mesh["replicate"])
    fully_shard(model, mesh=mesh)
    results = steps(rank, run_on(model, replicas), 7)
    return replicas.parts, results, steps(rank, hybrid(), 7)


@pytest.mark.skipif(IS_OLDEST, reason="DeviceMesh of torch 2.6 has no _unflatten")
def test_replicas_may_be_a_dimension_of_an_unflattened_mesh(fresh: Processes) -> None:
    for parts, ours, theirs in fresh(4, unflattened):
        assert parts == 2
        assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


class Spare(nn.Module):
    """With a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.spare = net(), nn.Linear(2, 2).double()
        nn.init.ones_(self.spare.weight)
        nn.init.zeros_(self.spare.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def odd_moments(rank: int, folder: str) -> list[bool]:
    # A short scout says on the first process that it saw little.
    warnings.filterwarnings("ignore", message="the scout ")
    same = []
    for number, (early, options) in enumerate(
        [(0, {}), (3, {}), (4, {"scout": hdet.Scout(decades=2, share=0.5), "spread": 0.0})]
    ):
        ends = []
        for is_saved in (True, False):
            mesh, model = mesh_of_four(), Spare()
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
            scheduler = hdet.HDET(
                OneCycleLR(optimizer, 0.02, total_steps=40),
                model=model,
                replicas=hdet.ProcessReplicas(mesh["replicate"]),
                sync_every=5,
                preset="paper",
                **options,  # type: ignore[arg-type]
            )
            run = (model, optimizer, scheduler)
            steps(rank, run, early)
            if is_saved:
                path = hdet.save_checkpoint(f"{folder}/{number}", **names(run))
                ends.append(steps(rank, run, 26))  # saving it has changed nothing
            else:
                hdet.load_checkpoint(path, **names(run))
            ends.append(steps(rank, run, 0 if is_saved else 26))
        same.append(all(a.equal(b) for a, b in zip(ends[0], ends[-1], strict=True)))
    return same


def test_checkpoint_can_be_saved_at_any_moment(fresh: Processes, tmp_path: Path) -> None:
    """Before its first step, with a parameter that has no state, and while it scouts."""
    for same in fresh(4, odd_moments, str(tmp_path)):
        assert same == [True, True, True]
