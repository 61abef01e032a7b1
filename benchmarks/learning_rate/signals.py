"""Which signal tells how a learning rate will end? -> signals.json

    python -m benchmarks.learning_rate.signals [--quick] [--only language|vision] [--data FOLDER]
        [--out FILE]

A run is trained once at a good learning rate, and kept early, in the middle and late. From each
point eight learning rates, from an eighth to eight times the run's own, are judged twice. The
truth: each is kept to the end of the run, cool-down included, and ends with a validation loss. The
signal: one cycle of hdet, in which each is a replica; repeated with other batches. A table says,
for each signal, how its order of the eight agrees with the truth (rank correlation), which learning
rate it prefers on average against the best one (bias, in factors of two), and how much of its
variation is chance (noise). All cost the same: the training loss, which is free, has a longer cycle
by as many steps as the probe takes (a forward is a third of a step).

A language model on tinyshakespeare and a convolutional network on CIFAR-10, from FOLDER or
$HDET_DATA (see benchmarks/zoo/data.py); without them, and with --quick, on scikit-learn's data.
"""

import argparse
import copy
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import hdet
from benchmarks.learning_rate.signal_tasks import FULL, QUICK, Settings, Task, language, vision
from benchmarks.result_file import RESULTS, read_result, write_result
from hdet.control.assignment import levels

N = 8
SPREAD = 7.0  # from 1/8 to 8 times
PHASES = {"early": 0.06, "middle": 0.4, "late": 0.75}
SIGNALS = {"training": None, "probe": 0.0, "averaged_probe": 0.5}
"""Signal -> the share of the cycle over which its probe averages the weights."""
PROBE_BATCHES = 3


def schedule(steps: int) -> Callable[[int], float]:
    """Warm up, stay, and cool down over the last fifth."""

    def at(step: int) -> float:
        return max(min((step + 1) / (0.05 * steps), 1.0, (steps - step) / (0.2 * steps)), 1e-3)

    return at


class Point(NamedTuple):
    """A run on its way."""

    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]


def make_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=0.1, fused=True)


def trunk(task: Task, settings: Settings, device: torch.device) -> dict[str, Point]:
    """One plain run, kept at each phase."""
    torch.manual_seed(0)
    model = task.model().to(device)
    optimizer = make_optimizer(task, model)
    factor = schedule(settings.steps)
    wanted = {int(share * settings.steps): phase for phase, share in PHASES.items()}
    points = {}
    for step in range(max(wanted) + 1):
        if step in wanted:
            states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            points[wanted[step]] = Point(step, *states)
        for group in optimizer.param_groups:
            group["lr"] = task.lr * factor(step)
        optimizer.zero_grad()
        task.loss(model, *task.batch(step, 1)).backward()
        optimizer.step()
    return points


