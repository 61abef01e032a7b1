"""save_checkpoint: writes a run to a folder of its own, which appears only when it is whole."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from hdet._validation import check_integer
from hdet.checkpoint.arguments import check_arguments
from hdet.checkpoint.folders import (
    check_token,
    commit,
    discard,
    free_megabytes,
    start_save,
    write_file,
)
from hdet.checkpoint.manifest import FileEntry, entry_of
from hdet.checkpoint.parts import Part, parts_of
from hdet.checkpoint.plain_data import to_bytes
from hdet.checkpoint.processes import Processes
from hdet.checkpoint.random_state import random_state
from hdet.checkpoint.sharded import INDEX, write_tensors
from hdet.scheduler.hdet import HDET

COMMON_FILE = "common.pt"
"""The plain data of all parts, equal on all processes."""


def process_file(rank: int) -> str:
    """The file of what each process has for itself."""
    return f"process-{rank:05d}.pt"


def save_checkpoint(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: HDET,
    step: int | None = None,
    keep: int = 2,
    extra: Any = None,
    scaler: GradScaler | None = None,
) -> Path:
    """Save a run into a new sub-folder, so that no failure can lose the earlier checkpoints.

    All processes must call it together. The replicas converge, as by `scheduler.converge()`. The
    files are written to a temporary folder with a checksum of each, and they are on the disk
    before the folder gets its name. Then older checkpoints are removed. A save that is killed
    leaves a temporary folder, which the next save removes.

    It saves model, optimizers, scheduler, outer optimizer, loss scale and the random states of
    every process. Parameters that only the optimizer has, such as one of a loss, are saved too.
    `extra` is for what else the loop needs.

    Args:
        folder: The folder of the run's checkpoints, on a disk that all processes share. It needs
            room for one checkpoint more than `keep`.
        model: The model of the run, wrapped as it is trained.
        optimizer: The optimizer of the run, or a list of all of them.
        scheduler: The scheduler of the run.
        step: The number in the name of the sub-folder. None takes the step of the scheduler.
        keep: How many checkpoints stay, with the new one.
        extra: Plain data or tensors of this process, such as its position in the data.
        scaler: The gradient scaler of the run, if it has one.

    Returns:
        The new checkpoint, such as `folder/step-00000200`.

    Raises:
        TypeError: An argument has the wrong type, or cannot be saved.
        ValueError: The model is not that of the optimizer, or plain tensors exist once in each
            process.
        OSError: A process could not write, or does not share the folder. It is raised on all
            processes, and the earlier checkpoints are as they were.

    Example:
        >>> import tempfile, hdet, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> base = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        >>> scheduler = hdet.HDET(base, model=model, preset="paper")
        >>> run = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = hdet.save_checkpoint(folder, **run, extra={"epoch": 3})
        ...     found = hdet.latest_checkpoint(folder)
        ...     extra = hdet.load_checkpoint(found, **run)
        >>> saved.name, found == saved, extra
        ('step-00000000', True, {'epoch': 3})
    """
    check_arguments("folder", folder, scheduler)
    processes = Processes()

    def prepare() -> tuple[list[Part], int]:
        check_integer("keep", keep, at_least=1)
        number = scheduler.last_epoch if step is None else step
        check_integer("step", number, at_least=0)
        to_bytes("extra", extra)
        parts = parts_of(model, optimizer, scheduler, scaler)
        for part in parts:
            part.check()
        return parts, number

    with scheduler.collective_call("`save_checkpoint()`"):
        parts, number = processes.alone(prepare)
        scheduler.converge()
        try:
            return _save(Path(folder), parts, number, keep, extra, processes)
        except OSError as error:
            raise OSError(
                f"the checkpoint of step {number} could not be written to {folder}, which has "
                f"{free_megabytes(Path(folder))} MB of free space: {error}. The earlier "
                "checkpoints are as they were. Free space or mend the cause, then save again."
            ) from error


def _save(
    folder: Path, parts: Sequence[Part], step: int, keep: int, extra: Any, processes: Processes
) -> Path:
    own = {"random": random_state(), "extra": extra}
    plain = {part.name: part.plain() for part in parts}
    tensors = {f"{part.name}.{name}": t for part in parts for name, t in part.tensors().items()}
    partial = folder / processes.on_first(lambda: start_save(folder, step))

    def write() -> dict[str, FileEntry]:
        return _write(partial, tensors, plain, own, processes.rank)

    try:
        processes.together(lambda: check_token(partial))
        files = {name: entry for one in processes.together(write) for name, entry in one.items()}
        size = processes.size
        return folder / processes.on_first(lambda: commit(partial, step, size, files, keep))
    except Exception:
        if processes.rank == 0:
            discard(partial)
        raise


def _write(
    partial: Path, tensors: dict[str, Tensor], plain: dict[str, Any], own: Any, rank: int
) -> dict[str, FileEntry]:
    """Write the files of this process, and return their entries."""
    names = write_tensors(partial, tensors) | {process_file(rank)}
    write_file(partial / process_file(rank), to_bytes("state", own))
    if rank == 0:
        write_file(partial / COMMON_FILE, to_bytes("state", plain))
        names |= {INDEX, COMMON_FILE}
    return {name: entry_of(partial / name) for name in names}
