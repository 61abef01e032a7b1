"""Update rules for many runs at once: every row has its own learning rates and its own scale.

Torch's own (AdamW, SGD) and those of the peers that need no learning rate, each as its paper and
its package state it. `tests/benchmarks/test_rules.py` compares them with the packages, step by
step.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.learning_rate.fleet import Fleet


class Rule:
    """Moves the weights of a fleet along its gradients."""

    cycles_momentum = False
    """Whether OneCycleLR moves its momentum, too."""

    def __init__(self, fleet: Fleet, decay: float) -> None:
        self.fleet, self.decay = fleet, decay
        self.count = torch.zeros(len(fleet), 1, dtype=fleet.weights.dtype, device=fleet.device)

    def step(self, lrs: Tensor, momenta: Tensor) -> None:
        """With the learning rates of every row, [R, groups], and its momentum, [R, 1]."""
        raise NotImplementedError

    def states(self) -> list[Tensor]:
        """All that belongs to a row, beside its weights; [R, ...] each."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def answer(self) -> Tensor:
        """The weights that the rule's authors would evaluate."""
        return self.fleet.weights

    def _zeros(self) -> Tensor:
        return torch.zeros_like(self.fleet.weights)

    def _per_row(self, value: float) -> Tensor:
        return torch.full_like(self.count, value)

    def _groups(self, lrs: Tensor) -> Sequence[tuple[slice, Tensor]]:
        return [(part, lrs[:, [g]]) for g, part in enumerate(self.fleet.layout.groups)]


class AdamW(Rule):
    cycles_momentum = True

    def __init__(self, fleet: Fleet, decay: float = 0.01) -> None:
        super().__init__(fleet, decay)
        self.first, self.second = self._zeros(), self._zeros()

    def step(self, lrs: Tensor, momenta: Tensor) -> None:
        weights, gradients = self.fleet.weights, self.fleet.gradients
        self.count += 1
        self.first.lerp_(gradients, 1 - momenta)
        self.second.mul_(0.999).addcmul_(gradients, gradients, value=1 - 0.999)
        size = -1 / (1 - momenta**self.count)
        below = self.second.sqrt().div_((1 - 0.999**self.count).sqrt()).add_(1e-8)
        for part, lr in self._groups(lrs):
            weights[:, part].mul_(1 - lr * self.decay)
            weights[:, part].addcdiv_(self.first[:, part] * (lr * size), below[:, part])


class SGD(Rule):
    cycles_momentum = True

    def __init__(self, fleet: Fleet, decay: float = 0.0) -> None:
        super().__init__(fleet, decay)
        self.velocity = self._zeros()

    def step(self, lrs: Tensor, momenta: Tensor) -> None:
        weights = self.fleet.weights
        self.velocity.mul_(momenta).add_(self.fleet.gradients)
        if self.decay:
            self.velocity.add_(weights, alpha=self.decay)
        for part, lr in self._groups(lrs):
            weights[:, part].sub_(self.velocity[:, part] * lr)


class Prodigy(Rule):
    """Mishchenko and Defazio, 2306.06101; `lrs` is the schedule around 1."""

    safeguard = False
    """For a schedule with a warm-up: its small learning rates do not count in the estimate."""
    clip: float | None = None
    """The largest norm of a gradient. With clipping comes Adam's correction of its first steps."""

    def __init__(self, fleet: Fleet, decay: float = 0.01, d0: float = 1e-6) -> None:
        super().__init__(fleet, decay)
        self.first, self.second, self.sum = self._zeros(), self._zeros(), self._zeros()
        self.begin = fleet.weights.clone()
        self.d, self.most = self._per_row(d0), self._per_row(d0)
        self.above = self._per_row(0.0)
        self._d0 = d0

    def step(self, lrs: Tensor, momenta: Tensor) -> None:
        weights, gradients, d = self.fleet.weights, self.fleet.gradients, self.d
        lr, beta3 = lrs[:, :1] * d, math.sqrt(0.999)
        if self.clip is not None:
            norms = gradients.norm(dim=1, keepdim=True)
            gradients = gradients * (self.clip / (norms + 1e-6)).clamp(max=1)
            self.count += 1
            lr = lr * (1 - 0.999**self.count).sqrt() / (1 - 0.9**self.count)
        way = (gradients * (self.begin - weights)).sum(1, keepdim=True)
        self.above.mul_(beta3).add_(d / self._d0 * lr * way)
        self.first.mul_(0.9).add_(gradients * (d * 0.1))
        self.second.mul_(0.999).add_(gradients**2 * (d**2 * (1 - 0.999)))
        self.sum.mul_(beta3).add_(gradients * (d / self._d0 * (d if self.safeguard else lr)))
        guess = self.above / self.sum.abs().sum(1, keepdim=True)
        d = torch.where(d == self._d0, torch.maximum(d, guess), d)
        self.most = torch.maximum(self.most, guess)
        moves = lrs[:, :1] > 0  # a schedule that begins at nothing has not begun
        self.d = torch.where(moves, self.most, self.d)
        weights.mul_(1 - lr * self.decay)
        weights.sub_(self.first / (self.second.sqrt() + self.d * 1e-8) * lr)


class SafeProdigy(Prodigy):
    safeguard = True


class ClippedProdigy(SafeProdigy):
    clip = 1.0


