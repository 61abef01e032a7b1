"""What the settling benchmark trains: language, vision, ranking and fine-tuning, on real data.

Every task says which samples a run with some seed sees at some step, so that all methods see the
same. `probe` scores data that training does not see, `judge` data that nothing else sees.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo import data
from benchmarks.zoo.models import GPT, Ranker, ResNet

Batches = Callable[[Tensor], tuple[Tensor, ...]]
"""The step of every row, [R] -> the samples of every row, [R, batch, ...]."""


class Plan(NamedTuple):
    """How a task is trained."""

    optimizer: str
    steps: int
    batch: int
    middle: float
    """Of the grid of learning rates."""
    size: Any = None
    """Of the model."""


class Task(NamedTuple):
    model: Callable[[int], nn.Module]
    """A seed -> a new model, on the device."""
    loss: Callable[..., Tensor]
    batches: Callable[[Sequence[int]], Batches]
    """The seed of every row -> its samples."""
    probe: Callable[[Any], Tensor]
    """A model -> one score for each part of the held-out data."""
    judge: Callable[[Any], Tensor]
    """A model -> what `measures` needs."""
    measures: Callable[[Tensor], dict[str, float]]
    group_of: Callable[[str], int] = lambda name: 0
    groups: tuple[str, ...] = ("all",)
    truth: Tensor | None = None
    """What `judge` should answer: classes, or yes or no for each question."""


def seeded(make: Callable[[], nn.Module], device: torch.device, seed: int) -> nn.Module:
    """A new model; the same for a seed wherever it is made."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(device)


def drawn(
    seeds: Sequence[int], draw: Callable[[torch.Generator], Tensor], device: torch.device
) -> tuple[Tensor, Tensor]:
    """What every seed draws, [seeds, ...], and the place of every row in it."""
    known = list(dict.fromkeys(seeds))
    tables = torch.stack([draw(torch.Generator().manual_seed(seed)) for seed in known])
    places = torch.tensor([known.index(seed) for seed in seeds])
    return tables.to(device), places.to(device)


def in_epochs(num: int, steps: int, batch: int, draw: torch.Generator) -> Tensor:
    """Samples without repetition, as long as they last, [steps, batch]."""
    epochs = -(-steps * batch // num)
    order = torch.cat([torch.randperm(num, generator=draw) for _ in range(epochs)])
    return order[: steps * batch].view(steps, batch)


def mean_loss(answer: Tensor) -> dict[str, float]:
    return {"loss": float(answer.mean())}


# Language -------------------------------------------------------------------------------------


@cache
def _tokens(name: str, folder: Path | None, device: torch.device) -> Tensor:
    read = data.corpus if name == "corpus" else data.text
    return torch.frombuffer(bytearray(read(folder)), dtype=torch.uint8).to(device)


def language(
    plan: Plan,
    folder: Path | None,
    device: torch.device,
    *,
    text: str = "corpus",
    start: dict[str, Tensor] | None = None,
    most: int | None = None,
) -> Task:
    """The next byte of a text, or of its first `most` bytes; from a checkpoint if there is one."""
    tokens, size = _tokens(text, folder, device)[:most], plan.size
    cut = int(0.9 * len(tokens))
    middle = (cut + len(tokens)) // 2
    reach = torch.arange(size.context + 1, device=device)

    def held(part: Tensor, num: int, seed: int) -> Tensor:
        places = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(part) - len(reach), (num, 1), generator=places).to(device)
        return part[starts + reach].long()

    def batches(seeds: Sequence[int]) -> Batches:
        shape = (plan.steps, plan.batch)
        starts, rows = drawn(
            seeds, lambda g: torch.randint(cut - len(reach), shape, generator=g), device
        )
        return lambda steps: (tokens[starts[rows, steps][..., None] + reach].long(),)

    def losses(model: Any, text: Tensor) -> Tensor:
        logits = model(text[:, :-1]).flatten(0, 1).float()
        each = F.cross_entropy(logits, text[:, 1:].flatten(), reduction="none")
        return each.view(len(text), -1).mean(1)

    def model(seed: int) -> nn.Module:
        made = seeded(partial(GPT, size), device, seed)
        if start is not None:
            made.load_state_dict(start)
        return made

    probed, judged = held(tokens[cut:middle], 64, 77), held(tokens[middle:], 512, 78)
    return Task(
        model,
        lambda model, text: losses(model, text).mean(),
        batches,
        lambda model: losses(model, probed),
        lambda model: losses(model, judged),
        mean_loss,
    )


# Vision ---------------------------------------------------------------------------------------


