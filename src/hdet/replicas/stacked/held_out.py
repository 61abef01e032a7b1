"""A probe that nobody has to write: batches that no replica of a scout trains on.

Losses on private batches differ by more than what learning rates do to them. Replicas on one device
know how a loss is computed, and of what: so some batches of a scout are kept, and every replica is
scored on the same parts of them.
"""

import math
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hdet.lr_search.constants import MAX_HELD_OUT_PARTS, NUM_HELD_OUT_PARTS
from hdet.replicas.stacked.forward import Forward, RecordedCall, copied, is_split
from hdet.tensors.ops import are_finite
from hdet.tensors.score_rows import NUM_BATCH_WORDS, pad_scores

MAX_CALLS = 64
"""Of a step: a loop that never calls `step()` would fill the memory."""


class HeldOutBatches:
    """Keeps what some steps are trained on, and scores all replicas by it that are not.

    Nobody trains on the first batches. And those who come back have not trained on anything: in
    later rounds the first batch of every earlier one is there too.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._heard: list[RecordedCall] = []
        """Of this step, if it is listened to."""
        self._trained_on: list[RecordedCall] = []
        """The first batch of this round."""
        self._steps: list[list[RecordedCall]] = []
        self.steps_left = math.ceil(NUM_HELD_OUT_PARTS / forward.num_replicas)
        """Before there is enough for a first round."""
        self._listen()

    def end_step(self) -> None:
        """A step is over that nobody trains on. It does not count if no loss of it is finite."""
        calls = self._take()
        if self._keep(calls) or not calls:
            self.steps_left -= 1
        self._listen()

    def begin_round(self) -> None:
        """The first step of a round is over."""
        self._trained_on = self._take()

    def end_round(self) -> None:
        """Everyone is back."""
        self._keep(self._trained_on)
        self._trained_on = []
        self._listen()

    def close(self) -> None:
        """Listen no longer, unless it is somebody else who does."""
        if self._forward.call_recorder is not None and self._forward.call_recorder() is self:
            self._forward.call_recorder = None

    @property
    def is_empty(self) -> bool:
        return not self._steps

    def rows(self, num: int, *, alike: bool = False) -> Tensor:
        """What every replica scores on so many parts at most, as a probe has it. It leaves no trace
        in the run. Those that are `alike` score one part each."""
        with self._forward.same_draws():
            table = self._own_parts(num) if alike else self._same_parts(num)
        same = table.new_zeros(NUM_BATCH_WORDS)
        return torch.stack([pad_scores(row, same) for row in table])

    def _own_parts(self, num: int) -> Tensor:
        """[replicas, parts], where all rows are the same."""
        size = self._forward.num_replicas
        lines = [
            _mean([self._forward.repeat(call, tree_map(copied, call.parts)) for call in calls])
            for calls in self._steps[: math.ceil(num / size)]
        ]
        return torch.cat(lines)[:num].expand(size, -1)

    def _same_parts(self, num: int) -> Tensor:
        """[replicas, parts]."""
        places = range(self._forward.num_replicas)
        parts = [(calls, partial(_for_all, p)) for calls in self._steps for p in places]
        lines = [
            _mean([self._forward.repeat(call, tree_map(same, call.parts)) for call in calls])
            for calls, same in parts[:num]
        ]
        return torch.stack(lines, 1)

    def _listen(self) -> None:
        if len(self._steps) * self._forward.num_replicas < MAX_HELD_OUT_PARTS:
            self._forward.call_recorder = ref(self)

    def hear(self, call: RecordedCall) -> None:
        self._heard.append(call)
        if len(self._heard) > MAX_CALLS:
            self._take()

    def _take(self) -> list[RecordedCall]:
        calls, self._heard = self._heard, []
        self.close()
        return calls

    def _keep(self, calls: list[RecordedCall]) -> bool:
        """What has finite losses: other batches would tell nothing of any replica."""
        fine = [call for call in calls if are_finite([call.losses])]
        self._steps += [fine] if fine else []
        return bool(fine)


def _mean(micro_batches: list[Tensor]) -> Tensor:
    return torch.stack(micro_batches).double().mean(0)


@torch.no_grad()
def _for_all(place: int, value: Any) -> Any:
    """The part of one replica for every one; in memory it lies as parts do."""
    if not is_split(value):
        return value
    same = torch.empty_like(value).copy_(value[place].expand_as(value))
    return same.requires_grad_(value.requires_grad)