class DAdaptAdam(Rule):
    """Defazio and Mishchenko, 2301.07733, with decoupled weight decay; `lrs` around 1."""

    def __init__(self, fleet: Fleet, decay: float = 0.01, d0: float = 1e-6) -> None:
        super().__init__(fleet, decay)
        self.first, self.second, self.sum = self._zeros(), self._zeros(), self._zeros()
        self.d, self.above = self._per_row(d0), self._per_row(0.0)

    def step(self, lrs: Tensor, momenta: Tensor) -> None:
        weights, gradients = self.fleet.weights, self.fleet.gradients
        lr, root = lrs[:, :1] * self.d, math.sqrt(0.999)
        way = (gradients * self.sum / (self.second.sqrt() + 1e-8)).sum(1, keepdim=True)
        self.above.mul_(root).add_((1 - root) * lr * way)
        self.first.mul_(0.9).add_(gradients * (lr * 0.1))
        self.second.mul_(0.999).addcmul_(gradients, gradients, value=1 - 0.999)
        self.sum.mul_(root).add_(gradients * (lr * (1 - root)))
        guess = self.above / ((1 - root) * self.sum.abs().sum(1, keepdim=True))
        moves = lrs[:, :1] > 0
        self.d = torch.where(moves, torch.maximum(self.d, guess.nan_to_num(0.0)), self.d)
        weights.mul_(1 - lr * self.decay)
        weights.sub_(self.first / (self.second.sqrt() + 1e-8))


class DoG(Rule):
    """Ivgi, Hinder and Carmon, 2302.12022, evaluated at the mean that its README asks for."""

    blockwise = False

    def __init__(self, fleet: Fleet, decay: float = 0.0, first: float = 1e-6) -> None:
        super().__init__(fleet, decay)
        self.begin, self.mean = fleet.weights.clone(), fleet.weights.clone()
        blocks = fleet.layout.blocks if self.blockwise else [slice(None)]
        self._blocks, self._first = blocks, first
        self.far = self.energy = torch.zeros(len(fleet), len(blocks), device=fleet.device)

    def step(self, lrs: Tensor, momenta: Tensor) -> None:
        weights, gradients = self.fleet.weights, self.fleet.gradients
        energy = torch.stack([gradients[:, b].square().sum(1) for b in self._blocks], 1)
        if not self.count.any():
            norms = torch.stack([weights[:, b].norm(dim=1) for b in self._blocks], 1)
            self.far, self.energy = self._first * (1 + norms), energy + 1e-8
        else:
            gone = weights - self.begin
            far = torch.stack([gone[:, b].norm(dim=1) for b in self._blocks], 1)
            self.far = torch.maximum(self.far, far)
            self.energy = self.energy + energy
        self.count += 1
        sizes = self.far / self.energy.sqrt() * lrs[:, :1]
        for place, block in enumerate(self._blocks):
            weights[:, block].sub_(gradients[:, block] * sizes[:, [place]])
        # Polynomial decay averaging with gamma = 8.
        self.mean.lerp_(weights, 9 / (8 + self.count).clamp(min=9.0))

    def answer(self) -> Tensor:
        return self.mean


class LDoG(DoG):
    """The same for each tensor alone."""

    blockwise = True


class ScheduleFree(Rule):
    """Defazio et al., 2405.15682, AdamW; `lrs` holds its warm-up and nothing else."""

    def __init__(self, fleet: Fleet, decay: float = 0.01) -> None:
        super().__init__(fleet, decay)
        self.fast, self.second = fleet.weights.clone(), self._zeros()
        self.highest, self.total = self._per_row(0.0), self._per_row(0.0)

    def step(self, lrs: Tensor, momenta: Tensor) -> None:
        weights, gradients, lr = self.fleet.weights, self.fleet.gradients, lrs[:, :1]
        self.count += 1
        self.highest = torch.maximum(self.highest, lr)
        self.total = self.total + self.highest**2
        share = self.highest**2 / self.total
        self.second.mul_(0.999).addcmul_(gradients, gradients, value=1 - 0.999)
        way = gradients / ((self.second / (1 - 0.999**self.count)).sqrt() + 1e-8)
        way.add_(weights, alpha=self.decay)
        weights.lerp_(self.fast, share)
        weights.add_(way * (lr * (0.9 * (1 - share) - 1)))
        self.fast.sub_(way * lr)

    def answer(self) -> Tensor:
        return torch.lerp(self.fast, self.fleet.weights, 1 / 0.9)


class Greedy:
    """GreedyLR of transformers (2512.14527) with its defaults: the loss of every step moves the
    learning rate up after ten better ones in a row, and down after ten others."""

    factor, patience, least, most, threshold = 0.95, 10, 1e-3, 1.0, 1e-6

    def __init__(self, lrs: Tensor) -> None:
        self.lrs = lrs
        self._best = torch.full_like(lrs[:, :1], math.inf)
        self._good, self._bad = torch.zeros_like(self._best), torch.zeros_like(self._best)

    def record_round(self, losses: Tensor) -> None:
        better = losses[:, None] < self._best - self.threshold
        self._best = torch.where(better, losses[:, None], self._best)
        self._good = torch.where(better, self._good + 1, 0)
        self._bad = torch.where(better, 0, self._bad + 1)
        up, down = self._good > self.patience, self._bad > self.patience
        higher = (self.lrs / self.factor).clamp(max=self.most)
        lower = (self.lrs * self.factor).clamp(min=self.least)
        # What is beyond a bound already stays where it is.
        higher, lower = torch.maximum(higher, self.lrs), torch.minimum(lower, self.lrs)
        self.lrs = torch.where(up, higher, torch.where(down, lower, self.lrs))
        self._good, self._bad = torch.where(up, 0, self._good), torch.where(down, 0, self._bad)


RULES: dict[str, Any] = {
    "AdamW": AdamW,
    "SGD": SGD,
    "Prodigy": Prodigy,
    "Prodigy, warm-up": SafeProdigy,
    "Prodigy, warm-up and clipping": ClippedProdigy,
    "D-Adapt Adam": DAdaptAdam,
    "DoG": DoG,
    "L-DoG": LDoG,
    "Schedule-Free AdamW": ScheduleFree,
}
