"""What the tests of hdet under Ray Train run, each in a program of its own.

Ray keeps global state in a process, so `fit` starts a program that starts Ray, trains and stops it.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, cast

import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hdet
from hdet.integrations.ray import HDETRun, ReplicaTable
from tests.integrations.digits import BAD_LR, NUM_TRAINED, digest, held_out_loss, network, tensors
from tests.processes import run_program

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # reports wait for it
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",  # the machine may be busy
    "OMP_NUM_THREADS": "1",
}
ENDED = "run-{run}-worker-{rank}.json"


def fit(folder: Path, *runs: dict[str, Any], max_failures: int = 0) -> list[list[Any]]:
    """Train with Ray in a program of its own.

    Args:
        folder: Of the program, for everything that it writes.
        *runs: The arguments of `train_once`, one after the other in the same workers.
        max_failures: How often Ray starts failed workers again.

    Returns:
        For each run what `train_once` returned in each worker.
    """
    words = [f"{folder}", f"{max_failures}", json.dumps(runs)]
    done = run_program(
        sys.executable,
        *("-m", "tests.integrations.ray_runs", *words),
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = [[ENDED.format(run=run, rank=rank) for rank in range(2)] for run in range(len(runs))]
    return [[json.loads((folder / name).read_text()) for name in both] for both in names]


def main(folder: str, max_failures: str, runs: str) -> None:
    """What the program does."""
    here = importlib.import_module("tests.integrations.ray_runs")  # workers import it by this name
    with tempfile.TemporaryDirectory() as ray_folder:
        options = {"include_dashboard": False, "object_store_memory": 100 << 20}
        ray.init(address="local", num_cpus=2, _temp_dir=ray_folder, **options)
        try:
            TorchTrainer(
                here.train_all,
                train_loop_config={"folder": folder, "runs": json.loads(runs)},
                torch_config=train.torch.TorchConfig(backend="gloo"),
                scaling_config=train.ScalingConfig(num_workers=2),
                run_config=train.RunConfig(
                    name="run",
                    storage_path=folder,
                    failure_config=train.FailureConfig(max_failures=int(max_failures)),
                    checkpoint_config=train.CheckpointConfig(num_to_keep=2),
                    callbacks=[ReplicaTable(here.Lines(f"{folder}/tables.txt"))],
                ),
            ).fit()
        finally:
            ray.shutdown()


class Lines:
    """Appends texts to a file: where the table of replicas goes in tests."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, text: str) -> None:
        with Path(self.path).open("a") as file:
            file.write(text + "\n")


def train_all(config: dict[str, Any]) -> None:
    """What each worker does."""
    rank = train.get_context().get_world_rank()
    for run, arguments in enumerate(config["runs"]):
        result = train_once(Path(config["folder"]), **arguments)
        path = Path(config["folder"]) / ENDED.format(run=run, rank=rank)
        path.write_text(json.dumps(result))


def train_once(
    folder: Path,
    lr: float = BAD_LR,
    steps: int = 400,
    with_hdet: bool = True,
    accumulate: int = 1,
    max_norm: float | None = None,
    evaluate_at: int | None = None,
    save_at: tuple[int, ...] = (),
    die_at: tuple[int, ...] = (),
    report_every: int | None = None,
    hold_out: int = 0,
) -> dict[str, Any]:
    """Train on the digits as a script of Ray Train does."""
    torch.manual_seed(train.get_context().get_world_rank())
    model = prepare_model(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    base = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    run, start, resumed = None, 0, None
    if with_hdet:
        scout = hdet.Scout(share=99 / steps)
        run = HDETRun(base, model=model, optimizer=optimizer, scout=scout)
        if (extra := run.resume()) is not None:
            start, resumed = extra["step"], run.scheduler.is_scouting
            _note(folder, f"resumed at {start}, scouting: {resumed}")
    for index in range(hold_out):
        x, y = tensors()
        rows = slice(NUM_TRAINED + 16 * index, NUM_TRAINED + 16 * (index + 1))
        cast(HDETRun, run).scheduler.hold_out(_loss_of, x[rows], y[rows])
    shown, lrs = None, []
    micro_batches = islice(batches(), start * accumulate, None)
    for step in range(start, steps):
        for part in range(accumulate):
            x, y = next(micro_batches)
            last = part == accumulate - 1
            with nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(x), y)
                (loss / accumulate).backward()
            if run is not None:
                run.scheduler.observe(loss)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        (base if run is None else run.scheduler).step()
        lrs.append(optimizer.param_groups[0]["lr"])
        if run is not None and step + 1 == evaluate_at:
            own = digest(model.module)
            with run.scheduler.consensus():
                shown = digest(model.module)
            assert digest(model.module) == own
        if run is not None and report_every and (step + 1) % report_every == 0:
            run.report({"loss": loss.item()})
        if run is not None and step + 1 in save_at:
            run.report({"loss": loss.item()}, save=True, extra={"step": step + 1})
        _die_once(folder, step + 1, die_at)
    result: dict[str, Any] = {"shown": shown, "steps": base.last_epoch, "lrs": lrs}
    if run is not None:
        run.scheduler.converge()
        result |= {"steps": run.scheduler.last_epoch, "found": run.scheduler.found_lr}
    return {**result, "loss": held_out_loss(model.module), "digest": digest(model.module)}


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of this worker, in the same order at every start."""
    x, y = tensors()
    dataset = TensorDataset(x[:NUM_TRAINED], y[:NUM_TRAINED])
    loader = prepare_data_loader(DataLoader(dataset, batch_size=16, shuffle=True, drop_last=True))
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def _loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def _die_once(folder: Path, step: int, at: tuple[int, ...]) -> None:
    """Kill the second worker at this step, at the first visit, when Ray knows the checkpoint."""
    mark = folder / f"died-at-{step}"
    if step in at and train.get_context().get_world_rank() == 1 and not mark.exists():
        train.get_all_reported_checkpoints()
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def _note(folder: Path, text: str) -> None:
    if train.get_context().get_world_rank() == 0:
        Lines(f"{folder}/resumed.txt")(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
