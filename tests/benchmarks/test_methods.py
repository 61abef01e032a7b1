"""A row of the settling benchmark ends as the library does, and as torch's own loop does."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks.learning_rate.methods.bench import DECAY, SYNC_EVERY, Bench, N, Run
from benchmarks.learning_rate.methods.guards import RowGuards
from benchmarks.learning_rate.methods.registry import METHODS
from benchmarks.learning_rate.methods.rows import train_rows
from benchmarks.learning_rate.methods.schedules import plans_of
from benchmarks.learning_rate.methods.scout import with_restart, with_scout
from benchmarks.learning_rate.methods.search import Signal
from benchmarks.learning_rate.methods.single import plain
from benchmarks.learning_rate.methods.steered import by_group
from benchmarks.zoo.tasks import Batches, Plan, Task
from tests.small_run import Unheard

STEPS = 300


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def draw(seed: int, step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(10_000 * seed + step)
    x = torch.randn(32, 6, generator=source, dtype=torch.float64)
    noise = 0.5 * torch.randn(32, 4, generator=source, dtype=torch.float64)
    return x, (x[:, :4] + noise).argmax(1)


def batches(seeds: Sequence[int]) -> Batches:
    def batch(steps: Tensor) -> tuple[Tensor, ...]:
        parts = [draw(seed, int(step)) for seed, step in zip(seeds, steps, strict=True)]
        return tuple(torch.stack(part) for part in zip(*parts, strict=True))

    return batch


def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


HELD = draw(99, 0)


@torch.no_grad()
def score(model: Any) -> Tensor:
    return F.cross_entropy(model(HELD[0]), HELD[1], reduction="none")


TASK = Task(
    model, loss, batches, score, score, lambda answer: {"loss": float(answer.double().mean())}
)


LAYERS = TASK._replace(group_of=lambda name: int(name[0] != "0"), groups=("first", "last"))


def bench(optimizer: str, task: Task = TASK) -> Bench:
    return Bench(task, Plan(optimizer, STEPS, 32, 0.01))


def make_optimizer(
    kind: str, net: nn.Module, lr: float, task: Task = TASK
) -> torch.optim.Optimizer:
    decay, groups = DECAY[kind], []
    for place, group in enumerate(task.groups):
        own = [p for name, p in net.named_parameters() if task.group_of(name) == place]
        groups.append({"params": own, "name": group})
    if kind == "SGD":
        return torch.optim.SGD(groups, lr, momentum=0.9, weight_decay=decay)
    return torch.optim.AdamW(groups, lr, weight_decay=decay)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_plain_method_equals_a_torch_training_loop(kind: str) -> None:
    runs = [Run(0.01, 0), Run(0.1, 1)]
    ended = plain(bench(kind), runs)
    for run, end in zip(runs, ended, strict=True):
        net = model(run.seed)
        optimizer = make_optimizer(kind, net, run.lr)
        schedule = OneCycleLR(optimizer, run.lr, total_steps=STEPS)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(net, *draw(run.seed, step)).backward()
            optimizer.step()
            if step < STEPS - 1:
                schedule.step()
        assert end.live["loss"] == pytest.approx(float(score(net).mean()), rel=1e-9)
        assert end.lr == pytest.approx(run.lr)


def trained(run: Run, ensemble: hdet.StackedReplicas, optimizer: Any, scheduler: Any) -> float:
    """What the library's consensus scores at the end of a run."""
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = ensemble.losses(loss, *draw(run.seed, step))
        losses.sum().backward()
        optimizer.step()
        scheduler.step(losses.detach())
    return float(score(ensemble.consensus()).mean())


