"""Runs with Lightning's Trainer, in the processes of a launch."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.integrations.lightning import HDETCallback
from tests.integrations import digits

BATCH = 16
NUM_BATCHES = 45
"""Batches of an epoch, for each of two processes."""
SCOUT = hdet.Scout(share=0.25)
"""Room for a usual search in a run of a few hundred steps."""
Batch = tuple[Tensor, Tensor]


class Batches:
    """The batches of this process. A checkpoint of Lightning has its place in them."""

    def __init__(self, num: int = NUM_BATCHES) -> None:
        self._num, self._place = num, 0
        self._rank, self._size = (
            int(os.environ.get("RANK", 0)),
            int(os.environ.get("WORLD_SIZE", 1)),
        )

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Batch]:
        x, y = digits.tensors()
        for place in range(self._place % self._num, self._num):
            self._place = place + 1
            start = (place * self._size + self._rank) * BATCH
            yield x[start : start + BATCH], y[start : start + BATCH]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = state["place"]


class Digits(LightningModule):
    """A module as the docs of Lightning show it."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.network = digits.network()
        self.shown: list[str] = []
        """The digest of the network at each validation."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def on_validation_epoch_start(self) -> None:
        self.shown.append(digits.digest(self.network))

    def loss_of(self, batch: Batch) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(optimizer, self.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer_of(*callbacks: Any, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "strategy": "ddp",
        "devices": int(os.environ["WORLD_SIZE"]),
        "use_distributed_sampler": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
        "limit_val_batches": 0,
        "callbacks": list(callbacks),
    }
    return Trainer(**{**given, **options})


def fitted(lr: float, *callbacks: Any, **options: Any) -> Digits:
    """Return the trained module."""
    module = Digits(lr)
    trainer_of(*callbacks, **options).fit(module, Batches())
    return module


def three_ways(epochs: int) -> dict[str, Any]:
    """Train without hdet at a bad and at a good learning rate, and with hdet at the bad one."""
    callback = HDETCallback(scout=SCOUT)
    runs = {
        "bad": fitted(digits.BAD_LR, max_epochs=epochs),
        "good": fitted(digits.GOOD_LR, max_epochs=epochs),
        "hdet": fitted(digits.BAD_LR, callback, max_epochs=epochs),
    }
    losses = {name: digits.held_out_loss(module.network) for name, module in runs.items()}
    return {
        **losses,
        "clock": callback.scheduler.last_epoch,
        "digest": digits.digest(runs["hdet"].network),
    }
