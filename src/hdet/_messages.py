"""Warnings that point at the user's line, and the log lines of decisions that change a run.

hdet never configures logging. Log lines go where the user's logging shows them, or else to stderr.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable
from types import FrameType

Warn = Callable[[str], None]
"""Raises a warning with this text. A process that must be quiet passes one that does nothing."""

LOGGER = logging.getLogger("hdet")
# Packages whose frames lie between the user's line and the warning. A context manager of hdet is
# entered by contextlib, and a record that is closed at the end of a run is closed by weakref.
_NOT_THE_USERS = frozenset({"hdet", "torch", "contextlib", "weakref"})


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Raise a warning that points at the first line outside hdet and torch.

    Args:
        text: What is wrong, the value, and what to write instead.
        category: The class of the warning.
    """
    warnings.warn(text, category, stacklevel=_stacklevel(sys._getframe(1)))


def launched_first() -> bool:
    """Return whether the launcher calls this process the first one, or calls it nothing.

    For code that runs before there are replicas to ask. torchrun and other launchers set `RANK`.
    """
    return os.environ.get("RANK", "0") == "0"


def info(text: str) -> None:
    """Say one decision that changes the run, in one line.

    The line is visible by default. It goes through the logger `hdet` where the user's logging
    shows it, and to stderr otherwise. `hdet.set_verbosity` and the level of the logger hide it.

    Args:
        text: What was decided, and why.
    """
    _log(logging.INFO, text)


def caution(text: str) -> None:
    """Say in one line what keeps the run from going on.

    Unlike `warn`, it needs no line of the user's and never raises.
    """
    _log(logging.WARNING, text)


def _log(level: int, text: str) -> None:
    line = " ".join(text.split())
    if LOGGER.disabled or LOGGER.manager.disable >= level:
        return
    if LOGGER.isEnabledFor(level) and LOGGER.hasHandlers():
        LOGGER.log(level, "%s", line)
    elif LOGGER.level <= level:  # a root logger at WARNING was not meant for hdet
        print(f"hdet: {line}", file=sys.stderr, flush=True)


def set_verbosity(level: int | str) -> None:
    """Set which lines hdet logs. By default it logs each decision that changes the run.

    hdet logs its decisions at level INFO, to the logger `hdet`. Warnings are not log lines:
    the module `warnings` filters them.

    Args:
        level: A level of the module `logging`, or its name. `"WARNING"` hides the decisions.

    Raises:
        TypeError: If `level` is neither an integer nor a string.
        ValueError: If `level` is negative or not the name of a level.

    Example:
        >>> set_verbosity("WARNING")
        >>> logging.getLogger("hdet").isEnabledFor(logging.INFO)
        False
        >>> set_verbosity(logging.NOTSET)
    """
    if isinstance(level, bool) or not isinstance(level, int | str):
        raise TypeError(f"`level` must be a logging level such as 'INFO', got {level!r}.")
    levels = logging.getLevelNamesMapping()
    is_known = level.upper() in levels if isinstance(level, str) else level >= 0
    if not is_known:
        raise ValueError(f"`level` must be one of {', '.join(levels)}, got {level!r}.")
    LOGGER.setLevel(levels[level.upper()] if isinstance(level, str) else level)


def _stacklevel(frame: FrameType | None) -> int:
    """Return the stacklevel, seen from `warn`, of the first frame that is the user's."""
    level = 2
    while frame is not None and _package(frame) in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    return level


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]
