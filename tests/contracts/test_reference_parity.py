"""Compare hdet on real processes with the plain loop of Algorithm 1 in tests/reference.py."""

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.control.assignment import assignment
from tests import reference, toy
from tests.processes import Processes

N, T, S, WARMUP = 4, 3, 132, 12  # 44 cycles; the controller acts in 40
PEAKS = [0.03, 0.01, 0.02, 0.05]
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
SETTINGS = {"spread": 0.25, "temperature": 0.05, "step_size": 0.7, "momentum": 0.8}


def train(rank: int, name: str, gradients: str, folder: str) -> list[torch.Tensor]:
    model: torch.nn.Module = toy.toy()
    model = DistributedDataParallel(model)
    optimizer = toy.OPTIMIZERS[name](model)
    scheduler = hdet.OneCycleHDET(
        optimizer,
        PEAKS,
        total_steps=S,
        cycle_momentum=False,
        sync_every=T,
        warmup_steps=WARMUP,
        model=model,
        gradients="shared" if gradients == "shared" else "local",
        outer=OUTER if gradients == "outer" else None,
        record=folder,
        seed=5,
        **SETTINGS,  # type: ignore[arg-type]
    )
    for step in range(S):
        optimizer.zero_grad()
        loss = toy.loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
    return [p.detach() for p in model.parameters()]


def expected(name: str, gradients: str, largest_move: float | None = 2.0) -> reference.Run:
    names = ["embedding", "no_decay", "non_embedding", "transformer"]
    return reference.run(
        toy.toy(),
        toy.OPTIMIZERS[name],
        toy.loss_of,
        lambda group, cycle: assignment(N, seed=5, cycle=cycle, knob=f"lr/{names[group]}"),
        num_replicas=N,
        peaks=PEAKS,
        total_steps=S,
        sync_every=T,
        warmup_steps=WARMUP,
        alpha=0.25,
        beta=0.8,
        sigma=0.05,
        lam=0.7,
        shared=gradients == "shared",
        outer=(0.7, 0.9) if gradients == "outer" else None,
        largest_move=largest_move,
    )


def test_update_printed_in_the_paper_makes_learning_rates_negative() -> None:
    """The reason for the bound: each of 40 syncs keeps 0.73 of the rate but 0.8 of the velocity."""
    cycles = expected("adamw", "shared", largest_move=None).cycles
    assert min(centre for cycle in cycles for centre in cycle.centres) < 0
    bounded = expected("adamw", "shared").cycles
    assert min(centre for cycle in bounded for centre in cycle.centres) > 0


@pytest.mark.parametrize(
    ("name", "gradients"),
    [*product(sorted(toy.OPTIMIZERS), ["shared", "local"]), ("adamw", "outer")],
)
def test_one_cycle_hdet_equals_the_reference_loop_in_weights_and_record(
    processes: Processes, tmp_path: Path, name: str, gradients: str
) -> None:
    got = processes(N, train, name, gradients, str(tmp_path))
    want = expected(name, gradients)
    for replica in range(N):
        for ours, theirs in zip(got[replica], want.parameters[replica], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    cycles = [line for line in lines if line["event"] == "cycle"]
    assert len(cycles) == len(want.cycles) == S // T
    assert sum(cycle.weights is not None for cycle in want.cycles) == 40
    held = want.cycles[WARMUP // T - 1].centres
    for line, cycle in zip(cycles, want.cycles, strict=True):
        check_cycle(line, cycle, held)


def check_cycle(line: dict[str, Any], cycle: reference.Cycle, held: list[float]) -> None:
    exactly: Any = {"rel": 1e-12, "abs": 1e-12}
    assert line["step"] == cycle.step
    assert line["losses"] == pytest.approx(cycle.losses, **exactly)
    assert (line["weights"] is None) == (cycle.weights is None)
    if cycle.weights is not None:
        assert line["weights"] == pytest.approx(cycle.weights, **exactly)
    for group, knob in enumerate(line["knobs"]):
        assert knob["lrs"] == pytest.approx(cycle.lrs[group], **exactly)
        assert knob["velocity"] * held[group] == pytest.approx(cycle.velocities[group], **exactly)
        if cycle.weights is not None:
            assert knob["scale"] * held[group] == pytest.approx(cycle.centres[group], **exactly)
