"""Sets of tensors that converge.py averages, and how it is set."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Shapes = Sequence[tuple[int, ...]]


class Settings(NamedTuple):
    """What a run is set to. Parameters are float32."""

    processes: int
    blocks: int
    """Transformer blocks of the model that is shaped like GPT-2; the real one has 12."""
    rounds: dict[str, int]
    bucket_bytes: int


FULL = Settings(
    processes=2, blocks=12, rounds={"gpt2": 15, "small_tensors": 101}, bucket_bytes=64 << 20
)
QUICK = FULL._replace(blocks=2, rounds={"gpt2": 5, "small_tensors": 25})


class Place(NamedTuple):
    """Where a row runs."""

    rank: int
    settings: Settings
    lighthouse: str | None
    """Address of torchft's server."""


class Row(NamedTuple):
    """A way to average, ready to be called."""

    call: Callable[[], Any]
    tensors: list[Tensor]
    """What holds the mean after the call; none if it is not a mean."""
    close: Callable[[], Any] = lambda: None
    way: float = 1.0
    """How far they go toward the mean at the first call; an outer optimizer goes beyond it."""


def gpt2_shapes(blocks: int) -> Shapes:
    """The parameters of GPT-2 small: 124 million with its 12 blocks."""
    norm = [(768,), (768,)]
    attention = [(768, 2304), (2304,), (768, 768), (768,)]
    mlp = [(768, 3072), (3072,), (3072, 768), (768,)]
    return [(50257, 768), (1024, 768), *(norm + attention + norm + mlp) * blocks, *norm]


def small_shapes() -> Shapes:
    """560 tensors of 1 to 16 kB."""
    return [(256 * (1 + index % 16),) for index in range(560)]


def shapes_of(settings: Settings) -> dict[str, Shapes]:
    return {"gpt2": gpt2_shapes(settings.blocks), "small_tensors": small_shapes()}


def num_bytes(shapes: Shapes) -> int:
    return 4 * sum(map(prod, shapes))


def model_of(shapes: Shapes) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)


def tensors_of(shapes: Shapes) -> list[Tensor]:
    return [torch.ones(shape) for shape in shapes]
