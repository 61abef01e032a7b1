"""Trains plain runs, keeps where their tails begin, and trains the tails: all seeds at once.

A tail takes the last part of a run. Its members share the samples of the plain run, an eighth for
each, so that all recipes and controls see the same data as often.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.learning_rate.fleet import Fleet
from benchmarks.learning_rate.methods.bench import DECAY, Bench, split
from benchmarks.learning_rate.methods.rows import measured
from benchmarks.learning_rate.methods.schedules import Shape, shape
from benchmarks.learning_rate.rules import Rule
from benchmarks.replication.tail_tasks import Regularise

MEMBERS = 8
SHARE = 0.125
"""Of the steps: the tail of all recipes but the quadratic rule."""
QUARTER = 0.25
"""Of the peak: the quadratic rule begins where the learning rate falls below it."""
FIRST_INTERVAL = 4
"""Steps between two averages where the quadratic rule begins."""
SMOOTHING, DROPPED, DECADES = 0.1, 0.2, 1.0
"""The most that a member of the regularised tail smooths and drops, and how its decay differs."""
NUM_REFRESHED = 45
"""Batches that make the running statistics of BatchNorm anew for averaged weights."""
SHARPNESS, DIRECTIONS = 0.02, 4
"""The length of a random step relative to the weights, and the number of steps."""


@dataclass(frozen=True)
class Recipe:
    """What the members of a tail do."""

    lr: float = 1.0
    """Times the learning rate of the plain run: its batch is eight times as large."""
    spread: float = 0.0
    """Half of the width of the members' learning rates."""
    own_shapes: bool = False
    """Whether members anneal along curves of their own."""
    quadratic_rule: bool = False
    """Whether they average at intervals that grow with the inverse square of the learning rate."""
    pull_every: int = 0
    """Steps after which members are pulled half-way to their mean; 0 is never."""
    push: bool = False
    """Whether each pull keeps the members as far apart as the first one found them."""
    regularised: bool = False
    """Whether smoothing, dropped inputs and weight decay differ."""
    share: float = SHARE
    """Of the steps, at the end of the run; the quadratic rule begins by the learning rate."""
    reach: float = 0.0
    """Of a running mean of each member, one of `REACHES`; 0 takes the last weights."""


RECIPES = {
    "soup": Recipe(),
    "soup, last quarter": Recipe(share=0.25),
    "R1 quadratic rule": Recipe(quadratic_rule=True),
    "R1 quadratic rule, spread": Recipe(quadratic_rule=True, spread=0.5),
    "R1 quadratic rule, EMA 15 %": Recipe(quadratic_rule=True, reach=0.15),
    "R2 divergent cool-down": Recipe(spread=0.5, own_shapes=True),
    "R3 divergent regularisers": Recipe(regularised=True, pull_every=10),
    "R4 push and pull": Recipe(share=0.25, pull_every=10, push=True),
}
REACHES = {"EMA 1 %": 0.01, "EMA 5 %": 0.05, "EMA 15 %": 0.15}
"""Running means of a plain run, and their reach as a share of the steps."""


class Snapshot:
    """Weights, their running means, buffers and optimizer states of all rows at one step."""

    def __init__(self, fleet: Fleet, rule: Rule, means: Mapping[float, "RunningMean"]) -> None:
        self.weights = fleet.weights.clone()
        self.means = {reach: mean.weights.clone() for reach, mean in means.items()}
        self.buffers = {name: buffer.clone() for name, buffer in fleet.buffers.items()}
        self.states = [state.clone() for state in rule.states()]

    def write(self, fleet: Fleet, rule: Rule, times: int) -> None:
        """Give every row to as many rows that lie side by side."""
        fleet.weights.copy_(self.weights.repeat_interleave(times, 0))
        for name, buffer in self.buffers.items():
            fleet.buffers[name] = buffer.repeat_interleave(times, 0)
        for mine, saved in zip(rule.states(), self.states, strict=True):
            mine.copy_(saved.repeat_interleave(times, 0))


class RunningMean:
    """An exponential mean of weights, with a reach in steps."""

    def __init__(self, fleet: Fleet, reach: float, start: Tensor | None = None) -> None:
        self._fleet, self._by = fleet, 1 / max(reach, 1.0)
        self.weights = fleet.weights.clone() if start is None else start

    def add(self) -> None:
        self.weights.lerp_(self._fleet.weights, self._by)


