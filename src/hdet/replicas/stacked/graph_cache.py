"""Compiled functions and captured CUDA graphs of stacked replicas, kept for the next batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from hdet._messages import warn
from hdet.replicas.stacked.cuda_graphs import CapturedGraphs

# A captured batch keeps its activations. A few shapes, such as the last batch of an epoch, suffice.
MAX_CAPTURED = 4


class GraphCache:
    """What `StackedReplicas.compile` asks for, made when it is first used.

    Without `compile`, functions run as they are and nothing is captured.
    """

    def __init__(self, device_type: str) -> None:
        self._on_cuda = device_type == "cuda"
        self._options: dict[str, Any] | None = None
        """The options of torch.compile, or None where nothing is compiled."""
        self._functions: dict[Any, Any] = {}
        self._captured: dict[Any, CapturedGraphs | None] = {}
        self._streams: list[Any] = []
        self._warned: set[str] = set()

    def compile(self, **options: Any) -> None:
        """Compile all functions from now on, and capture them on CUDA."""
        self._options = options
        self._functions.clear()
        self._captured.clear()

    @property
    def compiles(self) -> bool:
        return self._options is not None

    @property
    def captures(self) -> bool:
        return self.compiles and self._on_cuda

    def compiled(self, run: Callable[..., Tensor], **defaults: Any) -> Callable[..., Tensor]:
        """The compiled function, or the function itself where nothing is compiled.

        Args:
            run: The function.
            defaults: Options of torch.compile where the user gave none.
        """
        if self._options is None:
            return run
        if run not in self._functions:
            self._functions[run] = torch.compile(run, **(defaults | self._options))
        compiled: Callable[..., Tensor] = self._functions[run]
        return compiled

    def captured(self, key: Any, capture: Callable[[], CapturedGraphs]) -> CapturedGraphs | None:
        """The captured graphs of a key, or None where they cannot be captured.

        Args:
            key: All that the graphs depend on.
            capture: Makes the graphs. It raises a RuntimeError where that is impossible.
        """
        if key not in self._captured:
            if len(self._captured) >= MAX_CAPTURED:
                self._warn_once(
                    f"replicas run without CUDA graphs, which is slower: more than {MAX_CAPTURED} "
                    "kinds of batches or loss functions. Define the loss function once, outside "
                    "the loop."
                )
                return None
            self._captured[key] = self._try_capture(capture)
        return self._captured[key]

    def branches(self, num: int) -> "StreamBranches":
        """One stream for each of `num` replicas while a graph is captured, otherwise none."""
        is_capturing = self._on_cuda and torch.cuda.is_current_stream_capturing()
        if is_capturing and not self._streams:
            self._streams = [torch.cuda.Stream() for _ in range(num)]
        return StreamBranches(self._streams if is_capturing else [])

    def _try_capture(self, capture: Callable[[], CapturedGraphs]) -> CapturedGraphs | None:
        try:
            return capture()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
        # After a failed capture the other graphs would draw from a random state without a seed.
        self._captured.clear()
        warn(f"replicas run without CUDA graphs, which is slower: {reason}")
        return None

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warn(text)


class StreamBranches:
    """A stream for each replica, so that a captured graph runs the replicas side by side."""

    def __init__(self, streams: Sequence[Any]) -> None:
        self._streams = streams
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())

    def branch(self, replica: int) -> Any:
        """A context in which the replica's stream is the current one, if it has a stream."""
        return torch.cuda.stream(self._streams[replica] if self._streams else None)

    def join(self) -> None:
        """Let the current stream wait for all branches."""
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)


def batch_key(parts: Any) -> str:
    """A text that is equal for batches of equal structure, shapes, dtypes and strides."""
    leaves, layout = tree_flatten(parts)
    described = [
        (tuple(leaf.shape), leaf.dtype, leaf.stride()) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    return repr((described, layout))


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Inside, autocast casts a weight each time: a cached cast would be missing in a replay."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
