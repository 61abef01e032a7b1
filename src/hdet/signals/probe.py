"""Probe: compares replicas fairly, on the same held-out batches and in eval mode.

Training losses on different batches differ by more than the effect of most knobs, and a training
loss always prefers less dropout. Scores on shared held-out batches have neither fault.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from hdet._validation import check_choice, check_integer, check_range
from hdet.lr_search.constants import DEFAULT_TAIL

MAX_COST = 0.02
"""The default cost of a probe, as a share of the work of a cycle."""
MAX_BATCHES = 8
"""The default number of batches does not exceed this."""


class Probe:
    """Scores the replicas at the end of every cycle, so that they can be compared.

    Replicas are scored in eval mode, on the same batches and with the same random numbers. The
    scoring leaves no trace in the run.

    Args:
        score: A function `score(model, batch)`, or `score(model)` without `batches`. It returns one
            number, or a tensor with one number for each sample or batch. With more numbers, the
            uncertainty of the comparison is known better.
        batches: A loader or a list. Every cycle takes the next `num` batches, and starts again
            after the last one. All replicas must get the same batches in the same order.
        num: The number of batches for each cycle. By default as many as cost 2 % of the cycle's
            work, at most 8.
        mode: "min" if low scores are good, such as losses; "max" if high scores are good.
        tail: Replicas are scored at the mean of their weights over this share of the cycle, at its
            end. This mean predicts better how a replica ends than its last weights do. With 0,
            replicas are scored at their last weights.

    Raises:
        TypeError: `score` cannot be called as described, or `batches` cannot be iterated again.
        ValueError: `num`, `mode` or `tail` is out of range.

    Example:
        >>> batches = [(torch.ones(4, 2), torch.ones(4, 1))]
        >>> def score(model, batch):
        ...     x, y = batch
        ...     return (model(x) - y).square().mean()
        >>> probe = Probe(score, batches)
        >>> probe.mode, probe.tail
        ('min', 0.5)
    """

    def __init__(
        self,
        score: Callable[..., Any],
        batches: Iterable[Any] | None = None,
        *,
        num: int | None = None,
        mode: Literal["min", "max"] = "min",
        tail: float = DEFAULT_TAIL,
    ) -> None:
        if not callable(score):
            raise TypeError(
                "`score` must be a function of the model (and of a batch, if `batches` is given), "
                f"got {score!r}."
            )
        if batches is not None and (isinstance(batches, Iterator) or not _is_iterable(batches)):
            raise TypeError(
                "`batches` must be a loader or a list that can be iterated more than once, got "
                f"{batches!r}."
            )
        _check_call(score, ["model"] if batches is None else ["model", "batch"])
        if num is not None:
            check_integer("num", num, at_least=1)
        check_choice("mode", mode, ("min", "max"))
        check_range("tail", tail, least=0, below=1.0000001)
        self.score, self.batches, self.num = score, batches, num
        self.mode, self.tail = mode, float(tail)
        self._iterator: Iterator[Any] | None = None
        self._place = self._epoch = 0

    def describe(self) -> dict[str, Any]:
        """Return the settings, which must be equal on all replicas and which the record keeps.

        Returns:
            Plain data.
        """
        return {"num": self.num, "mode": self.mode, "tail": self.tail}

    def num_batches(self, sync_every: int, num_replicas: int = 1) -> int:
        """The number of batches for each cycle, at least one.

        A forward pass is taken for a third of a step's work. Stacked replicas divide a batch when
        they train, but each of them scores the whole batch. No batch is scored twice in a cycle:
        repeated scores would make the comparison look more certain than it is.

        Args:
            sync_every: Steps of a cycle.
            num_replicas: Replicas that share the device.

        Returns:
            The number, at least 1.

        >>> Probe(lambda model: 0.0).num_batches(100), Probe(lambda model: 0.0).num_batches(100, 4)
        (6, 1)
        """
        num = self.num or min(max(int(MAX_COST * 3 * sync_every / num_replicas), 1), MAX_BATCHES)
        return min(num, self._length or num)

    def tail_steps(self, sync_every: int) -> int:
        """Return the steps at the end of a cycle over which the weights are averaged.

        Args:
            sync_every: Steps of a cycle.

        Returns:
            The number of steps.
        """
        return math.ceil(self.tail * sync_every)

    def take(self, cycle: int, sync_every: int, seed: int, num_replicas: int = 1) -> list[Any]:
        """Return the batches of a cycle: the next ones, and again the first after the last.

        Args:
            cycle: The number of the cycle.
            sync_every: Steps of a cycle.
            seed: The seed of the run, for loaders that shuffle.
            num_replicas: Replicas that share the device.

        Returns:
            The batches, equal on all replicas.
        """
        num = self.num_batches(sync_every, num_replicas)
        place = cycle * num
        if self._iterator is None or self._place != place:
            self._restart(place // self._length if self._length else 0, seed)
            # A resumed run continues at its place in the loader.
            for _ in range(place % self._length if self._length else place):
                self._next(seed)
        taken = [self._next(seed) for _ in range(num)]
        self._place = place + num
        return taken

    @property
    def _length(self) -> int | None:
        try:
            return len(self.batches) or None  # type: ignore[arg-type]
        except TypeError:
            return None

    def _restart(self, epoch: int, seed: int) -> None:
        """Start to iterate again.

        A shuffling loader draws its order now. It draws the same in every process and after a
        resume.
        """
        assert self.batches is not None
        chosen = (seed * 1_000_003 + epoch) & 0x7FFFFFFF
        torch.manual_seed(chosen)
        sampler = getattr(self.batches, "sampler", None)
        for owner in (self.batches, sampler):  # a generator of its own, if there is one
            if isinstance(own := getattr(owner, "generator", None), torch.Generator):
                own.manual_seed(chosen)
        self._epoch, self._iterator = epoch, iter(self.batches)

    def _next(self, seed: int) -> Any:
        for _ in range(2):
            assert self._iterator is not None
            for batch in self._iterator:
                return batch
            self._restart(self._epoch + 1, seed)
        raise ValueError("`batches` of the probe must hold at least one batch, got none.")


def _check_call(score: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Raise a TypeError now if the score cannot be called at the end of the first cycle."""
    try:
        signature = inspect.signature(score, follow_wrapped=False)
    except (TypeError, ValueError):  # some callables have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as problem:
        raise TypeError(
            f"`score` of the probe must be callable as score({', '.join(arguments)}), got one with "
            f"the arguments {signature} ({problem})."
        ) from None


def as_probe(probe: Any) -> Probe | None:
    """Turn a user's `probe=` into a Probe: a function of the model becomes one.

    Raises:
        TypeError: `probe` is neither None, nor a Probe, nor a function.
    """
    if probe is None or isinstance(probe, Probe):
        return probe
    if callable(probe) and not isinstance(probe, nn.Module):
        return Probe(probe)
    raise TypeError(
        "`probe` must be a function of the model, or hdet.Probe(score, loader) with a function "
        f"that scores a model on one batch, got {probe!r}."
    )


def _is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable) or hasattr(value, "__getitem__")
