"""What a decision of a controller takes."""

import random
from functools import partial
from statistics import median

import hdet
from benchmarks.systems.loops import CYCLE, seconds
from hdet.control.knob_bank import KnobBank
from hdet.knobs.specs import LearningRate, lr_knobs


def decision(num_replicas: int, num_knobs: int, times: int) -> float:
    """Seconds from the scores of a probe to the moves of all knobs."""
    names = [f"group{place}" for place in range(num_knobs)]
    knob_bank = KnobBank(
        lr_knobs((LearningRate(),), names, 0.1),
        num_replicas=num_replicas,
        design="orthogonal",
        sync_every=CYCLE,
        seed=0,
        controller=hdet.Tracker(),
        total_steps=None,
    )
    knob_bank.start_if_due(0, [0.1] * num_knobs)
    draw, taken, everyone = random.Random(0), [], range(num_replicas)
    losses, errors = [2.0] * num_replicas, [0.01] * num_replicas
    for _ in range(times):
        knob_bank.fan_out()
        scores = [[draw.gauss(2.0, 0.01) for _ in range(8)] for _ in everyone]
        taken.append(seconds(partial(knob_bank.move_knobs, losses, everyone, errors, scores)))
        knob_bank.cycle += 1
    return median(taken)


def decisions(times: int) -> dict[str, float]:
    """Milliseconds."""
    grid = [(n, k) for n in (2, 8, 16, 64) for k in (1, 4, 16) if k < n]
    return {f"n{n}_k{k}": 1e3 * decision(n, k, times) for n, k in grid}
