"""UpdateWatch: whether a step of the optimizer mixes replicas, as one that communicates does.

Some optimizers divide the work over the processes: each computes a share of the update, and all get
the result. Then replicas cannot train with different learning rates. Such an optimizer is
recognized by what it does.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet.replicas.protocol import Replicas
from hdet.tensors.dtensor import local
from hdet.tensors.hashing import fingerprints
from hdet.tensors.ops import are_finite
from hdet.weights.inventory import ReplicaTensors

MIN_NUMEL = 16
"""Smaller tensors may be equal by chance, for example where a loop clips weights."""

JUDGED_STEPS = (1, 2, 4, 8, 16, 32)
"""The steps that are judged until one tells something: GradScaler may skip the first ones."""

LearningRates = Sequence[Sequence[float]]
"""For each replica the learning rate of each parameter group."""


class MixedParameter(NamedTuple):
    """A parameter that is equal on two replicas though they trained with different rates."""

    name: str
    replicas: tuple[int, int]
    lrs: tuple[float, float]

    @property
    def text(self) -> str:
        one, other = self.replicas
        return (
            f"{self.name!r} is equal on the replicas {one} and {other} after a step with the "
            f"learning rates {self.lrs[0]:.3g} and {self.lrs[1]:.3g}"
        )


class _Candidate(NamedTuple):
    """A parameter that can be judged."""

    place: int
    """Its place among all parameters of the optimizer."""
    group: int
    shard: Tensor


class UpdateWatch:
    """Compares replicas after their first step with different learning rates.

    A parameter counts if the step has changed it on both replicas. So a frozen one, one without a
    gradient, and an update that is lost in rounding say nothing.
    """

    def __init__(self, tensors: ReplicaTensors, replicas: Replicas) -> None:
        self._tensors, self._replicas = tensors, replicas
        self._before: Tensor | None = None
        """The parameters before this step."""
        self._num_steps = 0
        self.is_over = False
        """Whether a step was judged, or it is too late."""
        weakly = weakref.ref(self)  # a hook must not keep the watch alive

        def before_step(*_: Any) -> None:
            if (watch := weakly()) is not None:
                watch._note_start()

        self._hook = tensors.optimizer.register_step_pre_hook(before_step)

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def _note_start(self) -> None:
        if self._before is None and self._num_steps + 1 in JUDGED_STEPS:
            self._before = self._prints(self._candidates())

    def find(self, lrs: LearningRates) -> MixedParameter | None:
        """Judge the step that was made with these learning rates.

        All processes must call this together. They exchange a few numbers for each parameter.
        """
        groups = {group for group, column in enumerate(zip(*lrs, strict=True)) if differ(column)}
        self._num_steps += 1
        place, one, other = -1, 0, 0
        if groups and self._num_steps in JUDGED_STEPS:
            place, one, other, self.is_over = self._compare(groups, lrs)
        self._before = None
        if self.is_over or self._num_steps == JUDGED_STEPS[-1]:
            self.is_over = True
            self.close()
        return None if place < 0 else self._describe(place, one, other, lrs)

    def _compare(self, groups: set[int], lrs: LearningRates) -> tuple[int, int, int, bool]:
        """The place of a mixed parameter with two replicas, or -1; and whether one was judged."""
        chosen = [one for one in self._candidates() if one.group in groups]
        rows = self._replicas.gather(self._row(chosen)).tolist() if chosen else []
        mine = self._judge(chosen, rows, lrs)
        # The processes of one replica have different shards, and must decide alike.
        parts = self._replicas.gather_parts(torch.tensor([mine]))[0].tolist()
        return *max(parts)[:3], any(part[3] for part in parts)

    def _candidates(self) -> list[_Candidate]:
        known = {id(parameter) for parameter in self._tensors.optimized()}
        groups = self._tensors.optimizer.param_groups
        members = [(g, p) for g, group in enumerate(groups) for p in group["params"]]
        return [
            _Candidate(place, group, local(parameter).detach())
            for place, (group, parameter) in enumerate(members)
            if id(parameter) in known and local(parameter).numel() >= MIN_NUMEL
        ]

    def _prints(self, candidates: Sequence[_Candidate]) -> Tensor:
        """The place of each candidate and a hash of its bits."""
        places = torch.tensor([one.place for one in candidates], dtype=torch.int64)
        found = fingerprints([one.shard for one in candidates])
        return torch.stack([places.to(found.device), found])

    def _row(self, chosen: Sequence[_Candidate]) -> Tensor:
        """The hash of each parameter, and whether it counts: the step has changed it."""
        _, now = self._prints(chosen)
        counts = torch.zeros_like(now)
        if self._before is not None:
            places, before = self._before
            wanted = torch.tensor([one.place for one in chosen], device=places.device)
            before = before[torch.isin(places, wanted)]
            if len(before) == len(now):  # none was frozen or added meanwhile
                finite = [are_finite([one.shard]).to(now.device) for one in chosen]
                counts = ((before != now) & torch.stack(finite)).long()
        return torch.cat([now, counts])[None]

    def _judge(
        self, chosen: Sequence[_Candidate], rows: list[list[int]], lrs: LearningRates
    ) -> tuple[int, int, int, int]:
        """The place of a mixed parameter with two replicas, or -1; and whether one was judged."""
        judged, num = 0, len(chosen)
        for column, one in enumerate(chosen):
            rates: dict[int, tuple[int, float]] = {}
            seen = set()
            for replica, row in enumerate(rows):
                if not row[num + column]:
                    continue
                lr = lrs[replica][one.group]
                first, other = rates.setdefault(row[column], (replica, lr))
                if other != lr:
                    return one.place, first, replica, 1
                seen.add(lr)
            judged |= len(seen) > 1
        return -1, 0, 0, int(judged)

    def _describe(self, place: int, one: int, other: int, lrs: LearningRates) -> MixedParameter:
        groups = self._tensors.optimizer.param_groups
        members = [(g, p) for g, group in enumerate(groups) for p in group["params"]]
        group, parameter = members[place]
        names = {id(p): name for name, p in self._tensors.parameters().items()}
        name = names.get(id(parameter), f"param_groups[{group}]")
        return MixedParameter(name, (one, other), (lrs[one][group], lrs[other][group]))


def differ(values: Sequence[float]) -> bool:
    """Whether there are different numbers.

    >>> differ([1.0, 1.0]), differ([1.0, 2.0])
    (False, True)
    """
    return len(set(values)) > 1
