"""load_checkpoint: verifies a checkpoint completely, then loads it into a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from hdet.checkpoint import first_version
from hdet.checkpoint.arguments import check_arguments
from hdet.checkpoint.manifest import FILE_NAME, DamagedCheckpoint, Manifest, read_manifest
from hdet.checkpoint.parts import Part, Saved, parts_of
from hdet.checkpoint.plain_data import from_file
from hdet.checkpoint.processes import Processes
from hdet.checkpoint.random_state import restore_random_state
from hdet.checkpoint.save import COMMON_FILE, process_file
from hdet.checkpoint.sharded import INDEX, Reader, read_tensors
from hdet.scheduler.hdet import HDET


class Content(NamedTuple):
    """What a checkpoint says beside the values of its tensors."""

    plain: Mapping[str, Any]
    """The plain data of each part."""
    own: Mapping[str, Any]
    """What belongs to one process: its random states, if it is the same one, and `extra`."""
    tensors: Mapping[str, TensorStorageMetadata]

    def tensors_of(self, part: Part) -> Saved:
        start = f"{part.name}."
        named = self.tensors.items()
        return {name.removeprefix(start): t for name, t in named if name.startswith(start)}


def load_checkpoint(
    path: str | Path | None,
    *,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: HDET,
    scaler: GradScaler | None = None,
) -> Any:
    """Load a run that `save_checkpoint` has saved.

    All processes must call it together. It verifies the checksums of all files, then every field
    of every part. A checkpoint that is damaged or does not fit changes nothing. No code of a
    checkpoint is run.

    The mesh and the number of processes may be others than those of the saved run. With the same
    number of processes each of them goes on with its own random numbers.

    Args:
        path: The checkpoint, such as `hdet.latest_checkpoint(folder)`. None is refused.
        model: A model like the saved one. The weights are loaded into it.
        optimizer: An optimizer of the same kind and parameter groups, or a list like the saved
            one. Its state is replaced.
        scheduler: A scheduler like the saved one. Its state is replaced.
        scaler: A gradient scaler, if the run has one.

    Returns:
        The `extra` that this process gave to `save_checkpoint`. With another number of processes
        it is that of the first one.

    Raises:
        ValueError: The checkpoint is damaged, or model, optimizer or scheduler do not fit it.
        TypeError: An argument has the wrong type.
        OSError: A file could not be read.

    Example:
        See `save_checkpoint`.
    """
    if path is None:
        raise TypeError(
            "`path` must be a checkpoint, got None: the folder has none yet. Load only if "
            "`hdet.latest_checkpoint(folder)` finds one."
        )
    check_arguments("path", path, scheduler)
    with scheduler.collective_call("`load_checkpoint()`"):
        return _load_run(Path(path), model, optimizer, scheduler, scaler)


def _load_run(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: HDET,
    scaler: GradScaler | None,
) -> Any:
    processes = Processes()
    content = _read_content(path, processes)

    def prepare() -> tuple[list[Part], list[dict[str, Tensor]]]:
        parts = parts_of(model, optimizer, scheduler, scaler)
        _check_optimizers(parts, content.plain)
        saved = [(content.plain.get(part.name), content.tensors_of(part)) for part in parts]
        return parts, [part.targets(*one) for part, one in zip(parts, saved, strict=True)]

    parts, targets = processes.alone(prepare)
    pairs = list(zip(parts, targets, strict=True))
    read_tensors(path, {f"{p.name}.{name}": t for p, own in pairs for name, t in own.items()})
    for part, own in pairs:
        part.load(content.plain.get(part.name), own)
    if "random" in content.own:
        restore_random_state(content.own["random"])
        scheduler.keep_random_state()
    return content.own.get("extra")


def extra_of(path: Path) -> Any:
    """The `extra` of the first process, of a checkpoint that `latest_checkpoint` has verified."""
    return from_file(path / process_file(0))["extra"]


def _read_content(path: Path, processes: Processes) -> Content:
    """Verify a checkpoint together, and read everything but tensors."""
    is_first_version = processes.together(lambda: first_version.is_at(path))
    if all(is_first_version):
        return Content(*first_version.read(path), processes.alone(Reader(str(path)).tensors))
    manifests = processes.together(lambda: read_manifest(_checked(path)))
    if any(manifest != manifests[0] for manifest in manifests):
        raise ValueError(
            f"every process must load the same checkpoint, got those of the steps "
            f"{[manifest.step for manifest in manifests]}, saved as numbers "
            f"{[manifest.number for manifest in manifests]}."
        )
    manifest, rank, size = manifests[0], processes.rank, processes.size
    shares = sorted(manifest.files)[rank::size]
    processes.together(lambda: manifest.check_files(path, shares))
    return processes.alone(lambda: _content(path, manifest, rank, size))


def _checked(path: Path) -> Path:
    if not (path / FILE_NAME).exists() and any(path.glob(f"step-*/{FILE_NAME}")):
        raise ValueError(
            f"`path` must be a checkpoint, got {path}, a folder of them. Pass "
            "hdet.latest_checkpoint(folder)."
        )
    if not path.is_dir():
        raise ValueError(f"`path` must be a checkpoint, got {path}, which is no folder.")
    return path


def _content(path: Path, manifest: Manifest, rank: int, size: int) -> Content:
    reader = Reader(str(path))
    index = reader.read_metadata()
    named = {about.relative_path for about in index.storage_data.values()}
    if unknown := (named | {INDEX, COMMON_FILE}) - manifest.files.keys():
        raise DamagedCheckpoint(f"{path} is damaged: its files do not include {sorted(unknown)}.")
    is_same = manifest.processes == size
    own = from_file(path / process_file(rank if is_same else 0))
    if not is_same:
        del own["random"]
    return Content(from_file(path / COMMON_FILE), own, reader.tensors())


def _check_optimizers(parts: Sequence[Part], plain: Mapping[str, Any]) -> None:
    """Refuse a list of optimizers of another length than the saved one."""

    def optimizers(names: Sequence[str]) -> list[str]:
        return sorted(name for name in names if name.startswith("optimizer"))

    saved, own = optimizers(list(plain)), optimizers([part.name for part in parts])
    if saved != own:
        raise ValueError(
            f"`optimizer` must be as many optimizers as were saved ({len(saved)}), got {len(own)}."
        )
