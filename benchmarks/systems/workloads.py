"""The models and batches that stacked.py times."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.zoo.models import GPT, GPT2_SMALL, SMALL_GPT, ResNet18, Size, gpt_loss, image_loss

Batch = tuple[Tensor, ...]


class Workload(NamedTuple):
    """A model, and the batch it is trained with."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    batch: Callable[[int], Batch]
    """The number of samples -> a global batch on the device."""
    samples: int
    steps: int
    """Steps in a round, and in a cycle."""
    rounds: int
    small: bool = True
    """Whether launches matter: compared with CUDA graphs and with processes as well."""


def tokens(size: Size) -> Callable[[int], Batch]:
    return lambda num: (torch.randint(size.vocabulary, (num, size.context + 1), device="cuda"),)


def images(num: int) -> Batch:
    x = torch.randn(num, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    return x, torch.randint(10, (num,), device="cuda")


def resnet() -> nn.Module:
    return ResNet18().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


WORKLOADS = [
    Workload("gpt2", lambda: GPT(GPT2_SMALL), gpt_loss, tokens(GPT2_SMALL), 64, 12, 5, False),
    Workload("small_gpt", lambda: GPT(SMALL_GPT), gpt_loss, tokens(SMALL_GPT), 64, 50, 7),
    Workload("resnet", resnet, image_loss, images, 512, 50, 7),
]
