"""Which signal tells how a learning rate will end: training loss, probe, or averaged probe?

    python -m benchmarks.signals [--quick] [--data FOLDER] [--out FILE]

A run is trained once at a good learning rate, and kept early, in the middle and late. From each
point eight learning rates, from an eighth to eight times the run's own, are judged twice. The
truth: each is kept to the end of the run, cool-down included, and ends with a validation loss. The
signal: one cycle of hdet, in which each is a replica; repeated with other batches. A table says,
for each signal, how its order of the eight agrees with the truth (correlation), which learning rate
it prefers on average against the best one (bias, in factors of two), and how much of its variation
is chance (noise).

A language model on text (tinyshakespeare in FOLDER or $HDET_DATA; without it the descriptions that
come with scikit-learn) and a convolutional network on scikit-learn's digits.
"""

import argparse
import copy
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import hdet
from benchmarks.models import GPT, Size, gpt_loss
from hdet.design import levels

RESULTS = Path(__file__).parent / "results"
N = 8
SPREAD = 7.0  # from 1/8 to 8 times
PHASES = {"early": 0.06, "middle": 0.4, "late": 0.75}
SIGNALS = {"training": None, "probe": 0.0, "averaged_probe": 0.5}


class Settings(NamedTuple):
    steps: int
    cycle: int
    repeats: int


FULL = Settings(steps=1200, cycle=50, repeats=8)
QUICK = Settings(steps=120, cycle=10, repeats=3)


