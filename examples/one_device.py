"""An ordinary script for one device, with hdet in the lines marked so: four replicas at once.

python examples/one_device.py

A small network on scikit-learn's handwritten digits; it uses a GPU if there is one.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hdet  # hdet

REPLICAS, BATCH = 4, 64


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--max-lr", type=float, default=1e-4, help="far too low, on purpose")
    parser.add_argument("--out", default="runs/one_device", help="folder for record and checkpoint")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = load_digits(return_X_y=True)
    x = (torch.tensor(images, dtype=torch.float32) / 16).to(device)
    y = torch.tensor(labels).to(device)
    train, held_out, test = slice(0, 1400), slice(1400, 1500), slice(1500, None)

    model = nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)
    ).to(device)
    ensemble = hdet.StackedReplicas(model, REPLICAS)  # hdet
    optimizer = ensemble.optimizer(  # hdet: around the optimizer as it was
        torch.optim.AdamW(model.parameters(), lr=arguments.max_lr)
    )

    def probe(model: nn.Module) -> Tensor:  # hdet: how replicas are compared
        return nn.functional.cross_entropy(model(x[held_out]), y[held_out], reduction="none")

    base = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=arguments.max_lr, total_steps=arguments.steps
    )
    scheduler = hdet.HDET(  # hdet: around the schedule as it was
        base, model=model, replicas=ensemble, probe=probe, record=arguments.out
    )
    for step in range(arguments.steps):
        batch = torch.randint(1400, (BATCH,), device=device)
        optimizer.zero_grad()
        losses = ensemble.losses(loss_of, x[train][batch], y[train][batch])  # hdet: was loss_of(
        losses.sum().backward()
        optimizer.step()
        scheduler.step(losses)  # hdet: was scheduler.step()
        if (step + 1) % 100 == 0:
            with scheduler.consensus(), torch.no_grad():  # hdet: the mean of the replicas is judged
                model.eval()
                accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
                model.train()
            scheduler.note(accuracy=accuracy)  # hdet: for the report
            print(f"step {step + 1:4d}  loss {losses.mean().item():.3f}  accuracy {accuracy:.3f}")
    saved = hdet.save_checkpoint(  # hdet: one model, whole or not there at all
        Path(arguments.out) / "checkpoints", model=model, optimizer=optimizer, scheduler=scheduler
    )
    print(f"learning rate: {scheduler.get_knobs()['lr/group0']:.3g} times the given one")
    print(f"checkpoint in {saved}")
    print(f"record in {arguments.out}; hdet report {arguments.out} draws it")


if __name__ == "__main__":
    main()
