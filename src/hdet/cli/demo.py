"""`hdet demo`: a learning rate that is far too low, with hdet and without, side by side.

Both runs get the same model, learning rate, batches and number of steps, on handwritten digits that
install with pip. What is random is drawn from the step alone, so that a run that was stopped goes
on where it was.
"""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException, spawn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet._validation import check_choice, check_integer, check_positive
from hdet.cli.demo_data import BATCH, Digits, loss_of, network
from hdet.cli.progress import Display, Score, Status, display_for, number
from hdet.records.history import FILE_NAME, History
from hdet.replicas.factory import gloo_group
from hdet.report import build as report

SYNC_EVERY, NUM_MILESTONES = 10, 30
CHECKPOINT, PAGE, OURS, PLAIN = "checkpoint.pt", "report.html", "hdet", "plain"
ENGINES = ("stacked", "processes")


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What the demo was asked for."""

    replicas: int = 4
    steps: int = 3000
    lr: float = 1e-4
    """Some 300 times below what this network is usually trained with."""
    engine: Literal["stacked", "processes"] = "stacked"

    def __post_init__(self) -> None:
        check_integer("--replicas", self.replicas, at_least=1)
        check_integer("--steps", self.steps, at_least=1)
        check_positive("--lr", self.lr)
        check_choice("--engine", self.engine, ENGINES)
        if BATCH % self.replicas:
            raise ValueError(f"`--replicas` must divide {BATCH}, got {self.replicas}.")


class Outcome(NamedTuple):
    """What there is to tell when the demo ends or was stopped."""

    scores: list[Score]
    found: list[float]
    """For each run the peak of its schedule, scaled as it was at last."""
    step: int
    page: Path
    checkpoint: Path


# The two runs --------------------------------------------------------------------------------


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)


class DemoRun:
    """A model on its way: its optimizer, its scheduler, and how it makes a step."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: hdet.HDET,
        losses: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self._losses = losses
        self.score = Score(name, lr=scheduler.get_base_lr()[0])

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        losses = self._losses(x, y)
        losses.sum().backward()
        self.optimizer.step()
        self.scheduler.step(losses)
        self.score = self.score._replace(lr=self.scheduler.get_base_lr()[0])
        self._last = losses.detach()

    def judge(self, digits: Digits) -> None:
        with self.scheduler.consensus():
            loss, accuracy = digits.judge(self.model)
        self.scheduler.note(loss=loss, accuracy=accuracy)
        self.score = self.score._replace(
            training_loss=float(self._last.mean()), loss=loss, accuracy=accuracy
        )

    def save(self) -> dict[str, Any]:
        self.scheduler.converge()
        parts = (self.model, self.optimizer, self.scheduler)
        return {"states": [part.state_dict() for part in parts], "score": tuple(self.score)}

    def load(self, saved: dict[str, Any]) -> None:
        parts: tuple[Any, ...] = (self.model, self.optimizer, self.scheduler)
        for part, state in zip(parts, saved["states"], strict=True):
            part.load_state_dict(state)
        self.score = Score(*saved["score"])


def schedule(optimizer: torch.optim.Optimizer, settings: DemoSettings, **options: Any) -> hdet.HDET:
    base = OneCycleLR(optimizer, settings.lr, total_steps=settings.steps, cycle_momentum=False)
    return hdet.HDET(base, sync_every=SYNC_EVERY, **options)


AS_IT_COMES: dict[str, Any] = {}
WITHOUT: dict[str, Any] = {"scout": None, "guard": None}


