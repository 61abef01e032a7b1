"""Lightning's Trainer with hdet, in the lines marked so.

python examples/lightning_trainer.py

It starts two processes that train a small network on scikit-learn's handwritten digits.
"""

from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import hdet
from hdet.integrations.lightning import HDETCallback  # hdet


class Digits(LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
    train, val = random_split(data, [1440, len(data) - 1440])
    best = ModelCheckpoint("runs/lightning", monitor="val_loss")
    search = HDETCallback(hold_out=4, scout=hdet.Scout(share=0.2))  # hdet
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "max_epochs": 12}
    trainer = Trainer(accelerator="cpu", devices=2, callbacks=[best, search], **options)
    loaders = DataLoader(train, 16, shuffle=True), DataLoader(val, 64)
    trainer.fit(Digits(lr=1e-5), *loaders)  # 300 times too low, on purpose
    if trainer.is_global_zero:
        found, loss = search.scheduler.found_lr, best.best_model_score
        print(f"learning rate {found:.1e}, best loss {loss:.3f}")


if __name__ == "__main__":
    main()
