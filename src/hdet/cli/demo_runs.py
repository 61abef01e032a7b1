"""A run of the demo: model, optimizer, scheduler, and the loop that trains them.

All random numbers are drawn from the step alone, so that a run that was stopped continues exactly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.checkpoint.load import extra_of
from hdet.cli.demo_acts import Act, DemoSettings, acts
from hdet.cli.demo_data import Batches
from hdet.cli.demo_sweep import sweep_of
from hdet.cli.progress import ReplicaView, Status

NUM_MILESTONES = 20
CHECKPOINTS = "checkpoints"


class LastEvents:
    """A sink that keeps the last end of a cycle, and what the scout found."""

    def __init__(self) -> None:
        self.cycle: Mapping[str, Any] = {}
        self.search: Mapping[str, Any] = {}

    def write(self, event: Mapping[str, Any]) -> None:
        """Take an event."""
        if event["event"] == "cycle":
            self.cycle = event
        elif event["event"] == "scout" and event["factor"] is not None:
            self.search = event

    def close(self) -> None:
        """Do nothing."""


class DemoRun:
    """One run; with the engine `processes`, the part of one replica in it.

    Args:
        act: What is trained, from which learning rate.
        settings: The options of the demo.
        folder: The folder of the demo. The run writes its record to a folder inside it.
        device: The device of the model.
    """

    def __init__(
        self, act: Act, settings: DemoSettings, folder: Path, device: torch.device
    ) -> None:
        self.act = act
        self.replica, self.num_replicas = 0, settings.replicas
        self._batches = Batches(act.task, device)
        self._sweep = sweep_of(act.task.name)
        self._last = LastEvents()
        self._record = [folder / act.name, self._last]
        self._curve: list[tuple[int, float]] = []
        self._measures: dict[str, float] = {}
        self._sums, self._summed = torch.zeros(settings.replicas), 0
        self._modules: Sequence[nn.Module] = ()
        (self._stacked if settings.engine == "stacked" else self._distributed)(device)
        if self.replica == 0 and not act.is_paper:
            self._sweep.reference(act.task.name).write(folder / act.name)

    def _stacked(self, device: torch.device) -> None:
        self.model = self.act.task.network(0, device)
        ensemble = hdet.StackedReplicas(self.model, self.num_replicas)
        self.optimizer: torch.optim.Optimizer = ensemble.optimizer(
            self.act.task.optimizer(self.model, self.act.lr)
        )
        self._trained = self.model
        self.scheduler = self._scheduler(self.model, ensemble)
        self._losses: Callable[..., Tensor] = ensemble.losses
        self._modules = ensemble.modules(self.model)

    def _distributed(self, device: torch.device) -> None:
        replicas = hdet.ProcessReplicas()
        self.model = self.act.task.network(0, device)
        wrapped = nn.parallel.DistributedDataParallel(self.model)
        self._trained = wrapped
        self.optimizer = self.act.task.optimizer(wrapped, self.act.lr)
        self.scheduler = self._scheduler(wrapped, replicas)
        self.replica = replica = replicas.local[0]

        def losses(loss_of: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
            return loss_of(wrapped, *(part.chunk(replicas.size)[replica] for part in (x, y)))

        self._losses = losses

    def _scheduler(self, model: nn.Module, replicas: Any) -> hdet.HDET:
        act, shared = self.act, {"model": model, "replicas": replicas, "record": self._record}
        base = OneCycleLR(self.optimizer, act.lr, total_steps=act.steps, cycle_momentum=False)
        if act.is_paper:
            return hdet.HDET(base, preset="paper", sync_every=act.sync_every, **shared)
        return hdet.HDET(base, **shared)

    def _step(self, step: int) -> None:
        """Train on the batch of a step."""
        if step % self.act.sync_every == 0 or self.scheduler.is_scouting:
            self._sums, self._summed = torch.zeros(self.num_replicas), 0
        self.optimizer.zero_grad()
        losses = self._losses(self.act.task.loss, *self._batches.batch(step))
        losses.sum().backward()
        self.optimizer.step()
        self.scheduler.step(losses)
        if losses.dim():
            self._sums, self._summed = self._sums + losses.detach().cpu(), self._summed + 1

    def train(
        self,
        start: int,
        show: Callable[..., None],
        stopped: Callable[[], bool],
        save: Callable[[int], None],
    ) -> tuple[int, bool]:
        """Train, with an evaluation and a checkpoint at each milestone.

        Args:
            start: The first step.
            show: Called with the status after each step.
            stopped: Whether to stop at the end of the present cycle.
            save: Writes a checkpoint after this many steps.

        Returns:
            The number of steps that are done, and whether the run was stopped.
        """
        act = self.act
        cycles = 1 if act.is_paper else -(-act.steps // (NUM_MILESTONES * act.sync_every))
        if not start:
            self._curve = [(0, self._batches.evaluate(self.model)["loss"])]
        for step in range(start, act.steps):
            self._step(step)
            done = step + 1
            is_end = done % act.sync_every == 0
            is_milestone = done % (cycles * act.sync_every) == 0 or done == act.steps
            stops = is_end and stopped()
            if is_milestone or stops:
                self._evaluate(done)
                save(done)
            show(self._status(done), milestone=is_milestone)
            if stops:
                return done, True
        return act.steps, False

    def _evaluate(self, step: int) -> None:
        """Measure the consensus on held-out images, and note it in the record."""
        with self.scheduler.consensus():
            self._measures = self._batches.evaluate(self.model)
        self.scheduler.note("", **self._measures)
        self._curve.append((step, self._measures["loss"]))

    def _status(self, step: int) -> Status:
        """What the display shows after a step."""
        act, search = self.act, self._last.search
        is_end = act.is_paper and step % act.sync_every == 0
        phase = "converge" if is_end else "fan out" if act.is_paper else "train"
        return Status(
            title=act.title,
            step=step,
            total=act.steps,
            cycle=-(-step // act.sync_every),
            sync_every=act.sync_every,
            phase="scout" if self.scheduler.is_scouting else phase,
            replicas=self._views(is_end),
            lr=self.scheduler.get_base_lr()[0],
            given=act.lr,
            found=self.scheduler.found_lr,
            within=search.get("within"),
            measures=self._measures,
            curve=self._curve,
            band=None if act.is_paper else self._sweep.loss,
            price=self._sweep.price,
        )

    def _views(self, is_end: bool) -> list[ReplicaView]:
        lrs = [lrs[0] for lrs in self.scheduler.get_replica_lrs()]
        unknown: list[float | None] = [None] * len(lrs)
        losses, distances = unknown, unknown
        if self._summed:
            losses = (self._sums / self._summed).tolist()
        if is_end and self._last.cycle:  # just before the average
            distances = self._last.cycle["distances"]
            losses = self._last.cycle["losses"]
            lrs = self._last.cycle["knobs"][0]["lrs"]
        elif self.act.is_paper and self._modules:
            distances = [*distances_of(self._modules)]
        return [ReplicaView(*view) for view in zip(lrs, losses, distances, strict=True)]

    def save(self, folder: Path, place: Mapping[str, Any]) -> None:
        """Save a checkpoint with the place of the demo. All processes must call it together."""
        hdet.save_checkpoint(folder, **self._parts(), extra={**place, "curve": self._curve})

    def load(self, path: Path) -> None:
        """Continue from a checkpoint. All processes must call it together."""
        extra = hdet.load_checkpoint(path, **self._parts())
        self._curve = [(int(step), float(loss)) for step, loss in extra["curve"]]

    def _parts(self) -> dict[str, Any]:
        return {
            "model": self._trained,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }


@torch.no_grad()
def distances_of(modules: Sequence[nn.Module]) -> list[float]:
    """How far the weights of each module are from their mean, relative to it."""
    rows = torch.stack([nn.utils.parameters_to_vector(each.parameters()) for each in modules])
    mean = rows.mean(0)
    distances: list[float] = ((rows - mean).norm(dim=1) / mean.norm()).tolist()
    return distances


def train_all(
    settings: DemoSettings,
    folder: Path,
    device: torch.device,
    show: Callable[..., None],
    stopped: Callable[[], bool],
    *,
    resume: bool,
) -> bool:
    """Make all runs, one after another; with `resume`, from the checkpoint in the folder on.

    Returns:
        Whether they were stopped.
    """
    place: dict[str, Any] = {"act": 0, "step": 0}
    path = hdet.latest_checkpoint(folder / CHECKPOINTS) if resume else None
    if path is not None:
        place = extra_of(path)
    about = {**asdict(settings), "engine": None, "replicas": None}
    everything = acts(settings)
    for number, act in enumerate(everything):
        if number < place["act"]:
            continue
        run, start = DemoRun(act, settings, folder, device), 0
        if number == place["act"] and path is not None:
            run.load(path)
            start = place["step"]

        def save(step: int, run: DemoRun = run, number: int = number) -> None:
            run.save(folder / CHECKPOINTS, {"act": number, "step": step, "settings": about})

        def show_it(status: Status, *, milestone: bool, number: int = number) -> None:
            counted = status._replace(number=number + 1, runs=len(everything))
            show(counted, milestone=milestone)

        if run.train(start, show_it, stopped, save)[1]:
            return True
    return False
