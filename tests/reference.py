"""Algorithm 1 of the paper as a plain loop over N copies of a model, without hdet.

The caller gives the permutation of the multipliers at each sync. The paper draws it at random.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Cycle(NamedTuple):
    """The values at one sync."""

    step: int
    lrs: list[list[float]]  # [group][replica], in the step before the sync
    losses: list[float]
    weights: list[float] | None
    centres: list[float]  # etabar of each group, after the update
    velocities: list[float]


class Run(NamedTuple):
    cycles: list[Cycle]
    parameters: list[list[Tensor]]  # [replica][parameter]


def one_cycle(
    step: int,
    total: int,
    peak: float,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> float:
    """Return the learning rate of OneCycleLR with cosine annealing, from its definition."""

    def cosine(start: float, end: float, share: float) -> float:
        return end + (start - end) / 2 * (1 + math.cos(math.pi * share))

    top = pct_start * total - 1
    low = peak / div_factor
    if step <= top:
        return cosine(low, peak, step / top)
    return cosine(peak, low / final_div_factor, (step - top) / (total - 1 - top))


def multiplier(replica: int, num_replicas: int, alpha: float) -> float:
    middle = (num_replicas - 1) / 2
    return 1 + alpha * (replica - middle) / max(middle, 0.5)


def run(
    model: nn.Module,
    make_optimizers: Callable[[nn.Module], Optimizer | Sequence[Optimizer]],
    loss_of: Callable[[nn.Module, int, int], Tensor],
    permutation: Callable[[int, int], Sequence[int]],
    *,
    num_replicas: int,
    peaks: Sequence[float],
    total_steps: int,
    sync_every: int,
    warmup_steps: int,
    alpha: float,
    beta: float = 0.9,
    sigma: float = 0.1,
    lam: float = 0.5,
    largest_move: float | None = 2.0,
    auto_lr: bool = True,
    shared: bool = True,
    outer: tuple[float, float] | None = None,
    keeps_schedule: bool = False,
    on_step: Callable[[int, list[nn.Module]], Any] | None = None,
) -> Run:
    """Train the copies; `permutation(group, cycle)[replica]` is the index of a multiplier.

    A copy may have several optimizers. The groups are counted over all of them. `outer` holds
    learning rate and momentum of the Nesterov steps on the change of each cycle. With
    `keeps_schedule` the centres are factors on the schedule, which goes on to its end.
    """
    replicas = range(num_replicas)
    groups = range(len(peaks))
    models = [copy.deepcopy(model) for _ in replicas]
    made = [make_optimizers(m) for m in models]
    optimizers = [[one] if isinstance(one, Optimizer) else one for one in made]
    rho = [[multiplier(r, num_replicas, alpha) for r in replicas] for _ in groups]
    centre = [1.0] * len(peaks)
    velocity = [0.0] * len(peaks)
    gamma = [0.0] * len(peaks)
    floors = [0.0 if keeps_schedule else peak / 25.0 / 1e4 for peak in peaks]
    in_control = False
    loss_sums = [0.0] * num_replicas
    slow = [p.detach().clone() for p in model.parameters()]
    velocities = [torch.zeros_like(p) for p in slow]
    cycles: list[Cycle] = []
    for step in range(total_steps):
        base = [one_cycle(step, total_steps, peak) for peak in peaks]
        if not keeps_schedule:  # the centres are the learning rates themselves
            centre, base = centre if in_control else base, [1.0] * len(peaks)
        used = [[centre[g] * rho[g][r] for r in replicas] for g in groups]
        lrs = [[base[g] * factor for factor in used[g]] for g in groups]
        for r in replicas:
            models[r].zero_grad()
            loss = loss_of(models[r], step, r)
            loss.backward()
            loss_sums[r] += loss.item()
        if shared:
            share_gradients(models)
        for r in replicas:
            entries = [entry for one in optimizers[r] for entry in one.param_groups]
            for g in groups:
                entries[g]["lr"] = lrs[g][r]
            for one in optimizers[r]:
                one.step()
        if on_step is not None:
            on_step(step, models)
        done = step + 1
        if done % sync_every != 0 and done != total_steps:
            continue
        average(models)
        if outer is not None:
            nesterov(models, slow, velocities, *outer)
        steps = sync_every if done % sync_every == 0 else done % sync_every
        losses = [total / steps for total in loss_sums]
        loss_sums = [0.0] * num_replicas
        weights = None
        if auto_lr and in_control:
            scores = [(sum(losses) / num_replicas - loss) / sigma for loss in losses]
            raw = [math.exp(score) for score in scores]
            weights = [value / sum(raw) for value in raw]
            for g in groups:
                preferred = sum(w * value for w, value in zip(weights, used[g], strict=True))
                delta = preferred - sum(used[g]) / num_replicas
                velocity[g] = beta * velocity[g] + (1 - beta) * delta
                decayed = centre[g] * (1 - gamma[g])
                centre[g] = decayed + lam * velocity[g]
                if largest_move is not None:  # this bound is not in the paper
                    centre[g] = max(centre[g], decayed / largest_move, floors[g])
                    centre[g] = min(centre[g], decayed * largest_move)
        elif auto_lr and done >= warmup_steps:
            in_control = True
            num_syncs = math.ceil((total_steps - done) / sync_every)
            for g in () if keeps_schedule else groups:
                centre[g] = one_cycle(done, total_steps, peaks[g])
                if num_syncs:
                    gamma[g] = 1 - (floors[g] / centre[g]) ** (1 / num_syncs)
        cycles.append(Cycle(done, lrs, losses, weights, list(centre), list(velocity)))
        if in_control:
            for g in groups:
                order = permutation(g, len(cycles))
                rho[g] = [multiplier(order[r], num_replicas, alpha) for r in replicas]
    return Run(cycles, [[p.detach().clone() for p in m.parameters()] for m in models])


def share_gradients(models: Sequence[nn.Module]) -> None:
    for same in zip(*(m.parameters() for m in models), strict=True):
        mean = sum(p.grad for p in same) / len(same)
        for p in same:
            p.grad = mean.clone()


@torch.no_grad()
def nesterov(
    models: Sequence[nn.Module],
    slow: list[Tensor],
    velocities: list[Tensor],
    lr: float,
    momentum: float,
) -> None:
    """Apply the outer step of DiLoCo (2311.08105) to the weights of the last sync."""
    for place, same in enumerate(zip(*(m.parameters() for m in models), strict=True)):
        change = slow[place] - same[0]
        velocities[place] = momentum * velocities[place] + change
        slow[place] = slow[place] - lr * (change + momentum * velocities[place])
        for p in same:
            p.copy_(slow[place])


@torch.no_grad()
def average(models: Sequence[nn.Module]) -> None:
    for same in zip(*(m.parameters() for m in models), strict=True):
        mean = sum(p.detach() for p in same) / len(same)
        for p in same:
            p.copy_(mean)
