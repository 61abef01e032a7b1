"""Runs with Lightning's Trainer, in the processes of a launch."""

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
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


class Events:
    """A sink that keeps the events of a run."""

    def __init__(self) -> None:
        self.kept: list[Mapping[str, Any]] = []

    def write(self, event: Mapping[str, Any]) -> None:
        self.kept.append(event)

    def close(self) -> None:
        pass

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [event for event in self.kept if event["event"] == kind]


class Watch(Callback):
    """Sees the weights and the gradients of this replica after each batch."""

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}
        self.largest_norm = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Digits, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.digests[trainer.global_step] = digits.digest(pl_module.network)

    def on_before_zero_grad(self, trainer: Trainer, pl_module: Digits, optimizer: Any) -> None:
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        if grads and trainer.global_step:
            norm = float(nn.utils.get_total_norm(grads))
            self.largest_norm = max(self.largest_norm, norm)


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


EXPLORING: dict[str, Any] = {"spread": 0.5, "sync_every": 20, "scout": None}
"""Replicas with learning rates of their own, which differ in mid-cycle."""


def accumulating(steps: int) -> dict[str, Any]:
    """Accumulate two micro-batches and clip, at a learning rate that is far too low."""
    events, watch = Events(), Watch()
    callback = HDETCallback(scout=SCOUT, record=events)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_steps": steps}
    module = fitted(digits.BAD_LR, callback, watch, max_epochs=-1, **options)
    cycles = events.of("cycle")
    return {
        "loss": digits.held_out_loss(module.network),
        "clock": callback.scheduler.last_epoch,
        "steps": module.trainer.global_step,
        "norm": watch.largest_norm,
        "first_losses": cycles[0]["losses"] if cycles else None,
    }


def validating(folder: str) -> dict[str, Any]:
    """Validate in the middle of cycles, and log; the same run without both."""
    plain, watch = HDETCallback(**EXPLORING), Watch()
    expected = fitted(digits.GOOD_LR, plain, max_steps=70)
    callback = HDETCallback(**EXPLORING)
    module = Digits(digits.GOOD_LR)
    trainer = trainer_of(
        callback,
        watch,
        LearningRateMonitor(),
        max_steps=70,
        val_check_interval=27,
        check_val_every_n_epoch=None,
        limit_val_batches=2,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="", version=""),
    )
    trainer.fit(module, Batches(), list(Batches(4)))
    return {
        "expected": digits.digest(expected.network),
        "digest": digits.digest(module.network),
        "shown": module.shown,
        "before": [watch.digests[step] for step in (27, 54)],
        "lrs": callback.scheduler.get_replica_lrs(),
    }


def saving(folder: str, steps: Sequence[int], hold_out: int) -> dict[str, Any]:
    """Save with ModelCheckpoint, and resume from the checkpoints of these steps."""

    def run(name: str, path: Path | None = None) -> dict[str, Any]:
        save = ModelCheckpoint(
            f"{folder}/{name}", "{step}", every_n_train_steps=steps[0], save_top_k=-1
        )
        callback = HDETCallback(scout=SCOUT, hold_out=hold_out)
        module = Digits(digits.BAD_LR)
        trainer = trainer_of(
            callback, save, max_epochs=6, enable_checkpointing=True, limit_val_batches=1
        )
        trainer.fit(module, Batches(), list(Batches(4)), ckpt_path=path)
        return {
            "digest": digits.digest(module.network),
            "loss": digits.held_out_loss(module.network),
            "clock": callback.scheduler.last_epoch,
        }

    found = {"whole": run("whole")}
    for step in steps:
        path = Path(folder, "whole", f"step={step}.ckpt")
        saved = torch.load(path, weights_only=True)["lr_schedulers"][0]
        found[f"{step}"] = {**run(f"from-{step}", path), "scouts": "search" in saved}
    return found
