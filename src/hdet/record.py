"""The record of a run: one JSON line for its settings, then one for every cycle.

`SCHEMA` changes when a field changes its meaning. A line is complete in itself and is written at
once, so that an unfinished run leaves a record that can be read.
"""

import json
import math
import os
import platform
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from hdet.controller import Move
from hdet.fit import Slope
from hdet.guard import Triage
from hdet.history import FILE_NAME, SCHEMA
from hdet.steering import Knob, Steered
from hdet.version import __version__


def converge_line(step: int, verdict: Triage, num_bytes: int) -> dict[str, Any]:
    """What a converge did."""
    return {
        "event": "converge",
        "step": step,
        "excluded": [{"replica": r, "reason": why} for r, why in verdict.excluded.items()],
        "converge": {"bytes": num_bytes},
    }


def guard_line(step: int, reason: str, back_to: int, factor: float | None) -> dict[str, Any]:
    """Why a run was taken back, to which step, and what its scale was multiplied by."""
    return {
        "event": "guard",
        "step": step,
        "reason": reason,
        "back_to": back_to,
        "factor": factor,
    }


def cycle_line(
    cycle: int,
    names: Sequence[str],
    losses: Sequence[float | None],
    errors: Sequence[float | None],
    distances: Sequence[float | None],
    scores: Sequence[Sequence[float]] | None,
    steered: Steered,
    ran_with: Sequence[float],
    knobs: Sequence[Knob],
    used: Sequence[tuple[float, Sequence[float]]],
    course: dict[str, Any],
) -> dict[str, Any]:
    """What a cycle showed and what came of it. `lrs` are those of its last step; `used` has the
    centre of every knob and where each replica stood.

    Learning rates have one entry for every parameter group, whatever knob moves them.
    """
    rates: dict[int, dict[str, Any]] = {}
    others = []
    rows = zip(knobs, steered.moves, steered.slopes, used, strict=True)
    for knob, move, slope, (centre, values) in rows:
        told = _knob_line(knob, move, slope)
        for group, base in enumerate(ran_with):
            if group in knob.about.members:
                own = {"lrs": [base * factor for factor in values], "centre": base * centre}
                rates[group] = {"name": names[group], **own, **told}
        if not knob.about.members:
            others.append({"name": knob.name, "values": values, "centre": centre, **told})
    for group, lr in enumerate(ran_with):
        still = {"decision": "stay", "reason": "not explored"}
        lrs = [lr] * len(losses)
        rest = {"lrs": lrs, "centre": lr, "scale": 1.0, **still}
        rates.setdefault(group, {"name": names[group], **rest})
    return {
        "event": "cycle",
        "cycle": cycle,
        "losses": losses,
        "loss_errors": errors,
        "weights": steered.weights,
        "distances": distances,
        "scores": None if scores is None else [fmean(each) if each else None for each in scores],
        "course": course,
        "knobs": [*(rates[group] for group in sorted(rates)), *others],
    }


def _knob_line(knob: Knob, move: Move, slope: Slope | None) -> dict[str, Any]:
    return {
        "space": knob.about.space.kind,
        **move.state._asdict(),
        "hypergradient": move.hypergradient,
        "hypergradient_error": move.error,
        "slope": None if slope is None else slope.slope,
        "slope_error": None if slope is None else slope.error,
        "decision": move.decision,
        "reason": move.reason,
    }


class Stopwatch:
    """Time on the device of the tensors at hand, without making the host wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """Once to start (the constructor does it), once to stop."""
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self, *, wait: bool = False) -> float | None:
        """The time between the two marks; none while the device is still busy with it."""
        start, stop = self._marks
        if self._on_cuda and wait:
            stop.synchronize()
        if not self._on_cuda:
            return float(stop - start)
        return float(start.elapsed_time(stop)) / 1000 if stop.query() else None


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
            self._append(json.dumps(_plain({"schema": SCHEMA, **line}), allow_nan=False))

    def _append(self, text: str) -> None:
        if self._failed:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:
            self._failed = True
            warnings.warn(f"the record {self.path} ends here: {error}", stacklevel=2)


def _plain(value: Any) -> Any:
    """What strict JSON can say; a number that is not finite becomes null."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
