"""Simulated runs that a guard watches: losses that rise by design, and learning rates that fail.

A run has a progress that a rollback takes back, and a time that nothing takes back. Learning rates
are in units of the given one.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from hdet.control.guard import Guard
from hdet.control.guard_monitor import GuardMonitor

CYCLES = 60
ERROR = 0.02
"""The standard error of a cycle's loss, as a share of 1."""


class Told(NamedTuple):
    """What a guard did to a run.

    Attributes:
        rollbacks: How often it restored the run.
        lowest: The lowest scale of the learning rate.
        last: The scale at the end.
        loss: The loss of the last cycle.
        num_low: Cycles with a lowered learning rate.
        accepted: How often it accepted a new level.
        stopped: Whether it gave up.
    """

    rollbacks: int
    lowest: float
    last: float
    loss: float
    num_low: int
    accepted: int
    stopped: bool


@dataclass
class Stream:
    """A run: its losses follow its progress and its time.

    Attributes:
        loss: (progress, cycle) -> the loss without noise.
        noise: The standard error of a cycle's loss.
        heavy: Whether the noise has heavy tails.
        edge: Learning rates above it make the run fail.
        rate: The learning rate of each cycle, in units of the given one.
        growth: The excess of a run above the edge grows by this power of the learning rate.
        chance: A run whose excess reaches 1 is dead, and has this loss; None if it explodes.
    """

    loss: Callable[[float, int], float]
    noise: float = ERROR
    heavy: bool = False
    edge: float = math.inf
    rate: Callable[[float], float] = lambda at: 1.0
    growth: float = 1.0
    chance: float | None = None

    def watched(self, seed: int, guard: Guard | None = None, cycles: int = CYCLES) -> Told:
        """Train under a guard, as the end of a cycle asks it."""
        draw = random.Random(seed)
        monitor = GuardMonitor(guard or Guard())
        monitor.set_first_loss(self._seen((0.0, 0.0), 0, draw, 2), 2 * self.noise)
        state = kept = (0.0, 0.0)
        scales: list[float] = []
        scale, rollbacks, accepted, seen = 1.0, 0, 0, math.nan
        for cycle in range(cycles):
            rates = [scale * self.rate(place / cycles) for place in range(cycle, cycles)]
            state, scales = self._trained(state, rates[0]), [*scales, scale]
            seen = self._seen(state, cycle, draw)
            if monitor.check_cycle(seen, self.noise, lr=rates[0]) is None:
                scale *= monitor.scale_correction
                accepted += monitor.sees_new_data
                kept = state if monitor.is_best else kept
                continue
            rollbacks, state = rollbacks + 1, kept
            if monitor.is_out_of_retries:
                return Told(rollbacks, min(scales), scale, seen, len(scales), accepted, True)
            scale *= monitor.scale_factor(rates[0], max(rates))
        num_low = sum(each < 1 - 1e-9 for each in scales)
        return Told(rollbacks, min(scales), scale, seen, num_low, accepted, False)

    def _trained(self, state: tuple[float, float], lr: float) -> tuple[float, float]:
        """The progress and the excess after a cycle."""
        progress, excess = state
        if excess >= 1 and self.chance is not None:
            return progress, excess
        if lr > self.edge:
            return progress, max(excess, 0.02) * (1 + lr / self.edge) ** self.growth
        return progress + min(lr / min(self.edge, 1.0), 1.0), excess / 2

    def _seen(
        self, state: tuple[float, float], cycle: int, draw: random.Random, times: float = 1.0
    ) -> float:
        progress, excess = state
        loss = self.loss(progress, cycle) + excess
        if self.chance is not None and excess >= 1:
            loss = self.chance
        noise = draw.gauss(0, 1)
        if self.heavy:
            noise /= math.sqrt(draw.gammavariate(2, 0.5))
        return loss + times * self.noise * noise


def falling(progress: float, _: int = 0) -> float:
    return 0.3 + 2.0 / (1 + 0.3 * progress)


def warm_up(at: float) -> float:
    """One cycle: it rises over 30 % of the run."""
    return max(at / 0.3, 0.04) if at < 0.3 else (1 + math.cos(math.pi * (at - 0.3) / 0.7)) / 2


def _steps(_: float, cycle: int) -> float:
    lesson, since = divmod(cycle, 12)
    return 1.0 + 0.5 * lesson + 1.5 / (1 + since)


BY_DESIGN = {
    "falling": Stream(falling),
    "falling, one cycle": Stream(falling, rate=warm_up),
    "plateau": Stream(lambda *_: 2.3),
    "heavy noise": Stream(falling, noise=0.3, heavy=True),
    "gan": Stream(lambda p, _: 0.7 + 0.4 * math.sin(2 * math.pi * p / 9) / (1 + 2 / (p + 0.1))),
    "gan in time": Stream(lambda _, t: 0.7 + 0.4 * math.sin(2 * math.pi * t / 9) * min(t / 6, 1)),
    "gan, one cycle": Stream(
        lambda p, _: 0.7 + 0.4 * math.sin(2 * math.pi * p / 9) / (1 + 2 / (p + 0.1)), rate=warm_up
    ),
    "ppo": Stream(lambda p, _: 0.3 + max(0.7 - 0.1 * p, 0) + 0.15 * max(p - 8, 0), noise=0.05),
    "ppo from the start": Stream(lambda p, _: 0.1 + 0.15 * p, noise=0.03),
    "ppo that explodes": Stream(lambda p, _: 0.3 + 0.01 * math.exp(min(p / 4, 12)), noise=0.05),
    "queue": Stream(lambda p, _: 2 + 2 * min(p / 15, 1) - 0.02 * max(p - 15, 0)),
    "queue in time": Stream(lambda p, t: 2 + 2 * min(t / 15, 1) - 0.02 * p),
    "curriculum": Stream(_steps),
    "drift": Stream(lambda p, _: 1 + 0.03 * p),
    "drift in time": Stream(lambda _, t: 1 + 0.03 * t),
    "falls, then drifts in time": Stream(lambda p, t: falling(p) + 0.05 * max(t - 20, 0)),
}
"""Runs whose learning rate is good, whatever their losses do."""

FAILURES = {
    "diverges at once": Stream(falling, edge=1 / 30, growth=3.0),
    "diverges at once, far": Stream(falling, edge=1e-3, growth=2.0),
    "rises through a warm-up": Stream(falling, edge=0.4, rate=warm_up),
    "rises slowly through a warm-up": Stream(falling, edge=0.3, rate=warm_up, growth=0.3),
    "plateau, then a rise": Stream(
        lambda p, _: 2.3 if p < 5 else falling(p - 5), edge=0.3, rate=warm_up
    ),
    "fine-tuning at nine times": Stream(lambda p, _: 1.05 - 0.004 * p, edge=1 / 9, growth=0.4),
    "fine-tuning at a hundred times": Stream(
        lambda p, _: 1.05 - 0.004 * p, edge=1 / 100, growth=0.15
    ),
    "fine-tuning that forgets slowly": Stream(
        lambda p, _: 1.05 - 0.004 * p, edge=1 / 100, growth=0.05
    ),
    "rises slowly at a constant rate": Stream(falling, edge=1 / 30, growth=0.15),
    "collapses to chance": Stream(falling, edge=0.5, rate=warm_up, chance=2.3),
    "collapses early": Stream(falling, edge=0.05, rate=warm_up, chance=2.3),
}
"""Runs whose learning rate is too high."""
