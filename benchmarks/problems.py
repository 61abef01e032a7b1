"""Small problems whose best hyperparameters are known: in closed form, planted, or from a grid."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, OneCycleLR

import hdet
from benchmarks import data
from benchmarks.models import GPT, Size, gpt_loss

Score = Callable[[Any], Tensor]
Batch = tuple[Tensor, ...]


@dataclass
class Task:
    """A model to train, with knobs to find."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    knobs: list[Any]
    loss: Callable[..., Tensor]
    """(model, *batch) -> the training loss."""
    batch: Callable[[int, int], Batch]
    """(step, number of replicas) -> the batch of all replicas."""
    score: Score
    """What replicas are compared by: one number for each of some held-out batches."""
    judge: Callable[[Any], float]
    """The validation loss of the consensus."""
    sync_every: int = 25
    starts: dict[str, float] = field(default_factory=dict)
    """The start value of each knob; learning rates are explored as factors of it."""
    judged_cycles: int = 1
    """Validation losses of so many last cycles are averaged, where single ones vary by chance."""
    tail: float = 0.0
    """Of the probe; most best values are those for the weights as they stand."""
    schedule: Callable[[torch.optim.Optimizer, int], LRScheduler] = lambda optimizer, steps: (
        ConstantLR(optimizer, factor=1.0)
    )
    """(optimizer, number of steps) -> the base schedule."""
    gradients: Literal["shared", "local"] = "local"


@dataclass(frozen=True)
class Problem:
    """A family of tasks, one for each seed."""

    name: str
    make: Callable[[int, Mapping[str, float]], Task]
    """(seed, start value of each knob) -> a task."""
    best: Callable[[int], Mapping[str, float]] | None
    """The best value of each knob; none if a grid is to find it."""
    space: str
    grid: Sequence[float] = ()
    joint: bool = False
    """Whether a grid has one value for all knobs; then their geometric mean is compared with it."""
    factors: tuple[float, float] = (0.1, 10.0)
    """How far off a run starts, in units of the best value (of its odds in a logit space)."""
    cycles: int = 60


def off(space: str, value: float, factor: float) -> float:
    """A value that is so many times too low or too high, in its space."""
    if space == "logit":
        odds = factor * value / (1 - value)
        return odds / (1 + odds)
    return value * factor


def ratio(space: str, value: float, best: float) -> float:
    """How far a value is from the best: as a factor, of the odds in a logit space."""
    if space == "logit":
        return value / (1 - value) / (best / (1 - best))
    return value / best


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chunks(losses: Tensor, num: int = 8) -> Tensor:
    return losses.unflatten(0, (num, -1)).flatten(1).mean(1)


# Weight decay: ridge regression ----------------------------------------------------------------


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


# Dropout and label smoothing: digits with few and noisy labels ----------------------------------


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


# The temperature of attention: a planted teacher --------------------------------------------------

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


# Momentum and learning rates: quadratics whose optimum moves at every cycle -----------------------


class Quadratic(nn.Module):
    """0.5 sum_i h_i (w_i - target_i)^2, with noise in the gradient."""

    def __init__(self, curvatures: Tensor) -> None:
        super().__init__()
        self.curvatures: Tensor
        self.weight = nn.Parameter(torch.zeros(len(curvatures)))
        self.register_buffer("curvatures", curvatures)

    def forward(self, target: Tensor, noise: Tensor) -> Tensor:
        gap = self.weight - target
        return (0.5 * self.curvatures * gap * gap + noise * self.weight).mean()


