"""An outer optimizer on what the replicas have changed: DiLoCo, and Local SGD without one."""

import copy
import os
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import hdet
from hdet.weights.inventory import ReplicaTensors
from hdet.weights.outer_optimizer import OuterOptimizer
from tests import toy
from tests.managers import States, managed
from tests.processes import Processes
from tests.torch_version import IS_OLDEST

T, S = 5, 32  # the last two steps are in a cycle that never ends
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(rank: int, model: nn.Module, optimizer: Any, *, after: Any = lambda loss: None) -> None:
    for step in range(S):
        optimizer.zero_grad()
        loss = toy.loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
        after(loss.detach())


def ours(rank: int, outer: bool, **options: Any) -> list[Tensor]:
    model = toy.toy(torch.float32)
    optimizer = inner(model)
    scheduler = hdet.HDET(
        LambdaLR(optimizer, lambda _: 1.0),
        model=model,
        preset="paper",
        spread=0.0,
        controller=None,
        gradients="local",
        sync_every=T,
        outer=OUTER if outer else None,
        **options,
    )
    train(rank, model, optimizer, after=scheduler.step)
    return [p.detach() for p in model.parameters()]


# Beside other libraries ---------------------------------------------------------------------------


def torchft_diloco(rank: int, lighthouse: str) -> list[Tensor]:
    model = toy.toy(torch.float32)
    states: States = {"model": (model.load_state_dict, model.state_dict)}
    with managed(rank, lighthouse, states) as manager:
        from torchft.local_sgd import DiLoCo

        optimizer = inner(model)
        slow = OUTER(list(model.parameters()))
        with DiLoCo(manager, [model], optimizer, slow, sync_every=T):
            train(rank, model, optimizer)
    return [p.detach() for p in model.parameters()]


def accelerate_local_sgd(rank: int) -> list[Tensor]:
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    model = DistributedDataParallel(toy.toy(torch.float32))
    optimizer = inner(model)
    accelerator = Accelerator(cpu=True)
    with LocalSGD(accelerator, model, local_sgd_steps=T) as local_sgd:
        assert local_sgd.enabled
        train(rank, model, optimizer, after=lambda loss: local_sgd.step())
        local_sgd._sync_and_avg_model_params = lambda: None  # at the end, in mid-cycle
    warnings.simplefilter("error")
    return [p.detach() for p in model.parameters()]


def check_alike(some: list[list[Tensor]], others: list[list[Tensor]]) -> None:
    for mine, theirs in zip(some, others, strict=True):
        for ours, want in zip(mine, theirs, strict=True):
            torch.testing.assert_close(ours, want, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(IS_OLDEST, reason="torchft needs torch 2.7")
def test_diloco_equals_torchft() -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=2)
    pool = Processes(2)  # torchft leaves threads behind
    try:
        theirs = pool(2, torchft_diloco, server.address())
        check_alike(pool(2, ours, True), theirs)
    finally:
        pool.close()
        server.shutdown()


def test_averaging_without_outer_optimizer_equals_local_sgd_of_accelerate() -> None:
    pool = Processes(2)  # Accelerate keeps what it found in the environment
    try:
        check_alike(pool(2, ours, False), pool(2, accelerate_local_sgd))
    finally:
        pool.close()


# On its own ---------------------------------------------------------------------------------------


def talk(rank: int, layout: str, gradients: Any = "local") -> list[list[str]]:
    """What is sent in every step of two cycles."""
    model: nn.Module = toy.toy()
    replicas = hdet.ProcessReplicas()
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        replicas = hdet.ProcessReplicas(mesh["replicate"])
    else:
        model = DistributedDataParallel(model)
    optimizer = inner(model)
    scheduler = hdet.HDET(
        LambdaLR(optimizer, lambda _: 1.0),
        model=model,
        replicas=replicas,
        preset="paper",
        spread=0.0,
        controller=None,
        gradients=gradients,
        sync_every=T,
        outer=OUTER,
    )
    sent = []
    for step in range(2 * T):
        with profile(use_kineto=False) as seen:
            optimizer.zero_grad()
            loss = toy.loss_of(model, step, rank)
            loss.backward()
            optimizer.step()
            scheduler.step(loss.detach())
        events = seen.function_events or []
        sent.append([event.name for event in events if event.name.startswith("gloo:")])
    return sent


def test_nothing_is_sent_between_two_averages(processes: Processes) -> None:
    for results in processes(2, talk, "ddp"):
        for step, sent in enumerate(results, start=1):
            assert bool(sent) == (step % T == 0), (step, sent)


def test_replicas_of_several_processes_send_inside_of_a_replica_only(processes: Processes) -> None:
    """Whose reduce-scatter is an all-reduce where gloo makes it."""
    local, shared = processes(4, talk, "hsdp"), processes(4, talk, "hsdp", "shared")
    for alone, together in zip(local, shared, strict=True):
        assert sorted(together[0]) == sorted([*alone[0], "gloo:all_reduce"])
        for step, sent in enumerate(alone, start=1):
            assert (sent == alone[0]) == (step % T != 0), (step, sent)


def stacked(steps: int, noise: float = 0.0, **options: Any) -> tuple[Any, Any, hdet.HDET]:
    model = toy.toy()
    ensemble = hdet.StackedReplicas(model, 4)
    if noise:
        hdet.perturb_(model, noise, replicas=ensemble)
    optimizer = ensemble.optimizer(inner(model))
    scheduler = hdet.HDET(
        LambdaLR(optimizer, lambda _: 1.0),
        model=model,
        replicas=ensemble,
        preset="paper",
        controller=None,
        gradients="local",
        sync_every=T,
        **{"outer": OUTER, **options},
    )
    go_on(ensemble, optimizer, scheduler, steps)
    return ensemble, optimizer, scheduler


