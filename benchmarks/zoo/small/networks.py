"""The networks of the small tasks, made so that vmap can run several of them at once."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.models import Block, Size

Norm = Literal["none", "batch", "group"]


def conv_net(
    channels_in: int,
    widths: Sequence[int],
    places: int,
    *,
    norm: Norm = "none",
    he: bool = False,
    strides: Sequence[int] = (2, 2, 2),
    answers: int = 10,
) -> nn.Sequential:
    """Convolutions of 3 x 3 and a linear layer on what they give at every place."""
    layers: list[nn.Module] = []
    for width, stride in zip(widths, strides, strict=True):
        conv = nn.Conv2d(channels_in, width, 3, stride, 1, bias=norm == "none")
        if he:
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        layers += [conv, *normalised(norm, width), nn.ReLU()]
        channels_in = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels_in * places, answers))


def normalised(norm: Norm, width: int) -> list[nn.Module]:
    if norm == "none":
        return []
    return [nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(4, width)]


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers with ReLU between, on flattened inputs."""
    layers: list[nn.Module] = [nn.Flatten()]
    for width_in, width in pairwise(widths):
        layers += [nn.Linear(width_in, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def patches(x: Tensor, size: int) -> Tensor:
    """[batch, channels, height, width] -> [batch, places, values of a patch]."""
    batch, channels, height, width = x.shape
    cut = x.reshape(batch, channels, height // size, size, width // size, size)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * size * size)


class VisionTransformer(nn.Module):
    """Patches of 8 x 8 of a CIFAR image as tokens of two blocks."""

    def __init__(self, width: int = 32, num_blocks: int = 2) -> None:
        super().__init__()
        size = Size(0, 16, num_blocks, 4, width)
        self.embed = nn.Linear(192, width)
        self.place = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Block(size, causal=False) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(self.embed(patches(x, 8)) + self.place)
        logits: Tensor = self.head(self.norm(hidden).mean(1))
        return logits


class MixerBlock(nn.Module):
    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places = nn.Sequential(
            nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places)
        )
        self.channels = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """Patches of 7 x 7 of an MNIST image, mixed over places and over channels in turn."""

    def __init__(self, width: int = 32, num_blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(49, width)
        self.blocks = nn.Sequential(*(MixerBlock(16, width) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(self.embed(patches(x, 7)))
        logits: Tensor = self.head(self.norm(hidden).mean(1))
        return logits


class LSTM(nn.Module):
    """The next byte; written out, since vmap has no rule for torch's own."""

    def __init__(self, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.hidden = hidden
        self.token = nn.Embedding(256, width)
        self.input = nn.Linear(width, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden)
        self.head = nn.Linear(hidden, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs = self.input(self.token(tokens))
        state = memory = inputs.new_zeros(len(inputs), self.hidden)
        states = []
        for x in inputs.unbind(1):
            entry, keep, new, out = (x + self.recurrent(state)).chunk(4, -1)
            memory = keep.sigmoid() * memory + entry.sigmoid() * new.tanh()
            state = out.sigmoid() * memory.tanh()
            states.append(state)
        logits: Tensor = self.head(torch.stack(states, 1))
        return logits


class GRU(nn.Module):
    """The next byte; written out, as `LSTM`."""

    def __init__(self, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.hidden = hidden
        self.token = nn.Embedding(256, width)
        self.input = nn.Linear(width, 3 * hidden)
        self.recurrent = nn.Linear(hidden, 3 * hidden)
        self.head = nn.Linear(hidden, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs = self.input(self.token(tokens))
        state = inputs.new_zeros(len(inputs), self.hidden)
        states = []
        for x in inputs.unbind(1):
            reset, update, new = x.chunk(3, -1)
            old_reset, old_update, old_new = self.recurrent(state).chunk(3, -1)
            share = (update + old_update).sigmoid()
            fresh = (new + (reset + old_reset).sigmoid() * old_new).tanh()
            state = fresh + share * (state - fresh)
            states.append(state)
        logits: Tensor = self.head(torch.stack(states, 1))
        return logits


class TextConv(nn.Module):
    """What a window of bytes comes from, by convolutions over its characters."""

    def __init__(self, answers: int, width: int = 32) -> None:
        super().__init__()
        self.token = nn.Embedding(256, 16)
        self.conv1 = nn.Conv1d(16, width, 5, 2, 2)
        self.conv2 = nn.Conv1d(width, 2 * width, 5, 2, 2)
        self.head = nn.Linear(2 * width, answers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.relu(self.conv1(self.token(tokens).transpose(1, 2)))
        logits: Tensor = self.head(F.relu(self.conv2(x)).mean(2))
        return logits


class TableNet(nn.Module):
    """Embeddings of categories beside numbers, and a hidden layer."""

    def __init__(
        self,
        vocabulary: int,
        fields: int,
        numbers: int,
        answers: int,
        width: int = 4,
        hidden: int = 64,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = mlp([fields * width + numbers, hidden, hidden // 2, answers])
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        inputs = torch.cat([self.embedding(categories).flatten(1), numbers], 1)
        answers: Tensor = self.layers(inputs)
        return answers


class Denoiser(nn.Module):
    """The noise in an image of 8 x 8, given the angle between image and noise."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.time = nn.Linear(8, hidden)
        self.input = nn.Linear(64, hidden)
        self.hidden = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, 64)

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        turns = angle[:, None] * torch.arange(1, 5)
        time = self.time(torch.cat([turns.sin(), turns.cos()], 1))
        hidden = F.silu(self.input(x) + time)
        noise: Tensor = self.output(F.silu(self.hidden(hidden) + time))
        return noise


class VAE(nn.Module):
    """Logits of an image of 14 x 14, then the mean and the log-variance of its code."""

    def __init__(self, code: int = 8, hidden: int = 96) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(196, hidden), nn.ReLU(), nn.Linear(hidden, 2 * code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, 196))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + (0.5 * log_variance).exp() * noise), mean, log_variance


def autoencoder() -> nn.Sequential:
    """Colour images of 16 x 16 through a code of 8 channels at 4 x 4."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(16, 8, 3, 2, 1),
        nn.Conv2d(8, 64, 3, 1, 1),
        nn.ReLU(),
        nn.PixelShuffle(2),
        nn.Conv2d(16, 48, 3, 1, 1),
        nn.ReLU(),
        nn.PixelShuffle(2),
        nn.Conv2d(12, 3, 3, 1, 1),
    )


class Embedder(nn.Module):
    """Codes of length one of images of 14 x 14."""

    def __init__(self, width: int = 16, code: int = 32) -> None:
        super().__init__()
        self.body = conv_net(1, (width, 2 * width), 16, strides=(2, 2), answers=64)
        self.head = nn.Linear(64, code)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.head(F.relu(self.body(x))), dim=-1)
