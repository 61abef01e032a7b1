"""The optimizers of the small tasks, each with a typical learning rate."""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer

MUON_REST = 0.3
"""The learning rate that AdamW uses beside Muon, in units of Muon's."""


class Rule(NamedTuple):
    name: str
    middle: float
    """A typical learning rate."""
    make: Callable[[nn.Module, float], Optimizer]


def adamw(weight_decay: float = 0.01) -> Rule:
    """Only matrices, kernels and tables of embeddings decay."""

    def make(model: nn.Module, lr: float) -> Optimizer:
        groups = decayed_groups(model, weight_decay)
        return torch.optim.AdamW(groups, lr=lr)

    return Rule("AdamW", 6e-3, make)


def adam() -> Rule:
    return Rule("Adam", 6e-3, lambda model, lr: torch.optim.Adam(model.parameters(), lr=lr))


def sgd(momentum: float = 0.9, *, nesterov: bool = False, weight_decay: float = 0.0) -> Rule:
    def make(model: nn.Module, lr: float) -> Optimizer:
        return torch.optim.SGD(
            model.parameters(),
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
        )

    return Rule("SGD with momentum" if momentum else "SGD", 0.05 if momentum else 0.2, make)


def adafactor() -> Rule:
    return Rule(
        "Adafactor", 1e-2, lambda model, lr: torch.optim.Adafactor(model.parameters(), lr=lr)
    )


def lion(weight_decay: float = 0.1) -> Rule:
    def make(model: nn.Module, lr: float) -> Optimizer:
        from pytorch_optimizer import Lion

        return cast(Optimizer, Lion(decayed_groups(model, weight_decay), lr=lr))

    return Rule("Lion", 1e-3, make)


def muon() -> Rule:
    """Muon for the matrices of the blocks, AdamW for all else, in one object."""

    def make(model: nn.Module, lr: float) -> Optimizer:
        from pytorch_optimizer import Muon

        inside = {p for name, p in model.named_parameters() if "blocks" in name and p.dim() == 2}
        rest = [p for p in model.parameters() if p not in inside]
        own = [p for p in model.parameters() if p in inside]
        groups = [
            {"params": own, "lr": lr, "use_muon": True},
            {"params": rest, "lr": MUON_REST * lr, "use_muon": False},
        ]
        return cast(Optimizer, Muon(groups))

    return Rule("Muon", 2e-2, make)


def decayed_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
