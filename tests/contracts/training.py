"""A tiny seeded training loop in float64 on every engine, which traces all public numbers."""

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import hdet

INPUTS, HIDDEN, OUTPUTS, BATCH = 4, 5, 3, 8
NUM_SHOWN = 5
"""Numbers of each parameter that the trace keeps."""
SEED = 11


class Parts(NamedTuple):
    """What the options of a scheduler may refer to."""

    model: nn.Module
    criterion: nn.CrossEntropyLoss


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run. Without a `base` schedule the scheduler is a OneCycleHDET."""

    engine: Literal["one", "stacked", "processes", "torchft"]
    num: int
    steps: int
    options: Callable[[Parts], dict[str, Any]]
    base: Callable[[Any], LRScheduler] | None
    optimizer: Callable[[nn.Module], Optimizer]
    dropout: float = 0.0
    classifies: bool = False
    factor: Callable[[int, int], float] = lambda step, replica: 1.0
    """The targets of a step and a replica are multiplied by it."""
    actions: Mapping[int, Callable[["Training"], None]] = field(default_factory=dict)
    """What happens before a step."""
    every: int = 1
    """Steps between two rows of the trace."""


def net(dropout: float = 0.0, nudge: float = 0.0) -> nn.Module:
    """The same weights at every call; `nudge` moves them a little."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        layers = [nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS)]
        if dropout:
            layers.insert(2, nn.Dropout(dropout))
        model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + nudge)
    return model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    first, last = model[0], model[-1]  # type: ignore[index]
    return [
        {"name": "first", "params": list(first.parameters())},
        {"name": "last", "params": list(last.parameters())},
    ]


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    label: Tensor


def batch(step: int, replica: int, factor: float = 1.0) -> Batch:
    draw = torch.Generator().manual_seed(1000 * step + replica)
    x = torch.randn(BATCH, INPUTS, generator=draw, dtype=torch.float64)
    noise = torch.randn(BATCH, OUTPUTS, generator=draw, dtype=torch.float64)
    y = x[:, :OUTPUTS] - 0.5 * x[:, 1:] + 0.3 * noise
    return Batch(x, factor * y, y.argmax(1))


HELD_OUT = [batch(10**6 + number, 0) for number in range(4)]


def squared_error(model: Any, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def held_out_error(model: Any) -> Tensor:
    """One number for each held-out batch."""
    return torch.stack([squared_error(model, *one) for one in HELD_OUT])


def held_out_entropy(model: Any) -> Tensor:
    losses = [nn.functional.cross_entropy(model(one.x), one.label) for one in HELD_OUT]
    return torch.stack(losses)


class Training:
    """A run of a plan in this process."""

    def __init__(
        self, plan: Plan, rank: int, record: Path | None, nudge: float = 0.0, manager: Any = None
    ) -> None:
        self.plan, self.rank, self.record = plan, rank, record
        self.bare = net(plan.dropout, nudge)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        options = plan.options(Parts(self.bare, self.criterion))
        self.model: nn.Module = self.bare
        self.optimizer: Any = plan.optimizer(self.bare)
        self.ensemble: hdet.StackedReplicas | None = None
        replicas: Any = None
        if plan.engine == "stacked":
            replicas = self.ensemble = hdet.StackedReplicas(self.bare, plan.num)
            self.optimizer = self.ensemble.optimizer(self.optimizer)
        elif plan.engine == "processes":
            self.model = DistributedDataParallel(self.bare)
            replicas = hdet.ProcessReplicas()
        elif plan.engine == "torchft":
            replicas = hdet.TorchftReplicas(manager)
        options |= {"model": self.model, "replicas": replicas, "record": record}
        self.scheduler = self._scheduler(options)

    def _scheduler(self, options: dict[str, Any]) -> hdet.HDET:
        if self.plan.base is None:
            return hdet.OneCycleHDET(self.optimizer, **options)
        return hdet.HDET(self.plan.base(self.optimizer), **options)

    def loss_of(self, model: Any, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        if self.plan.classifies:
            loss: Tensor = self.criterion(model(x), label)
            return loss
        return squared_error(model, x, y, label)

    def losses(self, step: int) -> Tensor:
        """Those of the replicas in this process."""
        here = range(self.plan.num) if self.ensemble is not None else [self.rank]
        parts = [batch(step, replica, self.plan.factor(step, replica)) for replica in here]
        whole = [torch.cat(column) for column in zip(*parts, strict=True)]
        if self.ensemble is not None:
            return self.ensemble.losses(self.loss_of, *whole)
        return self.loss_of(self.model, *whole)

    def step(self) -> list[float]:
        self.optimizer.zero_grad()
        losses = self.losses(self.scheduler.last_epoch)
        losses.sum().backward()
        self.optimizer.step()
        self.scheduler.step(losses.detach())
        return [float(loss) for loss in losses.detach().reshape(-1)]

    def go(self, steps: int) -> dict[str, Any]:
        """Train for some steps; return the trace and the end."""
        rows: dict[str, list[Any]] = {"steps": [], "lrs": [], "centre": [], "losses": []}
        knobs: dict[str, list[float]] = {}
        for number in range(steps):
            if number in self.plan.actions:
                self.plan.actions[number](self)
            losses = self.step()
            if number % self.plan.every and number < steps - 1:
                continue
            rows["steps"].append(self.scheduler.last_epoch)
            rows["lrs"].append(self.scheduler.get_replica_lrs())
            rows["centre"].append(self.scheduler.get_base_lr())
            rows["losses"].append(losses)
            for name, value in self.scheduler.get_knobs().items():
                knobs.setdefault(name, []).append(value)
        return {**rows, "knob_values": knobs, **self.end()}

    def end(self) -> dict[str, Any]:
        return {
            "last_lr": self.scheduler.get_last_lr(),
            "weights": [self._first_weights(module) for module in self.modules()],
            "state": self.scheduler.state_dict(),
        }

    def modules(self) -> list[nn.Module]:
        """The replicas of this process."""
        return [self.bare] if self.ensemble is None else self.ensemble.modules(None)

    def _first_weights(self, module: nn.Module) -> dict[str, list[float]]:
        named = module.named_parameters()
        return {name: p.detach().flatten()[:NUM_SHOWN].tolist() for name, p in named}

    def save(self) -> dict[str, Any]:
        """The states of a run that has converged, as a training loop saves them."""
        self.scheduler.converge()
        parts = {"model": self.bare, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}

    def load(self, saved: Mapping[str, Any]) -> None:
        self.bare.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])


@contextmanager
def seeded() -> Iterator[None]:
    """Inside, chance begins with the same seed, and warnings are not errors."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(SEED)
        yield


def lines_of(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "record.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
