"""The two tasks of the demo: handwritten digits that install with pip.

All random numbers are drawn from the seed and the step alone, so that a run that was stopped
continues exactly.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

NUM_TRAINING = 1200
"""Images to train on. The other 597 are held out."""
LEVELS = 8
"""Levels of grey of the images that the transformer draws."""


@cache
def _digits() -> tuple[Tensor, Tensor]:
    """All images, with values from 0 to 16, and their labels, in a random order."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[order], torch.tensor(labels)[order]


class Task(NamedTuple):
    """A task of the demo.

    Attributes:
        name: The name of its folder.
        title: What trains, for people.
        batch_size: Images of a step, for all replicas together.
        steps: The usual number of optimizer steps.
        model: Makes the model.
        optimizer: Makes the optimizer from the parameters and the learning rate.
        data: All images and labels, as the model reads them.
        loss: The mean loss of a model on images and labels.
        has_labels: Whether the model names the digit, so that it has an accuracy.
        shifts: Whether training images are shifted by up to a pixel.
    """

    name: str
    title: str
    batch_size: int
    steps: int
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    data: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    has_labels: bool = False
    shifts: bool = False

    def network(self, seed: int, device: torch.device) -> nn.Module:
        """The model with the first weights of a seed."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.model().to(device)


class Batches:
    """The data of a task on a device.

    Args:
        task: The task.
        device: Where the data lies.
        seed: The seed of the batches.
    """

    def __init__(self, task: Task, device: torch.device, seed: int = 0) -> None:
        self._task, self._seed = task, seed
        self._x, self._y = (part.to(device) for part in task.data())

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The global batch of a step."""
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + step)
        places = torch.randint(NUM_TRAINING, (self._task.batch_size,), generator=generator)
        x, y = self._x[places], self._y[places]
        if self._task.shifts:
            shifts = torch.randint(-1, 2, (2,), generator=generator).tolist()
            x = x.roll(shifts, (2, 3))
        return x, y

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The loss on the held-out images, and the accuracy where there is one."""
        x, y = self._x[NUM_TRAINING:], self._y[NUM_TRAINING:]
        was_training = model.training
        model.eval()
        measures = {"loss": float(self._task.loss(model, x, y))}
        if self._task.has_labels:
            measures["accuracy"] = float((model(x).argmax(1) == y).float().mean())
        model.train(was_training)
        return measures


# A convolutional network that names the digit ---------------------------------------------------


def _images() -> tuple[Tensor, Tensor]:
    images, labels = _digits()
    return images.view(-1, 1, 8, 8) / 16, labels


def _conv_net() -> nn.Module:
    layers: list[nn.Module] = []
    for channels_in, channels in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


def _sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def _classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


# A transformer that draws the digit, pixel by pixel ---------------------------------------------


def _pixels() -> tuple[Tensor, Tensor]:
    images, labels = _digits()
    return (images * (LEVELS - 1) / 16).round().long(), labels


class PixelTransformer(nn.Module):
    """Says of each pixel how likely each level of grey is, from the pixels before it."""

    def __init__(self, width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.level = nn.Embedding(LEVELS + 1, width)
        self.place = nn.Parameter(torch.randn(64, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.mix = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.out = nn.Linear(width, LEVELS)

    def forward(self, pixels: Tensor) -> Tensor:
        """The logits of all pixels, [images, pixels, levels]."""
        first = torch.full_like(pixels[:, :1], LEVELS)
        x = self.level(torch.cat([first, pixels[:, :-1]], 1)) + self.place
        parts = self.mix(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = parts.unbind(2)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(seen.transpose(1, 2).flatten(2))
        x = x + self.think(self.norms[1](x))
        logits: Tensor = self.out(self.norms[2](x))
        return logits


def _adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def _draw(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())


CONV_NET = Task(
    name="conv-net",
    title="conv net, SGD",
    batch_size=64,
    steps=900,
    model=_conv_net,
    optimizer=_sgd,
    data=_images,
    loss=_classify,
    has_labels=True,
    shifts=True,
)
TRANSFORMER = Task(
    name="transformer",
    title="transformer, AdamW",
    batch_size=32,
    steps=600,
    model=PixelTransformer,
    optimizer=_adamw,
    data=_pixels,
    loss=_draw,
)
TASKS = (CONV_NET, TRANSFORMER)
