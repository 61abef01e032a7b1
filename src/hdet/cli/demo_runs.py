"""The two runs of the demo: the same model and batches, with hdet and without.

All random numbers are drawn from the step alone, so that a run that was stopped continues exactly.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet._validation import check_choice, check_integer, check_positive
from hdet.cli.demo_data import BATCH, Digits, loss_of, network
from hdet.cli.progress import Score, Status, number

SYNC_EVERY, NUM_MILESTONES = 10, 30
CHECKPOINT = "checkpoint.pt"
WITH_HDET, PLAIN = "hdet", "plain"
"""The names of the two runs, and of their folders."""
OPTIONS: dict[str, dict[str, Any]] = {WITH_HDET: {}, PLAIN: {"scout": None, "guard": None}}
"""The options of each run beside those that both have."""
ENGINES = ("stacked", "processes")


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The options of `hdet demo`.

    Attributes:
        replicas: The number of replicas; it must divide the batch.
        steps: The number of optimizer steps.
        lr: The learning rate that both runs start with. The default is about 300 times below a
            usual one for this network.
        engine: `stacked` for all replicas on one device, `processes` for one process each.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option is out of range.
    """

    replicas: int = 4
    steps: int = 3000
    lr: float = 1e-4
    engine: Literal["stacked", "processes"] = "stacked"

    def __post_init__(self) -> None:
        check_integer("--replicas", self.replicas, at_least=1)
        check_integer("--steps", self.steps, at_least=1)
        check_positive("--lr", self.lr)
        check_choice("--engine", self.engine, ENGINES)
        if BATCH % self.replicas:
            raise ValueError(f"`--replicas` must divide {BATCH}, got {self.replicas}.")


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The optimizer of both runs."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)


def schedule(optimizer: torch.optim.Optimizer, settings: DemoSettings, **options: Any) -> hdet.HDET:
    """OneCycleLR, wrapped by hdet with these options."""
    base = OneCycleLR(optimizer, settings.lr, total_steps=settings.steps, cycle_momentum=False)
    return hdet.HDET(base, sync_every=SYNC_EVERY, **options)


