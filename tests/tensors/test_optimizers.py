"""Optimizers around other optimizers are found by what they hold."""

from typing import Any

import accelerate
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.lr_search.prior import prior_of
from hdet.scheduler.search_result import prior_of_run
from hdet.tensors.optimizers import class_names, inner_optimizers, unwrapped


class FabricLike:
    """A wrapper that takes over the class of its optimizer, as that of Lightning Fabric does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        kinds = (type(self), type(optimizer))
        self.__class__ = type("Fabric" + type(optimizer).__name__, kinds, {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class Lookahead(torch.optim.Optimizer):
    """An optimizer with a state of its own around another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


def test_wrappers_of_trainers_are_taken_off() -> None:
    one = sgd()
    wrapped: Any = FabricLike(one)
    assert unwrapped(one) is unwrapped(wrapped) is one
    assert unwrapped(accelerate.Accelerator(cpu=True).prepare(one)) is one


def test_an_optimizer_with_a_state_of_its_own_is_no_wrapper() -> None:
    one = sgd()
    outer = Lookahead(one)
    assert unwrapped(outer) is outer
    assert inner_optimizers(outer) == [one]
    assert inner_optimizers(one) == []


def test_class_names_give_the_prior_of_a_subclass_and_of_a_kept_optimizer() -> None:
    class Mine(torch.optim.AdamW):
        pass

    class MadamSGD(torch.optim.SGD):  # its name contains "adam"
        pass

    parameters = [nn.Parameter(torch.ones(2))]
    assert prior_of(*class_names(Mine(parameters))) == prior_of("AdamW")
    assert prior_of(*class_names(MadamSGD(parameters))) == prior_of("SGD")
    assert prior_of(*class_names(Lookahead(sgd()))) == prior_of("SGD")
    fabric: Any = FabricLike(sgd())
    assert type(fabric).__name__ == "FabricSGD"
    assert prior_of(*class_names(fabric)) == prior_of("SGD")


@pytest.mark.parametrize("wrapper", ["accelerate", "fabric"])
def test_a_wrapped_optimizer_is_scouted_like_the_one_inside(wrapper: str) -> None:
    found = []
    for how in ("plain", wrapper):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
        if how == "accelerate":
            optimizer = accelerate.Accelerator(cpu=True).prepare(optimizer)
        elif how == "fabric":
            optimizer = FabricLike(optimizer)
        base = OneCycleLR(optimizer, 1e-3, total_steps=2000, cycle_momentum=False)
        scheduler = hdet.HDET(base, model=model, probe=lambda m: m(torch.ones(4, 2)).square())
        run = scheduler._run
        assert prior_of_run(run, run.base.peaks) is not None
        while scheduler.is_scouting:
            optimizer.zero_grad()
            loss = model(torch.randn(4, 2)).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step(loss)
        found.append(scheduler.found_lr)
    assert found[0] == found[1] != 1e-3
