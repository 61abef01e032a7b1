"""A small seeded model and data that every process creates alike."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH = 6
VOCABULARY = 11


class Toy(nn.Module):
    """A one-layer transformer in miniature, with the four parameter groups of the paper."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.transformer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(tokens))
        return self.head(torch.tanh(self.transformer(hidden)).mean(1))


def toy(dtype: torch.dtype = torch.float64) -> Toy:
    """Return a model with equal weights in every process and for any random state."""
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        return Toy().to(dtype)


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Return the four groups of the paper: embedding, no_decay, non_embedding, transformer."""
    model = getattr(model, "module", model)
    assert isinstance(model, Toy)
    return [
        {"name": "embedding", "params": [model.embedding.weight]},
        {"name": "no_decay", "params": [*model.norm.parameters()], "weight_decay": 0.0},
        {"name": "non_embedding", "params": [*model.head.parameters()]},
        {"name": "transformer", "params": [*model.transformer.parameters()]},
    ]


def batch(step: int, replica: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    tokens = torch.randint(VOCABULARY, (size, 4), generator=generator)
    return tokens, (tokens.sum(1) + tokens[:, 0]) % 3


def loss_of(model: nn.Module, step: int, replica: int) -> Tensor:
    tokens, labels = batch(step, replica)
    return nn.functional.cross_entropy(model(tokens), labels)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(groups(m), lr=1.0, momentum=0.9, weight_decay=1e-3),
    "adam": lambda m: torch.optim.Adam(groups(m), lr=1.0, weight_decay=1e-3),
    "adamw": lambda m: torch.optim.AdamW(groups(m), lr=1.0, weight_decay=1e-2),
}
