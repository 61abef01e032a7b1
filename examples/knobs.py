"""Three hyperparameters at once, each started far off, found by eight replicas on one device.

python examples/knobs.py

A network learns handwritten digits from few labels, three in ten of them wrong: without the right
amount of dropout and label smoothing it learns the wrong ones by heart. Replicas are compared by
what they score on held-out digits. The lines of hdet are marked so.
"""

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR

import hdet  # hdet

REPLICAS, TRAIN, HELD_OUT = 8, 400, 700


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", default="runs/knobs", help="folder for the record")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    wrong = torch.rand(TRAIN) < 0.3
    noisy = torch.where(wrong, torch.randint(10, (TRAIN,)), y[:TRAIN])
    held_out = slice(TRAIN, TRAIN + HELD_OUT)  # the probe's; what is after it judges at the end

    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.05),
        nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.05), nn.Linear(64, 10),
    )  # fmt: skip
    criterion = nn.CrossEntropyLoss(label_smoothing=0.02)
    knobs = [  # hdet
        hdet.weight_decay(bounds=(1e-3, 10.0)),
        hdet.dropout(model, bounds=(0.01, 0.9)),
        hdet.label_smoothing(criterion, bounds=(0.005, 0.9)),
    ]

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = criterion(model(x), y)
        return loss

    def probe(model: Any) -> Tensor:  # hdet: one loss for each held-out digit
        return nn.functional.cross_entropy(model(x[held_out]), y[held_out], reduction="none")

    ensemble = hdet.StackedReplicas(model, REPLICAS)  # hdet
    optimizer = ensemble.optimizer(  # hdet: around the optimizer as it was
        torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    )
    scheduler = hdet.HDET(  # hdet: around the schedule as it was
        ConstantLR(optimizer, factor=1.0),
        model=model,
        replicas=ensemble,
        knobs=knobs,
        probe=probe,
        gradients="local",  # every replica feels its own values
        sync_every=25,
        total_steps=arguments.steps,
        record=arguments.out,
    )
    for step in range(arguments.steps):
        # The same digits for all replicas: they differ by their knobs and by nothing else.
        batch = torch.randperm(TRAIN)[:200].repeat(REPLICAS)
        optimizer.zero_grad()
        losses = ensemble.losses(loss_of, x[:TRAIN][batch], noisy[batch])
        losses.sum().backward()
        optimizer.step()
        scheduler.step(losses)
        if (step + 1) % 150 == 0:
            judged = ensemble.consensus().eval()
            with torch.no_grad():
                scores, truth = judged(x[TRAIN + HELD_OUT :]), y[TRAIN + HELD_OUT :]
            loss = nn.functional.cross_entropy(scores, truth).item()
            accuracy = (scores.argmax(1) == truth).float().mean().item()
            scheduler.note(loss=loss, accuracy=accuracy)
            found = "  ".join(
                f"{name} {value:.3g}" for name, value in scheduler.get_knobs().items()
            )
            print(f"step {step + 1:4d}  loss {loss:.3f}  accuracy {accuracy:.3f}  {found}")
    for name, recent_slope in scheduler.sensitivity().items():
        low, high = recent_slope.interval
        print(
            f"d loss / d {name}: {recent_slope.slope:+.4f}, 95 % between {low:+.4f} and {high:+.4f}"
        )
    share = scheduler.probe_share()
    told = "" if share is None else f"; the probe took {100 * share:.1f} % of the last probed cycle"
    print(f"record in {arguments.out}; hdet report {arguments.out} draws it{told}")


if __name__ == "__main__":
    main()
