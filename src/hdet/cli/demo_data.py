"""The data and the network of the demo: handwritten digits that install with pip."""

import torch
from torch import Tensor, nn

BATCH = 64


class Digits:
    """Handwritten digits: 1200 images to train on, and 597 held out."""

    def __init__(self, device: torch.device) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self.x = (torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16)[order].to(
            device
        )
        self.y = torch.tensor(labels)[order].to(device)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The global batch of a step; its images are shifted by up to a pixel."""
        generator = torch.Generator().manual_seed(step)
        places = torch.randint(1200, (BATCH,), generator=generator)
        shifts = torch.randint(-1, 2, (2,), generator=generator).tolist()
        return self.x[places].roll(shifts, (2, 3)), self.y[places]

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Loss and accuracy on the held-out images."""
        was_training = model.training
        model.eval()
        logits, labels = model(self.x[1200:]), self.y[1200:]
        model.train(was_training)
        loss = nn.functional.cross_entropy(logits, labels)
        return float(loss), float((logits.argmax(1) == labels).float().mean())


def network(device: torch.device) -> nn.Module:
    """A small convolutional network with the same weights in each run and process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for channels_in, channels in ((1, 24), (24, 48), (48, 48)):
            layers += [nn.Conv2d(channels_in, channels, 3, padding=1)]
            layers += [nn.BatchNorm2d(channels), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if channels_in == 24 else []
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(48, 10)]
        return nn.Sequential(*layers, *head).to(device)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean cross entropy of a batch."""
    return nn.functional.cross_entropy(model(x), y)
