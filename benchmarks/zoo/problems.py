"""Small problems whose best hyperparameters are known: in closed form, planted, or from a grid."""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks.zoo import data
from benchmarks.zoo.models import GPT, Size, gpt_loss
from benchmarks.zoo.problem import Batch, Problem, Task, chunks, generator
from benchmarks.zoo.quadratics import (
    GRADIENT_NOISE,
    GROUPS,
    QUADRATIC_CYCLE,
    Moving,
    Quadratic,
    momentum,
    momentum_best,
    quadratic_task,
    rates,
    rates_best,
)
from benchmarks.zoo.small_models import (
    PLANTED,
    dropout,
    label_smoothing,
    ridge,
    ridge_best,
    temperature,
)

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
        every[name] = quadratic_task(part, optimizer, [], moving)
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
