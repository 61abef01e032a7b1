"""A script with a Schedule-Free optimizer, with hdet in the lines marked so.

python examples/schedule_free.py

The learning rate stays constant, so there is no schedule: hdet finds the constant. A small network
on scikit-learn's handwritten digits; it needs no GPU and no download.
"""

import argparse

import torch
from schedulefree import AdamWScheduleFree
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hdet  # hdet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-5, help="far too low, on purpose")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    train, test = TensorDataset(x[:1400], y[:1400]), (x[1400:], y[1400:])
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = AdamWScheduleFree(model.parameters(), lr=arguments.lr)
    steps = arguments.epochs * len(loader)
    scheduler = hdet.HDET(optimizer, total_steps=steps, model=model)  # hdet
    for epoch in range(arguments.epochs):
        model.train()
        optimizer.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step(loss)  # hdet
        model.eval()
        optimizer.eval()  # also before saving: the averaged weights are those to keep
        with torch.no_grad():
            accuracy = (model(test[0]).argmax(1) == test[1]).float().mean().item()
        lr = optimizer.param_groups[0]["lr"]
        print(f"epoch {epoch + 1:2d}  loss {loss.item():.3f}  lr {lr:.2e}  accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
