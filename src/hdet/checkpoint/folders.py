"""The folder of a run's checkpoints: each is written beside the others, then renamed."""

import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from hdet._messages import launched_first, warn
from hdet.checkpoint import first_version
from hdet.checkpoint.manifest import (
    FILE_NAME,
    DamagedCheckpoint,
    FileEntry,
    Manifest,
    read_manifest,
)

NAME = re.compile(r"step-\d{8,}(-\d+)?")
TEMPORARY = ".step-*"
"""A save that was killed, and an old checkpoint that was being removed, have such names."""
TOKEN = "token"
"""A file that every process must see: they need a common disk."""


def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest whole checkpoint that `save_checkpoint` has written to a folder.

    It reads all files of that checkpoint once, to verify their checksums: about half a second a
    gigabyte from memory, and as long as the disk takes otherwise. It needs no process group. Each
    damaged checkpoint that it finds on the way gets a warning with its name.

    Args:
        folder: The folder that was given to `save_checkpoint`. A checkpoint is returned itself.

    Returns:
        The path for `load_checkpoint`, None if there is no whole checkpoint.

    Example:
        See `save_checkpoint`.
    """
    path = Path(folder)
    for one, manifest in checkpoints(path):
        if _is_whole(one, manifest):
            return one
    if (path / FILE_NAME).exists() or _has_name_of_one(path):
        return path if _is_whole(path, _manifest_or_problem(path)) else None
    return path if _is_of_first_version(path) else None


def _has_name_of_one(path: Path) -> bool:
    """Whether a folder with files has the name of a checkpoint, but no checkpoint in it."""
    has_name = NAME.fullmatch(path.name) and path.is_dir() and any(path.iterdir())
    return bool(has_name) and not any(checkpoints(path))


def _is_of_first_version(path: Path) -> bool:
    try:
        return first_version.is_at(path)
    except ValueError as problem:
        if launched_first():
            warn(f"a checkpoint is skipped: {problem}")
        return False


def _is_whole(path: Path, manifest: Manifest | DamagedCheckpoint) -> bool:
    """Whether a checkpoint has all of its files. It warns of one that has not."""
    try:
        if isinstance(manifest, DamagedCheckpoint):
            raise manifest
        manifest.check_files(path, manifest.files)
    except DamagedCheckpoint as problem:
        # A checkpoint that a run has just removed is not damaged.
        if path.exists() and launched_first():
            warn(f"a checkpoint is skipped: {problem}")
        return False
    return True


def _manifest_or_problem(path: Path) -> Manifest | DamagedCheckpoint:
    try:
        return read_manifest(path)
    except DamagedCheckpoint as problem:
        return problem


def checkpoints(folder: Path) -> Iterator[tuple[Path, Manifest | DamagedCheckpoint]]:
    """Every checkpoint of a folder, the newest first; before them those without a manifest."""
    found: list[tuple[int, Path, Manifest | DamagedCheckpoint]] = []
    for path in sorted(folder.iterdir()) if folder.exists() else []:
        if NAME.fullmatch(path.name):
            try:
                manifest = read_manifest(path)
                found.append((manifest.number, path, manifest))
            except DamagedCheckpoint as problem:
                found.append((1 << 62, path, problem))
    for _, path, about in sorted(found, key=lambda one: -one[0]):
        yield path, about


def start_save(folder: Path, step: int) -> str:
    """Make the folder that a save is written to; return its name, which is unique.

    What killed saves have left is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(TEMPORARY):
        shutil.rmtree(left, ignore_errors=True)
    name = f".step-{step:08d}.partial-{secrets.token_hex(8)}"
    (folder / name).mkdir()
    write_file(folder / name / TOKEN, name.encode())
    return name


def check_token(partial: Path) -> None:
    """Check that this process sees the folder that the first one made.

    Raises:
        OSError: It does not.
    """
    try:
        sees_it = (partial / TOKEN).read_text() == partial.name
    except FileNotFoundError:
        sees_it = False
    if not sees_it:
        raise OSError(
            f"this process does not see the files of the first one in {partial.parent}. Save to a "
            "folder on a disk that all hosts share"
        )


def commit(
    partial: Path, step: int, processes: int, files: Mapping[str, FileEntry], keep: int
) -> str:
    """Make a complete save the newest checkpoint; return its name.

    The checkpoint counts from the rename on. Only then the oldest ones are removed, but for `keep`.
    """
    folder = partial.parent
    known = [(path, found) for path, found in checkpoints(folder) if isinstance(found, Manifest)]
    number = 1 + max((found.number for _, found in known), default=0)
    (partial / TOKEN).unlink()
    manifest = Manifest(number, step, processes, files)
    write_file(partial / FILE_NAME, manifest.text().encode())
    sync_folder(partial)
    path = _free_name(folder, step)
    partial.rename(path)
    sync_folder(folder)
    for old, _ in known[keep - 1 :]:
        _remove(old)
    return path.name


def discard(partial: Path) -> None:
    """Remove a save that failed."""
    shutil.rmtree(partial, ignore_errors=True)


def free_megabytes(folder: Path) -> int:
    """The free space of a folder, which torch's errors do not tell; 0 if it cannot be known."""
    try:
        return shutil.disk_usage(folder).free // 10**6
    except OSError:
        return 0


def write_file(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_name(folder: Path, step: int) -> Path:
    """A name that no checkpoint has: a step may be saved again, after a damaged checkpoint."""
    path, number = folder / f"step-{step:08d}", 2
    while path.exists():
        path, number = folder / f"step-{step:08d}-{number}", number + 1
    return path


def _remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that it is never there in part."""
    hidden = path.with_name(f".{path.name}.old-{secrets.token_hex(8)}")
    try:
        path.rename(hidden)
    except OSError:
        return  # the new checkpoint is whole, and the next save tries again
    shutil.rmtree(hidden, ignore_errors=True)
