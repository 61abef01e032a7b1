"""The processes that save or load together: an error of one of them is raised on all."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (OSError, RuntimeError, TypeError, ValueError)
}


class Processes:
    """All processes of the default group, or this one alone."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def together(self, work: Callable[[], T]) -> list[T]:
        """Do some work on every process, and return all results.

        The work must not wait for other processes unless an error there reaches all of them.

        Raises:
            Exception: The error of this process, or else that of the first one that has any.
        """
        result: Any = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as problem:
            error = problem
        told = self.gather((result, None if error is None else _described(error)))
        if error is not None:
            raise error
        for rank, (_, other) in enumerate(told):
            if other is not None:
                raise ERRORS[other[0]](f"process {rank} failed: {other[1]}")
        return [result for result, _ in told]

    def alone(self, work: Callable[[], T]) -> T:
        """Do some work on every process; return the result here, or raise on all processes."""
        results: list[T] = []
        self.together(lambda: results.append(work()))
        return results[0]

    def on_first(self, work: Callable[[], T]) -> T:
        """Do some work on the first process, and return its result on all."""
        results: list[Any] = self.together(lambda: work() if self.rank == 0 else None)
        first: T = results[0]
        return first


def _described(error: Exception) -> tuple[str, str]:
    """The kind and the text of an error: not every error can be sent."""
    names = (name for name, kind in ERRORS.items() if isinstance(error, kind))
    return next(names, "RuntimeError"), str(error)
