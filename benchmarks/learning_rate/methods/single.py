"""Methods with one row for each run: plain schedules, peers without a learning rate, controls."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.learning_rate.fleet import Fleet
from benchmarks.learning_rate.methods.bench import Bench, Ended, Run
from benchmarks.learning_rate.methods.rows import Average, both, train_rows
from benchmarks.learning_rate.methods.schedules import plans_of
from benchmarks.learning_rate.rules import Greedy


def plain(bench: Bench, runs: Sequence[Run], *, schedule: str = "one cycle") -> list[Ended]:
    return train_rows(bench, plans_of(bench, runs), schedule=schedule)


def trained(bench: Bench, run: Run) -> dict[str, Tensor]:
    """The weights of one plain run, as a checkpoint."""
    kept: dict[str, Tensor] = {}

    def after(step: int, fleet: Fleet) -> None:
        if step == bench.plan.steps:
            views = fleet.layout.views(fleet.weights)
            kept.update({name: view[0].clone() for name, view in views.items()})

    train_rows(bench, plans_of(bench, [run]), after=after)
    model = bench.task.model(run.seed)
    model.load_state_dict(kept, strict=False)  # tied tensors have one name there
    return model.state_dict()


def peer(bench: Bench, runs: Sequence[Run], *, rule: str, schedule: str) -> list[Ended]:
    """An optimizer that needs no learning rate: it gets the one of its README, 1."""
    plans = [plan._replace(peaks=(1.0,) * len(plan.peaks)) for plan in plans_of(bench, runs)]
    return train_rows(bench, plans, rule=rule, schedule=schedule)


def schedule_free(bench: Bench, runs: Sequence[Run]) -> list[Ended]:
    return train_rows(bench, plans_of(bench, runs), rule="Schedule-Free AdamW", schedule="warm-up")


def outer_nesterov(bench: Bench, runs: Sequence[Run]) -> list[Ended]:
    """One worker, and a slow copy of its weights that moves by Nesterov momentum."""
    slow: list[Tensor] = []

    def after(step: int, fleet: Fleet) -> None:
        if not slow:
            slow.append(fleet.weights.clone())  # one step late: the first is tiny
            slow.append(torch.zeros_like(fleet.weights))
        if step % bench.sync_every == 0:
            outer_step(slow[0], slow[1], fleet.weights)
            fleet.weights.copy_(slow[0])

    return train_rows(bench, plans_of(bench, runs), after=after)


def outer_step(slow: Tensor, velocity: Tensor, now: Tensor) -> None:
    """SGD with Nesterov momentum on what an interval has changed: 0.7 and 0.9, as in DiLoCo."""
    change = slow - now
    velocity.mul_(0.9).add_(change)
    slow.sub_(change + 0.9 * velocity, alpha=0.7)


def greedy(bench: Bench, runs: Sequence[Run]) -> list[Ended]:
    fleet = bench.fleet([run.seed for run in runs])
    rule = bench.rule(fleet)
    batch = bench.task.batches([run.seed for run in runs])
    first = torch.tensor([[run.lr] * len(bench.task.groups) for run in runs]).to(fleet.weights)
    scheduler, average = Greedy(first), Average(fleet, bench.plan.steps)
    momenta, active = torch.full_like(first[:, :1], 0.9), torch.ones(len(runs)).to(fleet.device)
    steps, highest = torch.zeros(len(runs), dtype=torch.long, device=fleet.device), first
    for now in range(bench.plan.steps):
        losses = fleet.losses(*batch(steps + now))
        rule.step(scheduler.lrs, momenta)
        scheduler.record_round(losses)
        highest = torch.maximum(highest, scheduler.lrs)
        average.add(active)
    pairs = both(bench, fleet, fleet.weights, average)
    return [
        Ended(live, mean, float(lr[0])) for (live, mean), lr in zip(pairs, highest, strict=True)
    ]


def range_test(bench: Bench, runs: Sequence[Run]) -> list[Ended]:
    """The usual finder: from 1e-7 up to 10 in 100 steps, a tenth of where the loss is lowest."""
    num = min(100, bench.plan.steps // 5)
    fleet = bench.fleet([run.seed for run in runs], capture=False)
    rule = bench.rule(fleet)
    batch = bench.task.batches([run.seed for run in runs])
    momenta = torch.full((len(runs), 1), 0.9).to(fleet.weights)
    steps, seen = torch.zeros(len(runs), dtype=torch.long, device=fleet.device), []
    lrs = [1e-7 * 1e8 ** (step / (num - 1)) for step in range(num)]
    for step, lr in enumerate(lrs):
        seen.append(fleet.losses(*batch(steps + step)).tolist())
        rule.step(torch.full((len(runs), len(bench.task.groups)), lr).to(momenta), momenta)
    plans = [
        plan._replace(peaks=(lr,) * len(plan.peaks), begin=num)
        for plan, lr in zip(
            plans_of(bench, runs),
            [_lowest(lrs, losses) / 10 for losses in zip(*seen, strict=True)],
            strict=True,
        )
    ]
    return train_rows(bench, plans)


def _lowest(lrs: Sequence[float], losses: Sequence[float]) -> float:
    """Where the smoothed loss is lowest, before it is four times that."""
    mean, best, at = 0.0, math.inf, lrs[0]
    for step, (lr, loss) in enumerate(zip(lrs, losses, strict=True), start=1):
        mean = 0.9 * mean + 0.1 * loss
        smooth = mean / (1 - 0.9**step)
        if not smooth <= 4 * best:
            break
        if smooth < best:
            best, at = smooth, lr
    return at