class Trunk:
    """Plain runs with OneCycleLR, one for each seed, and where their tails begin."""

    def __init__(self, bench: Bench, seeds: Sequence[int], lr: float) -> None:
        self.bench, self.seeds, self.lr = bench, seeds, lr
        self.fleet = bench.fleet(seeds)
        self._rule = bench.rule(self.fleet)
        self.shape: Shape = shape("one cycle", bench.plan.steps, self._rule.cycles_momentum)
        self._batch = bench.task.batches(seeds)
        self.snapshots: dict[int, Snapshot] = {}
        self._first_buffers = {name: buffer.clone() for name, buffer in self.fleet.buffers.items()}
        self._means = {
            reach: RunningMean(self.fleet, reach * bench.plan.steps) for reach in REACHES.values()
        }
        self._train()

    @property
    def means(self) -> dict[str, Tensor]:
        """The running means of the weights by name."""
        return {name: self._means[reach].weights for name, reach in REACHES.items()}

    def begin_of(self, recipe: Recipe) -> int:
        """The step at which a tail begins."""
        steps, lrs = self.bench.plan.steps, self.shape.lrs
        if not recipe.quadratic_rule:
            return round((1 - recipe.share) * steps)
        peak = max(range(steps), key=lrs.__getitem__)
        return next(step for step in range(peak, steps) if lrs[step] < QUARTER * lrs[peak])

    def batch(self, step: int) -> list[Tensor]:
        """The samples of every row at a step."""
        return list(self._batch(torch.full((len(self.seeds),), step, device=self.fleet.device)))

    def _train(self) -> None:
        steps = self.bench.plan.steps
        begins = {self.begin_of(recipe) for recipe in RECIPES.values()}
        for step in range(steps):
            if step in begins:
                self.snapshots[step] = Snapshot(self.fleet, self._rule, self._means)
            self.fleet.losses(*self.batch(step))
            lr = self.fleet.weights.new_full((len(self.seeds), 1), self.lr * self.shape.lrs[step])
            self._rule.step(
                lr.expand(-1, len(self.bench.task.groups)),
                torch.full_like(lr, self.shape.momenta[step]),
            )
            for mean in self._means.values():
                mean.add()

    def refreshed(self, weights: Tensor) -> dict[str, Tensor]:
        """Buffers that belong to weights, made from training batches."""
        fleet = self.fleet
        if fleet.buffers:
            kept = fleet.weights.clone()
            fleet.weights.copy_(weights)
            for name, first in self._first_buffers.items():
                fleet.buffers[name].copy_(first)
            for step in range(min(NUM_REFRESHED, self.bench.plan.steps)):
                fleet.losses(*self.batch(step))
            fleet.weights.copy_(kept)
        return fleet.buffers

    def measures(self, weights: Tensor) -> list[dict[str, float]]:
        """What weights are worth on data that nothing else sees, for every seed."""
        self.fleet.buffers = self.refreshed(weights)
        return measured(self.bench, self.fleet, weights)

    def losses(self, weights: Tensor) -> list[float]:
        return [one["loss"] for one in self.measures(weights)]

    def scores(self, weights: Tensor) -> list[float]:
        """The loss on the held-out data of the probe, for every seed."""
        self.fleet.buffers = self.refreshed(weights)
        found = self.fleet.evaluate(self.bench.task.probe, weights=weights)
        return found.flatten(1).mean(1).tolist()

    def sharpness(self, weights: Tensor) -> list[float]:
        """By how much a random step of a fixed relative length raises the loss, for every seed."""
        calm = torch.tensor(self.losses(weights))
        draw = torch.Generator().manual_seed(0)
        risen = torch.zeros_like(calm)
        for _ in range(DIRECTIONS):
            way = torch.randn(weights.shape, generator=draw).to(weights)
            way *= SHARPNESS * weights.norm(dim=1, keepdim=True) / way.norm(dim=1, keepdim=True)
            risen += torch.tensor(self.losses(weights + way)) - calm
        return (risen / DIRECTIONS).tolist()