class Moving:
    """A target that jumps at the start of every cycle, the same for all replicas."""

    def __init__(self, seed: int, size: int, sync_every: int, noise: float) -> None:
        self._seed, self._size, self._every, self._noise = seed, size, sync_every, noise

    def target(self, cycle: int) -> Tensor:
        return torch.randn(self._size, generator=generator(self._seed * 10_007 + cycle))

    def batch(self, step: int, num: int) -> Batch:
        draw = generator(self._seed * 1_000_003 + step + 1)
        noise = self._noise * torch.randn(self._size, generator=draw)
        return self.target(step // self._every).repeat(num), noise.repeat(num)


QUADRATIC_CYCLE = 40
RATE = 1.0
MOMENTUM_NOISE = 0.01


def momentum_best(_: int) -> dict[str, float]:
    """The momentum with the least expected loss after a cycle.

    From the recursion of (gap, velocity) in each direction: its mean, and its covariance.
    """
    h = _curvatures().double()
    betas = torch.linspace(0.01, 0.995, 2000, dtype=torch.float64)[:, None]
    gap = torch.full((len(betas), len(h)), 2.0**0.5, dtype=torch.float64)
    velocity = gg = gv = vv = torch.zeros_like(gap)
    for _step in range(QUADRATIC_CYCLE):
        velocity = betas * velocity + h * gap
        gap = gap - RATE * velocity
        # v' = beta v + h g + noise, g' = g - rate v'
        new = betas**2 * vv + 2 * betas * h * gv + h**2 * gg + MOMENTUM_NOISE**2
        cross = betas * gv + h * gg
        vv, gv, gg = new, cross - RATE * new, gg - 2 * RATE * cross + RATE**2 * new
    return {"momentum": float(betas[(h * (gap.square() + gg)).mean(1).argmin()])}


def _curvatures(size: int = 256) -> Tensor:
    return torch.logspace(math.log10(0.02), math.log10(1.0), size)


def _quadratic_task(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    knobs: list[Any],
    moving: Moving,
    **more: Any,
) -> Task:
    cycle = [0]

    def loss(model: Any, target: Tensor, noise: Tensor) -> Tensor:
        return model(target, noise)

    def batch(step: int, num: int) -> Batch:
        cycle[0] = step // QUADRATIC_CYCLE
        return moving.batch(step, num)

    def score(model: Any) -> Tensor:
        target = moving.target(cycle[0])
        return model(target, torch.zeros_like(target))

    task = Task(
        model, optimizer, knobs, loss, batch, score, lambda model: float(score(model)), **more
    )
    task.sync_every, task.judged_cycles = QUADRATIC_CYCLE, 6
    return task


def momentum(seed: int, starts: Mapping[str, float]) -> Task:
    curvatures = _curvatures()
    model = Quadratic(curvatures)
    # The loss is a mean: the learning rate is that of the sum.
    rate = RATE * len(curvatures)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=starts["momentum"])
    knobs = [hdet.momentum(bounds=(0.01, 0.995))]
    moving = Moving(seed, len(curvatures), QUADRATIC_CYCLE, MOMENTUM_NOISE)
    return _quadratic_task(model, optimizer, knobs, moving, starts=dict(starts))


GROUPS = {"a": 0.25, "b": 0.5, "c": 1.0, "d": 2.0}
GRADIENT_NOISE = 0.2


def rates_best(_: int) -> dict[str, float]:
    """eta with the least 2 c^T + eta^2 s^2 (1 - c^T) / (1 - c), c = (1 - eta h)^2."""
    return {f"lr/{name}": rate_best(curvature) for name, curvature in GROUPS.items()}


def rate_best(curvature: float) -> float:
    rates = torch.logspace(-4, math.log10(1.9 / curvature), 8000, dtype=torch.float64)
    contraction = (1 - rates * curvature) ** 2
    left = contraction**QUADRATIC_CYCLE
    # A gap between two targets has twice the variance of one.
    loss = 2 * left + rates**2 * GRADIENT_NOISE**2 * (1 - left) / (1 - contraction)
    return float(rates[loss.argmin()])


