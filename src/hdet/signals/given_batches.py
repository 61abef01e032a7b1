"""Batches that a training loop holds out itself, and the scores of all replicas on them.

Under DDP and FSDP2 hdet sees no batch. A loop can give some that no replica trains on.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hdet._messages import Warn
from hdet.lr_search.constants import MIN_PART_SIZE, NUM_HELD_OUT_PARTS
from hdet.replicas.protocol import Replicas, records_calls
from hdet.signals.batch_exchange import (
    check_batch,
    copy_of,
    exchange_batches,
    num_samples,
    split,
    with_leaves,
)
from hdet.signals.probe_scoring import (
    are_weights_finite,
    bare_module,
    equal_random_numbers,
    group_means,
    lost_row,
    of_replica,
)
from hdet.tensors.dtensor import whole
from hdet.tensors.score_rows import NUM_BATCH_WORDS, pad_scores

LossOf = Callable[..., Tensor]
"""(model, *batch, **named) -> the mean loss, or one loss for each sample."""


class GivenBatch(NamedTuple):
    """A batch, or a part of one, with the function that computes its loss."""

    loss_of: LossOf
    batch: tuple[tuple[Any, ...], dict[str, Any]]
    """The arguments of the loss function after the model, and those with names."""
    autocast_dtype: torch.dtype | None
    """The dtype of autocast, or None if it was off."""


class GivenBatches:
    """The held-out batches of all processes. It has the methods of `HeldOutBatches`.

    Args:
        replicas: The engine that gathers.
        modules: The model of each replica of this process.
        seed: The seed of the run.
        together: Whether replicas share a parameter. Then all run, also those that are lost.
        warn: Raises a warning. A process that must be quiet passes one that does nothing.
    """

    steps_left = 0
    """No step of training is needed: the loop gives the batches."""
    is_fixed = True
    """A search takes no more batches after its first step."""

    def __init__(
        self,
        replicas: Replicas,
        modules: Sequence[nn.Module],
        *,
        seed: int,
        together: bool,
        warn: Warn,
    ) -> None:
        self._replicas, self._modules, self._warn = replicas, modules, warn
        self._seed, self._together = seed, together
        self._device = next(iter(modules[0].parameters())).device
        self._own: list[GivenBatch] = []
        self._saved: Sequence[Sequence[Any]] | None = None
        """The leaves of all batches, as a checkpoint had them."""
        self._parts: list[GivenBatch] = []
        """The parts of the batches of all processes."""

    @property
    def is_empty(self) -> bool:
        return not self._own

    def add(self, loss_of: LossOf, batch: Any) -> None:
        """Add a batch of this process. Nothing is sent before `share()`.

        Raises:
            TypeError: `loss_of`, its result or the batch has the wrong type.
            ValueError: The loss has a wrong shape, or is not finite.
        """
        if not callable(loss_of):
            raise TypeError(
                "`loss_of` of `hold_out()` must be a function (model, *batch) -> loss, got "
                f"{loss_of!r}."
            )
        check_batch(batch)
        kind = self._device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        given = GivenBatch(loss_of, copy_of(batch), dtype)
        # Processes that hold one model can only run together, and here one may call alone.
        if self._replicas.parts == 1 and not self._together:
            loss = float(self._loss(self._modules[0], given, place=0))
            if not math.isfinite(loss):
                raise ValueError(
                    "`loss_of` of `hold_out()` must return a finite loss for the weights before "
                    f"the search, got {loss}."
                )
        self._own.append(given)

    def share(self) -> None:
        """Exchange the batches of all processes, which must call this together.

        Raises:
            RuntimeError: Processes gave different numbers of batches.
            ValueError: Their batches differ in structure or dtypes.
        """
        everyone = exchange_batches(self._replicas, [given.batch for given in self._own])
        if self._saved is not None:
            everyone = [
                [with_leaves(given.batch, leaves) for leaves in row]
                for given, row in zip(self._own, self._saved_rows(), strict=True)
            ]
        elif self._replicas.parts == 1:  # the parts of a replica have other batches
            self._saved = [[tree_leaves(batch) for batch in row] for row in everyone]
        pairs = list(zip(self._own, everyone, strict=True))
        size = self._smallest([self._num_samples(g, batch) for g, row in pairs for batch in row])
        num = sum(map(len, everyone))
        # Errors come from the differences between parts.
        pieces = max(min(math.ceil(NUM_HELD_OUT_PARTS / max(num, 1)), size // MIN_PART_SIZE), 1)
        self._parts = [
            given._replace(batch=part)
            for given, row in pairs
            for batch in row
            for part in (self._pieces(given, batch, pieces) if pieces > 1 else [batch])
        ]

    def _saved_rows(self) -> Sequence[Sequence[Any]]:
        """The saved leaves of the batches of all processes, for each call of `hold_out()`.

        Raises:
            RuntimeError: The checkpoint has another number of calls.
        """
        saved = self._saved or ()
        if len(saved) != len(self._own):
            raise RuntimeError(
                "`hold_out()` must be called as often as at the start of the search that the "
                f"checkpoint was saved in, {len(saved)} times, got {len(self._own)} calls."
            )
        return saved

    def state_dict(self) -> dict[str, Any]:
        return {} if self._saved is None else {"batches": self._saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        self._saved = state.get("batches")
        return self._saved is not None

    def _num_samples(self, given: GivenBatch, batch: Any) -> int:
        if records_calls(self._replicas):
            return self._replicas.num_samples(given.loss_of, batch)
        return num_samples(batch)

    def _pieces(self, given: GivenBatch, batch: Any, num: int) -> list[Any]:
        if records_calls(self._replicas):
            return self._replicas.pieces(given.loss_of, batch, num)
        return split(batch, num)

    def _smallest(self, sizes: list[int]) -> int:
        """The smallest size, also among the other parts of a replica."""
        rows = torch.tensor([[float(min(sizes, default=0))]] * len(self._replicas.local))
        return int(self._replicas.gather_parts(rows).min())

    def end_step(self) -> None:
        """Nothing: no step is held out."""

    def begin_round(self) -> None:
        """Nothing: batches of rounds are not recorded."""

    def end_round(self) -> None:
        """Nothing: batches of rounds are not recorded."""

    def close(self) -> None:
        """Nothing: the memory is free when this object is dropped, after its search."""

    @torch.no_grad()
    def rows(self, num: int, *, alike: bool = False) -> Tensor:
        """The scores of each replica, laid out like those of a probe; all processes call it.

        Every replica scores all parts, with the same random numbers. A replica without finite
        weights is lost, and so is one whose loss function fails while that of others does not.

        Args:
            num: The largest number of scores. More parts are averaged in groups.
            alike: All replicas have the same weights, so one is scored for those of this process.

        Raises:
            RuntimeError: The loss function failed on all replicas, or for equal weights on one.
        """
        scored, times = (self._modules[:1], len(self._modules)) if alike else (self._modules, 1)
        finite = self._have_finite_weights(scored, times)
        rows, problems = [], []
        for index, module in enumerate(scored):
            row, problem = lost_row(self._device), ""
            if finite[index] or self._together:
                which = nullcontext() if len(self._modules) == 1 else of_replica(index, row.device)
                try:
                    with which:
                        found = self._row(module, num)
                    row = found if finite[index] else row
                except Exception as error:  # other processes wait for this one
                    problem = f"{type(error).__name__}: {error}"
            rows.append(row)
            problems.append(problem)
        self._check_problems(problems * times, alike=alike)
        return torch.stack(rows * times)

    def _have_finite_weights(self, scored: Sequence[nn.Module], times: int) -> list[bool]:
        flags = torch.stack([are_weights_finite(module)[None] for module in scored] * times)
        flat: list[bool] = self._replicas.gather_parts(flags).flatten(1).bool().all(1).tolist()
        return flat

    def _row(self, module: nn.Module, num: int) -> Tensor:
        """The row of one replica."""
        losses = [self._loss(module, part, place) for place, part in enumerate(self._parts)]
        scores = torch.stack(losses)
        if len(scores) > num:
            scores = group_means(scores, num)
        return pad_scores(scores, scores.new_zeros(NUM_BATCH_WORDS))

    @torch.no_grad()
    def _loss(self, module: nn.Module, given: GivenBatch, place: int) -> Tensor:
        """The mean loss of one part, in the mode in which the loop trains the module."""
        bare = bare_module(module)
        # Casts that autocast has cached would be those of other weights.
        cast = torch.autocast(
            self._device.type,
            given.autocast_dtype,
            given.autocast_dtype is not None,
            cache_enabled=False,
        )
        with ExitStack() as inside:
            inside.enter_context(_restored(bare))
            inside.enter_context(equal_random_numbers(self._device, self._seed, place))
            inside.enter_context(cast)
            arguments, named = copy_of(given.batch)
            return mean_of(given.loss_of(bare, *arguments, **named)).to(self._device)

    def _check_problems(self, problems: Sequence[str], *, alike: bool) -> None:
        """Tell all processes of a loss function that failed on one of them."""
        flags = torch.tensor([[float(bool(problem))] for problem in problems], device=self._device)
        merged = self._replicas.gather_parts(flags).flatten(1).amax(1, keepdim=True)
        failed = self._replicas.gather(merged).flatten().bool().tolist()
        if not any(failed):
            return
        texts = self._replicas.gather_objects([problem for problem in problems if problem])
        first = next(text for of_process in texts for text in of_process)
        if alike or all(failed):
            raise RuntimeError(first)
        lost = [replica for replica, has_failed in enumerate(failed) if has_failed]
        self._warn(
            f"replica(s) {lost} count as diverged in a round of the scout: `loss_of` of "
            f"`hold_out()` failed on them ({first})."
        )


def mean_of(loss: Any) -> Tensor:
    """The mean of what a loss function has returned.

    Raises:
        TypeError: It is no tensor of floating-point numbers.
        ValueError: It has several dimensions, or no element.
    """
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        what = f"dtype {loss.dtype}" if isinstance(loss, Tensor) else repr(loss)
        raise TypeError(
            f"`loss_of` of `hold_out()` must return a tensor of floating-point numbers, got {what}."
        )
    values = whole(loss.detach())
    if values.dim() > 1 or not values.numel():
        raise ValueError(
            "`loss_of` of `hold_out()` must return one loss, or one for each sample, got shape "
            f"{tuple(values.shape)}."
        )
    return values.double().mean()


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Restore training flags and buffers at the end, also buffers that a forward replaced."""
    parts = list(module.modules())
    flags = [part.training for part in parts]
    kept = [
        (part._buffers, name, buffer, buffer.detach().clone())
        for part in parts
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for part, flag in zip(parts, flags, strict=True):
            part.training = flag
        with torch.no_grad():
            for owner, name, buffer, value in kept:
                owner[name] = buffer
                buffer.copy_(value)