class Task(NamedTuple):
    """What is learned."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    batch: Callable[[int], tuple[Tensor, ...]]
    """A seed -> the batch of one replica."""
    held_out: Callable[[int], tuple[Tensor, ...]]
    """A seed -> as much that nobody trains on."""
    lr: float


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
    return torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=0.1)


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
        task.loss(model, *task.batch(step)).backward()
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
        )

    def train(self, steps: int, seed: int, *, last_step: bool = True) -> None:
        """Private batches; without the last scheduler step the replicas do not converge."""
        for step in range(steps):
            parts = [self.task.batch((seed * 100_003 + step) * N + r) for r in range(N)]
            batch = [torch.cat(each) for each in zip(*parts, strict=True)]
            losses = self.replicas.losses(self.task.loss, *batch)
            self.optimizer.zero_grad()
            losses.sum().backward()
            self.optimizer.step()
            if last_step or step + 1 < steps:
                self.scheduler.step(losses.detach())


def judge(task: Task, model: nn.Module, num: int) -> float:
    model.eval()
    with torch.no_grad():
        losses = [float(task.loss(model, *task.held_out(10**6 + i))) for i in range(num)]
    model.train()
    return fmean(losses)


def truth_of(
    task: Task, point: Point, settings: Settings, device: torch.device
) -> dict[float, float]:
    """Learning rate -> the validation loss at the end of the run."""
    left = settings.steps - point.step
    one = Ensemble(task, point, settings, device, sync_every=left)
    one.train(left, seed=77, last_step=False)
    ends = [judge(task, module, 8) for module in one.replicas.modules(None)]
    worst = max([end for end in ends if math.isfinite(end)] or [0.0])
    column = levels("latin", N, ["lr"], seed=0, cycle=0)[0]
    pairs = zip(column, ends, strict=True)
    return {level: end if math.isfinite(end) else worst for level, end in pairs}


def signals_of(
    task: Task, point: Point, settings: Settings, device: torch.device, repeat: int
) -> dict[str, dict[float, float]]:
    """Signal -> learning rate -> what it says after one cycle."""
    told: dict[str, dict[float, float]] = {}
    for tail in (0.0, 0.5):
        batches = [task.held_out(repeat * 1000 + i) for i in range(3)]
        probe = hdet.Probe(lambda model, batch: task.loss(model, *batch), batches, tail=tail)
        with tempfile.TemporaryDirectory() as folder:
            one = Ensemble(
                task,
                point,
                settings,
                device,
                sync_every=settings.cycle,
                probe=probe,
                record=folder,
            )
            one.train(settings.cycle, seed=1000 + repeat)
            lines = (Path(folder) / "record.jsonl").read_text().splitlines()
        line = next(line for line in map(json.loads, lines) if line["event"] == "cycle")
        column = levels("latin", N, ["lr"], seed=0, cycle=0)[0]
        rows = {"averaged_probe" if tail else "probe": line["scores"]}
        if not tail:
            rows["training"] = line["losses"]
        for name, row in rows.items():
            finite = [value for value in row if value is not None]
            filled = [max(finite) if value is None else value for value in row]
            told[name] = dict(zip(column, filled, strict=True))
    return told


def correlation(one: Mapping[float, float], other: Mapping[float, float]) -> float:
    first, second = [one[level] for level in one], [other[level] for level in one]
    a, b = fmean(first), fmean(second)
    product = fmean((x - a) * (y - b) for x, y in zip(first, second, strict=True))
    spread = pstdev(first) * pstdev(second)
    return product / spread if spread else 0.0


def lowest(curve: Mapping[float, float]) -> float:
    return min(curve, key=lambda level: curve[level])


def row_of(
    task: str,
    phase: str,
    name: str,
    each: Sequence[Mapping[float, float]],
    truth: Mapping[float, float],
) -> dict[str, Any]:
    mean = {level: fmean(one[level] for one in each) for level in truth}
    chance = fmean(pstdev([one[level] for one in each]) for level in truth)
    return {
        "task": task,
        "phase": phase,
        "signal": name,
        "corr": fmean(correlation(one, truth) for one in each),
        "bias": 3 * (lowest(mean) - lowest(truth)),
        "noise": chance / pstdev(mean.values()),
        "mean": [mean[level] for level in sorted(mean)],
        "truth": [truth[level] for level in sorted(truth)],
    }


# Tasks -------------------------------------------------------------------------------------------


def language(data: Path | None, device: torch.device) -> Task:
    path = None if data is None else data / "tinyshakespeare.txt"
    if path is not None and path.exists():
        text = path.read_bytes()
    else:
        import sklearn.datasets

        folder = Path(sklearn.datasets.__file__).parent / "descr"
        text = b"".join(file.read_bytes() for file in sorted(folder.glob("*.rst")))
    tokens = torch.tensor(list(text), device=device)
    cut = int(0.9 * len(tokens))

    def some(part: Tensor) -> Callable[[int], tuple[Tensor, ...]]:
        def draw(seed: int) -> tuple[Tensor, ...]:
            starts = torch.randint(
                len(part) - 65, (8,), generator=torch.Generator().manual_seed(seed)
            )
            return (torch.stack([part[start : start + 65] for start in starts.tolist()]),)

        return draw

    size = Size(256, 64, 2, 4, 64)
    return Task(
        "language", lambda: GPT(size), gpt_loss, some(tokens[:cut]), some(tokens[cut:]), 4e-3
    )


def vision(device: torch.device) -> Task:
    from hdet.digits import Digits, network

    digits = Digits(device)

    def some(low: int, high: int) -> Callable[[int], tuple[Tensor, ...]]:
        def draw(seed: int) -> tuple[Tensor, ...]:
            generator = torch.Generator().manual_seed(seed)
            places = torch.randint(low, high, (16,), generator=generator)
            return digits.x[places], digits.y[places]

        return draw

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    return Task("vision", lambda: network(device), loss, some(0, 1200), some(1200, 1797), 4e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short runs")
    parser.add_argument("--data", type=Path, default=os.environ.get("HDET_DATA"))
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    settings = QUICK if options.quick else FULL
    out = options.out or RESULTS / ("signals.quick.json" if options.quick else "signals.json")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start, rows = time.perf_counter(), []
    data = None if options.data is None else Path(options.data)
    for task in (language(data, device), vision(device)):
        points = trunk(task, settings, device)
        for phase, point in points.items():
            truth = truth_of(task, point, settings, device)
            each = []
            for repeat in range(settings.repeats):
                each.append(signals_of(task, point, settings, device, repeat))
                took = time.perf_counter() - start
                print(
                    f"\r{took:5.0f} s  {task.name}, {phase}: {repeat + 1} of {settings.repeats}  ",
                    end="",
                    flush=True,
                )
            for name in SIGNALS:
                rows.append(row_of(task.name, phase, name, [one[name] for one in each], truth))
    print(f"\n{'task':<10}{'phase':<8}{'signal':<16}{'corr':>7}{'bias':>7}{'noise':>7}")
    for row in rows:
        print(
            f"{row['task']:<10}{row['phase']:<8}{row['signal']:<16}"
            f"{row['corr']:>7.2f}{row['bias']:>7.1f}{row['noise']:>7.2f}"
        )
    headline = {
        f"{name}_{phase}_corr": fmean(
            row["corr"] for row in rows if (row["signal"], row["phase"]) == (name, phase)
        )
        for name in SIGNALS
        for phase in PHASES
    }
    result = {
        "headline": headline,
        "settings": {**settings._asdict(), "replicas": N, "probe_batches": 3, "tail": 0.5},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "rows": rows,
    }
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