class Groups(nn.Module):
    """A quadratic of several groups, each with one curvature."""

    def __init__(self, size: int = 128) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {name: Quadratic(torch.full((size,), h)) for name, h in GROUPS.items()}
        )

    def forward(self, target: Tensor, noise: Tensor) -> Tensor:
        parts = list(self.parts.values())
        pieces = zip(parts, target.chunk(len(parts)), noise.chunk(len(parts)), strict=True)
        return torch.stack([part(*piece) for part, *piece in pieces]).sum()


def rates(seed: int, starts: Mapping[str, float]) -> Task:
    model = Groups()
    size = 128
    groups = [
        {"params": list(part.parameters()), "name": name, "lr": size * starts[f"lr/{name}"]}
        for name, part in model.parts.items()
    ]
    moving = Moving(seed, size * len(GROUPS), QUADRATIC_CYCLE, GRADIENT_NOISE)
    knobs = [hdet.lr(spread=0.5)]
    return _quadratic_task(model, torch.optim.SGD(groups), knobs, moving, starts=dict(starts))


# Four learning rates of a transformer, in the paper's groups -------------------------------------

KINDS = ("embedding", "no_decay", "non_embedding", "transformer")
SIZE = Size(256, 32, 2, 4, 48)


def kind_of(name: str) -> str:
    if name.startswith(("token", "place")):
        return "embedding"
    if "norm" in name or name.endswith("bias"):
        return "no_decay"
    return "transformer" if name.startswith("blocks") else "non_embedding"


@cache
def corpus() -> Tensor:
    """From $HDET_DATA: long enough for no text to be seen twice. What pip installs is not."""
    folder = os.environ.get("HDET_DATA")
    text = data.corpus(Path(folder) if folder else None)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def transformer(seed: int, starts: Mapping[str, float]) -> Task:
    model = GPT(SIZE)
    # Not tied to the embedding: the head is in a group of its own.
    model.head.weight = nn.Parameter(0.5 * model.token.weight.detach().clone())
    parameters = {
        kind: [p for name, p in model.named_parameters() if kind_of(name) == kind] for kind in KINDS
    }
    groups = [
        {
            "params": parameters[kind],
            "name": kind,
            "lr": starts[f"lr/{kind}"],
            "weight_decay": 0.0 if kind == "no_decay" else 0.1,
        }
        for kind in KINDS
    ]
    tokens = corpus()
    cut, reach = int(0.8 * len(tokens)), torch.arange(SIZE.context + 1)

    def some(part: Tensor, num: int, draw: torch.Generator) -> Tensor:
        places = torch.randint(len(part) - len(reach), (num, 1), generator=draw)
        return part[places + reach].long()

    held = some(tokens[cut:], 256, generator(seed))

    def losses(model: Any) -> Tensor:
        logits = model(held[:, :-1])
        each = F.cross_entropy(logits.flatten(0, 1), held[:, 1:].flatten(), reduction="none")
        return each.unflatten(0, held[:, 1:].shape)

    return Task(
        model,
        torch.optim.AdamW(groups, betas=(0.9, 0.95)),
        [hdet.lr(spread=0.5)],
        gpt_loss,
        # Every replica has batches of its own, as it would in data-parallel training.
        lambda step, num: (some(tokens[:cut], 4 * num, generator(seed * 1_000_003 + step)),),
        lambda model: chunks(losses(model)),
        lambda model: float(losses(model).mean()),
        starts={f"lr/{kind}": starts[f"lr/{kind}"] for kind in KINDS},
        tail=0.5,
        # A grid of constant learning rates has another best at every length of a run.
        schedule=lambda optimizer, steps: OneCycleLR(
            optimizer,
            [group["lr"] for group in optimizer.param_groups],
            total_steps=steps,
            cycle_momentum=False,
        ),
        gradients="shared",
    )


# Six at once -------------------------------------------------------------------------------------


