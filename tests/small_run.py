"""A small run on any engine that a test drives step by step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import hdet
from hdet.replicas.protocol import Capabilities


def batch(step: int, replica: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randn(16, 3, generator=draw, dtype=torch.float64)


def loss_of(model: Any, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x.flip(1))


class Unheard(hdet.StackedReplicas):
    """Stacked replicas without a held-out batch, like replicas in processes."""

    capabilities = Capabilities(has_own_optimizer=True)


class SmallRun:
    """A run of one replica ("one"), of N stacked replicas, or of one of N processes in DDP."""

    def __init__(
        self,
        engine: str,
        rank: int,
        num: int,
        model: nn.Module,
        optimizer: Optimizer,
        base: Callable[[Any], LRScheduler],
        **options: Any,
    ) -> None:
        self.rank, self.num, self.bare = rank, num, model
        self.model: nn.Module = model
        self.ensemble: hdet.StackedReplicas | None = None
        self.optimizer: Any = optimizer
        replicas: Any = None
        stacked = {"stacked": hdet.StackedReplicas, "unheard": Unheard}
        if engine in stacked:
            replicas = self.ensemble = stacked[engine](model, num)
            self.optimizer = self.ensemble.optimizer(optimizer)
        elif engine == "processes":
            self.model = DistributedDataParallel(model)
            replicas = hdet.ProcessReplicas()
        self.scheduler = hdet.HDET(
            base(self.optimizer),
            model=self.model,
            replicas=replicas,
            **{"preset": "paper", **options},
        )

    def modules(self) -> list[nn.Module]:
        """Return the replicas of this process."""
        return [self.bare] if self.ensemble is None else self.ensemble.modules(None)

    def backward(self, step: int) -> Tensor:
        if self.ensemble is None:
            losses = loss_of(self.model, batch(step, self.rank))
        else:
            x = torch.cat([batch(step, replica) for replica in range(self.num)])
            losses = self.ensemble.losses(loss_of, x)
        losses.sum().backward()
        return losses.detach()

    def step(self) -> None:
        self.optimizer.zero_grad()
        losses = self.backward(self.scheduler.last_epoch)
        self.optimizer.step()
        self.scheduler.step(losses)
