"""The tensors of a checkpoint, by torch's distributed checkpoint: any mesh writes, any mesh reads.

Torch reads what it has written with pickle, which can run code. Here its index is read by an
unpickler that knows only torch's own classes, and tensors with `weights_only=True`.
"""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

INDEX = ".metadata"
"""The index of torch: which tensor lies in which file."""

_METADATA, _PATHS = "torch.distributed.checkpoint.metadata", ("PosixPath", "WindowsPath")
_KNOWN_GLOBALS = {
    *((_METADATA, name) for name in ("Metadata", "StorageMeta", "MetadataIndex")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "TensorProperties")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "device"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in _PATHS),
}
"""What an index may name."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _KNOWN_GLOBALS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class Reader(FileSystemReader):
    """Reads the files of a checkpoint without running code of it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / INDEX
        try:
            index = _IndexUnpickler(BytesIO(path.read_bytes())).load()
        except FileNotFoundError:
            raise ValueError(f"{path.parent} is no checkpoint: it has no {INDEX}.") from None
        except Exception as error:  # damaged bytes raise whatever they like
            raise ValueError(f"{path} is no index of a checkpoint: {error}.") from error
        if not isinstance(index, Metadata):
            raise ValueError(f"{path} is no index of a checkpoint: it is a {type(index)}.")
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """The saved tensors by name."""
        entries = self.read_metadata().state_dict_metadata
        return {
            n: about for n, about in entries.items() if isinstance(about, TensorStorageMetadata)
        }


class _TextPlanner(DefaultLoadPlanner):
    """Reads entries that are no tensors, which torch would unpickle."""

    def load_bytes(self, read_item: Any, value: BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _Writer(FileSystemWriter):
    """Remembers the files that this process writes."""

    def write_data(self, plan: Any, planner: Any) -> Future[list[Any]]:
        future: Future[list[Any]] = super().write_data(plan, planner)
        self.written = {one.storage_data.relative_path for one in future.value()}
        return future


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> set[str]:
    """Write tensors, sharded or not. All processes must call it together.

    Returns:
        The names of the files that this process has written.

    Raises:
        OSError: A process could not write. It is raised on all processes.
    """
    writer = _Writer(str(folder))
    with ignore_torch_warnings(), _plain_errors():
        save(dict(tensors), storage_writer=writer)
    return writer.written


def read_tensors(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Read tensors into targets. All processes must call it together.

    Raises:
        OSError: A process could not read. It is raised on all processes.
    """
    with ignore_torch_warnings(), _plain_errors():
        load(dict(targets), storage_reader=Reader(str(folder)))


def read_texts(folder: Path, names: list[str]) -> dict[str, Any]:
    """Read entries that are no tensors. All processes must call it together."""
    texts: dict[str, Any] = dict.fromkeys(names, "")
    with ignore_torch_warnings(), _plain_errors():
        planner = _TextPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        load(texts, storage_reader=Reader(str(folder)), planner=planner)
    return texts


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the errors of all processes as one that says what went wrong."""
    try:
        yield
    except CheckpointException as error:
        texts = [f"process {rank} failed: {one[0]}" for rank, one in error.failures.items()]
        raise OSError("; ".join(texts)) from error


@contextmanager
def ignore_torch_warnings() -> Iterator[None]:
    """Ignore that a run has one process, which is fine here, and what torch says of itself."""
    with warnings.catch_warnings():
        # torch 2.6 does not say "disabled".
        one_process = "torch.distributed is (disabled, )?unavailable or"
        warnings.filterwarnings("ignore", message=one_process)
        # The writer of torch 2.6 uses what torch deprecates.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        yield