class Tail:
    """The members of all seeds, from where their runs begin the tail to its end."""

    def __init__(self, trunk: Trunk, recipe: Recipe, regularise: Regularise) -> None:
        self.trunk, self._recipe, self._regularise = trunk, recipe, regularise
        bench, self._begin = trunk.bench, trunk.begin_of(recipe)
        num = len(trunk.seeds)
        self._fleet = bench.fleet([seed for seed in trunk.seeds for _ in range(MEMBERS)])
        self._rule = bench.rule(self._fleet)
        trunk.snapshots[self._begin].write(self._fleet, self._rule, MEMBERS)
        weights, self._mean = self._fleet.weights, None
        if recipe.reach:
            start = trunk.snapshots[self._begin].means[recipe.reach].repeat_interleave(MEMBERS, 0)
            self._mean = RunningMean(self._fleet, recipe.reach * bench.plan.steps, start)
        places = torch.arange(MEMBERS).to(weights) / (MEMBERS - 1)
        turns = torch.randperm(MEMBERS, generator=torch.Generator().manual_seed(1))
        self._multipliers = (1 + recipe.spread * (2 * places - 1)).repeat(num)[:, None]
        powers = torch.tensor([(0.5, 1.0, 2.0)[r % 3] for r in range(MEMBERS)])
        self._powers = powers.to(weights).repeat(num)
        self._smoothing = (SMOOTHING * places).repeat(num)
        self._dropped = (DROPPED * places[turns]).repeat(num)
        self._decay = 10 ** (DECADES * (2 * places[turns.flip(0)] - 1)).repeat(num)[:, None]
        self._distance: Tensor | None = None
        self._since = 0

    def train(self) -> Tensor:
        """Train to the end; return the weights, [seeds, members, ...]."""
        torch.manual_seed(0)  # of what is dropped
        if self._recipe.regularised:
            self._rule.decay = 0.0
        for step in range(self._begin, self.trunk.bench.plan.steps):
            self._step(step)
        return self._of_seeds(self._mean.weights if self._mean else self._fleet.weights.clone())

    @property
    def members(self) -> Tensor:
        return self._of_seeds(self._fleet.weights)

    def _of_seeds(self, rows: Tensor) -> Tensor:
        return rows.view(len(self.trunk.seeds), MEMBERS, -1)

    def _step(self, step: int) -> None:
        batch = split(self.trunk.batch(step), MEMBERS)
        if self._recipe.regularised:
            batch = self._regularise(batch, self._smoothing, self._dropped)
        self._fleet.losses(*batch)
        lrs = self._lrs(step)
        if self._recipe.regularised:
            self._decay_weights(lrs)
        groups = len(self.trunk.bench.task.groups)
        momenta = torch.full_like(lrs, self.trunk.shape.momenta[step])
        self._rule.step(lrs.expand(-1, groups), momenta)
        self._since += 1
        self._average_or_pull(step)
        if self._mean is not None:
            self._mean.add()

    def _lrs(self, step: int) -> Tensor:
        trunk, recipe = self.trunk, self._recipe
        if not recipe.own_shapes:
            return trunk.lr * recipe.lr * trunk.shape.lrs[step] * self._multipliers
        left = (trunk.bench.plan.steps - step) / (trunk.bench.plan.steps - self._begin)
        first = trunk.lr * recipe.lr * trunk.shape.lrs[self._begin]
        return first * self._multipliers * left ** self._powers[:, None]

    def _decay_weights(self, lrs: Tensor) -> None:
        kind = self.trunk.bench.plan.optimizer
        decay = self._decay * DECAY[kind]
        if kind == "SGD":
            self._fleet.gradients.add_(self._fleet.weights * decay)
        else:
            self._fleet.weights.mul_(1 - lrs * decay)

    def _average_or_pull(self, step: int) -> None:
        """Average or pull, where the recipe says so."""
        recipe = self._recipe
        if recipe.quadratic_rule and self._since >= self._interval(step):
            self.members.copy_(self.members.mean(1, keepdim=True).expand_as(self.members))
            self._since = 0
        if recipe.pull_every and self._since >= recipe.pull_every:
            self._pull()
            self._since = 0

    def _interval(self, step: int) -> float:
        """Of the quadratic synchronization rule, arXiv 2310.14423."""
        share = self.trunk.shape.lrs[step] / max(self.trunk.shape.lrs)
        return max(FIRST_INTERVAL, math.floor(FIRST_INTERVAL * (QUARTER / share) ** 2))

    def _pull(self) -> None:
        """Half-way to the mean; with a push, back to a fixed distance (as arXiv 2507.20424)."""
        mean = self.members.mean(1, keepdim=True)
        away = self.members - mean
        far = away.norm(dim=2, keepdim=True)
        if self._distance is None:
            self._distance = far.mean(1, keepdim=True)
        moved = away / 2
        if self._recipe.push:
            moved = moved + away / far.clamp(min=1e-12) * self._distance / 2
        self.members.copy_(mean + moved)


