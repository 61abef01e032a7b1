"""The optimizers of a run train all of its model, and nothing but its model."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR

import hdet
from tests.processes import Processes, RemoteError, warns_on_first

LEFT_OUT = "must belong to an optimizer of the run, got none for '{}'"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1))


def constant(optimizer: Optimizer) -> ConstantLR:
    return ConstantLR(optimizer, factor=1.0)


def sgd(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def test_trainable_parameters_without_an_optimizer_are_refused_by_name() -> None:
    model = net()
    words = (
        r"got none for '2.weight', '2.bias', '4.weight' and 1 more\. Give the schedules of all "
        r"optimizers in one HDET\(\[\.\.\.\], model=model\), or set requires_grad=False"
    )
    with pytest.raises(ValueError, match=words):
        hdet.HDET(constant(sgd(model[0])), model=model, scout=None)
    with pytest.raises(ValueError, match=words):
        hdet.OneCycleHDET(sgd(model[0]), 0.1, total_steps=9, model=model)


def test_frozen_parameters_need_no_optimizer_and_may_be_in_one() -> None:
    model = net()
    optimizer = sgd(model[4])
    model[:4].requires_grad_(False)
    hdet.HDET(constant(optimizer), model=model, scout=None)
    hdet.HDET(constant(sgd(model)), model=model, scout=None)


def test_parameters_of_the_loss_may_be_in_an_optimizer_without_being_in_the_model() -> None:
    model, temperature = net(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    hdet.HDET(constant(optimizer), model=model, scout=None)


def sharded_with_loss_parameter(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model, temperature = net(), nn.Parameter(torch.ones(1))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    replicas = hdet.ProcessReplicas(mesh["replicate"])
    words = r"will refuse this run: the optimizer has 1 plain parameter.s. .* of shape \(1,\)"
    with warns_on_first(rank, words):
        scheduler = hdet.HDET(constant(optimizer), model=model, scout=None, replicas=replicas)
    with pytest.raises(ValueError, match=r"\['params'\]\[6\].* exist once in each process"):
        hdet.save_checkpoint(folder, model=model, optimizer=optimizer, scheduler=scheduler)


def test_loss_parameter_beside_a_sharded_model_is_warned_of_since_it_cannot_be_saved(
    processes: Processes, tmp_path: Path
) -> None:
    processes(2, sharded_with_loss_parameter, str(tmp_path))


def test_model_that_the_optimizers_do_not_train_is_refused() -> None:
    model, other = net(), nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"`model` must .*got a Linear without those of SGD"):
        hdet.HDET(constant(sgd(model)), model=other, scout=None)
    both = [constant(sgd(model)), constant(torch.optim.Adam(other.parameters()))]
    with pytest.raises(ValueError, match=r"got a Sequential without those of Adam\. .*ModuleDict"):
        hdet.HDET(both, model=model, scout=None)
    together = nn.ModuleDict({"generator": model, "critic": other})
    hdet.HDET(both, model=together, scout=None)


def test_stacked_replicas_need_all_their_optimizers_in_one_run() -> None:
    model = net()
    ensemble = hdet.StackedReplicas(model, 2)
    first = ensemble.optimizer(sgd(model[0]))
    second = ensemble.optimizer(sgd(model[2:]))
    for given in (model, None):
        with pytest.raises(ValueError, match=LEFT_OUT.format("2.weight")):
            hdet.HDET(constant(first), model=given, replicas=ensemble, scout=None)
    plain = constant(sgd(model[0]))
    with pytest.raises(ValueError, match=r"got a StackedOptimizer \+ SGD\. That optimizer steps"):
        hdet.HDET([constant(second), plain], model=model, replicas=ensemble, scout=None)
    with pytest.raises(ValueError, match="`replicas=` must be the StackedReplicas that made"):
        hdet.HDET([constant(first), constant(second)], model=model, scout=None)
    hdet.HDET([constant(first), constant(second)], model=model, replicas=ensemble, scout=None)


def test_selected_replica_gives_all_the_states_of_both_optimizers() -> None:
    model = net()
    ensemble = hdet.StackedReplicas(model, 2, mode="loop")
    halves = [
        torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(model[2:].parameters(), lr=0.1),
    ]
    both = [ensemble.optimizer(half) for half in halves]
    scheduler = hdet.HDET(
        list(map(constant, both)),
        model=model,
        replicas=ensemble,
        scout=None,
        gradients="local",
        sync_every=4,
        knobs=hdet.betas(beta2=None, groups=["group1"]),  # SGD has none
    )
    losses = ensemble.losses(lambda model, x: model(x).square().mean(), torch.randn(8, 4))
    losses.sum().backward()
    for optimizer in both:
        optimizer.step()
    scheduler.step(losses)
    moments = [[one.state_dict()["state"][0] for one in optimizer.each] for optimizer in both]
    assert not torch.equal(moments[0][0]["momentum_buffer"], moments[0][1]["momentum_buffer"])
    ensemble.select_(1)
    moments = [[one.state_dict()["state"][0] for one in optimizer.each] for optimizer in both]
    assert torch.equal(moments[0][0]["momentum_buffer"], moments[0][1]["momentum_buffer"])
    assert torch.equal(moments[1][0]["exp_avg"], moments[1][1]["exp_avg"])


def drift(rank: int) -> None:
    """Only the second process leaves a layer out."""
    model = DistributedDataParallel(net())
    left = model.module[:4] if rank else model.module
    hdet.HDET(constant(sgd(left)), model=model, scout=None)


def test_all_processes_refuse_a_run_in_which_one_leaves_parameters_out(
    processes: Processes,
) -> None:
    with pytest.raises(RemoteError) as error:
        processes(2, drift)
    assert all(
        text is not None and LEFT_OUT.format("module.4.weight") in text
        for text in error.value.tracebacks
    )
