"""Where the events of a run go: JSON lines in a file, or an object of the user."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hdet.records.history import FILE_NAME


@runtime_checkable
class Sink(Protocol):
    """Receives the events of a run, for example to forward them to an experiment tracker.

    Any object with these two methods is a sink; pass it as `record=`. Only the first process of a
    run writes to its sinks. A sink that raises gets no further events, and the run goes on.
    """

    def write(self, event: Mapping[str, Any]) -> None:
        """Take one event.

        Args:
            event: Plain data: the fields of one class of `hdet.records.events`, with its name
                under `event` and the version of the schema under `schema`.
        """

    def close(self) -> None:
        """End the record: the scheduler no longer exists, or `write` raised."""


RecordTarget = str | Path | Sink
Record = RecordTarget | Sequence[RecordTarget]
"""What `record=` takes: the folder of a run, a sink, or a sequence of them."""


class JsonLines:
    """Appends each event as one line to RUN/record.jsonl.

    A line is complete in itself and is written at once, so that an unfinished run leaves a record
    that can be read.

    Args:
        run: The folder of the run. It is made if it does not exist.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, run: str | Path) -> None:
        self.path = Path(run) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:  # a path that cannot be written is an error now
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # a half-written line must not spoil the next one
                    file.write(b"\n")

    def __str__(self) -> str:
        return str(self.path)

    def write(self, event: Mapping[str, Any]) -> None:
        """Append one line. The file is open only meanwhile."""
        text = json.dumps(event, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def close(self) -> None:
        """Do nothing: the file is closed after each line."""


def check_record(record: Record | None) -> tuple[RecordTarget, ...]:
    """The targets that `record` names; none for a run without a record.

    Raises:
        TypeError: `record` holds something that is neither a path nor a sink.
    """
    if record is None:
        return ()
    is_one = isinstance(record, (str, bytes, Path, Sink))
    targets = (record,) if is_one or not isinstance(record, Sequence) else tuple(record)
    for target in targets:
        is_target = isinstance(target, (str, Path, Sink)) and not isinstance(target, type)
        if not is_target or target == "":
            raise TypeError(
                "`record` must be a folder, an object with `write(event)` and `close()`, or a "
                f"sequence of them, got {target!r}."
            )
    return targets  # type: ignore[return-value]  # each was checked above


def open_sink(target: RecordTarget) -> Sink:
    """The sink itself; for a path, the file of JSON lines in that folder."""
    return JsonLines(target) if isinstance(target, (str, Path)) else target
