"""Stopwatch: how long parts of a run take, on the host or on a CUDA device."""

import time
from typing import Any

import torch


class Stopwatch:
    """Measures time on a device without making the host wait.

    Args:
        device: Where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """Stop the watch. The constructor has started it."""
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self, *, wait: bool = False) -> float | None:
        """The time between start and stop, or None while the device is still busy.

        Args:
            wait: Wait for the device.
        """
        start, stop = self._marks
        if self._on_cuda and wait:
            stop.synchronize()
        if not self._on_cuda:
            return float(stop - start)
        return float(start.elapsed_time(stop)) / 1000 if stop.query() else None
