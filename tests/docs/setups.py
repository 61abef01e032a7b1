"""What a block of code on a page finds when it starts: `<!-- setup: NAME -->` names a function.

Each function returns the variables of the block. It runs in an empty folder.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import hdet

STEPS = 1600
Names = dict[str, Any]


def model_and_data() -> Names:
    """What a training loop has before its optimizer, and the usual imports."""
    held_x, held_y = torch.randn(64, 4), torch.randint(3, (64,))
    return {
        "torch": torch,
        "nn": nn,
        "F": F,
        "hdet": hdet,
        "OneCycleLR": OneCycleLR,
        "model": nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)),
        "criterion": nn.CrossEntropyLoss(label_smoothing=0.05),
        "loader": [(torch.randn(32, 4), torch.randint(3, (32,))) for _ in range(6)],
        "held_x": held_x,
        "held_y": held_y,
        "held_out_loader": DataLoader(TensorDataset(held_x, held_y), batch_size=16),
        "S": STEPS,
        "total_steps": STEPS,
        "folder": Path("checkpoint"),
        "path": Path("checkpoint.pt"),
        "evaluate": lambda model: 0.5,
        "loss_of": _loss_of,
        "score": _score,
    }


def loop() -> Names:
    """The same with an optimizer and a base schedule: one process, one replica."""
    names = model_and_data()
    optimizer = torch.optim.AdamW(names["model"].parameters(), lr=1e-3)
    base = OneCycleLR(optimizer, max_lr=1e-3, total_steps=STEPS)
    return {**names, "optimizer": optimizer, "base": base}


def two_optimizers() -> Names:
    """A model before it has two optimizers. Without Muon another optimizer stands for it."""
    names = model_and_data()
    muon = getattr(torch.optim, "Muon", torch.optim.SGD)
    probe = lambda model: F.cross_entropy(model(names["held_x"]), names["held_y"])  # noqa: E731
    return {**names, "Muon": muon, "ExponentialLR": ExponentialLR, "probe": probe}


def gan() -> Names:
    """Two networks with their schedules."""
    generator, critic = nn.Linear(4, 2), nn.Linear(2, 1)
    pair = [torch.optim.Adam(network.parameters(), lr=1e-3) for network in (generator, critic)]
    return {
        "nn": nn,
        "hdet": hdet,
        "generator": generator,
        "critic": critic,
        "schedules": [OneCycleLR(optimizer, 1e-3, total_steps=STEPS) for optimizer in pair],
        "quality_of": lambda model: model["generator"](torch.ones(2, 4)).square().mean(1),
    }


def loop_run() -> Names:
    """A loop with a scheduler, in the middle of a run."""
    names = loop()
    scheduler = hdet.HDET(names["base"], model=names["model"], record="runs/a")
    return {**names, "scheduler": scheduler}


class Tracker:
    """Stands for the module `wandb`: accepts numbers by name, and steps that do not go back."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.is_finished = False
        self._step = 0

    def init(self, project: str) -> "Tracker":
        assert project
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        assert all(isinstance(value, float) for value in values.values())
        assert step >= self._step
        self._step = step
        self.logged.append(values)

    def finish(self) -> None:
        self.is_finished = True


def tracked_loop() -> Names:
    """A loop beside an experiment tracker."""
    names = loop()
    names["loader"] = names["loader"][:1] * 6  # other batches differ by more than six steps gain
    return {**names, "wandb": Tracker()}


def stacked_run() -> Names:
    """Eight replicas on one device that explore a weight decay, after a few steps."""
    names = model_and_data()
    model = names["model"]
    ensemble = hdet.StackedReplicas(model, 8)
    optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    base = OneCycleLR(optimizer, max_lr=1e-3, total_steps=STEPS)
    scheduler = hdet.HDET(
        base,
        model=model,
        replicas=ensemble,
        knobs=[hdet.weight_decay()],
        probe=hdet.Probe(_score, names["held_out_loader"]),
        gradients="local",
        sync_every=2,
        record="runs/a",
    )
    for x, y in names["loader"]:
        optimizer.zero_grad()
        losses = ensemble.losses(_loss_of, x, y)
        losses.sum().backward()
        optimizer.step()
        scheduler.step(losses)
    names.update(ensemble=ensemble, optimizer=optimizer, base=base, scheduler=scheduler)
    return {**names, "x": x, "y": y, "losses": losses}


def stacked_checkpoint() -> Names:
    """The same beside a checkpoint of it."""
    names = stacked_run()
    parts = {name: names[name] for name in ("model", "optimizer", "scheduler")}
    hdet.save_checkpoint("checkpoints", **parts)
    return {**names, "parts": parts}


def ddp_script() -> Names:
    """The variables of examples/ddp.py before it makes its schedule."""
    return {
        **loop(),
        "arguments": SimpleNamespace(max_lr=1e-3, epochs=1, out="runs/a"),
        "held_out": None,
        "probe_on": lambda held_out: lambda model: model(torch.ones(2, 4)).square().mean(1),
        "sampler": SimpleNamespace(set_epoch=lambda epoch: None),
    }


def _loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def _score(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)