def vision(
    plan: Plan, folder: Path | None, device: torch.device, *, most: tuple[int, int] | None = None
) -> Task:
    """The class of an image, shifted by up to two pixels and mirrored.

    `most` is how many images there are to train and to test with; all by default.
    """
    images = _images(folder, device, most)
    height, width = images.x.shape[2:]
    shift = 2 if height >= 32 else 0
    padded = F.pad(images.x, [shift] * 4).permute(0, 2, 3, 1).contiguous()
    half = len(images.x_test) // 2
    parts = (slice(0, min(half, 512)), slice(half, None))

    def batches(seeds: Sequence[int]) -> Batches:
        shape = (plan.steps, plan.batch)
        order, rows = drawn(
            seeds, lambda g: in_epochs(len(images.x), plan.steps, plan.batch, g), device
        )

        def shifts(g: torch.Generator) -> Tensor:
            most = (2 * shift + 1, 2 * shift + 1, 2 if shift else 1)
            return torch.stack([torch.randint(one, shape, generator=g) for one in most], -1)

        moves, _ = drawn(seeds, shifts, device)

        def batch(steps: Tensor) -> tuple[Tensor, ...]:
            chosen = order[rows, steps]
            down, right, mirrored = moves[rows, steps][..., None].unbind(-2)
            ys = down + torch.arange(height, device=device)
            xs = torch.arange(width, device=device)
            xs = right + torch.where(mirrored == 1, width - 1 - xs, xs)
            x = padded[chosen[..., None, None], ys[..., :, None], xs[..., None, :]]
            return x.permute(0, 1, 4, 2, 3), images.y[chosen]

        return batch

    def losses(model: Any, part: slice) -> Tensor:
        logits = model(images.x_test[part]).float()
        return F.cross_entropy(logits, images.y_test[part], reduction="none")

    def answers(model: Any) -> Tensor:
        return model(images.x_test[parts[1]]).float()

    def measures(logits: Tensor) -> dict[str, float]:
        truth = images.y_test[parts[1]]
        right = (logits.argmax(1) == truth).float().mean()
        return {"loss": float(F.cross_entropy(logits, truth)), "accuracy": float(right)}

    return Task(
        partial(seeded, partial(ResNet, images.x.shape[1], plan.size), device),
        lambda model, x, y: F.cross_entropy(model(x).float(), y),
        batches,
        lambda model: losses(model, parts[0]),
        answers,
        measures,
        truth=images.y_test[parts[1]],
    )


@cache
def _images(folder: Path | None, device: torch.device, most: tuple[int, int] | None) -> data.Images:
    return data.images(folder, device, most)


# Ranking --------------------------------------------------------------------------------------

GROUPS = ("embedding", "no_decay", "non_embedding", "transformer")


def ranker(plan: Plan, folder: Path | None, device: torch.device, *, table: str) -> Task:
    """Several yes-or-no questions about a row of a table, in one epoch; the paper's four groups."""
    rows = _table(table, folder, device)
    num = len(rows.labels)
    order = torch.randperm(num, generator=torch.Generator().manual_seed(5)).to(device)
    train, rest = order[: int(0.8 * num)], order[int(0.8 * num) :]
    held, test = rest[::2][:1024], rest[1::2]

    def batches(seeds: Sequence[int]) -> Batches:
        order, places = drawn(
            seeds, lambda g: in_epochs(len(train), plan.steps, plan.batch, g), device
        )

        def batch(steps: Tensor) -> tuple[Tensor, ...]:
            chosen = train[order[places, steps]]
            return rows.categories[chosen], rows.numbers[chosen], rows.labels[chosen]

        return batch

    def losses(logits: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none").sum(1)

    def answers(model: Any, part: Tensor) -> Tensor:
        return model(rows.categories[part], rows.numbers[part])

    def measures(logits: Tensor) -> dict[str, float]:
        truth = rows.labels[test]
        aucs = [auc(logits[:, task], truth[:, task]) for task in range(truth.shape[1])]
        loss, share = float(losses(logits, truth).mean()), truth.mean(0)
        entropy = float(F.binary_cross_entropy(share, share, reduction="sum"))
        return {
            "loss": loss,
            "auc": sum(aucs) / len(aucs),
            "normalised_entropy": loss / entropy,  # 1 for a model that knows the shares only
        }

    shape = (rows.vocabulary, rows.categories.shape[1], rows.numbers.shape[1], rows.labels.shape[1])
    return Task(
        partial(seeded, partial(Ranker, *shape, plan.size), device),
        lambda model, *row: losses(model(*row[:2]), row[2]).mean(),
        batches,
        lambda model: losses(answers(model, held), rows.labels[held]),
        lambda model: answers(model, test),
        measures,
        group_of_ranker,
        GROUPS,
        rows.labels[test],
    )


def group_of_ranker(name: str) -> int:
    if name.startswith("embedding"):
        return 0
    if name.endswith("bias") or "norm" in name:
        return 1
    return 3 if name.startswith("blocks") else 2


def auc(scores: Tensor, truth: Tensor) -> float:
    """How often a yes scores higher than a no."""
    ranks = scores.double().argsort().argsort().double() + 1
    yes = truth.bool()
    num = int(yes.sum())
    above = ranks[yes].sum() - num * (num + 1) / 2
    return float(above / (num * (len(truth) - num)))


@cache
def _table(name: str, folder: Path | None, device: torch.device) -> data.Table:
    rows = {"census": data.census, "feed": data.feed}[name](folder)
    return rows._replace(
        categories=rows.categories.to(device),
        numbers=rows.numbers.to(device),
        labels=rows.labels.to(device),
    )
