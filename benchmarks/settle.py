"""From any starting learning rate: does one run end as good as the best of a grid?

    python -m benchmarks.settle [--quick] [--only language] [--data FOLDER] [--out FILE]

For every task a grid of fixed learning rates is trained with OneCycleLR. The best is picked on one
seed and trained again on the seeds that are reported: its loss there is the reference. Then every
method starts from the best learning rate times 1/1000 to 1000, with the same steps, samples and
schedule. Regret is (validation loss - reference) / reference. Runs are kept in FILE as they end;
the same command goes on where it was stopped (delete FILE after a change of the code).

Tasks so far: a byte-level GPT (tinyshakespeare in FOLDER or $HDET_DATA, else scikit-learn's texts)
and a convolutional network with BatchNorm (CIFAR-10, else scikit-learn's digits); AdamW and SGD.
Methods so far: plain OneCycleLR, hdet with a scout judged by training losses (nothing but
`scout=hdet.Scout()` is added) and by a probe, and the paper's controller.
"""

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks import data
from benchmarks.models import GPT, ConvNet, Size, image_loss

RESULTS = Path(__file__).parent / "results"
N = 8
STARTS = (1e-3, 1e-2, 0.1, 1 / 3, 1.0, 3.0, 10.0, 100.0, 1000.0)
SELECTION_SEED = 100
STEP_OF_GRID = 2.0


class Settings(NamedTuple):
    steps: int
    seeds: int
    starts: Sequence[float]


FULL = Settings(1500, 5, STARTS)
QUICK = Settings(600, 1, (1e-3, 0.1, 1.0, 10.0, 1000.0))


# Tasks ----------------------------------------------------------------------------------------


class Task(NamedTuple):
    """What is learned. `judge` sees data that neither training nor probes have seen."""

    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    batch: Callable[[int], tuple[Tensor, ...]]
    """A step -> the global batch."""
    score: Callable[[Any], Tensor]
    judge: Callable[[Any], float]


def language(seed: int, folder: Path | None, device: torch.device) -> Task:
    tokens = torch.tensor(list(data.text(folder)), device=device)
    cut, size = int(0.9 * len(tokens)), Size(256, 48, 2, 4, 64)
    reach = torch.arange(size.context + 1, device=device)

    def some(part: Tensor, num: int, draw: int) -> Tensor:
        places = torch.Generator().manual_seed(draw)
        starts = torch.randint(len(part) - len(reach), (num, 1), generator=places)
        return part[starts.to(device) + reach]

    def losses(model: Any, held: Tensor) -> Tensor:
        logits = model(held[:, :-1]).flatten(0, 1)
        each = F.cross_entropy(logits, held[:, 1:].flatten(), reduction="none")
        return each.view(len(held), -1).mean(1)

    middle = (cut + len(tokens)) // 2
    held, test = some(tokens[cut:middle], 64, 77), some(tokens[middle:], 256, 78)
    return Task(
        partial(GPT, size),
        lambda model, x: losses(model, x).mean(),
        lambda step: (some(tokens[:cut], 32, seed * 1_000_003 + step),),
        lambda model: losses(model, held),
        lambda model: float(losses(model, test).mean()),
    )


def vision(seed: int, folder: Path | None, device: torch.device) -> Task:
    images = data.images(folder, device)
    half = len(images.x_test) // 2

    def batch(step: int) -> tuple[Tensor, ...]:
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
        places = torch.randint(len(images.x), (128,), generator=draw).to(device)
        return images.x[places], images.y[places]

    def losses(model: Any, part: slice) -> Tensor:
        return F.cross_entropy(model(images.x_test[part]), images.y_test[part], reduction="none")

    return Task(
        partial(ConvNet, images.x.shape[1], 16),
        image_loss,
        batch,
        lambda model: losses(model, slice(0, min(half, 256))),
        lambda model: float(losses(model, slice(half, None)).mean()),
    )


TASKS: dict[str, tuple[Callable[..., Task], str, float]] = {
    # task, optimizer, the middle of its grid
    "language, AdamW": (language, "AdamW", 1e-2),
    "language, SGD": (language, "SGD", 0.2),
    "vision, AdamW": (vision, "AdamW", 1e-2),
    "vision, SGD": (vision, "SGD", 0.1),
}


