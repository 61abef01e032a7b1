"""The manifest of a checkpoint: which files it has, and their checksums. It needs no torch."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE_NAME = "checkpoint.json"
FORMAT = 1


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files are not those that were saved."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The size and the SHA-256 of a file."""

    bytes: int
    sha256: str


def entry_of(path: Path) -> FileEntry:
    """The entry of a file, which is read once."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(file.tell(), digest)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of. It is written last, so a folder that has one is complete.

    Attributes:
        number: The place of the save among all saves to the same folder.
        step: The step of the run.
        processes: The number of processes that saved.
        files: The files by name.
    """

    number: int
    step: int
    processes: int
    files: Mapping[str, FileEntry]

    def text(self) -> str:
        """The manifest as JSON, with a checksum of its own."""
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({"content": content, "sha256": _digest(content)}, indent=1)

    def check_files(self, folder: Path, names: Iterable[str]) -> None:
        """Read files and compare them with their checksums.

        Raises:
            DamagedCheckpoint: A file is missing, cut or changed.
        """
        for name in names:
            try:
                has_size = (folder / name).stat().st_size == self.files[name].bytes
                is_whole = has_size and entry_of(folder / name) == self.files[name]
            except FileNotFoundError:
                raise DamagedCheckpoint(
                    f"{folder} is damaged: the file {name} is missing."
                ) from None
            if not is_whole:
                what = "has other content" if has_size else "has another length"
                raise DamagedCheckpoint(f"{folder} is damaged: the file {name} {what}.")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamagedCheckpoint: It is missing, cut, changed, or of a later version of hdet.
    """
    try:
        saved = json.loads((folder / FILE_NAME).read_bytes())
        content = saved["content"]
        is_whole = saved["sha256"] == _digest(content)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{folder} is damaged: the file {FILE_NAME} is missing.") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        is_whole = False
    if not is_whole:
        raise DamagedCheckpoint(f"{folder} is damaged: the file {FILE_NAME} has other content.")
    if content["format"] != FORMAT:
        raise DamagedCheckpoint(
            f"{folder} has the format {content['format']}, and this version of hdet reads "
            f"{FORMAT}. Update hdet."
        )
    files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
    return Manifest(content["number"], content["step"], content["processes"], files)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
