"""The models that benchmarks train: a GPT, CIFAR ResNets and a ranker, as everyone writes them."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Size(NamedTuple):
    """How large a GPT is."""

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int


GPT2_SMALL = Size(
    50304, 1024, 12, 12, 768
)  # the vocabulary of 50257 rounded up to a multiple of 64
SMALL_GPT = Size(256, 256, 6, 6, 384)  # 10.7 million parameters, bytes as tokens


class Block(nn.Module):
    def __init__(self, size: Size, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = size.heads, causal
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Embedding, blocks, and a head tied to the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.place = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.place(places)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def gpt_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Residual(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


class ResNet18(nn.Module):
    """The CIFAR variant: a 3x3 stem, no first pooling."""

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.blocks = nn.Sequential(
            *(
                Residual(widths[i] if first else widths[i + 1], widths[i + 1], stride)
                for i in range(4)
                for first, stride in ((True, 1 if i == 0 else 2), (False, 1))
            )
        )
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        logits: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return logits


class Mean(nn.Module):
    """Over all places of an image; vmap has no rule for torch's pooling on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class ResNet(nn.Sequential):
    """A stem and three stages of one residual block each, for images of any size."""

    def __init__(self, channels_in: int, width: int, classes: int = 10) -> None:
        super().__init__(
            nn.Conv2d(channels_in, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            Residual(width, width, 1),
            Residual(width, 2 * width, 2),
            Residual(2 * width, 4 * width, 2),
            Mean(),
            nn.Linear(4 * width, classes),
        )


class Ranker(nn.Module):
    """Fields of a row as tokens of a small transformer, then one answer for each task."""

    def __init__(
        self, vocabulary: int, fields: int, numbers: int, tasks: int, width: int = 16
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(Block(Size(vocabulary, fields, 1, 2, width), causal=False))
        self.norm = nn.LayerNorm(fields * width + numbers)
        self.hidden = nn.Linear(fields * width + numbers, 8 * width)
        self.towers = nn.Linear(8 * width, tasks * 2 * width)
        self.heads = nn.Linear(tasks * 2 * width, tasks)
        nn.init.normal_(self.embedding.weight, std=0.05)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        tokens = self.blocks(self.embedding(categories)).flatten(1)
        hidden = F.relu(self.hidden(self.norm(torch.cat([tokens, numbers], 1))))
        answers: Tensor = self.heads(F.relu(self.towers(hidden)))
        return answers


class ConvNet(nn.Sequential):
    """Three convolutions with BatchNorm, for images of any size."""

    def __init__(self, channels_in: int, width: int, classes: int = 10) -> None:
        layers: list[nn.Module] = []
        for channels in (width, 2 * width, 4 * width):
            layers += [nn.Conv2d(channels_in, channels, 3, 1, 1, bias=False)]
            layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)]
            channels_in = channels
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, classes)]
        super().__init__(*layers, *head)


def image_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y)
