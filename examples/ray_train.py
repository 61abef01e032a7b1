"""Ray Train with hdet in the lines marked so: one worker dies, and the run goes on.

python examples/ray_train.py
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hdet.integrations.ray import HDETRun, ReplicaTable  # hdet

EPOCHS, STEPS, LR = 20, 45, 1e-5  # a learning rate that is far too low, on purpose


def train_on_worker(config: dict[str, Any]) -> None:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    data = TensorDataset(x[:1440], y[:1440])
    loader = prepare_data_loader(DataLoader(data, 16, shuffle=True, drop_last=True))
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=EPOCHS * STEPS)
    run = HDETRun(schedule, model=model, optimizer=optimizer)  # hdet
    resumed = run.resume() or {"epochs": 0}  # hdet
    for epoch in range(resumed["epochs"], EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x_batch, y_batch in loader:
            loss = nn.functional.cross_entropy(model(x_batch), y_batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.scheduler.step(loss)  # hdet: was schedule.step()
        if epoch % 5 == 4:
            run.report({"loss": loss.item()}, save=True, extra={"epochs": epoch + 1})  # hdet
        mark = Path(config["folder"]) / "has-died"
        if epoch == 13 and train.get_context().get_world_rank() == 1 and not mark.exists():
            mark.touch()
            os._exit(1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run_config = train.RunConfig(
            storage_path=folder,
            failure_config=train.FailureConfig(max_failures=1),
            callbacks=[ReplicaTable()],  # hdet
        )
        own = {"train_loop_config": {"folder": folder}, "run_config": run_config}
        TorchTrainer(
            train_on_worker, scaling_config=train.ScalingConfig(num_workers=2), **own
        ).fit()