class Contest:
    """Both runs in one process, or in each of several."""

    def __init__(self, settings: DemoSettings, folder: Path, device: torch.device) -> None:
        self.settings, self.digits, self.folder = settings, Digits(device), folder
        self.here = 0
        makers = {OURS: AS_IT_COMES, PLAIN: WITHOUT}
        make = self._stacked if settings.engine == "stacked" else self._distributed
        self.runs = [make(name, how, folder / name, device) for name, how in makers.items()]

    def _stacked(
        self, name: str, how: dict[str, Any], folder: Path, device: torch.device
    ) -> DemoRun:
        model = network(device)
        optimizer = sgd(model, self.settings.lr)
        if name == PLAIN:
            # On its own it is one replica, and then hdet is exactly the base schedule.
            scheduler = schedule(optimizer, self.settings, model=model, record=folder, **how)
            return DemoRun(name, model, optimizer, scheduler, lambda x, y: loss_of(model, x, y))
        ensemble = hdet.StackedReplicas(model, self.settings.replicas)
        stacked = ensemble.optimizer(optimizer)
        scheduler = schedule(
            stacked, self.settings, model=model, replicas=ensemble, record=folder, **how
        )
        return DemoRun(name, model, stacked, scheduler, lambda x, y: ensemble.losses(loss_of, x, y))

    def _distributed(
        self, name: str, how: dict[str, Any], folder: Path, device: torch.device
    ) -> DemoRun:
        replicas = hdet.ProcessReplicas()
        inner = network(device)
        model = nn.parallel.DistributedDataParallel(inner)
        optimizer = sgd(model, self.settings.lr)
        scheduler = schedule(
            optimizer, self.settings, model=model, replicas=replicas, record=folder, **how
        )
        self.here = here = replicas.local[0]

        def losses(x: Tensor, y: Tensor) -> Tensor:
            return loss_of(model, *(part.chunk(replicas.size)[here] for part in (x, y)))

        return DemoRun(name, inner, optimizer, scheduler, losses)

    def status(self, step: int) -> Status:
        scheduler = self.runs[0].scheduler
        return Status(
            step=step,
            total=self.settings.steps,
            cycle=step // SYNC_EVERY,
            sync_every=SYNC_EVERY,
            phase="scouting" if scheduler.is_scouting else "training",
            replica_lrs=[lrs[0] for lrs in scheduler.get_replica_lrs()],
            scores=[run.score for run in self.runs],
            remark=self._remark(scheduler),
        )

    def _remark(self, scheduler: hdet.HDET) -> str:
        (factor,) = scheduler.get_knobs().values()
        if factor == 1.0 or scheduler.is_scouting:
            return ""
        return f"found: {number(self.settings.lr * factor)}, {factor:,.4g} times the given one"

    def train(
        self,
        start: int,
        show: Callable[..., None],
        stopped: Callable[[], bool],
    ) -> int:
        """From a step on; the step after which it was stopped, or the last."""
        every = -(-self.settings.steps // (NUM_MILESTONES * SYNC_EVERY)) * SYNC_EVERY
        for step in range(start, self.settings.steps):
            batch = self.digits.batch(step)
            for run in self.runs:
                torch.manual_seed(1000 * step + self.here)  # of dropout
                run.step(*batch)
            done = step + 1
            is_milestone = done % every == 0 or done == self.settings.steps
            stops = done % SYNC_EVERY == 0 and stopped()
            if is_milestone or stops:
                for run in self.runs:
                    run.judge(self.digits)
                self.save(done)
            show(self.status(done), milestone=is_milestone)
            if stops:
                return done
        return self.settings.steps

    def save(self, step: int) -> None:
        saved = {run.score.name: run.save() for run in self.runs}
        if self.here == 0:
            folder = self.folder
            about = {**asdict(self.settings), "engine": None, "replicas": None}
            partial = folder / f"{CHECKPOINT}.partial"
            torch.save({"step": step, "settings": about, "runs": saved}, partial)
            partial.replace(folder / CHECKPOINT)  # at once: a kill leaves the old one or the new

    def load(self) -> int:
        """Go on from a checkpoint; its step."""
        device = self.digits.x.device
        saved = torch.load(self.folder / CHECKPOINT, map_location=device, weights_only=True)
        for run in self.runs:
            run.load(saved["runs"][run.score.name])
        return int(saved["step"])


# From start to end -----------------------------------------------------------------------------


def run(
    settings: DemoSettings, folder: Path, *, resume: bool, display: Display | None = None
) -> Outcome:
    """Train both, on whatever device there is; Ctrl-C stops after the cycle and loses nothing."""
    prepare(folder, settings, resume)
    try:
        with display or display_for() as shown, _asked_to_stop() as stopped:
            if settings.engine == "stacked":
                device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
                scores, step = take_part(settings, folder, resume, device, shown.show, stopped)
            else:
                scores, step = _in_processes(settings, folder, resume, shown, stopped)
    finally:  # also of a run that was lost or interrupted there is something to see
        told = _reported(folder)
    scales = [one.cycles[-1].knobs[0].scale if one.cycles else None for one in told]
    found = [settings.lr * (scale or 1.0) for scale in scales]
    return Outcome(scores, found, step, folder / PAGE, folder / CHECKPOINT)


def _reported(folder: Path) -> list[History]:
    runs = [folder / name for name in (OURS, PLAIN) if (folder / name / FILE_NAME).exists()]
    return report.write(runs, folder / PAGE) if runs else []


def take_part(
    settings: DemoSettings,
    folder: Path,
    resume: bool,
    device: torch.device,
    show: Callable[..., None],
    stopped: Callable[[], bool],
) -> tuple[list[Score], int]:
    """One process of the demo; often the only one."""
    contest = Contest(settings, folder, device)
    start = contest.load() if resume else 0
    step = contest.train(start, show, stopped)
    return [one.score for one in contest.runs], step


def prepare(folder: Path, settings: DemoSettings, resume: bool) -> None:
    """Refuse to write over another run, or to resume something else."""
    checkpoint = folder / CHECKPOINT
    if resume:
        if not checkpoint.exists():
            raise FileNotFoundError(f"nothing to resume: {checkpoint} does not exist")
        try:
            saved = torch.load(checkpoint, weights_only=True)
        except Exception as error:
            raise ValueError(f"{checkpoint} cannot be read: {error}") from None
        if not isinstance(saved, dict) or not {"step", "settings", "runs"} <= saved.keys():
            raise ValueError(f"{checkpoint} is not a checkpoint of the demo")
        for name, value in saved["settings"].items():
            if value is not None and getattr(settings, name) != value:
                raise ValueError(
                    f"`--{name}` must be that of the run to resume ({value}), "
                    f"got {getattr(settings, name)}."
                )
        if saved["step"] >= settings.steps:
            raise ValueError(f"nothing to resume: the run in {folder} has ended")
    else:
        _set_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)