def greedy_soup(trunk: Trunk, members: Tensor) -> Tensor:
    """For every seed: from the best member on, add those that raise no loss of the probe."""
    num, size = members.shape[:2]
    scores = torch.tensor([trunk.scores(members[:, r]) for r in range(size)]).to(members)
    order, rows = scores.argsort(0), torch.arange(num)
    best = scores.amin(0)
    total, count = members[rows, order[0]].clone(), members.new_ones(num, 1)
    for place in range(1, size):
        tried = (total + members[rows, order[place]]) / (count + 1)
        found = torch.tensor(trunk.scores(tried)).to(members)
        taken = found <= best
        best = torch.where(taken, found, best)
        total += taken[:, None] * members[rows, order[place]]
        count += taken[:, None]
    return total / count


def best_member(trunk: Trunk, members: Tensor) -> Tensor:
    """For every seed, the member with the lowest loss of the probe."""
    scores = torch.tensor([trunk.scores(members[:, r]) for r in range(members.shape[1])])
    return members[torch.arange(len(members)), scores.argmin(0)]


# Whole runs that no tail begins in -----------------------------------------------------------


class Primal:
    """Gradients at a mean of the fast and the averaged weights, as generalised primal averaging.

    One worker, arXiv 2512.17131: y = m_y x + (1 - m_y) z, the optimizer moves z by the gradient at
    y, and x = m_x x + (1 - m_x) z is evaluated. The reach of x, 1 / (1 - m_x), is a share of the
    steps: these runs are far shorter than those of the paper.
    """

    def __init__(self, fleet: Fleet, rule: Rule, reach: float, mixed: float = 0.9) -> None:
        self._fleet, self._rule, self._mixed = fleet, rule, mixed
        self._slow = 1 - 1 / max(reach, 1.0)
        self.average, self._fast = fleet.weights.clone(), fleet.weights.clone()

    def step(self, lrs: Tensor, momenta: Tensor) -> None:
        weights = self._fleet.weights
        weights.copy_(self._fast)
        self._rule.step(lrs, momenta)
        self._fast.copy_(weights)
        self.average.lerp_(self._fast, 1 - self._slow)
        weights.copy_(torch.lerp(self._fast, self.average, self._mixed))


class Anytime:
    """A running mean over about the last ninth of the steps so far, which needs no length."""

    def __init__(self, fleet: Fleet, rule: Rule) -> None:
        self._fleet, self._rule, self._done = fleet, rule, 0
        self.average = fleet.weights.clone()

    def step(self, lrs: Tensor, momenta: Tensor) -> None:
        self._rule.step(lrs, momenta)
        self._done += 1
        self.average.lerp_(self._fleet.weights, min(9 / (8 + self._done), 1.0))


class Plain:
    """The weights as they are."""

    def __init__(self, fleet: Fleet, rule: Rule) -> None:
        self.average, self._rule = fleet.weights, rule

    def step(self, lrs: Tensor, momenta: Tensor) -> None:
        self._rule.step(lrs, momenta)


WHOLE: dict[str, tuple[Callable[[Fleet, Rule, int], Any], str]] = {
    "plain": (lambda fleet, rule, steps: Plain(fleet, rule), "one cycle"),
    "GPA, 1 %": (lambda fleet, rule, steps: Primal(fleet, rule, 0.01 * steps), "one cycle"),
    "GPA, 5 %": (lambda fleet, rule, steps: Primal(fleet, rule, 0.05 * steps), "one cycle"),
    "R5 anytime average": (lambda fleet, rule, steps: Anytime(fleet, rule), "warm-up"),
}
"""How a whole run is trained, (fleet, rule, steps) -> what moves the weights, and its schedule."""


def whole(bench: Bench, name: str, lrs: Sequence[float], seeds: Sequence[int]) -> list[Any]:
    """Train rows from nothing, each with its own learning rate and seed; return their measures."""
    make, wave = WHOLE[name]
    fleet = bench.fleet(seeds)
    rule = bench.rule(fleet)
    mover = make(fleet, rule, bench.plan.steps)
    course = shape(wave, bench.plan.steps, rule.cycles_momentum)
    batch = bench.task.batches(seeds)
    rows = torch.zeros(len(seeds), dtype=torch.long, device=fleet.device)
    peaks = torch.tensor(lrs).to(fleet.weights)[:, None].expand(-1, len(bench.task.groups))
    for step in range(bench.plan.steps):
        fleet.losses(*batch(rows + step))
        momenta = fleet.weights.new_full((len(seeds), 1), course.momenta[step])
        mover.step(peaks * course.lrs[step], momenta)
    fleet.weights.copy_(mover.average)
    for step in range(min(NUM_REFRESHED, bench.plan.steps) if fleet.buffers else 0):
        fleet.losses(*batch(rows + step))
    return measured(bench, fleet, fleet.weights)