def make_optimizer(kind: str, model: nn.Module, lr: float) -> Optimizer:
    if kind == "SGD":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)


# Methods --------------------------------------------------------------------------------------


class Job(NamedTuple):
    """One run."""

    task: str
    method: str
    lr: float
    seed: int
    steps: int


class Ended(NamedTuple):
    loss: float
    lr: float
    """The learning rate it was trained with, at its highest."""


def train(job: Job, folder: Path | None) -> Ended:
    make, kind, _ = TASKS[job.task]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = make(job.seed, folder, device)
    torch.manual_seed(job.seed)
    model = task.model().to(device)
    optimizer = make_optimizer(kind, model, job.lr)
    if job.method == "fixed":
        return train_plain(job, task, model, optimizer)
    ensemble = hdet.StackedReplicas(model, N)
    stacked = ensemble.optimizer(optimizer)
    base = OneCycleLR(stacked, job.lr, total_steps=job.steps)
    common: dict[str, Any] = {"model": model, "replicas": ensemble, "sync_every": 50}
    if job.method == "paper":
        scheduler = hdet.HDET(base, **common)
    else:
        probe = task.score if job.method == "hdet, probe" else None
        calm: dict[str, Any] = {"spread": 0.0, "controller": None}
        scheduler = hdet.HDET(base, scout=hdet.Scout(), probe=probe, **calm, **common)
    highest = 0.0
    for step in range(job.steps):
        stacked.zero_grad()
        losses = ensemble.losses(task.loss, *task.batch(step))
        losses.sum().backward()
        stacked.step()
        scheduler.step(losses.detach())
        if step > 0.05 * job.steps:  # before that a scout has only begun
            highest = max(highest, *scheduler.get_base_lr())
    with torch.no_grad():
        return Ended(task.judge(ensemble.consensus().eval()), highest)


def train_plain(job: Job, task: Task, model: nn.Module, optimizer: Optimizer) -> Ended:
    scheduler = OneCycleLR(optimizer, job.lr, total_steps=job.steps)
    for step in range(job.steps):
        optimizer.zero_grad()
        task.loss(model, *task.batch(step)).backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        return Ended(task.judge(model.eval()), job.lr)


METHODS = ("fixed", "hdet", "hdet, probe", "paper")


# The bench ------------------------------------------------------------------------------------


class Bench:
    """Makes the runs that are not in the file yet, and keeps each as it ends."""

    def __init__(self, out: Path, folder: Path | None, workers: int, resume: bool) -> None:
        self._out, self._folder, self._workers = out, folder, workers
        self._start = time.perf_counter()
        rows = json.loads(out.read_text())["runs"] if resume and out.exists() else []
        self.known = {Job(**row["job"]): Ended(row["loss"] or math.inf, row["lr"]) for row in rows}

    def __call__(self, what: str, jobs: Sequence[Job]) -> list[Ended]:
        missing = [job for job in dict.fromkeys(jobs) if job not in self.known]
        with ProcessPoolExecutor(self._workers) as pool:
            work = partial(_work, folder=self._folder)
            for number, (job, ended) in enumerate(
                zip(missing, pool.map(work, missing), strict=True), start=1
            ):
                self.known[job] = ended
                took = time.perf_counter() - self._start
                print(f"{took:6.0f} s  {what}: {number} of {len(missing)}", flush=True)
                self.write({})
        return [self.known[job] for job in jobs]

    def write(self, result: dict[str, Any]) -> None:
        runs = [
            {"job": job._asdict(), "loss": _finite(ended.loss), "lr": ended.lr}
            for job, ended in self.known.items()
        ]
        self._out.parent.mkdir(exist_ok=True)
        self._out.write_text(json.dumps({**result, "runs": runs}, indent=1) + "\n")