class Ensemble:
    """Eight learning rates from one point on, each a replica."""

    def __init__(
        self, task: Task, point: Point, settings: Settings, device: torch.device, **hdets: Any
    ) -> None:
        self.task, self.point = task, point
        self.model = task.model().to(device)
        self.replicas = hdet.StackedReplicas(self.model, N)
        self.optimizer = self.replicas.optimizer(make_optimizer(task, self.model))
        self.model.load_state_dict(point.model)
        self.optimizer.load_state_dict(point.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = task.lr
        factor = schedule(settings.steps)
        base = LambdaLR(self.optimizer, lambda step: factor(point.step + step))
        self.scheduler = hdet.HDET(
            base,
            model=self.model,
            replicas=self.replicas,
            knobs=[hdet.lr(spread=SPREAD, shared=True)],
            controller=None,
            design="latin",
            gradients="local",
            **hdets,
            preset="paper",
        )

    def train(self, steps: int, seed: int, *, last_step: bool = True) -> None:
        """Private batches; without the last scheduler step the replicas do not converge."""
        for step in range(steps):
            batch = self.task.batch(seed * 100_003 + step, N)
            losses = self.replicas.losses(self.task.loss, *batch)
            self.optimizer.zero_grad()
            losses.sum().backward()
            self.optimizer.step()
            if last_step or step + 1 < steps:
                self.scheduler.step(losses.detach())


def judge(task: Task, model: nn.Module, num: int) -> float:
    model.eval()
    with torch.no_grad():
        losses = [float(task.loss(model, *task.held_out(10**6 + i, 8))) for i in range(num)]
    model.train()
    return fmean(losses)


def truth_of(
    task: Task, point: Point, settings: Settings, device: torch.device, seed: int
) -> dict[float, float]:
    """Learning rate -> the validation loss at the end of the run."""
    left = settings.steps - point.step
    one = Ensemble(task, point, settings, device, sync_every=left)
    if device.type == "cuda":
        one.replicas.compile(backend="eager")  # for its CUDA graphs: the run is long
    one.train(left, seed=77 + seed, last_step=False)
    ends = [judge(task, module, 8) for module in one.replicas.modules(None)]
    worst = max([end for end in ends if math.isfinite(end)] or [0.0])
    column = levels("latin", N, ["lr"], seed=0, cycle=0)[0]
    pairs = zip(column, ends, strict=True)
    return {level: end if math.isfinite(end) else worst for level, end in pairs}


def signals_of(
    task: Task, point: Point, settings: Settings, device: torch.device, repeat: int
) -> dict[str, dict[float, float]]:
    """Signal -> learning rate -> what it says after one cycle."""
    results: dict[str, dict[float, float]] = {}
    column = levels("latin", N, ["lr"], seed=0, cycle=0)[0]
    for name, tail in SIGNALS.items():
        batches = [task.held_out(repeat * 1000 + i, 1) for i in range(PROBE_BATCHES)]
        cycle, probe = settings.cycle, None
        if tail is None:
            cycle += PROBE_BATCHES // 3
        else:
            probe = hdet.Probe(lambda model, batch: task.loss(model, *batch), batches, tail=tail)
        with tempfile.TemporaryDirectory() as folder:
            one = Ensemble(
                task, point, settings, device, sync_every=cycle, probe=probe, record=folder
            )
            one.train(cycle, seed=1000 + repeat)
            lines = (Path(folder) / "record.jsonl").read_text().splitlines()
        line = next(line for line in map(json.loads, lines) if line["event"] == "cycle")
        row = line["losses" if tail is None else "scores"]
        finite = [value for value in row if value is not None]
        filled = [max(finite) if value is None else value for value in row]
        results[name] = dict(zip(column, filled, strict=True))
    return results


def rank_correlation(one: Mapping[float, float], other: Mapping[float, float]) -> float:
    places = [
        {level: place for place, level in enumerate(sorted(curve, key=lambda level: curve[level]))}
        for curve in (one, other)
    ]
    squares = sum((places[0][level] - places[1][level]) ** 2 for level in one)
    return 1 - 6 * squares / (len(one) * (len(one) ** 2 - 1))


def mean_of(curves: Sequence[Mapping[float, float]]) -> dict[float, float]:
    return {level: fmean(curve[level] for curve in curves) for level in curves[0]}


def lowest(curve: Mapping[float, float]) -> float:
    return min(curve, key=lambda level: curve[level])


def row_of(
    task: str,
    phase: str,
    name: str,
    each: Sequence[Mapping[float, float]],
    truth: Mapping[float, float],
) -> dict[str, Any]:
    mean = mean_of(each)
    # What a repetition adds to all eight alike, such as harder batches, compares nothing.
    centred = [{level: one[level] - fmean(one.values()) for level in truth} for one in each]
    chance = fmean(pstdev([one[level] for one in centred]) for level in truth)
    return {
        "task": task,
        "phase": phase,
        "signal": name,
        "corr": fmean(rank_correlation(one, truth) for one in each),
        "bias": 3 * (lowest(mean) - lowest(truth)),
        "noise": chance / pstdev(mean.values()),
        "mean": [mean[level] for level in sorted(mean)],
        "truth": [truth[level] for level in sorted(truth)],
    }


# Tasks -------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short runs")
    parser.add_argument("--only", choices=("language", "vision"), help="the other is kept")
    parser.add_argument("--data", type=Path, default=os.environ.get("HDET_DATA"))
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    settings = QUICK if options.quick else FULL
    out = options.out or RESULTS / ("signals.quick.json" if options.quick else "signals.json")
    folder = None if options.data is None or options.quick else Path(options.data)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start, rows = time.perf_counter(), []
    if options.only is not None and out.exists():
        rows = [r for r in json.loads(out.read_text())["rows"] if r["task"] != options.only]

    def say(text: str) -> None:
        print(f"{time.perf_counter() - start:5.0f} s  {text}", flush=True)

    for make in (language, vision):
        if options.only not in (None, make.__name__):
            continue
        task = make(folder, settings, device)
        for phase, point in trunk(task, settings, device).items():
            truth = mean_of(
                [truth_of(task, point, settings, device, seed) for seed in range(settings.truths)]
            )
            say(f"{task.name}, {phase}: the truth is known")
            each = [
                signals_of(task, point, settings, device, repeat)
                for repeat in range(settings.repeats)
            ]
            say(f"{task.name}, {phase}: the signals have spoken {settings.repeats} times")
            for name in SIGNALS:
                rows.append(row_of(task.name, phase, name, [one[name] for one in each], truth))
            write(out, rows, settings, folder)
    print(table(rows), flush=True)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{'task':<10}{'phase':<8}{'signal':<16}{'corr':>7}{'bias':>7}{'noise':>7}"]
    lines += [
        f"{row['task']:<10}{row['phase']:<8}{row['signal']:<16}"
        f"{row['corr']:>7.2f}{row['bias']:>7.1f}{row['noise']:>7.2f}"
        for row in rows
    ]
    return "\n".join(lines)


def write(
    out: Path, rows: Sequence[Mapping[str, Any]], settings: Settings, folder: Path | None
) -> None:
    write_result(
        out,
        headline=headline(rows),
        settings={
            **settings._asdict(),
            "replicas": N,
            "probe_batches": PROBE_BATCHES,
            "data": "scikit-learn" if folder is None else "tinyshakespeare, CIFAR-10",
        },
        seeds=range(settings.repeats),
        kept=read_result(out),
        rows=list(rows),
    )


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The mean correlation of each signal with the truth, in each phase of a run."""

    def mean(name: str, phase: str) -> float | None:
        found = [row["corr"] for row in rows if (row["signal"], row["phase"]) == (name, phase)]
        return fmean(found) if found else None

    return {f"{name}_{phase}_corr": mean(name, phase) for name in SIGNALS for phase in PHASES}


if __name__ == "__main__":
    main()
