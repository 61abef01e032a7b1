"""Counts the files of hdet that one `scheduler.step(loss)` crosses, with the paper and a scout.

python tools/trace_step.py
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hdet

SOURCE = str(Path(hdet.__file__).parent)


def crossed(step: Callable[[], Any]) -> list[str]:
    """The files of hdet that a call enters, in order; one entry for each change of the file."""
    hops: list[str] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(SOURCE):
            file = name.removeprefix(SOURCE).lstrip("/")
            if not hops or hops[-1] != file:
                hops.append(file)

    sys.setprofile(watch)
    try:
        step()
    finally:
        sys.setprofile(None)
    return hops


def loss_of(model: Any, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x.flip(1))


def steps(num: int, **options: Any) -> list[list[str]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    ensemble = hdet.StackedReplicas(model, 4)
    optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    base = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=2000)
    scheduler = hdet.HDET(base, model=model, replicas=ensemble, **options)
    found = []
    for _ in range(num):
        optimizer.zero_grad()
        losses = ensemble.losses(loss_of, torch.randn(16, 3))
        losses.sum().backward()
        optimizer.step()
        found.append(crossed(partial(scheduler.step, losses.detach())))
    return found


def say(what: str, hops: list[str]) -> None:
    print(f"{what}: {len(set(hops))} files, {len(hops)} hops")
    print("   ", " -> ".join(dict.fromkeys(hops)))


if __name__ == "__main__":
    paper = steps(12, preset="paper", sync_every=5)
    say("paper, a step within a cycle", paper[6])
    say("paper, a step that ends a cycle", paper[9])
    scout = steps(60, probe=lambda model: loss_of(model, torch.ones(4, 3)))
    say("scout, a step within a round", scout[3])
    say("scout, the step that ends a round", max(scout[:40], key=len))
