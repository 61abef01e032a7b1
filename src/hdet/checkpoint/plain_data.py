"""Plain data as files of torch, which load without running code."""

import re
import warnings
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from hdet.checkpoint.manifest import DamagedCheckpoint

_CLASS = re.compile(r"[Uu]nsupported (?:global: GLOBAL|GLOBAL|class) (\S+)")
"""Where torch names the class that it does not load."""
_ESCAPE_CODE = re.compile(r"\x1b\[[0-9;]*m")


def to_bytes(name: str, value: Any) -> bytes:
    """The content of a file with a value.

    Args:
        name: What the value is called in an error.
        value: Numbers, texts, tensors, or lists and dicts of them.

    Raises:
        TypeError: A part of the value has another type.
    """
    try:
        return _written(value)
    except Exception as error:
        where, part = _odd_part(name, value, set())
        raise TypeError(
            f"`{where}` must be plain data or tensors, which load without running code, got a "
            f"{_kind(part)}. Convert it: float(x) for a number of NumPy, x.tolist() for an array, "
            "str(x) for a path or a time."
        ) from error


def from_file(file: Path) -> dict[str, Any]:
    """The value of a file, on the host.

    Raises:
        DamagedCheckpoint: It cannot be read, or not without running code.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch says of files that are not its own
            loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # odd bytes raise whatever they like
        raise DamagedCheckpoint(
            f"{file} cannot be read without running code: {_reason(error)}"
        ) from error
    return loaded


def _written(value: Any) -> bytes:
    file = BytesIO()
    torch.save(value, file)
    torch.load(BytesIO(file.getvalue()), weights_only=True)
    return file.getvalue()


def _odd_part(name: str, value: Any, seen: set[int]) -> tuple[str, Any]:
    """The innermost part that cannot be written, with its place in the whole."""
    seen.add(id(value))  # a list may hold itself
    for where, part in _parts(name, value):
        if id(part) not in seen and not _can_be_written(part):
            return _odd_part(where, part, seen)
    return name, value


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in (list, tuple):
        yield from ((f"{name}[{place}]", part) for place, part in enumerate(value))
    elif isinstance(value, dict):
        for key, part in value.items():
            yield f"a key of {name}", key
            yield f"{name}[{key!r}]", part


def _can_be_written(value: Any) -> bool:
    try:
        _written(value)
    except Exception:
        return False
    return True


def _kind(value: Any) -> str:
    kind = type(value)
    is_builtin = kind.__module__ == "builtins"
    return kind.__name__ if is_builtin else f"{kind.__module__}.{kind.__qualname__}"


def _reason(error: Exception) -> str:
    """Why torch did not load a file, without what it advises."""
    text = _ESCAPE_CODE.sub("", str(error))
    if found := _CLASS.search(text):
        return f"it has a {found[1]}"
    if text.startswith("Weights only load failed"):
        return "it is no plain data"
    return text.splitlines()[0] if text else type(error).__name__
