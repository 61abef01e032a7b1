"""Four replicas on one device, recorded by experiment trackers.

python examples/trackers.py tensorboard  # or: wandb, mlflow, trackio, several of them
"""

import sys

import torch
from sklearn.datasets import load_digits

import hdet
from hdet.records.sinks import Sink

STEPS, LR = 400, 1e-5  # far too low, on purpose


def sink(tracker: str) -> Sink:
    match tracker:
        case "tensorboard":
            from hdet.integrations.tensorboard import TensorBoardSink

            return TensorBoardSink("runs/trackers")
        case "wandb":
            from hdet.integrations.wandb import WandbSink

            return WandbSink(project="digits", mode="offline")
        case "mlflow":
            from hdet.integrations.mlflow import MlflowSink

            return MlflowSink(run_name="digits")
    from hdet.integrations.trackio import TrackioSink

    return TrackioSink(project="digits")


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(x), y)


def main(trackers: list[str]) -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    ensemble = hdet.StackedReplicas(model, 4)
    optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=LR))
    base = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS)
    scheduler = hdet.HDET(base, model=model, replicas=ensemble, record=[*map(sink, trackers)])
    for _ in range(STEPS):
        batch = torch.randint(1440, (256,))
        optimizer.zero_grad()
        losses = ensemble.losses(loss_of, x[batch], y[batch])
        losses.sum().backward()
        optimizer.step()
        scheduler.step(losses)
    scheduler.note("the end", test_loss=loss_of(model, x[1440:], y[1440:]).item())


if __name__ == "__main__":
    main(sys.argv[1:])
