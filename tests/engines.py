"""The same training loop on every engine: one replica in each process, or N stacked in one."""

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from benchmarks.zoo.models import GPT, Size
from tests import toy

ENGINES = ["processes", "vmap", "loop"]
PEAKS = [0.03, 0.01, 0.02, 0.05]


class Task(NamedTuple):
    """A model with four parameter groups, and the batch of a replica in a step."""

    model: Callable[[], nn.Module]
    groups: Callable[[nn.Module], list[dict[str, Any]]]
    batch: Callable[[int, int], tuple[Tensor, Tensor]]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        inner = getattr(model, "module", model)
        return torch.optim.AdamW(self.groups(inner), lr=1.0, weight_decay=1e-2)

    def loss(self, model: nn.Module, step: int, replica: int) -> Tensor:
        return loss_of(model, *self.batch(step, replica))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    return nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())


def transformer() -> nn.Module:
    """Attention, embeddings, LayerNorm, and a head tied to the embedding."""
    return GPT(Size(vocabulary=13, context=6, layers=2, heads=2, width=8))


def transformer_groups(model: nn.Module) -> list[dict[str, Any]]:
    names = dict(model.named_parameters())
    embedding = [p for n, p in names.items() if n.startswith(("token", "place"))]
    norms = [p for n, p in names.items() if "norm" in n]
    attention = [p for n, p in names.items() if "qkv" in n or ".out." in n]
    rest = [p for n, p in names.items() if ".up." in n or ".down." in n]
    assert len(embedding) + len(norms) + len(attention) + len(rest) == len(names)
    return [
        {"name": "embedding", "params": embedding},
        {"name": "no_decay", "params": norms, "weight_decay": 0.0},
        {"name": "attention", "params": attention},
        {"name": "mlp", "params": rest},
    ]


def sequences(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    start = torch.randint(13, (3, 1), generator=generator)
    tokens = (start + torch.arange(7) * 2 + torch.randint(2, (3, 7), generator=generator)) % 13
    return tokens[:, :-1], tokens[:, 1:]


class ConvNet(nn.Module):
    """Convolutions with BatchNorm and its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv, self.norm2 = nn.Conv2d(4, 6, 3, stride=2, bias=False), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.stem(x)))
        x = torch.relu(self.norm2(self.conv(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def conv_groups(model: nn.Module) -> list[dict[str, Any]]:
    assert isinstance(model, ConvNet)
    return [
        {"name": "stem", "params": [*model.stem.parameters()]},
        {"name": "no_decay", "weight_decay": 0.0,
         "params": [*model.norm1.parameters(), *model.norm2.parameters()]},
        {"name": "conv", "params": [*model.conv.parameters()]},
        {"name": "head", "params": [*model.head.parameters()]},
    ]  # fmt: skip


def pictures(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    x = torch.randn(6, 1, 6, 6, dtype=torch.float64, generator=generator)
    return x, (x.mean((1, 2, 3)) > 0).long() + (x[:, 0, 0, 0] > 0.5).long()


TASKS = {
    "toy": Task(toy.Toy, toy.groups, toy.batch),
    "transformer": Task(transformer, transformer_groups, sequences),
    "conv": Task(ConvNet, conv_groups, pictures),
}


class Trainer:
    """An ordinary loop with hdet in it. `replica` says which process this is, if it is one."""

    def __init__(self, engine: str, task: str, num: int, replica: int = 0, **settings: Any) -> None:
        self.task, self.num, self.engine = TASKS[task], num, engine
        with torch.random.fork_rng():
            torch.manual_seed(1234)
            self.inner = self.task.model().double()
        self.model = self.inner
        common: dict[str, Any] = {"cycle_momentum": False, **settings}
        if engine == "processes":
            self.local = [replica]
            # DDP rearranges its buckets after the first batch, and with them the order in which
            # gradients are summed: a resumed run would differ in the last bit. Not so with this.
            self.model = DistributedDataParallel(self.inner, find_unused_parameters=True)
            # And it would give all replicas the running statistics of the first at every step.
            self.model.broadcast_buffers = self.model.forward_sync_buffers = False
            self.optimizer = self.task.optimizer(self.inner)
        else:
            self.local = list(range(num))
            self.ensemble = hdet.StackedReplicas(self.inner, num, mode=engine)  # type: ignore[arg-type]
            self.optimizer = self.ensemble.optimizer(self.task.optimizer(self.inner))
            common["replicas"] = self.ensemble
        self.scheduler = hdet.OneCycleHDET(self.optimizer, PEAKS, model=self.model, **common)

    def train(self, steps: range) -> "Trainer":
        for step in steps:
            self.optimizer.zero_grad()
            parts = [self.task.batch(step, replica) for replica in self.local]
            batch = [torch.cat(column) for column in zip(*parts, strict=True)]
            if self.engine == "processes":
                losses = loss_of(self.model, *batch)
            else:
                losses = self.ensemble.losses(loss_of, *batch)
            losses.sum().backward()
            self.optimizer.step()
            self.scheduler.step(losses)
        return self

    def modules(self) -> list[nn.Module]:
        return [self.inner] if self.engine == "processes" else self.ensemble.modules(None)

    def weights(self) -> list[list[Tensor]]:
        """For each local replica its parameters."""
        return [[p.detach().clone() for p in module.parameters()] for module in self.modules()]

    def buffers(self) -> list[list[Tensor]]:
        return [[b.detach().clone() for b in module.buffers()] for module in self.modules()]

    def save(self) -> bytes:
        self.scheduler.converge()
        file = io.BytesIO()
        parts = (self.inner, self.optimizer, self.scheduler)
        torch.save([part.state_dict() for part in parts], file)
        return file.getvalue()

    def load(self, saved: bytes) -> "Trainer":
        states = torch.load(io.BytesIO(saved), weights_only=True)
        parts: tuple[Any, ...] = (self.inner, self.optimizer, self.scheduler)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        return self

    def state(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def moments(self) -> list[Tensor]:
        entries = self.optimizer.state_dict()["state"]
        return [entries[i][key].clone() for i in sorted(entries) for key in sorted(entries[i])]
