"""The search of every run for its learning rate, decided by the library."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import hdet
from benchmarks.learning_rate.fleet import Fleet
from benchmarks.learning_rate.methods.bench import Bench, Run, split
from benchmarks.learning_rate.methods.schedules import RowPlan, shape
from benchmarks.learning_rate.rules import Rule
from hdet.lr_search.constants import NUM_HELD_OUT_PARTS
from hdet.lr_search.estimator import Estimate
from hdet.lr_search.observations import observations_of_round
from hdet.lr_search.plan import Search
from hdet.lr_search.prior import Prior, prior_of
from hdet.scheduler.search_result import peak_over_mean

Look = Callable[[Sequence[Run], Fleet, Rule], None]
"""At the replicas of some runs when a round is over, N rows for each."""


Signal = Literal["probe", "losses", "held out"]
"""What the replicas of a scout are compared by."""


def search_lrs(
    bench: Bench,
    runs: Sequence[Run],
    *,
    by: Signal,
    scout: hdet.Scout,
    look: Look | None = None,
    since: Sequence[int] | None = None,
) -> list[Search]:
    """Every run's search, to its end; from the first weights, whatever steps were made before."""
    total, since = bench.plan.steps, since or [0] * len(runs)
    searches = [
        Search(scout, num_replicas=bench.replicas, total_steps=total, prior=prior_for(bench, run))
        for run in runs
    ]
    held = math.ceil(NUM_HELD_OUT_PARTS / bench.replicas) if by == "held out" else 0
    if held and not searches[0].can_spare(held):
        by, held = "losses", 0
    kept = [[begin + step for step in range(held)] for begin in since]
    """The steps of every run whose batches score its replicas."""
    for search in searches:
        search.interrupt(held)

    while pending := [place for place, search in enumerate(searches) if not search.is_over]:
        begins = [since[place] + searches[place].used for place in pending]
        steps = [kept[place] for place in pending]
        scores = _round(
            bench,
            [runs[place] for place in pending],
            [searches[place].factors for place in pending],
            begins,
            searches[0].num_steps,
            score=partial(_scores, bench, by, steps),
            look=look,
        )
        for place, result in zip(pending, scores, strict=True):
            _tell(searches[place], result)
    return searches


def prior_for(bench: Bench, run: Run) -> Prior | None:
    """The usual learning rate of the optimizer, in units of that of the run."""
    model = bench.task.model(run.seed)
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    momentum = 0.9 if bench.plan.optimizer == "SGD" else 0.0
    known = prior_of(bench.plan.optimizer, momentum=momentum, num_parameters=size)
    return None if known is None else known._replace(mean=known.mean - math.log10(run.lr))


def _tell(search: Search, result: "RoundResult") -> None:
    points = observations_of_round(
        search.factors, result.losses, result.errors, result.scores, result.finite
    )
    search.record_round(points, result.start_score)


class RoundResult(NamedTuple):
    """What the replicas of a run have come to in a round."""

    losses: list[float]
    errors: list[float]
    scores: list[list[float]] | None
    finite: list[bool]
    start_score: float | None
    """The score of the weights that all set out from; by losses, what all saw in a first step."""


def _round(
    bench: Bench,
    runs: Sequence[Run],
    factors: Sequence[Sequence[float]],
    begins: Sequence[int],
    num_steps: int,
    *,
    score: "Score",
    look: Look | None = None,
) -> list[RoundResult]:
    """One round of every run."""
    fleet = bench.fleet([run.seed for run in runs for _ in range(bench.replicas)], capture=False)
    rule = bench.rule(fleet)
    batch = bench.task.batches([run.seed for run in runs])
    peaks = [run.lr * factor for run, row in zip(runs, factors, strict=True) for factor in row]
    lrs = (
        torch.tensor(peaks, dtype=torch.float64)
        .to(fleet.weights)[:, None]
        .expand(-1, len(bench.task.groups))
    )
    wave = shape("one cycle", bench.plan.steps, rule.cycles_momentum)
    momenta = torch.full_like(lrs[:, :1], wave.momenta[0])
    steps = torch.tensor(begins, device=fleet.device)
    seen, mean, begin = [], torch.zeros_like(fleet.weights), fleet.weights.clone()
    tail = hdet.Probe(bench.task.probe).tail_steps(num_steps)
    for step in range(num_steps):
        seen.append(fleet.losses(*split(batch(steps + step), bench.replicas)))
        rule.step(lrs, momenta)
        if step >= num_steps - tail:
            mean += fleet.weights / tail
    judged = torch.stack(seen[num_steps - num_steps // 2 :]).double()
    losses = judged.mean(0).view(-1, bench.replicas).tolist()
    jumps = judged.diff(dim=0).square().sum(0)
    num = len(judged)
    errors = (jumps / (2 * (num - 1) * num)).sqrt().view(-1, bench.replicas).tolist()
    finite = fleet.weights.isfinite().all(1).view(-1, bench.replicas).tolist()
    probed: list[Any] = [None] * len(runs)
    start_score: list[Any] = seen[0].double().view(-1, bench.replicas).mean(1).tolist()
    found = score(runs, fleet, mean)
    if found is not None:
        begun = score(runs, fleet, begin)
        assert begun is not None
        start_score = begun.double().mean(1)[:: bench.replicas].tolist()
        probed = found.double().view(len(runs), bench.replicas, -1).tolist()
    if look is not None:
        look(runs, fleet, rule)
    rows = zip(losses, errors, probed, finite, start_score, strict=True)
    return [RoundResult(*row) for row in rows]


Score = Callable[[Sequence[Run], Fleet, Tensor], Tensor | None]
"""The scores of all rows with some weights, [R x N, parts]; none if losses are all there is."""


def _scores(
    bench: Bench,
    by: Signal,
    kept: Sequence[Sequence[int]],
    runs: Sequence[Run],
    fleet: Fleet,
    at: Tensor,
) -> Tensor | None:
    """By the probe; or by parts of the batches of some steps, on which no replica has trained."""
    if by == "losses":
        return None
    if by == "probe":
        return fleet.evaluate(bench.task.probe, weights=at, training=True)
    batch, scores = bench.task.batches([run.seed for run in runs]), []
    for part in range(NUM_HELD_OUT_PARTS):
        steps = torch.tensor([row[part // bench.replicas] for row in kept], device=fleet.device)
        own = [
            value.unflatten(0, (-1, bench.replicas))[:, part % bench.replicas]
            for value in split(batch(steps), bench.replicas)
        ]
        same = [value.repeat_interleave(bench.replicas, 0) for value in own]
        scores.append(fleet.evaluate(bench.task.loss, weights=at, batch=same, training=True))
    return torch.stack(scores, 1)


def plan_by_search(
    bench: Bench,
    runs: Sequence[Run],
    *,
    by: Signal,
    scout: hdet.Scout | None = None,
) -> tuple[list[RowPlan], list[Search]]:
    """What every run begins with after its scout, and how that was found."""
    searches = search_lrs(bench, runs, by=by, scout=scout or hdet.Scout())
    plans = []
    for run, search in zip(runs, searches, strict=True):
        peaks = (run.lr * start_of(bench, search).factor,) * len(bench.task.groups)
        plans.append(RowPlan(run.seed, peaks, search.used))
    return plans, searches


def start_of(bench: Bench, search: Search) -> Estimate:
    """What a run begins with, in units of what was given."""
    wave = shape("one cycle", bench.plan.steps, True)
    return search.estimate(peak=peak_over_mean(sum(wave.lrs) / len(wave.lrs)))
