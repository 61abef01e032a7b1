"""Rows of a fleet against torch's optimizers and the packages of the peers, step by step."""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import dadaptation
import dog
import prodigyopt
import pytest
import schedulefree
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.learning_rate.fleet import Fleet
from benchmarks.learning_rate.rules import RULES

STEPS = 30
SCALES = (1.0, 0.3)
CLIP = 0.1
"""Below the norms of these gradients."""


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * seed + step)
    x = torch.randn(16, 6, generator=draw, dtype=torch.float64)
    return x, x[:, :3].argmax(1)


def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def shape(step: int) -> float:
    """A warm-up that begins at nothing, then a decay."""
    return step / 5 if step < 5 else 1 - 0.5 * step / STEPS


def quietly(make: Callable[..., Any], *args: Any, **how: Any) -> Any:
    with redirect_stdout(io.StringIO()):
        return make(*args, **how)


CASES: dict[str, tuple[float, Callable[..., Any]]] = {
    "AdamW": (0.01, lambda p, lr: torch.optim.AdamW(p, lr, betas=(0.9, 0.999), weight_decay=0.01)),
    "SGD": (0.1, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)),
    "Prodigy": (1.0, lambda p, lr: prodigyopt.Prodigy(p, lr, weight_decay=0.01)),
    "Prodigy, warm-up": (
        1.0,
        lambda p, lr: prodigyopt.Prodigy(p, lr, weight_decay=0.01, safeguard_warmup=True),
    ),
    "Prodigy, warm-up and clipping": (
        1.0,
        lambda p, lr: prodigyopt.Prodigy(
            p, lr, weight_decay=0.01, safeguard_warmup=True, use_bias_correction=True
        ),
    ),
    "D-Adapt Adam": (
        1.0,
        lambda p, lr: quietly(dadaptation.DAdaptAdam, p, lr, weight_decay=0.01, decouple=True),
    ),
    "DoG": (1.0, lambda p, lr: dog.DoG(p)),
    "L-DoG": (1.0, lambda p, lr: dog.LDoG(p)),
    "Schedule-Free AdamW": (
        0.01,
        lambda p, lr: schedulefree.AdamWScheduleFree(p, lr, weight_decay=0.01),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rule_moves_weights_as_its_optimizer_does(name: str) -> None:
    lr, make = CASES[name]
    scheduled = "DoG" not in name
    fleet = Fleet([make_model(seed) for seed in (0, 1)], loss, lambda name: 0)
    rule = RULES[name](fleet)
    if "clipping" in name:
        rule.clip = CLIP
    models = [make_model(seed) for seed in (0, 1)]
    optimizers = [make(model.parameters(), lr) for model in models]
    for optimizer in optimizers:
        getattr(optimizer, "train", lambda: None)()
    for step in range(STEPS):
        now = [lr * scale * shape(step + 1) if scheduled else lr for scale in SCALES]
        parts = [batch(seed, step) for seed in (0, 1)]
        fleet.losses(*(torch.stack(part) for part in zip(*parts, strict=True)))
        rates = torch.tensor(now, dtype=torch.float64)[:, None]
        rule.step(rates, torch.full_like(rates, 0.9))
        for model, optimizer, part, rate in zip(models, optimizers, parts, now, strict=True):
            optimizer.zero_grad()
            loss(model, *part).backward()
            if "clipping" in name:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    for optimizer in optimizers:
        getattr(optimizer, "eval", lambda: None)()
    row = rule.answer() if name == "Schedule-Free AdamW" else fleet.weights
    expected = torch.stack([fleet.layout.row(model) for model in models])
    moved = (expected - torch.stack([fleet.layout.row(make_model(s)) for s in (0, 1)])).norm()
    assert moved > 5e-5
    torch.testing.assert_close(row, expected, rtol=1e-7, atol=1e-9)
