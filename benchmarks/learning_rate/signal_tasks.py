"""What signals.py trains: a language model and a vision model, in full and in short."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.zoo import data
from benchmarks.zoo.models import GPT, ConvNet, Size, gpt_loss, image_loss


class Settings(NamedTuple):
    steps: int
    cycle: int
    repeats: int
    truths: int
    """Runs to the end for each learning rate, with other batches."""
    size: Size
    channels: int


FULL = Settings(1000, 50, 6, 2, Size(256, 128, 4, 4, 128), 32)
QUICK = Settings(120, 10, 3, 1, Size(256, 64, 2, 4, 64), 8)


class Task(NamedTuple):
    """What is learned."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    batch: Callable[[int, int], tuple[Tensor, ...]]
    """A seed and a number of replicas -> a batch for each of them, joined."""
    held_out: Callable[[int, int], tuple[Tensor, ...]]
    """The same on held-out data."""
    lr: float


def language(folder: Path | None, settings: Settings, device: torch.device) -> Task:
    tokens = torch.tensor(list(data.text(folder)), device=device)
    cut, length = int(0.9 * len(tokens)), settings.size.context + 1
    reach = torch.arange(length, device=device)

    def some(part: Tensor) -> Callable[[int, int], tuple[Tensor, ...]]:
        def draw(seed: int, num: int) -> tuple[Tensor, ...]:
            generator = torch.Generator().manual_seed(seed)
            starts = torch.randint(len(part) - length, (8 * num, 1), generator=generator)
            return (part[starts.to(device) + reach],)

        return draw

    model = partial(GPT, settings.size)
    return Task("language", model, gpt_loss, some(tokens[:cut]), some(tokens[cut:]), 4e-3)


def vision(folder: Path | None, settings: Settings, device: torch.device) -> Task:
    images = data.images(folder, device)

    def some(x: Tensor, y: Tensor) -> Callable[[int, int], tuple[Tensor, ...]]:
        def draw(seed: int, num: int) -> tuple[Tensor, ...]:
            generator = torch.Generator().manual_seed(seed)
            places = torch.randint(len(x), (32 * num,), generator=generator).to(device)
            return x[places], y[places]

        return draw

    return Task(
        "vision",
        partial(ConvNet, images.x.shape[1], settings.channels),
        image_loss,
        some(images.x, images.y),
        some(images.x_test, images.y_test),
        4e-3,
    )
