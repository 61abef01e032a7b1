"""A probe that nobody has to write: batches that no replica of a scout trains on.

Losses on private batches differ by more than what learning rates do to them. Replicas on one device
know how a loss is computed, and of what: so some batches of a scout are kept, and every replica is
scored on the same parts of them.
"""

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hdet.bulk import are_finite
from hdet.forward import Call, Forward, is_split
from hdet.probe import WORDS, padded
from hdet.scout import MOST_PARTS, NUM_PARTS

MOST_CALLS = 64
"""Of a step: a loop that never calls `step()` would fill the memory."""


class HeldOut:
    """Keeps what some steps are trained on, and scores all replicas by it that are not.

    Nobody trains on the first batches. And those who come back have not trained on anything: in
    later rounds the first batch of every earlier one is there too.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._heard: list[Call] | None = None
        """Of this step, as long as it is listened to."""
        self._trained_on: list[Call] = []
        """The first batch of this round."""
        self._steps: list[list[Call]] = []
        self.steps_left = math.ceil(NUM_PARTS / forward.num_replicas)
        """Before there is enough for a first round."""
        forward.listener = WeakMethod(self._hear)
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
        self._forward.listener = None

    @property
    def is_empty(self) -> bool:
        return not self._steps

    def rows(self, num: int, *, alike: bool = False) -> Tensor:
        """What every replica scores on so many parts at most, as a probe has it. It leaves no trace
        in the run. Those that are `alike` score one part each."""
        size = self._forward.num_replicas
        if alike:
            steps = self._steps[: math.ceil(num / size)]
            scores = torch.cat([_mean([self._repeat(c) for c in calls]) for calls in steps])[:num]
            table = scores.expand(size, -1)
        else:
            parts = [(calls, place) for calls in self._steps for place in range(size)][:num]
            lines = [_mean([self._repeat(c, place) for c in calls]) for calls, place in parts]
            table = torch.stack(lines, 1)
        same = table.new_zeros(WORDS)
        return torch.stack([padded(row, same) for row in table])

    def _repeat(self, call: Call, place: int | None = None) -> Tensor:
        """The loss of every replica on its own part, or on that of one of them."""
        parts = call.parts if place is None else tree_map(_for_all(place), call.parts)
        return self._forward.repeat(call, parts)

    def _listen(self) -> None:
        has_enough = len(self._steps) * self._forward.num_replicas >= MOST_PARTS
        self._heard = None if has_enough else []

    def _hear(self, call: Call) -> None:
        if self._heard is not None:
            self._heard = [*self._heard, call] if len(self._heard) < MOST_CALLS else None

    def _take(self) -> list[Call]:
        calls, self._heard = self._heard or [], None
        return calls

    def _keep(self, calls: list[Call]) -> bool:
        """What has finite losses: other batches would tell nothing of any replica."""
        fine = [call for call in calls if are_finite([call.losses])]
        self._steps += [fine] if fine else []
        return bool(fine)


def _mean(micro_batches: list[Tensor]) -> Tensor:
    return torch.stack(micro_batches).double().mean(0)


def _for_all(place: int) -> Callable[[Any], Any]:
    """The part of one replica for every one; in memory it lies as parts do."""

    def same(value: Any) -> Any:
        if not is_split(value):
            return value
        return torch.empty_like(value).copy_(value[place].expand_as(value))

    return same