def _set_aside(folder: Path) -> None:
    """What an earlier demo left in the folder moves into a folder of its own."""
    left = [folder / name for name in (OURS, PLAIN, CHECKPOINT, PAGE) if (folder / name).exists()]
    if left:
        number = next(n for n in count(1) if not (folder / f"earlier-{n}").exists())
        (folder / f"earlier-{number}").mkdir()
        for path in left:
            path.rename(folder / f"earlier-{number}" / path.name)


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed. Pressed once more, it interrupts at once."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _unheard() -> Iterator[None]:
    """Processes that are started inside never hear Ctrl-C, not even while they start."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# N processes -----------------------------------------------------------------------------------


def _in_processes(
    settings: DemoSettings, folder: Path, resume: bool, shown: Display, stopped: Callable[[], bool]
) -> tuple[list[Score], int]:
    context = torch.multiprocessing.get_context("spawn")
    messages, stop = context.SimpleQueue(), context.Event()
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (settings, folder, resume, meeting, messages, stop)
        with _unheard():  # Ctrl-C goes to all processes: the others hear of it from this one
            workers = spawn(_one_process, arguments, settings.replicas, join=False)
        answer: tuple[list[Score], int] | None = None
        try:
            while not workers.join(timeout=0.1) or not messages.empty():
                if stopped():
                    stop.set()
                while not messages.empty():
                    kind, content = messages.get()
                    if kind == "status":
                        shown.show(content[0], milestone=content[1])
                    else:
                        answer = content
        except ProcessRaisedException as error:
            raise RuntimeError(str(error).strip().splitlines()[-1]) from None
        finally:
            for process in workers.processes:
                process.terminate()  # nothing to do for one that has ended
    assert answer is not None
    return answer


def _one_process(
    rank: int,
    settings: DemoSettings,
    folder: Path,
    resume: bool,
    meeting: str,
    messages: Any,
    stop: Any,
) -> None:
    torch.set_num_threads(max((os.cpu_count() or 1) // settings.replicas, 1))
    with gloo_group(f"file://{meeting}/store", rank, settings.replicas) as agree:

        def show(status: Status, *, milestone: bool) -> None:
            if rank == 0:
                messages.put(("status", (status, milestone)))

        answer = take_part(
            settings, folder, resume, torch.device("cpu"), show,
            lambda: agree(stop.is_set()),
        )  # fmt: skip
        if rank == 0:
            messages.put(("answer", answer))
