"""Two optimizers in one run, compared with the plain loop of tests/reference.py on every engine."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

import hdet
from hdet.control.assignment import assignment
from hdet.tensors.dtensor import whole
from tests import reference, toy
from tests.processes import Processes

N, T, S, WARMUP = 4, 3, 72, 12
PEAKS = [0.02, 0.01, 0.03]
"""Of the matrices, of the biases, and of the weights of the LayerNorm."""
PAPER: dict[str, Any] = {
    "preset": "paper",
    "spread": 0.25,
    "sync_every": T,
    "seed": 5,
    "controller": hdet.PaperController(
        warmup_steps=WARMUP, momentum=0.8, temperature=0.05, step_size=0.7
    ),
}
HAS_MUON = hasattr(torch.optim, "Muon")


def optimizers_of(model: nn.Module, kind: str) -> list[Optimizer]:
    """One optimizer for the matrices, and AdamW with two groups for everything else."""
    named = dict(model.named_parameters())
    matrices = [p for p in named.values() if p.ndim == 2]
    norm = [p for name, p in named.items() if name.endswith("norm.weight")]
    biases = [p for p in named.values() if p.ndim == 1 and p is not norm[0]]
    groups: list[dict[str, Any]] = [{"params": biases}, {"params": norm, "weight_decay": 0.0}]
    first: Optimizer = torch.optim.SGD(matrices, lr=1.0, momentum=0.9)
    if kind == "muon":
        first = torch.optim.Muon(matrices, lr=1.0, weight_decay=0.1)
    return [first, torch.optim.AdamW(groups, lr=1.0, weight_decay=0.01)]


def schedules_of(optimizers: Sequence[Optimizer]) -> list[LRScheduler]:
    peaks = [PEAKS[:1], PEAKS[1:]]
    return [
        OneCycleLR(optimizer, highest, total_steps=S, cycle_momentum=False)
        for optimizer, highest in zip(optimizers, peaks, strict=True)
    ]


def probe(model: nn.Module) -> Tensor:
    tokens, labels = toy.batch(10_000, 0, 64)
    return nn.functional.cross_entropy(model(tokens), labels, reduction="none")


class Trained(NamedTuple):
    """The weights of each local replica, and the centres of the knobs after each cycle."""

    weights: list[list[Tensor]]
    centres: list[list[float]]


class Loop:
    """The loop of a user. It can run on every engine."""

    def __init__(self, engine: str, kind: str, rank: int = 0, **options: Any) -> None:
        self.inner, self.rank = toy.toy(), rank
        self.model: nn.Module = self.inner
        self.ensemble: hdet.StackedReplicas | None = None
        if engine == "ddp":
            self.model = DistributedDataParallel(self.inner)
        if engine == "fsdp2":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            fully_shard(self.inner, mesh=mesh)
            options["replicas"] = hdet.ProcessReplicas(mesh["replicate"])
        self.optimizers = optimizers_of(self.inner, kind)
        if engine in ("vmap", "loop"):
            self.ensemble = hdet.StackedReplicas(self.inner, N, mode=engine)  # type: ignore[arg-type]
            self.optimizers = [self.ensemble.optimizer(one) for one in self.optimizers]
            options["replicas"] = self.ensemble
        self.scheduler = hdet.HDET(schedules_of(self.optimizers), model=self.model, **options)

    def losses(self, step: int) -> Tensor:
        if self.ensemble is None:
            return toy.loss_of(self.model, step, self.rank)
        parts = [toy.batch(step, replica) for replica in range(N)]
        batch = [torch.cat(column) for column in zip(*parts, strict=True)]
        return self.ensemble.losses(loss_of_batch, *batch)

    def step(self, step: int, factor: float = 1.0) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        losses = self.losses(step) * factor
        losses.sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.scheduler.step(losses)

    def train(self) -> Trained:
        centres = []
        for step in range(S):
            self.step(step)
            if (step + 1) % T == 0:
                centres.append(list(self.scheduler.get_knobs().values()))
        return Trained(self.weights(), centres)

    def weights(self) -> list[list[Tensor]]:
        modules = [self.inner] if self.ensemble is None else self.ensemble.modules(None)
        return [[whole(p.detach()).clone() for p in module.parameters()] for module in modules]

    def everything(self) -> list[Tensor]:
        """The weights, and the states of both optimizers."""
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        entries = [entry for state in states for one in state.values() for entry in one.values()]
        return [*self.weights()[0], *(entry.clone() for entry in entries)]


def loss_of_batch(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def expected(kind: str, names: Sequence[str], num: int = N) -> reference.Run:
    """The plain loop; `names` are the knobs of the three groups."""

    def loss(model: nn.Module, step: int, replica: int) -> Tensor:
        if num == N:
            return toy.loss_of(model, step, replica)
        # Each of the two processes of a sharded replica has a batch of its own.
        parts = [toy.loss_of(model, step, 2 * replica + part) for part in range(2)]
        return (parts[0] + parts[1]) / 2

    return reference.run(
        toy.toy(),
        lambda model: optimizers_of(model, kind),
        loss,
        lambda group, cycle: assignment(num, seed=5, cycle=cycle, knob=names[group]),
        num_replicas=num,
        peaks=PEAKS,
        total_steps=S,
        sync_every=T,
        warmup_steps=WARMUP,
        alpha=0.25,
        beta=0.8,
        sigma=0.05,
        lam=0.7,
        keeps_schedule=True,
    )


def check(trained: Trained, want: reference.Run, replicas: Sequence[int], num_knobs: int) -> None:
    for replica, weights in zip(replicas, trained.weights, strict=True):
        for ours, theirs in zip(weights, want.parameters[replica], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for centres, cycle in zip(trained.centres, want.cycles, strict=True):
        assert centres == pytest.approx(cycle.centres[:num_knobs], rel=1e-12, abs=1e-12)
    assert trained.centres[-1] != trained.centres[0]  # the controller has moved them


ONE_EACH = [f"lr/group{index}" for index in range(3)]
COMMON = ["lr"] * 3


def matrix_kind() -> str:
    return "muon" if HAS_MUON else "sgd"


def start_while_gathered(rank: int) -> None:
    """After a forward pass FSDP2 may have whole parameters in the place of its shards."""
    model = toy.toy()
    fully_shard(model, mesh=init_device_mesh("cpu", (N,)), reshard_after_forward=False)
    optimizers = optimizers_of(model, "sgd")
    toy.loss_of(model, 0, rank)
    mesh = init_device_mesh("cpu", (1, N), mesh_dim_names=("one", "all"))
    replicas = hdet.ProcessReplicas(mesh["one"])
    hdet.HDET(schedules_of(optimizers), model=model, replicas=replicas, scout=None)


def scouted(rank: int) -> Trained:
    """Search, and train on for some steps with shared gradients and one learning rate."""
    loop = Loop("ddp", matrix_kind(), rank, probe=probe, scout=hdet.Scout(share=0.6), sync_every=T)
    step = 0
    while loop.scheduler.is_scouting:
        loop.step(step)
        step += 1
    assert step > 3
    for number in range(step, step + 5):
        loop.step(number)
    return Trained([loop.everything()], [[*loop.scheduler.get_knobs().values()]])


def on_processes(rank: int) -> dict[str, Trained]:
    """All runs on processes in one call: processes take seconds to start."""
    start_while_gathered(rank)
    return {
        "scouted": scouted(rank),
        "ddp": Loop("ddp", matrix_kind(), rank, knobs=[hdet.lr()], **PAPER).train(),
        "fsdp2": Loop("fsdp2", "sgd", rank, **PAPER).train(),
    }


@pytest.fixture(scope="module")
def trained() -> Iterator[list[dict[str, Trained]]]:
    """Processes of our own: torch keeps the groups of a mesh by name, also after they are gone."""
    pool = Processes()
    yield pool(N, on_processes)
    pool.close()


def test_two_optimizers_under_ddp_equal_the_reference_loop(
    trained: list[dict[str, Trained]],
) -> None:
    want = expected(matrix_kind(), ONE_EACH)
    for rank, runs in enumerate(trained):
        check(runs["ddp"], want, [rank], 3)


def test_replicas_of_a_scout_are_alike_in_both_optimizers_after_it(
    trained: list[dict[str, Trained]],
) -> None:
    first, *others = [runs["scouted"] for runs in trained]
    assert first.centres[0][0] != 1.0
    for other in others:
        assert other.centres == first.centres
        for ours, theirs in zip(first.weights[0], other.weights[0], strict=True):
            assert torch.equal(ours, theirs)


def test_two_optimizers_under_fsdp2_equal_the_reference_loop(
    trained: list[dict[str, Trained]],
) -> None:
    want = expected("sgd", COMMON, num=2)
    for rank, runs in enumerate(trained):
        check(runs["fsdp2"], want, [rank // 2], 1)


@pytest.mark.parametrize(
    ("engine", "kind", "knobs"),
    [("vmap", "muon", COMMON), ("vmap", "sgd", ONE_EACH), ("loop", "sgd", COMMON)],
)
def test_two_optimizers_of_stacked_replicas_equal_the_reference_loop(
    engine: str, kind: str, knobs: list[str]
) -> None:
    if kind == "muon" and not HAS_MUON:
        pytest.skip("this torch has no Muon")
    options: dict[str, Any] = {} if knobs == COMMON else {"knobs": [hdet.lr()]}
    loop = Loop(engine, kind, **PAPER, **options)
    check(loop.train(), expected(kind, knobs), range(N), len(set(knobs)))


BAD, BACK_AT = 44, 48
"""The step of a batch without a finite loss, and the end of its cycle."""


def survive(rank: int, engine: str) -> tuple[bool, bool]:
    """Meet a bad batch. Did the guard restore everything of an earlier cycle, and is all finite?"""
    loop = Loop(engine, matrix_kind(), rank, scout=None, sync_every=8)
    ends: list[list[Tensor]] = []
    for step in range(BACK_AT):
        loop.step(step, math.nan if step == BAD and rank == 0 else 1.0)
        if (step + 1) % 8 == 0:
            ends.append(loop.everything())
    restored = ends.pop()
    is_restored = any(
        all(map(torch.equal, restored, kept)) for kept in ends if len(kept) == len(restored)
    )
    for step in range(BACK_AT, S):
        loop.step(step)
    return is_restored, all(bool(entry.isfinite().all()) for entry in loop.everything())


@pytest.mark.parametrize("engine", ["plain", "loop", "ddp"])
def test_guard_restores_both_optimizers_after_a_bad_batch(
    processes: Processes, engine: str
) -> None:
    told = processes(2, survive, engine) if engine == "ddp" else [survive(0, engine)]
    assert told == [(True, True)] * len(told)
