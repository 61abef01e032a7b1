"""The record of a run: one JSON line for its settings, then one for every cycle.

`SCHEMA` changes when a field changes its meaning. A line is complete in itself and is written at
once, so that an unfinished run leaves a record that can be read.
"""

import json
import os
import platform
import time
import warnings
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hdet._version import __version__
from hdet.records.events import as_json
from hdet.records.reader import FILE_NAME, SCHEMA
from hdet.tensors.timing import Stopwatch


class Recorder:
    """Appends lines to RUN/record.jsonl. A disk that fails ends the record, not the run."""

    def __init__(self, run: str | Path) -> None:
        self.path = Path(run) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:  # a path that cannot be written is an error now
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # what a kill left half written must not spoil the next
                    file.write(b"\n")
        self._failed = False
        self._waiting: deque[tuple[dict[str, Any], Mapping[str, Stopwatch]]] = deque()

    def start(self, settings: dict[str, Any], replicas: dict[str, Any], device: str) -> None:
        versions = {
            "hdet": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        self.write(
            {
                "event": "run",
                "settings": settings,
                "replicas": replicas,
                "device": device,
                "versions": versions,
            }
        )

    def write(
        self,
        line: dict[str, Any],
        watches: Mapping[str, Stopwatch] | None = None,
        *,
        wait: bool = False,
    ) -> None:
        """Queue a line; it is written as soon as the times of its parts are known."""
        self._waiting.append(({"time": round(time.time(), 3), **line}, watches or {}))
        self.flush(wait=wait)

    def flush(self, *, wait: bool = False) -> None:
        """Write the lines that are ready, in order; the host waits for the device if told to."""
        while self._waiting:
            line, watches = self._waiting[0]
            for part, watch in watches.items():
                seconds = watch.seconds(wait=wait)
                if seconds is None:
                    return
                line = {**line, part: {**line.get(part, {}), "seconds": seconds}}
            self._waiting.popleft()
            self._append(json.dumps(as_json({"schema": SCHEMA, **line}), allow_nan=False))

    def _append(self, text: str) -> None:
        if self._failed:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:
            self._failed = True
            warnings.warn(f"the record {self.path} ends here: {error}", stacklevel=2)
