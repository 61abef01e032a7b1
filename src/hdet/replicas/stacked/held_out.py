"""Batches that are held out of training, to score all replicas on them.

Losses on different batches differ by more than learning rates change them. The stacked engine sees
the loss function and every batch. So it holds out some batches, and scores every replica on the
same parts of them.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from hdet.replicas.stacked.batch_dims import is_split
from hdet.replicas.stacked.forward import Forward
from hdet.replicas.stacked.recorded_calls import RecordedCall, copied
from hdet.tensors.ops import are_finite
from hdet.tensors.score_rows import NUM_BATCH_WORDS, pad_scores

MAX_CALLS = 64
"""The calls that are recorded in a step. A loop that never calls `step()` must not fill memory."""


class RecordedBatches:
    """Keeps the batches of some steps, and scores all replicas on them.

    The first batches are held out: no replica trains on them. In later rounds the first batch of
    every earlier round counts as held out too, because all replicas are restored after a round.

    Args:
        forward: Computes the losses and records the calls.
        num_parts: The parts to hold out before the first round.
        max_parts: The number of parts from which on no more are recorded.
    """

    is_fixed = False
    """Later rounds are scored on more batches."""

    def __init__(self, forward: Forward, num_parts: int, max_parts: int) -> None:
        self._forward = forward
        self._max_parts = max_parts
        self._calls: list[RecordedCall] = []
        """The calls of this step, if it is recorded."""
        self._first_calls: list[RecordedCall] = []
        """The calls of the first step of this round."""
        self._steps: list[list[RecordedCall]] = []
        """The calls of each step that was kept."""
        self._saved: list[list[SavedCall]] = []
        """The calls of a checkpoint, until the loop shows the functions that they are for."""
        self.steps_left = math.ceil(num_parts / forward.num_replicas)
        self._start_recording()

    def end_step(self) -> None:
        """A held-out step is over. It does not count if none of its losses is finite."""
        calls = self._take_calls()
        if self._keep(calls) or not calls:
            self.steps_left -= 1
        self._start_recording()

    def begin_round(self) -> None:
        """The first training step of a round is over."""
        self._first_calls = self._take_calls()

    def end_round(self) -> None:
        """All replicas were restored, so they have not trained on the round's first batch."""
        self._keep(self._first_calls)
        self._first_calls = []
        self._start_recording()

    def close(self) -> None:
        """Stop recording, unless another object records by now."""
        if self._forward.call_recorder is not None and self._forward.call_recorder() is self:
            self._forward.call_recorder = None

    def state_dict(self) -> dict[str, Any]:
        known = [[_saved_call(call) for call in calls] for calls in self._steps]
        return {"left": self.steps_left, "calls": self._saved + known}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        if "calls" not in state:  # batches that a loop gave, and gives no more
            return False
        self._saved, self.steps_left = list(state["calls"]), state["left"]
        return True

    def _complete_saved(self, calls: Sequence[RecordedCall]) -> None:
        """Give the saved calls the functions of the first calls of this loop.

        Calls of another loop, or of another number of replicas, are left out.
        """
        for saved in self._saved if calls else ():
            if len(saved) == len(calls):
                pairs = list(zip(calls, saved, strict=True))
                if all(_fits(call, one) for call, one in pairs):
                    self._steps.append([_completed(call, one) for call, one in pairs])
        self._saved = [] if calls else self._saved

    @property
    def is_empty(self) -> bool:
        return not (self._steps or self._saved)

    def rows(self, num: int, *, alike: bool = False) -> Tensor:
        """The scores of each replica on at most `num` parts, laid out like those of a probe.

        The random state is restored afterwards.

        Args:
            num: The largest number of parts to score.
            alike: All replicas have the same weights, so each of them scores another part.

        Raises:
            RuntimeError: No batch is left, since those of a checkpoint do not fit this loop.
        """
        if not self._steps:
            raise RuntimeError("the held-out batches of the checkpoint do not fit this loop")
        with self._forward.restored_random_state():
            table = self._divided_scores(num) if alike else self._scores(num)
        words = table.new_zeros(NUM_BATCH_WORDS)
        return torch.stack([pad_scores(row, words) for row in table])

    def _divided_scores(self, num: int) -> Tensor:
        """Scores of equal replicas, [replicas, parts]: every replica computes its own part."""
        size = self._forward.num_replicas
        lines = [
            _mean([self._forward.repeat(call, tree_map(copied, call.parts)) for call in calls])
            for calls in self._steps[: math.ceil(num / size)]
        ]
        return torch.cat(lines)[:num].expand(size, -1)

    def _scores(self, num: int) -> Tensor:
        """Scores of every replica on every part, [replicas, parts]."""
        replicas = range(self._forward.num_replicas)
        parts = [(calls, partial(_part_for_all, r)) for calls in self._steps for r in replicas]
        lines = [
            _mean([self._forward.repeat(call, tree_map(same, call.parts)) for call in calls])
            for calls, same in parts[:num]
        ]
        return torch.stack(lines, 1)

    def record(self, call: RecordedCall) -> None:
        """Keep a call of this step."""
        self._calls.append(call)
        if len(self._calls) > MAX_CALLS:
            self._take_calls()

    def _start_recording(self) -> None:
        if len(self._steps) * self._forward.num_replicas < self._max_parts:
            self._forward.call_recorder = ref(self)

    def _take_calls(self) -> list[RecordedCall]:
        """The calls that were recorded. Recording stops."""
        calls, self._calls = self._calls, []
        self.close()
        self._complete_saved(calls)
        return calls

    def _keep(self, calls: list[RecordedCall]) -> bool:
        """Keep calls with finite losses: other batches would not tell replicas apart."""
        finite = [call for call in calls if are_finite([call.losses])]
        self._steps += [finite] if finite else []
        return bool(finite)


SavedCall = Mapping[str, Any]
"""A call without its function: the leaves of its parts, and how it was made."""


def _saved_call(call: RecordedCall) -> SavedCall:
    return {
        "parts": tree_leaves(call.parts),
        "losses": call.losses,
        "autocast": call.autocast_dtype,
        "training": list(call.training_flags),
    }


def _fits(call: RecordedCall, saved: SavedCall) -> bool:
    """Whether a saved call has losses and leaves like those of a call of the loop."""
    own, theirs = tree_leaves(call.parts), saved["parts"]
    return call.losses.shape == saved["losses"].shape and list(map(_kind, own)) == list(
        map(_kind, theirs)
    )


def _kind(leaf: Any) -> Any:
    return (leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else type(leaf)


def _completed(call: RecordedCall, saved: SavedCall) -> RecordedCall:
    """A saved call with the function and the structure of a call of the loop."""
    leaves, structure = tree_flatten(call.parts)
    pairs = zip(leaves, saved["parts"], strict=True)
    moved = [new.to(old.device) if isinstance(old, Tensor) else new for old, new in pairs]
    return RecordedCall(
        call.function,
        tree_unflatten(moved, structure),
        saved["losses"].to(call.losses.device),
        saved["autocast"],
        tuple(saved["training"]),
    )


def _mean(micro_batches: list[Tensor]) -> Tensor:
    return torch.stack(micro_batches).double().mean(0)


@torch.no_grad()
def _part_for_all(replica: int, value: Any) -> Any:
    """One replica's part for every replica. It has the strides of the original parts."""
    if not is_split(value):
        return value
    same = torch.empty_like(value).copy_(value[replica].expand_as(value))
    return same.requires_grad_(value.requires_grad)
