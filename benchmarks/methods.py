"""How every method of the settling benchmark trains a stack of runs.

All get the same samples, the same number of steps and the same number of replicas. Methods whose
replicas stay equal (a plain schedule; hdet after its scout; LR-free optimizers) are one row of a
fleet each, with the whole batch; the others are one row for each replica. hdet's own decisions
(where to look, what to choose, when to go back) are the library's; `tests/test_methods.py` shows
that a row ends with the weights of `hdet.HDET` over stacked replicas.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks.fleet import Fleet
from benchmarks.rules import RULES, Greedy, Rule
from benchmarks.tasks import Batches, Plan, Task
from hdet.control.knob_bank import KnobBank
from hdet.control.one_cycle_bounds import OneCycleBounds
from hdet.control.spike_guard import SpikeMonitor
from hdet.control.stall_detector import (
    MAX_CYCLE,
    MAX_SHARE_OF_RUN,
    StallDetector,
    is_far_off,
    is_too_late_to_restart,
)
from hdet.knobs.specs import LearningRate, lr_knobs
from hdet.lr_search.constants import NUM_HELD_OUT_PARTS
from hdet.lr_search.estimator import Estimate
from hdet.lr_search.observations import observations_of_round
from hdet.lr_search.plan import Search
from hdet.lr_search.reasons import Reason, describe
from hdet.lr_search.transfer import GradientNorms, peak_over_mean
from hdet.scheduler.schedule_clock import ScheduleClock

N = 8
SYNC_EVERY = 50
WARM_UP = 0.05
"""Of the steps, before a cosine and for Schedule-Free."""
DECAY = {"AdamW": 0.01, "SGD": 5e-4}


class Run(NamedTuple):
    """From which learning rate, with which samples."""

    lr: float
    seed: int


class Ended(NamedTuple):
    """What became of a run."""

    live: Mapping[str, float | None]
    """What its weights measure; none (in a file) for what is not finite."""
    averaged: Mapping[str, float | None]
    """The same for a running mean of the weights over the last twentieth of the run."""
    lr: float
    """The learning rate it was trained with, at its highest."""
    notes: dict[str, Any] = {}  # noqa: RUF012 (never changed)


class Bench(NamedTuple):
    """What a stack of runs is trained on."""

    task: Task
    plan: Plan
    half: bool = False
    capture: bool = False

    def fleet(self, seeds: Sequence[int], *, capture: bool = True) -> Fleet:
        models = [self.task.model(seed) for seed in seeds]
        return Fleet(
            models,
            self.task.loss,
            self.task.group_of,
            half=self.half,
            capture=self.capture and capture,
        )

    def rule(self, fleet: Fleet, name: str | None = None) -> Rule:
        kind = name or self.plan.optimizer
        made: Rule = RULES[kind](fleet, **({"decay": DECAY[kind]} if kind in DECAY else {}))
        return made


# Schedules ------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """A schedule around 1, and the momentum beside it, for every step."""

    lrs: list[float]
    momenta: list[float]


@cache
def shape(name: str, steps: int, cycles_momentum: bool) -> Shape:
    if name == "one cycle":
        return _one_cycle(steps, cycles_momentum)
    if name == "too long":  # for a run that ends half-way
        long = _one_cycle(2 * steps, cycles_momentum)
        return Shape(long.lrs[:steps], long.momenta[:steps])
    if name == "too short":  # for a run that goes on with what is left at its end
        short = _one_cycle(steps // 2, cycles_momentum)
        rest = steps - steps // 2
        return Shape(short.lrs + short.lrs[-1:] * rest, short.momenta + short.momenta[-1:] * rest)
    rising = max(round(WARM_UP * steps), 1)
    falling = {
        "constant": lambda step: 1.0,
        "warm-up": lambda step: min((step + 1) / rising, 1.0),
        "cosine": lambda step: _half_wave(step / steps),
        "warm-up and cosine": lambda step: (
            (step + 1) / rising if step < rising else _half_wave((step - rising) / (steps - rising))
        ),
    }[name]
    return Shape([falling(step) for step in range(steps)], [0.9] * steps)


def _half_wave(way: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * way))


def _one_cycle(steps: int, cycles_momentum: bool) -> Shape:
    """What torch's own does."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    schedule = OneCycleLR(optimizer, 1.0, total_steps=steps, cycle_momentum=cycles_momentum)
    lrs, momenta = [], []
    for step in range(steps):
        lrs.append(float(optimizer.param_groups[0]["lr"]))
        momenta.append(float(optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        if step < steps - 1:
            schedule.step()
    return Shape(lrs, momenta)


def places(steps: int, begin: int) -> list[int]:
    """Where the schedule of a run is that has spent its first steps otherwise."""
    clock = ScheduleClock(0, steps)
    if begin:
        clock.scouted(begin)
    at = []
    for step in range(begin, steps):
        at.append(clock.base_step)
        clock.due(step + 1)
    return at


class Leg(NamedTuple):
    """One row: its samples, the peak for each group, and the step it begins at."""

    seed: int
    peaks: tuple[float, ...]
    begin: int = 0
    places: tuple[int, ...] | None = None
    """Where its schedule is at each of its steps; by default as the library has it."""


class Course:
    """The learning rates, [steps, R, G], and momenta, [steps, R, 1], of a stack of rows."""

    def __init__(self, legs: Sequence[Leg], name: str, steps: int, rule: Rule) -> None:
        like = rule.fleet.weights
        wave = shape(name, steps, rule.cycles_momentum)
        lrs = torch.zeros(steps, len(legs), len(legs[0].peaks), dtype=torch.float64)
        momenta = torch.full((steps, len(legs), 1), wave.momenta[-1], dtype=torch.float64)
        for row, leg in enumerate(legs):
            at = torch.tensor(leg.places or places(steps, leg.begin))
            peaks = torch.tensor(leg.peaks, dtype=torch.float64)
            lrs[: len(at), row] = torch.tensor(wave.lrs, dtype=torch.float64)[at, None] * peaks
            momenta[: len(at), row, 0] = torch.tensor(wave.momenta, dtype=torch.float64)[at]
        self.lrs, self.momenta = lrs.to(like), momenta.to(like)
        begins = torch.tensor([leg.begin for leg in legs])
        steps_of = begins + torch.arange(steps)[:, None]
        self.steps = steps_of.clamp(max=steps - 1).to(like.device)
        self.sails = (steps_of < steps).to(like.device)
        self.arrived = [(row >= steps).nonzero().flatten().tolist() for row in steps_of]
        """The rows that have made all their steps."""


# Rows -----------------------------------------------------------------------------------------


class Average:
    """A running mean of weights and buffers over about a twentieth of the run."""

    def __init__(self, fleet: Fleet, steps: int) -> None:
        self._fleet, self._reach = fleet, max(0.05 * steps, 1.0)
        self.weights = fleet.weights.clone()
        self.buffers = {name: buffer.clone() for name, buffer in fleet.buffers.items()}
        self._done = 0

    def add(self, sails: Tensor) -> None:
        self._done += 1
        by = max(1 / self._reach, 9 / (9 + self._done)) * sails.to(self.weights)
        self.weights.lerp_(self._fleet.weights, by[:, None])
        for name, mine in self.buffers.items():
            theirs = self._fleet.buffers[name]
            if mine.is_floating_point():
                mine.lerp_(theirs, by.view(-1, *[1] * (mine.dim() - 1)))
            else:
                mine.copy_(theirs)


def measured(bench: Bench, fleet: Fleet, weights: Tensor) -> list[dict[str, float]]:
    answers = fleet.evaluate(bench.task.judge, weights=weights)
    return [bench.task.measures(answer) for answer in answers]


def both(
    bench: Bench, fleet: Fleet, live: Tensor, average: Average
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """What live and averaged weights come to."""
    found = measured(bench, fleet, live)
    kept, fleet.buffers = fleet.buffers, average.buffers
    pairs = list(zip(found, measured(bench, fleet, average.weights), strict=True))
    fleet.buffers = kept
    return pairs


def sail(
    bench: Bench,
    legs: Sequence[Leg],
    *,
    rule: str | None = None,
    schedule: str = "one cycle",
    watch: "Lookout | None" = None,
    start: Callable[[Fleet, Rule], None] | None = None,
    after: Callable[[int, Fleet], None] | None = None,
) -> list[Ended]:
    """Train rows to their end."""
    fleet = bench.fleet([leg.seed for leg in legs])
    mover = bench.rule(fleet, rule)
    if start is not None:
        start(fleet, mover)
    course = Course(legs, schedule, bench.plan.steps, mover)
    batch = bench.task.batches([leg.seed for leg in legs])
    average = Average(fleet, bench.plan.steps)
    if watch is not None:
        watch.board(fleet, mover, legs, bench.plan.steps)
    for now in range(bench.plan.steps):
        fleet.hold(course.arrived[now])
        losses = fleet.losses(*batch(course.steps[now]))
        lrs = course.lrs[now] if watch is None else course.lrs[now] * watch.scales
        mover.step(lrs, course.momenta[now])
        if after is not None:
            after(now + 1, fleet)
        if watch is not None:
            watch.see(now, losses)
        average.add(course.sails[now])
    refresh_statistics(bench, fleet, mover, batch)
    pairs = both(bench, fleet, mover.answer(), average)
    peaks = course.lrs.amax((0, 2)).tolist()
    return [Ended(live, mean, peak) for (live, mean), peak in zip(pairs, peaks, strict=True)]


def refresh_statistics(bench: Bench, fleet: Fleet, rule: Rule, batch: Batches) -> None:
    """BatchNorm's running statistics, where other weights are evaluated than those that trained."""
    if rule.answer() is fleet.weights or not fleet.buffers:
        return
    kept, steps = fleet.weights.clone(), torch.zeros(len(fleet), dtype=torch.long)
    fleet.weights.copy_(rule.answer())
    for step in range(50):
        fleet.losses(*batch((steps + step).to(fleet.device)))
    fleet.weights.copy_(kept)


class Means:
    """The mean loss of every row in its cycle, and the standard error, as the library has them."""

    def __init__(self, num: int, device: torch.device) -> None:
        self._sums = torch.zeros(num, dtype=torch.float64, device=device)
        self._jumps, self._before = torch.zeros_like(self._sums), torch.zeros_like(self._sums)
        self._counts = [0] * num

    def add(self, losses: Tensor) -> None:
        later = torch.tensor([count > 0 for count in self._counts], device=losses.device)
        self._sums += losses
        self._jumps += torch.where(later, (losses.double() - self._before).square(), 0.0)
        self._before = losses.double()
        self._counts = [count + 1 for count in self._counts]

    def end(self, rows: Sequence[int]) -> list[tuple[float, float | None]]:
        """Those of some rows, whose next cycle begins."""
        sums, jumps, told = self._sums.tolist(), self._jumps.tolist(), []
        for row in rows:
            num = self._counts[row]
            error = math.sqrt(jumps[row] / (2 * (num - 1) * num)) if num > 1 else None
            told.append((sums[row] / num, error))
            self._sums[row], self._jumps[row], self._counts[row] = 0.0, 0.0, 0
        return told


class Lookout:
    """A guard for every row: hdet's own watch, and the weights it goes back to."""

    def __init__(self, guard: hdet.Guard) -> None:
        self._guard = guard
        self.stopped: set[int] = set()
        self.returns: list[int] = []

    def board(self, fleet: Fleet, rule: Rule, legs: Sequence[Leg], steps: int) -> None:
        self._steps = steps
        self._fleet, self._rule, self._legs = fleet, rule, legs
        self._watches = [SpikeMonitor(self._guard) for _ in legs]
        self._means = Means(len(legs), fleet.device)
        self._first: list[float] | None = None
        self.scales = torch.ones(len(legs), 1, dtype=fleet.weights.dtype, device=fleet.device)
        self.returns = [0] * len(legs)
        self._kept = [tensor.clone() for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        return [self._fleet.weights, *self._rule.states(), *self._fleet.buffers.values()]

    def see(self, now: int, losses: Tensor) -> None:
        if self._first is None:
            self._first = losses.tolist()
        self._means.add(losses)
        steps = [leg.begin + now + 1 for leg in self._legs]
        ends = [
            row
            for row, step in enumerate(steps)
            if (step % SYNC_EVERY == 0 or step == self._steps) and step <= self._steps
            if row not in self.stopped
        ]
        if not ends:
            return
        finite = self._fleet.weights.isfinite().all(1).tolist()
        for row, (loss, error) in zip(ends, self._means.end(ends), strict=True):
            self._judge(row, loss, error, finite[row])

    def _judge(self, row: int, loss: float, error: float | None, finite: bool) -> None:
        watch = self._watches[row]
        assert self._first is not None
        watch.set_first_loss(self._first[row])
        sound = finite and math.isfinite(loss)
        reason = watch.check_cycle(loss, error) if sound else watch.record_failure("not finite")
        if reason is None:
            self.scales[row] *= watch.scale_correction
            for kept, tensor in zip(self._kept, self._tensors(), strict=True):
                kept[row] = tensor[row]
            return
        self.returns[row] += 1
        for kept, tensor in zip(self._kept, self._tensors(), strict=True):
            tensor[row] = kept[row]
        if watch.is_out_of_retries:
            self.stopped.add(row)
            self.scales[row] = 0.0
        self.scales[row] *= watch.scale_factor()


# hdet -----------------------------------------------------------------------------------------


Look = Callable[[Sequence[Run], Fleet, Rule], None]
"""At the replicas of some runs when a round is over, N rows for each."""


Signal = Literal["probe", "losses", "held out"]
"""What the replicas of a scout are compared by."""


def scouted(
    bench: Bench,
    runs: Sequence[Run],
    *,
    by: Signal,
    scout: hdet.Scout,
    look: Look | None = None,
    since: Sequence[int] | None = None,
    brief: bool = False,
) -> list[Search]:
    """Every run's search, to its end; from the first weights, whatever steps were made before."""
    total, since, kind = bench.plan.steps, since or [0] * len(runs), bench.plan.optimizer
    searches = [
        Search(scout, num_replicas=N, total_steps=total, optimizer=kind, brief=brief) for _ in runs
    ]
    held = math.ceil(NUM_HELD_OUT_PARTS / N) if by == "held out" else 0
    if held and not searches[0].can_spare(held):
        by, held = "losses", 0
    kept = [[begin + step for step in range(held)] for begin in since]
    """The steps of every run whose batches score its replicas."""
    for search in searches:
        search.interrupt(held)

    def sort(place: int) -> tuple[int, int]:
        """Rounds of one sort are made together."""
        parts = min(N * len(kept[place]), searches[place].num_parts)
        return searches[place].num_steps, parts

    while pending := [place for place, search in enumerate(searches) if not search.is_over]:
        num_steps, num_parts = first = min(map(sort, pending))
        pending = [place for place in pending if sort(place) == first]
        begins = [since[place] + searches[place].used for place in pending]
        steps = [kept[place] for place in pending]
        scores = _round(
            bench,
            [runs[place] for place in pending],
            [searches[place].factors for place in pending],
            begins,
            num_steps,
            score=partial(_scores, bench, by, steps, num_parts),
            look=look,
        )
        for place, begin, came in zip(pending, begins, scores, strict=True):
            _tell(searches[place], came)
            if held:
                kept[place].append(begin)
    return searches


def _tell(search: Search, came: "Came") -> None:
    points = observations_of_round(
        search.factors, came.losses, came.errors, came.scores, came.finite
    )
    outset = came.start_score
    if came.scores is not None and search.start_score is not None and outset is not None:
        # What is held out has become more since; for a probe that is nothing.
        points = [point.shifted_by(search.start_score - outset) for point in points]
        outset = None
    search.record_round(points, came.gradient_norms, outset)


class Came(NamedTuple):
    """What the replicas of a run have come to in a round."""

    losses: list[float]
    errors: list[float]
    scores: list[list[float]] | None
    finite: list[bool]
    gradient_norms: GradientNorms
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
) -> list[Came]:
    """One round of every run."""
    fleet = bench.fleet([run.seed for run in runs for _ in range(N)], capture=False)
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
        seen.append(fleet.losses(*split(batch(steps + step), N)))
        if step == 0:
            agreements = agreed(fleet.gradients)
        rule.step(lrs, momenta)
        if step >= num_steps - tail:
            mean += fleet.weights / tail
    judged = torch.stack(seen[num_steps - num_steps // 2 :]).double()
    losses = judged.mean(0).view(-1, N).tolist()
    jumps = judged.diff(dim=0).square().sum(0)
    num = len(judged)
    errors = (jumps / (2 * (num - 1) * num)).sqrt().view(-1, N).tolist()
    finite = fleet.weights.isfinite().all(1).view(-1, N).tolist()
    probed: list[Any] = [None] * len(runs)
    start_score: list[Any] = seen[0].double().view(-1, N).mean(1).tolist()
    found = score(runs, fleet, mean)
    if found is not None:
        begun = score(runs, fleet, begin)
        assert begun is not None
        start_score = begun.double().mean(1)[::N].tolist()
        probed = found.double().view(len(runs), N, -1).tolist()
    if look is not None:
        look(runs, fleet, rule)
    rows = zip(losses, errors, probed, finite, agreements, start_score, strict=True)
    return [Came(*row) for row in rows]


Score = Callable[[Sequence[Run], Fleet, Tensor], Tensor | None]
"""The scores of all rows with some weights, [R x N, parts]; none if losses are all there is."""


def _scores(
    bench: Bench,
    by: Signal,
    kept: Sequence[Sequence[int]],
    num_parts: int,
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
    for part in range(num_parts):
        steps = torch.tensor([row[part // N] for row in kept], device=fleet.device)
        own = [value.unflatten(0, (-1, N))[:, part % N] for value in split(batch(steps), N)]
        same = [value.repeat_interleave(N, 0) for value in own]
        scores.append(fleet.evaluate(bench.task.loss, weights=at, batch=same, training=True))
    return torch.stack(scores, 1)


def agreed(gradients: Tensor) -> list[GradientNorms]:
    """How far the replicas of every run agree."""
    runs = gradients.double().view(-1, N, gradients.shape[1])
    alone, together = runs.square().sum(2).mean(1), runs.mean(1).square().sum(1)
    return [GradientNorms(*pair) for pair in zip(alone.tolist(), together.tolist(), strict=True)]


def split(batch: Sequence[Tensor], num: int) -> list[Tensor]:
    """The samples of every run, shared out among its replicas."""
    return [part.reshape(len(part) * num, part.shape[1] // num, *part.shape[2:]) for part in batch]


def set_out(
    bench: Bench,
    runs: Sequence[Run],
    *,
    by: Signal,
    since: Sequence[int] | None = None,
    brief: bool = False,
    scout: hdet.Scout | None = None,
) -> tuple[list[Leg], list[Search]]:
    """What every run begins with after its scout, and how that was found."""
    since, scout = since or [0] * len(runs), scout or hdet.Scout()
    searches = scouted(bench, runs, by=by, scout=scout, since=since, brief=brief)
    legs = []
    for run, search, before in zip(runs, searches, since, strict=True):
        peaks = (run.lr * beginning(bench, search).factor,) * len(bench.task.groups)
        legs.append(Leg(run.seed, peaks, before + search.used))
    return legs, searches


def beginning(bench: Bench, search: Search) -> Estimate:
    """What a run begins with, in units of what was given."""
    wave = shape("one cycle", bench.plan.steps, True)
    return search.estimate(peak=peak_over_mean(sum(wave.lrs) / len(wave.lrs)))


def with_scout(
    bench: Bench,
    runs: Sequence[Run],
    *,
    by: Signal = "probe",
    guard: bool = True,
    scout: hdet.Scout | None = None,
) -> list[Ended]:
    """hdet: a scout, then a plain run that a guard looks after."""
    legs, searches = set_out(bench, runs, by=by, scout=scout)
    watch = Lookout(hdet.Guard()) if guard else None
    ended = sail(bench, legs, watch=watch)
    notes = [
        {
            "points": [list(point) for point in search.points],
            "close": [list(point) for point in search.refined_observations],
            "noise": search.noise,
            "outset": search.start_score,
            "steps": search.used,
            "edge": search.lowest_lost,
            "explosion": search.divergence,
            "found": search.found,
            "reason": describe(search.reasons),
            "returns": watch.returns[row] if watch is not None else 0,
        }
        for row, search in enumerate(searches)
    ]
    return [end._replace(notes=note) for end, note in zip(ended, notes, strict=True)]


def rescued(bench: Bench, runs: Sequence[Run]) -> list[Ended]:
    """hdet with `scout="restart"`: a guard, a look at the beginning whether the learning rate is
    hopeless, and a scout from the first weights for a run that is stuck all the same.

    A run that its scout would leave as it is goes on here as if nothing had been.
    """
    legs, looks = set_out(bench, runs, by="probe", brief=True)
    watched = []
    for place, (run, search) in enumerate(zip(runs, looks, strict=True)):
        begin = beginning(bench, search)
        if not is_far_off(begin.factor) or begin.factor > 1 or begin.reason is Reason.NOTHING_FOUND:
            watched.append(place)
            legs[place] = legs[place]._replace(peaks=(run.lr,) * len(legs[place].peaks))
    stuck = stuck_at(bench, legs) if watched else []  # a single row has no rule for vmap
    since = {place: stuck[place] for place in watched}
    again = [place for place, step in since.items() if step is not None]
    if again:
        steps = [since[place] or 0 for place in again]
        found, _ = set_out(bench, [runs[place] for place in again], by="probe", since=steps)
        for place, leg in zip(again, found, strict=True):
            legs[place] = leg if is_far_off(leg.peaks[0] / runs[place].lr) else legs[place]
    watch = Lookout(hdet.Guard())
    ended = sail(bench, legs, watch=watch)
    notes = [
        {"returns": returns, "stuck": since.get(place), "begin": leg.begin}
        for place, (returns, leg) in enumerate(zip(watch.returns, legs, strict=True))
    ]
    return [end._replace(notes=note) for end, note in zip(ended, notes, strict=True)]


def stuck_at(bench: Bench, runs: Sequence[Leg]) -> list[int | None]:
    """The step at which each run is found to be stuck; none for one that is not."""
    found: list[int | None] = [None] * len(runs)
    fleet = bench.fleet([run.seed for run in runs], capture=False)
    rule, watches = bench.rule(fleet), [StallDetector() for _ in runs]
    course = Course(runs, "one cycle", bench.plan.steps, rule)
    batch, means = bench.task.batches([run.seed for run in runs]), Means(len(runs), fleet.device)
    for now in range(min(MAX_CYCLE * SYNC_EVERY, bench.plan.steps // MAX_SHARE_OF_RUN)):
        losses = fleet.losses(*batch(course.steps[now]))
        rule.step(course.lrs[now], course.momenta[now])
        means.add(losses)
        if now == 0:
            for watch, loss in zip(watches, losses.tolist(), strict=True):
                watch.set_first_loss(loss)
        steps = [run.begin + now + 1 for run in runs]
        ends = [row for row, step in enumerate(steps) if step % SYNC_EVERY == 0]
        finite = fleet.weights.isfinite().all(1).tolist() if ends else []
        for row, (loss, error) in zip(ends, means.end(ends), strict=True):
            cycle = now // SYNC_EVERY  # those that have ended before
            if found[row] is not None or is_too_late_to_restart(
                cycle, steps[row], bench.plan.steps
            ):
                continue
            if now + 1 < SYNC_EVERY:  # what a look has left of its first cycle
                continue
            if watches[row].reason(loss if finite[row] else math.nan, error):
                found[row] = steps[row]
        if None not in found:
            break
    return found


# Plain schedules and LR-free peers ------------------------------------------------------------


def legs_of(bench: Bench, runs: Sequence[Run]) -> list[Leg]:
    return [Leg(run.seed, (run.lr,) * len(bench.task.groups)) for run in runs]


def plain(bench: Bench, runs: Sequence[Run], *, schedule: str = "one cycle") -> list[Ended]:
    return sail(bench, legs_of(bench, runs), schedule=schedule)


def trained(bench: Bench, run: Run) -> dict[str, Tensor]:
    """The weights of one plain run, as a checkpoint."""
    kept: dict[str, Tensor] = {}

    def after(step: int, fleet: Fleet) -> None:
        if step == bench.plan.steps:
            views = fleet.layout.views(fleet.weights)
            kept.update({name: view[0].clone() for name, view in views.items()})

    sail(bench, legs_of(bench, [run]), after=after)
    model = bench.task.model(run.seed)
    model.load_state_dict(kept, strict=False)  # tied tensors have one name there
    return model.state_dict()


def peer(bench: Bench, runs: Sequence[Run], *, rule: str, schedule: str) -> list[Ended]:
    """An optimizer that needs no learning rate: it gets the one of its README, 1."""
    legs = [leg._replace(peaks=(1.0,) * len(leg.peaks)) for leg in legs_of(bench, runs)]
    return sail(bench, legs, rule=rule, schedule=schedule)


def schedule_free(bench: Bench, runs: Sequence[Run]) -> list[Ended]:
    return sail(bench, legs_of(bench, runs), rule="Schedule-Free AdamW", schedule="warm-up")


def outer_nesterov(bench: Bench, runs: Sequence[Run]) -> list[Ended]:
    """One worker, and a slow copy of its weights that moves by Nesterov momentum."""
    slow: list[Tensor] = []

    def after(step: int, fleet: Fleet) -> None:
        if not slow:
            slow.append(fleet.weights.clone())  # one step late: the first is tiny
            slow.append(torch.zeros_like(fleet.weights))
        if step % SYNC_EVERY == 0:
            _outer_step(slow[0], slow[1], fleet.weights)
            fleet.weights.copy_(slow[0])

    return sail(bench, legs_of(bench, runs), after=after)


def _outer_step(slow: Tensor, velocity: Tensor, now: Tensor) -> None:
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
    momenta, sails = torch.full_like(first[:, :1], 0.9), torch.ones(len(runs)).to(fleet.device)
    steps, highest = torch.zeros(len(runs), dtype=torch.long, device=fleet.device), first
    for now in range(bench.plan.steps):
        losses = fleet.losses(*batch(steps + now))
        rule.step(scheduler.lrs, momenta)
        scheduler.record_round(losses)
        highest = torch.maximum(highest, scheduler.lrs)
        average.add(sails)
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
    legs = [
        leg._replace(peaks=(lr,) * len(leg.peaks), begin=num)
        for leg, lr in zip(
            legs_of(bench, runs),
            [_lowest(lrs, losses) / 10 for losses in zip(*seen, strict=True)],
            strict=True,
        )
    ]
    return sail(bench, legs)


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


# Populations ----------------------------------------------------------------------------------


class Crowd:
    """N rows for each run, which meet every `SYNC_EVERY` steps."""

    shares_gradients = False
    schedule = "one cycle"
    begin = 0
    """The steps that were spent otherwise."""

    def __init__(self, bench: Bench, runs: Sequence[Run]) -> None:
        self.bench, self.runs = bench, runs
        self.fleet = bench.fleet([run.seed for run in runs for _ in range(N)])
        self.rule = bench.rule(self.fleet)
        self.wave = shape(self.schedule, bench.plan.steps, self.rule.cycles_momentum)
        peaks = torch.tensor([run.lr for run in runs], dtype=torch.float64)
        peaks = peaks.repeat_interleave(N)[:, None]
        self.peaks = peaks.expand(-1, len(bench.task.groups)).to(self.fleet.weights).clone()

    def place(self, step: int) -> int:
        """Where the schedule is."""
        return step

    def lrs(self, step: int) -> Tensor:
        return self.peaks * self.wave.lrs[step]

    def meet(self, step: int, losses: Tensor) -> None:
        """At the end of a cycle, with the mean loss of every replica, [runs, N]."""

    def after(self, step: int) -> None:
        """After every step."""

    def train(self) -> list[Ended]:
        bench, fleet, count = self.bench, self.fleet, len(self.runs)
        batch = bench.task.batches([run.seed for run in self.runs])
        average, sails = Average(fleet, bench.plan.steps), torch.ones(len(fleet))
        steps = torch.zeros(count, dtype=torch.long, device=fleet.device)
        sums, num = torch.zeros(len(fleet), device=fleet.device, dtype=torch.float64), 0
        highest = torch.zeros_like(self.peaks[:, 0])
        for now in range(self.begin, bench.plan.steps):
            sums += fleet.losses(*split(batch(steps + now), N))
            num += 1
            if self.shares_gradients:
                shared = fleet.gradients.view(count, N, -1).mean(1, keepdim=True)
                fleet.gradients.view(count, N, -1).copy_(shared.expand(-1, N, -1))
            lrs = self.lrs(now)
            highest = torch.maximum(highest, lrs.amax(1))
            momenta = torch.full_like(lrs[:, :1], self.wave.momenta[self.place(now)])
            self.rule.step(lrs, momenta)
            self.after(now + 1)
            average.add(sails.to(fleet.device))
            if (now + 1) % SYNC_EVERY == 0 or now + 1 == bench.plan.steps:
                self.meet(now + 1, (sums / num).view(count, N))
                self.last = (sums / num).view(count, N)
                sums, num = torch.zeros_like(sums), 0
        pairs = both(bench, fleet, fleet.weights, average)
        chosen = [run * N + place for run, place in enumerate(self.delegates())]
        return [Ended(*pairs[row], lr=float(highest[row])) for row in chosen]

    def delegates(self) -> list[int]:
        """The replica that speaks for each run."""
        return [0] * len(self.runs)

    def mean(self, tensor: Tensor) -> Tensor:
        """Over the replicas of each run, [runs, 1, ...]."""
        return tensor.view(len(self.runs), N, *tensor.shape[1:]).mean(1, keepdim=True)

    def spread(self, tensor: Tensor, mean: Tensor) -> None:
        tensor.view(len(self.runs), N, *tensor.shape[1:]).copy_(mean.expand(-1, N, *mean.shape[2:]))

    def average_buffers(self) -> None:
        for buffer in self.fleet.buffers.values():
            if buffer.is_floating_point():
                self.spread(buffer, self.mean(buffer))


class LocalSGD(Crowd):
    """Weights and optimizer states are averaged at every meeting."""

    def meet(self, step: int, losses: Tensor) -> None:
        for tensor in (self.fleet.weights, *self.rule.states()):
            self.spread(tensor, self.mean(tensor))
        self.average_buffers()


class DiLoCo(Crowd):
    """An outer step on the mean of what the replicas have changed; optimizer states are kept."""

    schedule = "warm-up and cosine"

    def __init__(self, bench: Bench, runs: Sequence[Run]) -> None:
        super().__init__(bench, runs)
        self._slow = self.mean(self.fleet.weights)
        self._velocity = torch.zeros_like(self._slow)

    def meet(self, step: int, losses: Tensor) -> None:
        _outer_step(self._slow, self._velocity, self.mean(self.fleet.weights))
        self.spread(self.fleet.weights, self._slow)
        self.average_buffers()


class PBT(Crowd):
    """The worst quarter takes over from the best, and explores; as Ray's defaults have it.

    Its members begin over the same four decades as a scout.
    """

    def __init__(self, bench: Bench, runs: Sequence[Run]) -> None:
        super().__init__(bench, runs)
        decades = hdet.Scout().decades
        span = 10 ** (decades * (torch.arange(N) / (N - 1) - 0.5)).to(self.peaks)
        self._low, self._high = self.peaks * span[0], self.peaks * span[-1]
        self.peaks = self.peaks * span.repeat(len(runs))[:, None]
        self._draws = [torch.Generator().manual_seed(run.seed) for run in runs]

    def meet(self, step: int, losses: Tensor) -> None:
        if step >= self.bench.plan.steps:
            return
        for run, draw in enumerate(self._draws):
            row = losses[run].nan_to_num(math.inf)
            order = (run * N + row.argsort()).tolist()
            for worst, best in zip(order[-N // 4 :], order[: N // 4], strict=True):
                self._exploit(worst, best, draw)

    def _exploit(self, worst: int, best: int, draw: torch.Generator) -> None:
        tensors = [self.fleet.weights, *self.rule.states(), *self.fleet.buffers.values()]
        for tensor in tensors:
            tensor[worst] = tensor[best]
        chance, way = torch.rand(2, generator=draw).tolist()
        if chance < 0.25:
            low, high = float(self._low[worst, 0]), float(self._high[worst, 0])
            self.peaks[worst] = low * (high / low) ** way
        else:
            self.peaks[worst] = self.peaks[best] * (1.2 if way < 0.5 else 0.8)

    def delegates(self) -> list[int]:
        best: list[int] = self.last.nan_to_num(math.inf).argmin(1).tolist()
        return best


class Steered(Crowd):
    """Shared gradients, a spread, and a controller that the library asks."""

    shares_gradients = True

    def __init__(self, bench: Bench, runs: Sequence[Run], begin: int = 0) -> None:
        super().__init__(bench, runs)
        self.begin = begin
        self._places = [0] * begin + places(bench.plan.steps, begin)
        self._captains = [self.captain(run) for run in runs]
        for run, captain in zip(runs, self._captains, strict=True):
            captain.start_if_due(begin, self._base_lrs(run, begin))
            captain.fan_out()

    def captain(self, run: Run) -> KnobBank:
        raise NotImplementedError

    def scores(self) -> list[Any]:
        """What a probe says of the replicas of every run; nothing without one."""
        return [None] * len(self.runs)

    def place(self, step: int) -> int:
        return self._places[min(step, self.bench.plan.steps - 1)]

    def _base_lrs(self, run: Run, step: int) -> list[float]:
        return [run.lr * self.wave.lrs[self.place(step)]] * len(self.bench.task.groups)

    def lrs(self, step: int) -> Tensor:
        rows = [
            captain.lrs(self._base_lrs(run, step), replica)
            for run, captain in zip(self.runs, self._captains, strict=True)
            for replica in range(N)
        ]
        return torch.tensor(rows, dtype=torch.float64).to(self.fleet.weights)

    def meet(self, step: int, losses: Tensor) -> None:
        scores = self.scores()
        self.spread(self.fleet.weights, self.mean(self.fleet.weights))
        self.average_buffers()
        rows = zip(self.runs, self._captains, losses.tolist(), scores, strict=True)
        for run, captain, row, told in rows:
            if not all(map(math.isfinite, row)):
                continue  # shared gradients: all are lost at once
            captain.move_knobs(row, range(N), scores=told)
            captain.cycle += 1
            captain.start_if_due(step, self._base_lrs(run, step))
            captain.fan_out()

    def train(self) -> list[Ended]:
        ended = super().train()
        moved = [[knob.state.scale for knob in captain.knobs] for captain in self._captains]
        return [end._replace(notes={"moved": m}) for end, m in zip(ended, moved, strict=True)]


class Paper(Steered):
    """The paper's preset: a spread of 1/9, its controller after the warm-up."""

    def captain(self, run: Run) -> KnobBank:
        groups, steps = self.bench.task.groups, self.bench.plan.steps
        return KnobBank(
            lr_knobs((LearningRate(),), groups, 1 / 9),
            num_replicas=N,
            design="permutation",
            sync_every=SYNC_EVERY,
            seed=0,
            controller=hdet.PaperController(warmup_steps=math.ceil(0.3 * steps)),
            total_steps=steps,
            one_cycle=OneCycleBounds([run.lr] * len(groups), [run.lr / 25e4] * len(groups)),
        )


class Tracked(Steered):
    """A tracker, which compares replicas by a probe at the mean of their last steps."""

    shared, relative = True, False

    def __init__(self, bench: Bench, runs: Sequence[Run], begin: int = 0) -> None:
        super().__init__(bench, runs, begin)
        self._tail = hdet.Probe(bench.task.probe).tail_steps(SYNC_EVERY)
        self._iterates = torch.zeros_like(self.fleet.weights)
        self._num_iterates = 0

    def captain(self, run: Run) -> KnobBank:
        knob = LearningRate(shared=self.shared)
        return KnobBank(
            lr_knobs((knob,), self.bench.task.groups, 1 / 9),
            num_replicas=N,
            design="orthogonal",
            sync_every=SYNC_EVERY,
            seed=0,
            controller=hdet.Tracker(relative=self.relative),
            total_steps=self.bench.plan.steps,
        )

    def after(self, step: int) -> None:
        steps = self.bench.plan.steps
        left = min(-step % SYNC_EVERY, steps - step)
        if left < self._tail:
            self._iterates += self.fleet.weights
            self._num_iterates += 1

    def scores(self) -> list[Any]:
        mean = self._iterates / self._num_iterates
        self._iterates, self._num_iterates = torch.zeros_like(mean), 0
        if not any(captain.is_spread() for captain in self._captains):
            return [None] * len(self.runs)
        found = self.fleet.evaluate(self.bench.task.probe, weights=mean)
        rows: list[Any] = found.double().view(len(self.runs), N, -1).tolist()
        return rows


class ByGroup(Tracked):
    shared, relative = False, True


def by_group(bench: Bench, runs: Sequence[Run]) -> list[Ended]:
    """hdet with `knobs=[lr()]`: a scout, then one learning rate per group around what it found.

    All of a stack begin when the last has found something. There is no guard.
    """
    legs, _ = set_out(bench, runs, by="probe")
    found = [Run(leg.peaks[0], leg.seed) for leg in legs]
    return ByGroup(bench, found, max(leg.begin for leg in legs)).train()


def crowd(kind: type[Crowd]) -> Callable[[Bench, Sequence[Run]], list[Ended]]:
    return lambda bench, runs: kind(bench, runs).train()


# All of them ----------------------------------------------------------------------------------


class Method(NamedTuple):
    train: Callable[[Bench, Sequence[Run]], list[Ended]]
    takes_lr: bool = True
    """Whether it is tried from several starts."""
    rows: int = 1
    """Of a fleet, for each run."""
    kind: str = "peer"
    optimizers: tuple[str, ...] = ("AdamW", "SGD")


ADAM = ("AdamW",)
METHODS: dict[str, Method] = {
    "hdet": Method(with_scout, kind="hdet"),
    "hdet, a shorter scout": Method(partial(with_scout, scout=hdet.Scout(share=0.02)), kind="hdet"),
    "hdet, no probe": Method(partial(with_scout, by="losses"), kind="default"),
    "hdet, one device": Method(partial(with_scout, by="held out"), kind="default"),
    "hdet, by group": Method(by_group, rows=N, kind="groups", optimizers=("AdamW",)),
    "hdet, no scout": Method(rescued, kind="guard"),
    "OneCycleLR": Method(plain, kind="plain"),
    "warm-up and cosine": Method(partial(plain, schedule="warm-up and cosine"), kind="second"),
    "paper": Method(crowd(Paper), rows=N, kind="paper"),
    "Prodigy": Method(
        partial(peer, rule="Prodigy", schedule="cosine"), takes_lr=False, optimizers=ADAM
    ),
    "Prodigy, warm-up": Method(
        partial(peer, rule="Prodigy, warm-up", schedule="warm-up and cosine"),
        takes_lr=False,
        optimizers=ADAM,
    ),
    "D-Adapt Adam": Method(
        partial(peer, rule="D-Adapt Adam", schedule="warm-up and cosine"),
        takes_lr=False,
        optimizers=ADAM,
    ),
    "DoG": Method(partial(peer, rule="DoG", schedule="constant"), takes_lr=False),
    "L-DoG": Method(partial(peer, rule="L-DoG", schedule="constant"), takes_lr=False),
    "Schedule-Free AdamW": Method(schedule_free, optimizers=ADAM),
    "GreedyLR": Method(greedy),
    "PBT": Method(crowd(PBT), rows=N),
    "Local SGD": Method(crowd(LocalSGD), rows=N, kind="control"),
    "DiLoCo": Method(crowd(DiLoCo), rows=N, kind="control"),
    "outer Nesterov, one worker": Method(outer_nesterov, kind="control"),
    "LR range test": Method(range_test, takes_lr=False, kind="control"),
}