def by_the_library(
    kind: str,
    run: Run,
    task: Task = TASK,
    engine: type[hdet.StackedReplicas] = hdet.StackedReplicas,
    **how: Any,
) -> float:
    net = model(run.seed)
    ensemble = engine(net, N)
    optimizer = ensemble.optimizer(make_optimizer(kind, net, run.lr, task))
    base = OneCycleLR(optimizer, run.lr, total_steps=STEPS)
    scheduler = hdet.HDET(
        base, model=net, replicas=ensemble, sync_every=SYNC_EVERY, **how, preset="paper"
    )
    return trained(run, ensemble, optimizer, scheduler)


@pytest.mark.filterwarnings("ignore:the scout ")
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("by", ["losses", "held out", "probe"])
def test_hdet_method_equals_the_library(kind: str, by: Signal) -> None:
    runs = [Run(0.01, 0), Run(1e-5, 1)]
    ended = with_scout(bench(kind), runs, by=by)
    for run, end in zip(runs, ended, strict=True):
        expected = by_the_library(
            kind,
            run,
            scout=hdet.Scout(),
            guard=hdet.Guard(),
            probe=score if by == "probe" else None,
            engine=Unheard if by == "losses" else hdet.StackedReplicas,
            spread=0.0,
            controller=None,
        )
        assert end.live["loss"] == pytest.approx(expected, rel=1e-7)


@pytest.mark.filterwarnings("ignore:the scout ")
def test_method_with_lrs_by_group_equals_the_library() -> None:
    run = Run(0.003, 0)
    (end,) = by_group(bench("AdamW", LAYERS), [run])
    how: dict[str, Any] = {"scout": hdet.Scout(), "probe": score}
    how |= {"knobs": [hdet.lr()], "spread": 1 / 9}
    tracker = hdet.Tracker(relative=True)
    expected = by_the_library("AdamW", run, LAYERS, **how, controller=tracker, design="orthogonal")
    first, last = end.notes["moved"]
    assert first * last == pytest.approx(1.0)
    assert first != last
    assert end.live["loss"] == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("lr", [0.03, 300.0])
@pytest.mark.filterwarnings("ignore:the scout saw too little")
def test_method_with_a_restart_equals_the_library(lr: float) -> None:
    run = Run(lr, 0)
    (end,) = with_restart(bench("SGD"), [run])
    how: dict[str, Any] = {"scout": "restart", "guard": hdet.Guard(), "probe": score}
    expected = by_the_library("SGD", run, **how, spread=0.0, controller=None)
    assert end.notes["kept"] == (lr < 1)
    assert (end.lr < lr) == (lr > 1)
    assert end.live["loss"] == pytest.approx(expected, rel=1e-7)


def test_method_with_a_guard_equals_the_library() -> None:
    run, watch = Run(300.0, 0), RowGuards(hdet.Guard())
    (end,) = train_rows(bench("SGD"), plans_of(bench("SGD"), [run]), watch=watch)
    expected = by_the_library("SGD", run, guard=hdet.Guard(), spread=0.0, controller=None)
    assert watch.returns[0] > 0
    assert end.live["loss"] == pytest.approx(expected, rel=1e-7)


def test_method_of_the_paper_equals_the_library() -> None:
    run = Run(0.03, 3)
    (end,) = METHODS["paper"].train(bench("AdamW"), [run])
    net = model(run.seed)
    ensemble = hdet.StackedReplicas(net, N)
    optimizer = ensemble.optimizer(make_optimizer("AdamW", net, run.lr))
    scheduler = hdet.OneCycleHDET(
        optimizer,
        run.lr,
        total_steps=STEPS,
        model=net,
        replicas=ensemble,
        sync_every=SYNC_EVERY,
    )
    expected = trained(run, ensemble, optimizer, scheduler)
    assert end.live["loss"] == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_lowers_the_loss(name: str) -> None:
    method = METHODS[name]
    for kind in method.optimizers:
        ended = method.train(bench(kind), [Run(0.03, 0), Run(0.01, 1)])
        before = float(score(model(0)).mean())
        assert all(end.live.keys() == {"loss"} and end.lr > 0 for end in ended)
        after = ended[0].live["loss"]
        assert after is not None
        assert after < before
