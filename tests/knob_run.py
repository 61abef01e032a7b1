"""A small model with a setting for every knob, and stacked runs of this model."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ConstantLR

import hdet

T = 3


class Tiny(nn.Module):
    """A model with attention and its own `temperature`, which hdet does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 3)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        queries = hidden / self.temperature
        mixed = F.scaled_dot_product_attention(queries[None], hidden[None], hidden[None])[0]
        output: Tensor = self.down(mixed)
        return output


def tiny() -> Tiny:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Tiny().double()


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    decayed = [p for name, p in named.items() if name.endswith("weight")]
    rest = [p for name, p in named.items() if not name.endswith("weight")]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "name": "weights"},
        {"params": rest, "name": "biases", "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + replica)
    x = torch.randn(5, 3, generator=draw, dtype=torch.float64)
    return x, torch.randint(3, (5,), generator=draw)


class Run:
    """A small stacked run with given knobs."""

    def __init__(self, knobs: Any, num: int = 4, **options: Any) -> None:
        self.model = options.pop("model", None) or tiny()
        make = options.pop("optimizer", adamw)
        self.ensemble = hdet.StackedReplicas(self.model, num)
        self.optimizer = self.ensemble.optimizer(make(self.model))
        base = options.pop("base", lambda optimizer: ConstantLR(optimizer, factor=1.0))
        self.loss = options.pop("loss", lambda model, x, y: F.cross_entropy(model(x), y))
        settings = {"controller": None, "sync_every": T, "spread": 0.0, **options}
        self.scheduler = hdet.HDET(
            base(self.optimizer),
            model=self.model,
            replicas=self.ensemble,
            knobs=knobs,
            **settings,
            preset="paper",
        )

    def go(self, steps: int) -> "Run":
        start = self.scheduler.last_epoch
        for step in range(start, start + steps):
            parts = [batch(step, replica) for replica in self.ensemble.local]
            x, y = (torch.cat(each) for each in zip(*parts, strict=True))
            losses = self.ensemble.losses(self.loss, x, y)
            self.optimizer.zero_grad()
            losses.sum().backward()
            self.optimizer.step()
            self.scheduler.step(losses.detach())
        return self

    def each(self, key: str, group: int = 0) -> list[Any]:
        return [one.param_groups[group][key] for one in self.optimizer.each]


def knobs_of(model: nn.Module, criterion: Any) -> list[Any]:
    return [
        hdet.lr(shared=True),
        hdet.weight_decay(),
        hdet.attention_temperature(model),
        hdet.label_smoothing(criterion),
    ]


def steered(path: Path | None = None) -> Run:
    model, criterion = tiny(), nn.CrossEntropyLoss(label_smoothing=0.1)
    x, y = batch(10_000, 0)

    def score(model: Any) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    return Run(
        knobs_of(model, criterion),
        num=8,
        model=model,
        loss=lambda model, x, y: criterion(model(x), y),
        controller=hdet.Tracker(threshold=0.1),
        probe=score,
        spread=0.2,
        total_steps=60,
        record=path,
    )
