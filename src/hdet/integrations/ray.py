"""Ray Train: reports the numbers of every replica, saves and resumes whole runs, shows a table.

The model is trained by the user's own loop. Every name of Ray that is used here is public.
`TrainContext.get_storage()` is a developer API: it tells which folder all workers share.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from hdet.checkpoint import load_checkpoint, save_checkpoint
from hdet.integrations._extras import extra as needs
from hdet.integrations._replica_table import LastCycle, replica_table
from hdet.integrations.tracking import scalars_now
from hdet.records.sinks import Record, check_record
from hdet.replicas.factory import local_replicas
from hdet.scheduler.given_schedule import Base
from hdet.scheduler.hdet import HDET

with needs("ray"):
    from ray import train

if not hasattr(train, "UserCallback"):
    raise ImportError(
        "this adapter of hdet needs Ray Train v2. Do not set RAY_TRAIN_V2_ENABLED to 0, and "
        "install a newer ray where it has no UserCallback."
    )


class HDETRun:
    """The run of hdet in a worker of Ray Train.

    Make it on all workers, after `prepare_model`. Then call `resume()`, and `scheduler.step(loss)`.

    Args:
        base: The schedule to wrap, as for `hdet.HDET`.
        model: The model as the loop calls it, so the result of `prepare_model`.
        optimizer: The optimizer of the run, or a list of all of them.
        scaler: The gradient scaler of the loop, if it has one.
        folder: A folder on a disk of all workers, for a checkpoint until Ray has stored it. None
            takes one in Ray's `storage_path`, if that is on a disk.
        record: The record of the run, as for `hdet.HDET`.
        **options: More options of `hdet.HDET`.
    """

    def __init__(
        self,
        base: Base | Sequence[Base],
        *,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        scaler: GradScaler | None = None,
        folder: str | Path | None = None,
        record: Record | None = None,
        **options: Any,
    ) -> None:
        self._last_cycle, self._folder = LastCycle(), folder
        sinks = (*check_record(record), self._last_cycle)
        self.scheduler = HDET(base, model=model, scaler=scaler, record=sinks, **options)
        """The scheduler of the run."""
        self._parts: dict[str, Any] = {"scheduler": self.scheduler, "scaler": scaler}
        self._parts |= {"model": model, "optimizer": optimizer}
        replicas = options.get("replicas")
        self._replica = (replicas.local if replicas else local_replicas())[0]

    def resume(self) -> Any:
        """Load the checkpoint that Ray resumes from, on all workers.

        Returns:
            The `extra` of that checkpoint. None at a fresh start.

        Raises:
            ValueError: If the checkpoint is damaged or does not fit the run.
        """
        checkpoint = train.get_checkpoint()
        if checkpoint is None:
            return None
        with checkpoint.as_directory() as folder:
            return load_checkpoint(folder, **self._parts)

    def report(
        self, metrics: Mapping[str, Any] | None = None, *, save: bool = False, extra: Any = None
    ) -> None:
        """Report the numbers of this worker to Ray, with a checkpoint if asked for.

        All workers must call it together, as they must call `ray.train.report`.

        Args:
            metrics: Numbers of this worker. Those of hdet begin with `hdet/` and are added.
            save: Whether to save the run first. The replicas converge then.
            extra: What else to save, as for `hdet.save_checkpoint`.

        Raises:
            ValueError: If no folder is known that all workers share.
            OSError: If the checkpoint could not be written.
        """
        numbers = {**self._numbers(), **(metrics or {})}
        if not save:
            train.report(numbers)
            return
        saved = save_checkpoint(self._shared_folder(), keep=1, extra=extra, **self._parts)
        is_first = train.get_context().get_world_rank() == 0
        checkpoint = train.Checkpoint.from_directory(saved) if is_first else None
        train.report(numbers, checkpoint=checkpoint, delete_local_checkpoint_after_upload=True)

    def _numbers(self) -> dict[str, float]:
        own = {"hdet/step": self.scheduler.last_epoch, "hdet/replica": self._replica}
        return {**self._last_cycle.scalars, **scalars_now(self.scheduler), **own}

    def _shared_folder(self) -> Path:
        if self._folder is not None:
            return Path(self._folder)
        storage = train.get_context().get_storage()
        if storage.storage_filesystem.type_name == "local":
            return Path(storage.experiment_fs_path) / "hdet"
        raise ValueError(
            "checkpoints need a disk that all workers share, and `storage_path` of Ray is none. "
            "Pass `folder=` to HDETRun."
        )


class ReplicaTable(train.UserCallback):
    """Shows the numbers of every replica. Pass it in `RunConfig(callbacks=[ReplicaTable()])`.

    It runs in Ray's controller, whose output Ray forwards to the driver.

    Args:
        write: Takes each table as one text. It is sent to the controller.
    """

    def __init__(self, write: Callable[[str], object] = print) -> None:
        self._write = write

    def after_report(self, run_context: Any, metrics: Sequence[Any], checkpoint: Any) -> None:
        """Write the table of a report."""
        reported = [one for one in metrics if one and "hdet/replica" in one]
        if reported:
            self._write(replica_table(reported))

    def after_exception(
        self, run_context: Any, worker_exceptions: Mapping[int, BaseException]
    ) -> None:
        """Write which workers failed."""
        for rank, error in sorted(worker_exceptions.items()):
            about = str(error).strip() or type(error).__name__
            self._write(f"worker {rank} failed: {about.splitlines()[0]}")
