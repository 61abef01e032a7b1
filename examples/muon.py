"""Muon for the matrices and AdamW for the rest, with hdet in the lines marked so.

python examples/muon.py

A small network on scikit-learn's handwritten digits. Muon is part of torch 2.9 and newer.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

import hdet  # hdet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--muon-lr", type=float, default=2e-4, help="far too low, on purpose")
    parser.add_argument("--adamw-lr", type=float, default=1e-5, help="far too low, on purpose")
    arguments = parser.parse_args()
    if not hasattr(torch.optim, "Muon"):
        raise SystemExit(f"torch {torch.__version__} has no Muon: use torch 2.9 or newer")

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, held, test = order[:1400], order[1400:1500], order[1500:]

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    model.append(nn.Linear(64, 10))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    muon = torch.optim.Muon(matrices, lr=arguments.muon_lr)
    adamw = torch.optim.AdamW(others, lr=arguments.adamw_lr)
    schedules = [
        OneCycleLR(muon, arguments.muon_lr, total_steps=arguments.steps),
        OneCycleLR(adamw, arguments.adamw_lr, total_steps=arguments.steps),
    ]

    def validate(model: nn.Module) -> torch.Tensor:
        return cross_entropy(model(x[held]), y[held], reduction="none")

    scheduler = hdet.HDET(schedules, model=model, probe=validate)  # hdet: around both schedules
    for step in range(arguments.steps):
        batch = train[torch.randint(len(train), (64,))]
        loss = cross_entropy(model(x[batch]), y[batch])
        muon.zero_grad()
        adamw.zero_grad()
        loss.backward()
        muon.step()
        adamw.step()
        scheduler.step(loss)  # hdet: was a step of each schedule
        if (step + 1) % 200 == 0:
            print(f"step {step + 1:4d}  validation loss {validate(model).mean().item():.3f}")
    accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
    print(f"accuracy {accuracy:.3f}")
    print(f"learning rates: {scheduler.get_knobs()['lr']:.3g} times the given ones")


if __name__ == "__main__":
    main()
