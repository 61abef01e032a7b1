"""How often torch compiles anything again while every kind of knob is on."""

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR

import hdet


class Everything(nn.Module):
    """A small model with something for every knob."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.attention(x, x, x, need_weights=False)[0]
        output: torch.Tensor = self.head(self.dropout(mixed).mean(1))
        return output


def recompiles(cycles: int, every: int = 3) -> int:
    """How often anything was compiled after the first cycle, with all knobs on."""
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model, criterion = Everything(), nn.CrossEntropyLoss(label_smoothing=0.1)
    knobs = [
        hdet.lr(spread=0.3),
        hdet.weight_decay(),
        hdet.betas(),
        hdet.eps(),
        hdet.dropout(model),
        hdet.label_smoothing(criterion),
        hdet.attention_temperature(model),
        hdet.gradient_clip(1.0),
    ]
    ensemble = hdet.StackedReplicas(model, 12)
    ensemble.compile()
    rate = torch.tensor(1e-3)
    optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=rate))
    for one in optimizer.each:
        one.step = torch.compile(one.step)  # type: ignore
    scheduler = hdet.HDET(
        ConstantLR(optimizer, factor=1.0),
        model=model,
        replicas=ensemble,
        knobs=knobs,
        controller=hdet.Tracker(threshold=0.0, cooldown=0.0),
        sync_every=every,
        total_steps=cycles * every,
        preset="paper",
    )

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return criterion(model(x), y)

    before = 0
    # Each of the optimizers has a step of its own to compile, and torch stops at 8 by default.
    with torch._dynamo.config.patch(recompile_limit=100):
        for step in range(cycles * every):
            if step == every:
                before = counters["stats"]["unique_graphs"]
            x, y = torch.randn(48, 5, 16), torch.randint(4, (48,))
            losses = ensemble.losses(loss, x, y)
            optimizer.zero_grad()
            losses.sum().backward()
            optimizer.step()
            scheduler.step(losses.detach())
    return int(counters["stats"]["unique_graphs"] - before)
