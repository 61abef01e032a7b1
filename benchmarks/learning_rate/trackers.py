"""Does it pay to move the learning rate during a run? Judges and placebos. -> trackers.json

    python -m benchmarks.learning_rate.trackers [--quick] [--only "ranking"] [--data FOLDER]
        [--out FILE]

Without a scout, from a quarter of the best learning rate of the grid, from itself and from four
times it. In every cycle of the rising and high part of the schedule the replicas form arms, which
share gradients inside only: a high one and a low one (or eight, for one learning rate per group).
Then all train together for as long. What a judge makes of the arms moves the learning rate:

- central: the loss on both sides of the running average of all weights, along what the high arm
  has that the low one has not: not greedy.
- live: the loss of the arms themselves: greedy.
- flipped, random, up: the central judge's opposite, a coin, and always up: placebos.
- frozen: arms, but nothing moves: what the arms cost.
- tracker: `hdet.Tracker` over a spread with shared gradients, as the library has it; for all groups
  together, for each, and for each against the others.

Regret is against runs at the best learning rate with the same seeds.
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.learning_rate.methods.bench import SYNC_EVERY, Bench, Ended, N, Run, split
from benchmarks.learning_rate.methods.populations import Population
from benchmarks.learning_rate.methods.rows import Average as Mean
from benchmarks.learning_rate.methods.rows import both
from benchmarks.learning_rate.methods.schedules import shape
from benchmarks.learning_rate.methods.single import plain
from benchmarks.learning_rate.methods.steered import ByGroup, Tracked
from benchmarks.learning_rate.names import TASK_WORDS
from benchmarks.learning_rate.regret import best_of_grid, by
from benchmarks.result_file import RESULTS, write_result
from benchmarks.zoo.entries import ENTRIES

STARTS, SEEDS = (0.25, 1.0, 4.0), (5, 6)
FIRST, LAST = 0.1, 0.6
"""The share of the run in which arms are compared."""
APART = 0.35
"""How far each arm is from the middle, in logarithms: two are a factor of two apart."""
REACH, LONGER, SHORTER, BOUNDS = math.log(2), 1.2, 0.6, (0.05, math.log(4))
"""Of a move: the first, how it grows and shrinks, and within what."""
FADE = 0.5
WINDOW = 8
"""The running average reaches over about 1 / WINDOW of the run so far."""

Judge = Callable[["Arms", Tensor], Tensor]
"""Arms that have just ended a cycle, what each has over the others [runs, knobs, P] -> evidence
for more, in standard errors, [runs, knobs]."""


def central(arms: "Arms", apart: Tensor) -> Tensor:
    sides = torch.cat([arms.average[:, None] - apart / 2, arms.average[:, None] + apart / 2], 1)
    found = arms.scores(sides.flatten(0, 1)).view(len(arms.runs), 2, arms.knobs, -1)
    return in_errors(found[:, 0] - found[:, 1])


def live(arms: "Arms", apart: Tensor) -> Tensor:
    rows = arms.scores(arms.fleet.weights).view(len(arms.runs), arms.num, -1)
    better = -torch.einsum("aj,raq->rjq", arms.levels.to(rows), rows) * 2 / arms.num
    return in_errors(better)


def flipped(arms: "Arms", apart: Tensor) -> Tensor:
    return -central(arms, apart)


def walk(arms: "Arms", apart: Tensor) -> Tensor:
    coins = torch.rand(len(arms.runs), arms.knobs, generator=arms.draw, dtype=torch.float64)
    return torch.where(coins < 0.5, -10.0, 10.0)


def up(arms: "Arms", apart: Tensor) -> Tensor:
    return torch.full((len(arms.runs), arms.knobs), 10.0, dtype=torch.float64)


def still(arms: "Arms", apart: Tensor) -> Tensor:
    return torch.zeros(len(arms.runs), arms.knobs, dtype=torch.float64)


def in_errors(gains: Tensor) -> Tensor:
    """The mean over batches of a probe, in units of its standard error."""
    error = gains.std(-1) / math.sqrt(gains.shape[-1])
    return (gains.mean(-1) / error.clamp(min=1e-300)).nan_to_num(0.0).double().cpu()


def hadamard(order: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


class Arms:
    """Some runs, each of two arms, or of eight for one learning rate per group."""

    def __init__(self, bench: Bench, runs: Sequence[Run], judge: Judge, by_group: bool) -> None:
        self.bench, self.runs, self._judge = bench, runs, judge
        self.knobs = len(bench.task.groups) if by_group else 1
        self.num = 2 if self.knobs == 1 else N
        self.levels = hadamard(self.num)[:, 1 : self.knobs + 1]
        self.fleet = bench.fleet([run.seed for run in runs for _ in range(self.num)])
        self.rule = bench.rule(self.fleet)
        self.draw = torch.Generator().manual_seed(runs[0].seed)
        self.average = self.fleet.weights[:: self.num].clone()
        self.centre = torch.zeros(len(runs), self.knobs, dtype=torch.float64)
        self._pull, self._mass = torch.zeros_like(self.centre), 0.0
        self._reach = torch.full_like(self.centre, REACH)

    def scores(self, weights: Tensor) -> Tensor:
        """Of the probe, a row each; with the buffers of the first arm."""
        found = []
        kept = self.fleet.buffers
        per_run = len(weights) // len(self.runs)
        for place in range(per_run):
            self.fleet.buffers = {n: b[:: self.num] for n, b in kept.items()}
            rows = weights[place::per_run]
            found.append(self.fleet.evaluate(self.bench.task.probe, weights=rows, training=True))
        self.fleet.buffers = kept
        return torch.stack(found, 1).flatten(0, 1).double()

    def train(self) -> list[Ended]:
        bench, steps = self.bench, self.bench.plan.steps
        wave = shape("one cycle", steps, self.rule.cycles_momentum)
        batch = bench.task.batches([run.seed for run in self.runs])
        start = torch.tensor([run.lr for run in self.runs], dtype=torch.float64)[:, None]
        zeros = torch.zeros(len(self.runs), dtype=torch.long, device=self.fleet.device)
        mean, sails = Mean(self.fleet, steps), torch.ones(len(self.fleet), device=zeros.device)
        windows = torch.zeros_like(self.fleet.weights)
        highest = start[:, 0].clone()
        for now in range(steps):
            apart = self._is_apart(now)
            self.fleet.losses(*split(batch(zeros + now), self.num))
            if not apart:
                self._share(self.fleet.gradients)
            lrs = start * self.centre.exp() * wave.lrs[now]
            highest = torch.maximum(highest, lrs.amax(1))
            self.rule.step(
                self._rates(lrs, apart),
                torch.full((len(self.fleet), 1), wave.momenta[now]).to(windows),
            )
            mean.add(sails)
            if apart:
                windows += self.fleet.weights / SYNC_EVERY
                if (now + 1) % SYNC_EVERY == 0:
                    self._meet(now + 1, windows)
                    windows.zero_()
            else:
                by = min(1.0, (WINDOW + 1) / (now + 1 + WINDOW))
                self.average.lerp_(self.fleet.weights[:: self.num], by)
        pairs = both(bench, self.fleet, self.fleet.weights, mean)[:: self.num]
        notes = [{"moved": row.exp().tolist()} for row in self.centre]
        return [
            Ended(*pair, lr=float(lr), notes=note)
            for pair, lr, note in zip(pairs, highest, notes, strict=True)
        ]

    def _is_apart(self, now: int) -> bool:
        steps = self.bench.plan.steps
        cycle = now // SYNC_EVERY
        ends = (cycle + 1) * SYNC_EVERY
        return FIRST * steps <= cycle * SYNC_EVERY and ends <= LAST * steps and cycle % 2 == 0

    def _rates(self, lrs: Tensor, apart: bool) -> Tensor:
        """[rows, groups]"""
        groups = len(self.bench.task.groups)
        factors = (
            (APART * self.levels).exp() / math.cosh(APART)
            if apart
            else torch.ones_like(self.levels)
        )
        rates = lrs[:, None, :] * factors[None]
        rates = rates.expand(-1, -1, groups) if self.knobs == 1 else rates
        return rates.reshape(-1, groups).to(self.fleet.weights)

    def _share(self, tensor: Tensor) -> None:
        rows = tensor.view(len(self.runs), self.num, *tensor.shape[1:])
        rows.copy_(rows.mean(1, keepdim=True).expand_as(rows).clone())

    def _meet(self, now: int, windows: Tensor) -> None:
        rows = windows.view(len(self.runs), self.num, -1)
        by = min(1.0, SYNC_EVERY * (WINDOW + 1) / (now + 1 + WINDOW))
        self.average.lerp_(rows.mean(1), by)
        apart = torch.einsum("aj,rap->rjp", self.levels.to(rows), rows) * 2 / self.num
        self._move(self._judge(self, apart))
        for tensor in (self.fleet.weights, *self.rule.states()):
            self._share(tensor)
        for buffer in self.fleet.buffers.values():
            if buffer.is_floating_point():
                self._share(buffer)

    def _move(self, sure: Tensor) -> None:
        if not sure.any():
            return
        before = self._pull
        self._pull = FADE * self._pull + sure.clamp(-10, 10)
        self._mass = FADE**2 * self._mass + 1
        again = self._pull * before
        factor = torch.where(again > 0, LONGER, torch.where(again < 0, SHORTER, 1.0))
        self._reach = (self._reach * factor).clamp(*BOUNDS)
        self.centre += self._reach * (self._pull / math.sqrt(self._mass) / 2).tanh()


class TrackedGroups(Tracked):
    shared = False


class Contender(NamedTuple):
    train: Callable[[Bench, Sequence[Run]], list[Ended]]
    needs_groups: bool = False


def of_arms(judge: Judge, *, by_group: bool = False) -> Contender:
    return Contender(lambda bench, runs: Arms(bench, runs, judge, by_group).train(), by_group)


def population(kind: type[Population], *, by_group: bool = False) -> Contender:
    return Contender(lambda bench, runs: kind(bench, runs).train(), by_group)


CONTENDERS: dict[str, Contender] = {
    "plain": Contender(plain),
    "central": of_arms(central),
    "live": of_arms(live),
    "flipped": of_arms(flipped),
    "random": of_arms(walk),
    "up": of_arms(up),
    "frozen": of_arms(still),
    "tracker": population(Tracked),
    "central, by group": of_arms(central, by_group=True),
    "tracker, by group": population(TrackedGroups, by_group=True),
    "tracker, groups against each other": population(ByGroup, by_group=True),
}


def measured(
    bench: Bench, best: float, seeds: Sequence[int], starts: Sequence[float]
) -> dict[str, Any]:
    reference = {
        seed: float(end.live["loss"] or math.nan)
        for seed, end in zip(seeds, plain(bench, [Run(best, seed) for seed in seeds]), strict=True)
    }
    found: dict[str, Any] = {}
    for name, contender in CONTENDERS.items():
        if contender.needs_groups and len(bench.task.groups) == 1:
            continue
        runs = [Run(best * start, seed) for start in starts for seed in seeds]
        ended = contender.train(bench, runs)
        regrets = [
            100 * ((end.live["loss"] or math.inf) / reference[run.seed] - 1)
            for run, end in zip(runs, ended, strict=True)
        ]
        num = len(seeds)
        found[name] = {
            f"x{start:g}": regrets[at * num : (at + 1) * num] for at, start in enumerate(starts)
        }
        found[name]["moved"] = [end.notes.get("moved") for end in ended]
        results = "  ".join(f"x{s:g} {fmean(found[name][f'x{s:g}']):7.2f}" for s in starts)
        print(
            f"{name:20} {results}  {[end.notes.get('moved') for end in ended][::num]}", flush=True
        )
    return found


def headline(tasks: Mapping[str, Any]) -> dict[str, float]:
    """What every contender makes of the best learning rate: its mean regret, in percent."""
    short = {"tracker, groups against each other": "groups"}
    return {
        f"{TASK_WORDS[task]}_{short.get(name, name)}_from_best_pct": fmean(
            math.inf if regret is None else regret for regret in own["x1"]
        )
        for task, table in tasks.items()
        for name, own in table.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models, two CPU cores")
    parser.add_argument("--only", default="language;ranking")
    parser.add_argument("--data", type=Path, default=os.environ.get("HDET_DATA"))
    parser.add_argument("--grid", type=Path, default=RESULTS / "settle.json")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs = by(json.loads(options.grid.read_text())["runs"], lambda run: run["job"]["task"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    found = {}
    for name, entry in ENTRIES.items():
        if not name.startswith(tuple(options.only.split(";"))):
            continue
        print(name, flush=True)
        plan = entry.quick if options.quick else entry.full
        task = entry.make(plan, options.data and Path(options.data), device)
        bench = Bench(task, plan, entry.half and device.type == "cuda", device.type == "cuda")
        found[name] = measured(bench, best_of_grid(runs[name]), SEEDS, STARTS)
        out = options.out or RESULTS / ("trackers.quick.json" if options.quick else "trackers.json")
        settings = {"starts": STARTS, "first": FIRST, "last": LAST, "apart": APART}
        write_result(out, headline=headline(found), settings=settings, seeds=SEEDS, tasks=found)


if __name__ == "__main__":
    main()
