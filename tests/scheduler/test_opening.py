"""A model that is wrapped after its scheduler is made, and gradients that the loop shares."""

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from tests import toy
from tests.processes import Processes

STEPS = 800


def made(model: nn.Module) -> tuple[torch.optim.Optimizer, OneCycleLR]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return optimizer, OneCycleLR(optimizer, 1e-4, total_steps=STEPS)


def trained(
    model: nn.Module, optimizer: Any, scheduler: hdet.HDET, rank: int, steps: int = 60
) -> tuple[list[Tensor], float | None]:
    warnings.filterwarnings("ignore", "the scout saw too little difference")
    for step in range(steps):
        optimizer.zero_grad()
        loss = toy.loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
    return [parameter.detach().clone() for parameter in model.parameters()], scheduler.found_lr


def attached_or_given(rank: int, **options: Any) -> list[tuple[list[Tensor], float | None]]:
    """Train with a model that is attached, then with one that is given."""
    results = []
    for is_given in (False, True):
        net = toy.toy()
        optimizer, base = made(net)
        if is_given:
            model = DistributedDataParallel(net)
            scheduler = hdet.HDET(base, model=model, **options)
        else:
            scheduler = hdet.HDET(base, model=net, **options)  # a bare one: no scout
            assert not scheduler.is_scouting
            model = DistributedDataParallel(net)
            scheduler.attach(model)
        results.append(trained(model, optimizer, scheduler, rank))
    return results


def test_attached_model_trains_like_a_given_one(processes: Processes) -> None:
    """Bit for bit, with a scout, and without a warning that a scout lacks its model."""
    for attached, given in processes(2, attached_or_given):
        assert attached[1] == given[1] is not None
        for ours, theirs in zip(attached[0], given[0], strict=True):
            assert torch.equal(ours, theirs)


class Events:
    """A sink."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.is_closed = False

    def write(self, event: Mapping[str, Any]) -> None:
        self.kinds.append(event["event"])

    def close(self) -> None:
        self.is_closed = True


def explored(rank: int) -> None:
    """Attach a model to a run with knobs and a record."""
    net, sink = toy.toy(), Events()
    optimizer, base = made(net)
    knobs = [hdet.lr(), hdet.weight_decay()]
    scheduler = hdet.HDET(base, knobs=knobs, preset="paper", record=sink, sync_every=5)
    lr, decay, first = base.get_last_lr(), scheduler.get_knobs(), scheduler.get_replica_lrs()
    scheduler.attach(DistributedDataParallel(net))
    assert base.get_last_lr() == lr
    assert scheduler.get_knobs() == decay
    assert scheduler.get_replica_lrs() == first
    trained(net, optimizer, scheduler, rank, 5)
    assert not sink.is_closed
    assert sink.kinds == (["run", "run", "cycle"] if rank == 0 else [])


def test_attaching_keeps_knobs_and_record(processes: Processes) -> None:
    processes(2, explored)


def refused(rank: int) -> None:
    net = toy.toy()
    optimizer, base = made(net)
    scheduler = hdet.HDET(base)
    with pytest.raises(TypeError, match="`model` must be a torch"):
        scheduler.attach("model")  # type: ignore[arg-type]
    other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="must have the parameters of each optimizer"):
        scheduler.attach(other)
    scheduler.attach(DistributedDataParallel(net))  # the run is as before a refusal
    assert scheduler.is_scouting
    trained(net, optimizer, scheduler, rank, 1)
    with pytest.raises(RuntimeError, match=r"must come before the first `step\(\)`.*at step 1"):
        scheduler.attach(net)


def test_attaching_too_late_or_another_model_is_refused(processes: Processes) -> None:
    processes(2, refused)


def test_attaching_after_a_loaded_state_is_refused() -> None:
    model = toy.toy()
    _, base = made(model)
    scheduler = hdet.HDET(base, scout=None)
    scheduler.load_state_dict(scheduler.state_dict())
    with pytest.raises(RuntimeError, match="before `load_state_dict"):
        scheduler.attach(model)


def test_drop_in_attaches_its_model() -> None:
    model = toy.toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = hdet.OneCycleHDET(optimizer, 0.1, total_steps=STEPS, guard=hdet.Guard())
    lr = scheduler.get_last_lr()
    scheduler.attach(model)
    assert scheduler.get_last_lr() == lr
    assert scheduler.total_steps == STEPS


def shared_by_the_loop(rank: int) -> tuple[list[Tensor], float | None]:
    """Average gradients in the loop, as an engine outside torch does."""
    net = toy.toy()
    optimizer, base = made(net)
    calls: list[bool] = []
    replicas = hdet.ProcessReplicas(share_gradients=calls.append)
    scheduler = hdet.HDET(base, model=net, replicas=replicas)
    assert scheduler.is_scouting
    warnings.filterwarnings("ignore", "the scout saw too little difference")
    for step in range(60):
        optimizer.zero_grad()
        loss = toy.loss_of(net, step, rank)
        loss.backward()
        for parameter in net.parameters():
            if calls[-1] and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
        optimizer.step()
        scheduler.step(loss.detach())
    assert calls[0] is True
    assert calls[-1] is True
    assert False in calls
    return [parameter.detach().clone() for parameter in net.parameters()], scheduler.found_lr


def under_ddp(rank: int) -> tuple[list[Tensor], float | None]:
    model = DistributedDataParallel(toy.toy())
    optimizer, base = made(model)
    return trained(model, optimizer, hdet.HDET(base, model=model), rank)


def test_loop_that_shares_gradients_itself_trains_as_under_ddp(processes: Processes) -> None:
    for ours, theirs in zip(processes(2, shared_by_the_loop), processes(2, under_ddp), strict=True):
        assert ours[1] == pytest.approx(theirs[1], rel=1e-12)
        for mine, other in zip(ours[0], theirs[0], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def bad_switch(rank: int) -> None:
    with pytest.raises(TypeError, match="`share_gradients` must be a function of one bool"):
        hdet.ProcessReplicas(share_gradients=True)  # type: ignore[arg-type]


def test_switch_of_gradients_must_be_a_function(processes: Processes) -> None:
    processes(2, bad_switch)
