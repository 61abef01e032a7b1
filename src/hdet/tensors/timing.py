"""Stopwatch: how long parts of a run take, on the host or on a CUDA device."""

import time
from typing import Any

import torch


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