class DemoRun:
    """One of the two runs: a model, its optimizer and its scheduler.

    Args:
        name: The name of the run.
        model: The model to evaluate and to save.
        optimizer: The optimizer that makes the steps.
        scheduler: The scheduler, which writes the record.
        losses: The loss of each local replica on a batch.
    """

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
        """Train on one batch."""
        self.optimizer.zero_grad()
        losses = self._losses(x, y)
        losses.sum().backward()
        self.optimizer.step()
        self.scheduler.step(losses)
        self.score = self.score._replace(lr=self.scheduler.get_base_lr()[0])
        self._last = losses.detach()

    def evaluate(self, digits: Digits) -> None:
        """Measure the consensus on held-out images, and note it in the record."""
        with self.scheduler.consensus():
            loss, accuracy = digits.evaluate(self.model)
        self.scheduler.note(loss=loss, accuracy=accuracy)
        self.score = self.score._replace(
            training_loss=float(self._last.mean()), loss=loss, accuracy=accuracy
        )

    def save(self) -> dict[str, Any]:
        """Average the replicas; the states to save."""
        self.scheduler.converge()
        parts = (self.model, self.optimizer, self.scheduler)
        return {"states": [part.state_dict() for part in parts], "score": tuple(self.score)}

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from states that `save` returned."""
        parts: tuple[Any, ...] = (self.model, self.optimizer, self.scheduler)
        for part, state in zip(parts, saved["states"], strict=True):
            part.load_state_dict(state)
        self.score = Score(*saved["score"])


class DemoPair:
    """Both runs in this process; with the engine `processes`, the part of one replica in each.

    Args:
        settings: The options of the demo.
        folder: The folder of the demo. Each run writes its record to a folder inside it.
        device: The device of the models.
    """

    def __init__(self, settings: DemoSettings, folder: Path, device: torch.device) -> None:
        self.settings, self.digits, self.folder = settings, Digits(device), folder
        self.replica = 0
        make = self._stacked if settings.engine == "stacked" else self._distributed
        self.runs = [make(name, own, folder / name, device) for name, own in OPTIONS.items()]

    def _stacked(
        self, name: str, own: dict[str, Any], folder: Path, device: torch.device
    ) -> DemoRun:
        model = network(device)
        optimizer = sgd(model, self.settings.lr)
        if name == PLAIN:
            # With one replica and these options hdet is exactly the base schedule.
            scheduler = schedule(optimizer, self.settings, model=model, record=folder, **own)
            return DemoRun(name, model, optimizer, scheduler, lambda x, y: loss_of(model, x, y))
        ensemble = hdet.StackedReplicas(model, self.settings.replicas)
        stacked = ensemble.optimizer(optimizer)
        scheduler = schedule(
            stacked, self.settings, model=model, replicas=ensemble, record=folder, **own
        )
        return DemoRun(name, model, stacked, scheduler, lambda x, y: ensemble.losses(loss_of, x, y))

    def _distributed(
        self, name: str, own: dict[str, Any], folder: Path, device: torch.device
    ) -> DemoRun:
        replicas = hdet.ProcessReplicas()
        inner = network(device)
        model = nn.parallel.DistributedDataParallel(inner)
        optimizer = sgd(model, self.settings.lr)
        scheduler = schedule(
            optimizer, self.settings, model=model, replicas=replicas, record=folder, **own
        )
        self.replica = replica = replicas.local[0]

        def losses(x: Tensor, y: Tensor) -> Tensor:
            return loss_of(model, *(part.chunk(replicas.size)[replica] for part in (x, y)))

        return DemoRun(name, inner, optimizer, scheduler, losses)

    def status(self, step: int) -> Status:
        """What the display shows after a step."""
        scheduler = self.runs[0].scheduler
        return Status(
            step=step,
            total=self.settings.steps,
            cycle=step // SYNC_EVERY,
            sync_every=SYNC_EVERY,
            phase="scouting" if scheduler.is_scouting else "training",
            replica_lrs=[lrs[0] for lrs in scheduler.get_replica_lrs()],
            scores=self.scores(),
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
        """Train both runs, with an evaluation and a checkpoint at each milestone.

        Args:
            start: The first step.
            show: Called with the status after each step.
            stopped: Whether to stop at the end of the present cycle.

        Returns:
            The number of steps that are done.
        """
        every = -(-self.settings.steps // (NUM_MILESTONES * SYNC_EVERY)) * SYNC_EVERY
        for step in range(start, self.settings.steps):
            batch = self.digits.batch(step)
            for run in self.runs:
                torch.manual_seed(1000 * step + self.replica)  # for dropout
                run.step(*batch)
            done = step + 1
            is_milestone = done % every == 0 or done == self.settings.steps
            stops = done % SYNC_EVERY == 0 and stopped()
            if is_milestone or stops:
                for run in self.runs:
                    run.evaluate(self.digits)
                self.save(done)
            show(self.status(done), milestone=is_milestone)
            if stops:
                return done
        return self.settings.steps

    def scores(self) -> list[Score]:
        """The last measurements of both runs."""
        return [run.score for run in self.runs]

    def save(self, step: int) -> None:
        """Write a checkpoint of both runs."""
        saved = {run.score.name: run.save() for run in self.runs}
        if self.replica == 0:
            folder = self.folder
            about = {**asdict(self.settings), "engine": None, "replicas": None}
            partial = folder / f"{CHECKPOINT}.partial"
            torch.save({"step": step, "settings": about, "runs": saved}, partial)
            partial.replace(folder / CHECKPOINT)  # atomic: a kill leaves the old file or the new

    def load(self) -> int:
        """Continue from the checkpoint in the folder; returns its step."""
        device = self.digits.x.device
        saved = torch.load(self.folder / CHECKPOINT, map_location=device, weights_only=True)
        for run in self.runs:
            run.load(saved["runs"][run.score.name])
        return int(saved["step"])
