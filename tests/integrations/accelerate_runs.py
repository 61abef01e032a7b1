"""Runs with Accelerate, in the processes of a launch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hdet
from hdet.integrations.accelerate import prepare_hdet
from tests.integrations import digits

BATCH = 16
SCOUT = hdet.Scout(share=0.25)
"""Room for a usual search in a run of a few hundred steps."""


class Training:
    """A loop as the docs of Accelerate show it. Without options of hdet, it is a plain run."""

    def __init__(
        self,
        lr: float,
        num_steps: int,
        *,
        accumulation: int = 1,
        clip: float | None = None,
        **options: Any,
    ) -> None:
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulation,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        )
        x, y = digits.tensors()
        trained = TensorDataset(x[: digits.NUM_TRAINED], y[: digits.NUM_TRAINED])
        loader: DataLoader[Any] = DataLoader(trained, BATCH, shuffle=True)
        model = digits.network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.num_steps, self.clip = num_steps, clip
        self.step = self.num_batches = self.num_updates = 0
        optimizer.register_step_post_hook(self._count_update)
        base = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, lr, total_steps=num_steps)
        self.scheduler: Any = base
        self.is_hdet = bool(options)
        if self.is_hdet:
            self.scheduler = prepare_hdet(self.accelerator, base, self.model, **options)

    def _count_update(self, *_: Any) -> None:
        self.num_updates += 1

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of all epochs, from the one that is due."""
        while True:
            epoch, done = divmod(self.num_batches, len(self.loader))
            loader = self.accelerator.skip_first_batches(self.loader, done) if done else self.loader
            loader.set_epoch(epoch)
            for batch in loader:
                self.num_batches += 1
                yield batch

    def run(self, until: int | None = None) -> None:
        """Train up to a number of optimizer steps."""
        accelerator, batches = self.accelerator, self.batches()
        while self.step < (until or self.num_steps):
            x, y = next(batches)
            with accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(x), y)
                accelerator.backward(loss)
                if self.clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.optimizer.step()
                if self.is_hdet:
                    self.scheduler.step(loss)
                elif accelerator.sync_gradients:
                    self.scheduler.step()
                self.optimizer.zero_grad()
            self.step += accelerator.sync_gradients

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path, step: int) -> None:
        self.accelerator.load_state(str(folder))
        self.step = self.num_batches = step

    def loss(self) -> float:
        return digits.held_out_loss(self.accelerator.unwrap_model(self.model))

    def digest(self) -> str:
        return digits.digest(self.accelerator.unwrap_model(self.model))

    def end(self) -> None:
        """Free the run, so that another one can begin in this process."""
        self.scheduler = None
        self.accelerator.free_memory()


def three_ways(num_steps: int) -> dict[str, float]:
    """The loss of a plain run at a bad learning rate, of hdet there, and of a good plain run."""
    found = {}
    ways: list[tuple[str, float, dict[str, Any]]] = [
        ("bad", digits.BAD_LR, {}),
        ("hdet", digits.BAD_LR, {"scout": SCOUT}),
        ("good", digits.GOOD_LR, {}),
    ]
    for name, lr, options in ways:
        training = Training(lr, num_steps, **options)
        training.run()
        found[name] = training.loss()
        training.end()
    return found