class Parts(nn.Module):
    """Independent parts, each with a knob of its own; their losses are added."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(dict(parts))

    def forward(self, losses: Mapping[str, Any], batches: Mapping[str, Batch]) -> Tensor:
        each = [losses[name](part, *batches[name]) for name, part in self.parts.items()]
        return torch.stack(each).sum()


RATE_GROUPS = ("b", "d")
SIX_CYCLES = 80


def six_best(seed: int) -> dict[str, float]:
    rates = rates_best(seed)
    return {
        **{f"lr/{name}": rates[f"lr/{name}"] for name in RATE_GROUPS},
        **ridge_best(seed),
        **momentum_best(seed),
        "attention_temperature": PLANTED,
        "dummy": 1.0,
    }


def six(seed: int, starts: Mapping[str, float]) -> Task:
    """Ridge regression, a taught attention and three quadratics; a sixth knob does nothing."""
    every = {"slow": momentum(seed, starts), "attention": temperature(seed, starts)}
    every["ridge"] = ridge(seed, starts)
    model = Parts({name: task.model for name, task in every.items()})
    size = 128
    for place, name in enumerate(RATE_GROUPS):
        part = Quadratic(torch.full((size,), GROUPS[name]))
        model.parts[name] = part
        rate = size * starts[f"lr/{name}"]
        optimizer = torch.optim.SGD([{"params": part.parameters(), "name": name}], lr=rate)
        moving = Moving(seed + 100 * place, size, QUADRATIC_CYCLE, GRADIENT_NOISE)
        every[name] = _quadratic_task(part, optimizer, [], moving)
    groups = []
    for name, task in every.items():
        (group,) = task.optimizer.param_groups
        groups.append({**group, "name": name})
    state = {"dummy": starts["dummy"]}
    dummy = hdet.Knob(
        "dummy",
        lambda: state["dummy"],
        lambda value: state.update(dummy=value),
        bounds=(1e-6, 1e6),
        space="log",
    )
    knobs = [
        hdet.lr(spread=0.5, groups=RATE_GROUPS),
        *every["ridge"].knobs,
        hdet.momentum(bounds=(0.01, 0.995), groups=["slow"]),
        *every["attention"].knobs,
        dummy,
    ]
    # In the order in which their noises are alike: none of the parts drowns the others.
    weights = {"slow": 30.0, "attention": 1.0, "ridge": 0.3, "b": 10.0, "d": 10.0}

    def batch(step: int, num: int) -> Any:
        return {name: task.batch(step, num) for name, task in every.items()}

    def loss(model: Any, batches: Any) -> Tensor:
        return model({name: task.loss for name, task in every.items()}, batches)

    def score(model: Any) -> Tensor:
        each = [
            weights[name] * task.score(model.parts[name]).mean() for name, task in every.items()
        ]
        return torch.stack(each).sum()

    return Task(
        model,
        torch.optim.SGD(groups),
        knobs,
        loss,
        lambda step, num: (batch(step, num),),
        score,
        lambda model: float(score(model)),
        sync_every=QUADRATIC_CYCLE,
        starts=dict(starts),
        judged_cycles=6,
    )


SIX = Problem("six at once", six, six_best, "", cycles=SIX_CYCLES)
SPACES = {"momentum": "logit"}

PROBLEMS = [
    Problem("weight decay, ridge regression", ridge, ridge_best, "log"),
    Problem(
        "dropout, few noisy digits",
        dropout,
        None,
        "logit",
        grid=(0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8),
        cycles=90,
    ),
    Problem(
        "label smoothing, noisy labels",
        label_smoothing,
        None,
        "logit",
        grid=(0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8),
    ),
    Problem(
        "attention temperature, planted teacher",
        temperature,
        lambda _: {"attention_temperature": PLANTED},
        "log",
    ),
    Problem("momentum, moving quadratic", momentum, momentum_best, "logit", cycles=100),
    Problem("four learning rates, noisy quadratic", rates, rates_best, "log"),
    Problem(
        "four learning rates, transformer",
        transformer,
        None,
        "log",
        grid=tuple(5e-4 * 2**place for place in range(9)),
        joint=True,
        cycles=80,
    ),
]
