"""Weight decay, dropout, label smoothing and a temperature: problems with a best value."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hdet
from benchmarks.zoo.problem import Batch, Task, chunks, generator


def ridge_data(seed: int) -> tuple[Batch, Batch]:
    draw = generator(seed)
    truth = 0.5 * torch.randn(30, generator=draw)

    def some(num: int) -> Batch:
        x = torch.randn(num, 30, generator=draw)
        return x, x @ truth + torch.randn(num, generator=draw)

    return some(60), some(400)


def ridge_best(seed: int) -> dict[str, float]:
    """argmin over lambda of the held-out loss of (X'X/n + lambda)^-1 X'y/n."""
    (x, y), (held_x, held_y) = ridge_data(seed)
    values, vectors = torch.linalg.eigh(x.double().T @ x.double() / len(x))
    image = vectors.T @ (x.double().T @ y.double() / len(x))
    decays = torch.logspace(-3, 1.5, 4000, dtype=torch.float64)
    weights = vectors @ (image[:, None] / (values[:, None] + decays))
    losses = (held_x.double() @ weights - held_y.double()[:, None]).square().mean(0)
    return {"weight_decay": float(decays[losses.argmin()])}


def ridge(seed: int, starts: Mapping[str, float]) -> Task:
    (x, y), (held_x, held_y) = ridge_data(seed)
    model = nn.Linear(30, 1, bias=False)
    nn.init.zeros_(model.weight)
    decay = starts["weight_decay"]

    def errors(model: Any) -> Tensor:
        return (model(held_x)[:, 0] - held_y).square()

    return Task(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=decay),
        [hdet.weight_decay(bounds=(1e-3, 30.0))],
        lambda model, x, y: 0.5 * (model(x)[:, 0] - y).square().mean(),
        lambda step, num: (x.repeat(num, 1), y.repeat(num)),
        lambda model: chunks(errors(model)),
        lambda model: float(errors(model).mean()),
        starts={"weight_decay": decay},
    )


def digits(seed: int, num: int, noise: float, *, noisy_judge: bool) -> tuple[Batch, Batch]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    draw = generator(seed)
    order = torch.randperm(len(x), generator=draw)
    flipped = torch.rand(len(x), generator=draw) < noise
    wrong = torch.randint(10, (len(x),), generator=draw)
    noisy = torch.where(flipped, wrong, y)
    train, held = order[:num], order[num : num + 1200]
    return (x[train], noisy[train]), (x[held], (noisy if noisy_judge else y)[held])


def mlp(width: int, p: float) -> nn.Sequential:
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Dropout(p), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(p), nn.Linear(width, 10))


def classify(
    data: tuple[Batch, Batch],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    knob: Any,
    criterion: Any,
    start: float,
) -> Task:
    (x, y), (held_x, held_y) = data

    def losses(model: Any) -> Tensor:
        return F.cross_entropy(model(held_x), held_y, reduction="none")

    return Task(
        model,
        optimizer,
        [knob],
        lambda model, x, y: criterion(model(x), y),
        lambda step, num: (x.repeat(num, 1), y.repeat(num)),
        lambda model: chunks(losses(model), 16),
        lambda model: float(losses(model).mean()),
        starts={knob.name: start},
        judged_cycles=6,
    )


def dropout(seed: int, starts: Mapping[str, float]) -> Task:
    model = mlp(64, starts["dropout"])
    knob = hdet.dropout(model, bounds=(0.005, 0.97))
    data = digits(seed, 400, 0.3, noisy_judge=False)
    # The decay lets the network forget within some 300 steps what it learned by heart before.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1.0)
    return classify(data, model, optimizer, knob, nn.CrossEntropyLoss(), starts["dropout"])


def label_smoothing(seed: int, starts: Mapping[str, float]) -> Task:
    model = mlp(64, 0.0)
    criterion = nn.CrossEntropyLoss(label_smoothing=starts["label_smoothing"])
    knob = hdet.label_smoothing(criterion, bounds=(0.005, 0.97))
    data = digits(seed, 150, 0.3, noisy_judge=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1.0)
    return classify(data, model, optimizer, knob, criterion, starts["label_smoothing"])


PLANTED = 0.5


class Attention(nn.Module):
    """One head with given queries and keys; what is made of them is learned."""

    def __init__(self, draw: torch.Generator, width: int = 8) -> None:
        super().__init__()
        self.query: Tensor
        self.key: Tensor
        self.register_buffer("query", torch.randn(width, width, generator=draw) / width**0.25)
        self.register_buffer("key", torch.randn(width, width, generator=draw) / width**0.25)
        self.value = nn.Linear(width, width, bias=False)
        with torch.no_grad():
            self.value.weight.normal_(generator=draw)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys = x @ self.query, x @ self.key
        output: Tensor = F.scaled_dot_product_attention(queries, keys, self.value(x))
        return output


def taught(seed: int) -> tuple[Attention, Batch, Batch]:
    """A student like the teacher but for what it must learn, and what the teacher says."""
    draw = generator(seed)
    teacher = Attention(draw)
    hdet.attention_temperature(teacher, start=PLANTED)

    def some(num: int) -> Batch:
        x = torch.randn(num, 12, 8, generator=draw)
        with torch.no_grad():
            answers = teacher(x)
        return x, answers + 0.3 * torch.randn(answers.shape, generator=draw)

    data, held = some(128), some(400)
    student = Attention(generator(seed))
    with torch.no_grad():
        student.value.weight.normal_(generator=draw)
    return student, data, held


def temperature(seed: int, starts: Mapping[str, float]) -> Task:
    student, (x, y), (held_x, held_y) = taught(seed)
    start = starts["attention_temperature"]
    knob = hdet.attention_temperature(student, bounds=(0.01, 100.0), start=start)

    def errors(model: Any) -> Tensor:
        return (model(held_x) - held_y).square()

    return Task(
        student,
        torch.optim.SGD([student.value.weight], lr=0.3, momentum=0.9),
        [knob],
        lambda model, x, y: (model(x) - y).square().mean(),
        lambda step, num: (x.repeat(num, 1, 1), y.repeat(num, 1, 1)),
        lambda model: chunks(errors(model)),
        lambda model: float(errors(model).mean()),
        starts={"attention_temperature": start},
    )