def _work(job: Job, folder: Path | None) -> Ended:
    torch.set_num_threads(1)
    return train(job, folder)


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def settle(name: str, settings: Settings, bench: Bench) -> list[dict[str, Any]]:
    """The regret of every method from every start, on one task."""
    best = best_of_grid(name, settings, bench)
    seeds = range(settings.seeds)
    references = bench(
        f"{name}, the best again", [Job(name, "fixed", best, s, settings.steps) for s in seeds]
    )
    jobs = [
        Job(name, method, best * start, seed, settings.steps)
        for method in METHODS
        for start in settings.starts
        for seed in seeds
    ]
    rows = []
    for job, ended in zip(jobs, bench(f"{name}, all starts", jobs), strict=True):
        reference = references[job.seed].loss
        rows.append(
            {
                "task": name,
                "method": job.method,
                "start": job.lr / best,
                "seed": job.seed,
                "best_lr": best,
                "lr": ended.lr,
                "loss": _finite(ended.loss),
                "regret_pct": _finite(100 * (ended.loss - reference) / reference),
            }
        )
    return rows


def best_of_grid(name: str, settings: Settings, bench: Bench) -> float:
    """Widened while the best sits at an end; picked on a seed that is not reported."""
    places = list(range(-4, 5))
    middle = TASKS[name][2]
    while True:
        grid = [middle * STEP_OF_GRID**place for place in places]
        jobs = [Job(name, "fixed", lr, SELECTION_SEED, settings.steps) for lr in grid]
        losses = [ended.loss for ended in bench(f"{name}, grid", jobs)]
        best = min(range(len(grid)), key=losses.__getitem__)
        if 0 < best < len(grid) - 1:
            return grid[best]
        places += [places[0] - 1] if best == 0 else [places[-1] + 1]
        places.sort()


# Output ---------------------------------------------------------------------------------------


def regrets(rows: Sequence[dict[str, Any]], method: str) -> list[float]:
    chosen = [row["regret_pct"] for row in rows if row["method"] == method]
    return sorted(math.inf if regret is None else regret for regret in chosen)


def headline(rows: Sequence[dict[str, Any]], method: str) -> dict[str, Any]:
    found = regrets(rows, method)
    at_best = [r["regret_pct"] for r in rows if r["method"] == method and r["start"] == 1.0]
    return {
        "median_regret_pct": median(found),
        "p90_regret_pct": found[math.ceil(0.9 * len(found)) - 1],
        "worst_regret_pct": _finite(found[-1]),
        "harm_at_best_pct": median(at_best) if None not in at_best else None,
        "runs_lost": sum(not math.isfinite(regret) for regret in found),
    }


def table(rows: Sequence[dict[str, Any]], starts: Sequence[float]) -> str:
    heads = "".join(f"{f'x {start:.3g}':>9}" for start in starts)
    lines = [f"regret in %, mean over seeds\n{'task':<18}{'method':<14}{heads}"]
    for task in dict.fromkeys(row["task"] for row in rows):
        for method in METHODS:
            cells = ""
            for start in starts:
                found = [
                    math.inf if row["regret_pct"] is None else row["regret_pct"]
                    for row in rows
                    if (row["task"], row["method"]) == (task, method)
                    and math.isclose(row["start"], start)
                ]
                cells += f"{fmean(found):9.2f}" if found else f"{'':>9}"
            lines.append(f"{task:<18}{method:<14}{cells}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short runs, few starts, one seed")
    parser.add_argument("--only", default="", help="the beginning of task names")
    parser.add_argument("--seeds", type=int, help="fewer seeds than the full benchmark has")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", type=Path, default=os.environ.get("HDET_DATA"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    settings = QUICK if options.quick else FULL
    settings = settings._replace(seeds=options.seeds or settings.seeds)
    out = options.out or RESULTS / ("settle.quick.json" if options.quick else "settle.json")
    folder = None if options.data is None else Path(options.data)
    bench = Bench(out, folder, options.workers, resume=True)
    rows: list[dict[str, Any]] = []
    for name in TASKS:
        if name.startswith(options.only):
            rows += settle(name, settings, bench)
            bench.write(
                {
                    "headline": headline(rows, "hdet"),
                    "headline_with_a_probe": headline(rows, "hdet, probe"),
                    "settings": {**settings._asdict(), "replicas": N, "grid": STEP_OF_GRID},
                    "versions": {
                        "hdet": hdet.__version__,
                        "torch": torch.__version__,
                        "python": platform.python_version(),
                    },
                    "device": "cuda" if torch.cuda.is_available() else "cpu",
                    "rows": rows,
                }
            )
    print(table(rows, settings.starts))
    print(headline(rows, "hdet"))


if __name__ == "__main__":
    main()