def loss_of(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens), labels)


def go_on(
    ensemble: Any, optimizer: Any, scheduler: hdet.HDET, steps: int, scale: float = 1.0
) -> None:
    for _ in range(steps):
        parts = [toy.batch(scheduler.last_epoch, replica) for replica in range(4)]
        losses = ensemble.losses(loss_of, *(torch.cat(same) for same in zip(*parts, strict=True)))
        optimizer.zero_grad()
        (scale * losses.sum()).backward()
        optimizer.step()
        scheduler.step(scale * losses.detach())


def weights(ensemble: Any) -> list[Tensor]:
    return [p.detach().clone() for module in ensemble.modules(None) for p in module.parameters()]


def check_equal(some: list[Tensor], others: list[Tensor]) -> None:
    assert all(a.equal(b) for a, b in zip(some, others, strict=True))


def test_converge_without_a_training_step_makes_no_outer_step() -> None:
    ensemble, _, scheduler = stacked(T)
    before = weights(ensemble)
    scheduler.converge()
    scheduler.converge()
    check_equal(before, weights(ensemble))


def test_a_run_resumes_with_the_state_of_its_outer_optimizer() -> None:
    first = stacked(7)
    first[2].converge()
    ensemble, optimizer, scheduler = stacked(0)
    assert first[2].outer is not None
    assert scheduler.outer is not None
    ensemble.modules(None)[0].load_state_dict(first[0].modules(None)[0].state_dict())
    optimizer.load_state_dict(first[1].state_dict())
    scheduler.outer.load_state_dict(copy.deepcopy(first[2].outer.state_dict()))
    scheduler.load_state_dict(first[2].state_dict())
    for run in (first, (ensemble, optimizer, scheduler)):
        go_on(*run, 8)
    check_equal(weights(first[0]), weights(ensemble))


def test_rollback_restores_the_state_of_the_outer_optimizer() -> None:
    ensemble, optimizer, scheduler = stacked(T, guard=hdet.Guard(offload=True))
    assert scheduler.outer is not None
    assert scheduler._run.good_point is not None
    assert scheduler._run.good_point.step == T
    before = weights(ensemble)
    moments = [state["momentum_buffer"].clone() for state in scheduler.outer.state.values()]
    for factor in (1.0, 0.25):  # the first failure is spared
        go_on(ensemble, optimizer, scheduler, T, scale=1e4)
        assert scheduler.get_knobs()["lr/group0"] == factor
        check_equal(before, weights(ensemble))
        check_equal(moments, [s["momentum_buffer"] for s in scheduler.outer.state.values()])


def test_outer_that_makes_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="`outer` must make an optimizer of a list of parameters"):
        stacked(0, outer=0.7)
    with pytest.raises(TypeError, match="`outer` must make a torch optimizer, got a list"):
        stacked(0, outer=list)


def test_outer_with_one_replica_warns() -> None:
    model = toy.toy()
    base = LambdaLR(inner(model), lambda _: 1.0)
    with pytest.warns(UserWarning, match="`outer` has no effect"):
        hdet.HDET(base, model=model, preset="paper", outer=OUTER)


def meets(ensemble: Any) -> bool:
    first, *others = ([*m.parameters()] for m in ensemble.modules(None))
    return all(a.equal(b) for other in others for a, b in zip(first, other, strict=True))


def test_perturbed_replicas_are_equal_after_their_first_average() -> None:
    ensemble, optimizer, scheduler = stacked(0, noise=0.1)
    for _ in range(2):
        go_on(ensemble, optimizer, scheduler, T)
        assert meets(ensemble)


def skips(rank: int) -> list[Tensor]:
    """One replica attempts steps and makes none, as GradScaler does at first."""
    model = toy.toy()
    optimizer = inner(model)
    scheduler = hdet.HDET(
        LambdaLR(optimizer, lambda _: 1.0),
        model=model,
        preset="paper",
        controller=None,
        gradients="local",
        sync_every=T,
        outer=OUTER,
    )
    optimizer.step()  # torch warns of schedules that come first; there is no gradient yet
    for step in range(2 * T):
        optimizer.zero_grad()
        loss = toy.loss_of(model, step, rank)
        loss.backward()
        if rank == 0 or step >= T:
            optimizer.step()
        scheduler.step(loss.detach())
    return [p.detach() for p in model.parameters()]


def test_a_replica_that_skips_its_steps_takes_the_outer_step(processes: Processes) -> None:
    one, other = processes(2, skips)
    check_equal(one, other)


def test_two_parameters_that_share_memory_make_one_outer_step() -> None:
    """As by `head.weight = nn.Parameter(embedding.weight)`, which torch does not know as tied."""
    weights = []
    for shared in (False, True):
        model = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(2)])
        if shared:
            model[1].data = model[0].data
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        (body,) = (ReplicaTensors(optimizer, model),)
        outer = OuterOptimizer(OUTER, optimizer, [body])
        outer.remember_start()
        with torch.no_grad():
            model[0].add_(1.0)
            if not shared:
                model[1].add_(1.0)
        outer.has_trained = True
        outer.step()
        weights.append([p.detach().clone() for p in model])
    check_equal(*weights)


def test_a_parameter_that_is_frozen_later_makes_no_outer_step() -> None:
    ensemble, optimizer, scheduler = stacked(2 * T)
    for module in ensemble.modules(None):
        module.head.weight.requires_grad_(False)
    before = ensemble.modules(None)[0].head.weight.detach().clone()
    go_on(ensemble, optimizer, scheduler, 2 * T)
    assert ensemble.modules(None)[0].head.weight.equal(before)
    assert meets(ensemble)
