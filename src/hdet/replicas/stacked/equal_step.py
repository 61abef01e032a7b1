"""One optimizer step for replicas that are equal: it is computed once and copied to all.

In a run without a spread, replicas have the same weights, states and settings, and they share
their gradients. Then N optimizers would compute the same step N times. Equal replicas also stay
equal to the last bit this way, with every optimizer.
"""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hdet.replicas.stacked.rows import copy_rows_
from hdet.replicas.stacked.shared_step import parameters_of
from hdet.tensors.ops import are_equal


class EqualStep:
    """Steps all replicas with the update of the first one, while they are equal.

    Whether weights and states are equal is compared when they were written outside of a step:
    after an average or a restore. The versions of the weights tell that.

    Args:
        each: The optimizer of each replica.
    """

    def __init__(self, each: Sequence[Optimizer]) -> None:
        self._each = each
        self._rows = [parameters_of(optimizer) for optimizer in each]
        self._versions: list[int] | None = None
        """The versions of all weights after the last step."""
        self._are_equal = False

    def applies(self) -> bool:
        """Whether one step serves all replicas now."""
        if not self._have_equal_settings():
            self._are_equal = False
            return False
        if self._versions != self._read_versions():
            self._are_equal = self._compare()
        return self._are_equal

    def step(self) -> None:
        """Step the first replica, and give its weights, state and settings to all."""
        first, others = self._each[0], self._each[1:]
        first.step()
        copy_rows_(self._rows[1:], [weight.detach() for weight in self._rows[0]])
        kept = {name: value for name, value in own_attributes(first).items() if _is_plain(value)}
        for optimizer, row in zip(others, self._rows[1:], strict=True):
            for mine, theirs in zip(first.param_groups, optimizer.param_groups, strict=True):
                theirs.update({k: copy.deepcopy(v) for k, v in mine.items() if k != "params"})
            others_of = dict(zip(self._rows[0], row, strict=True))
            for key, value in first.state.items():
                if key in others_of:
                    optimizer.state[others_of[key]] = value
                else:  # the state of all parameters together is not shared
                    optimizer.state[key] = copy.deepcopy(value)
            vars(optimizer).update(kept)

    def note_step(self, *, equal: bool) -> None:
        """Note the versions of the weights after a step, of equal replicas or of others."""
        self._versions, self._are_equal = self._read_versions(), equal

    def forget(self) -> None:
        """Compare weights and states again before the next step of all."""
        self._versions = None

    def _read_versions(self) -> list[int]:
        return [weight._version for row in self._rows for weight in row]

    def _have_equal_settings(self) -> bool:
        first = self._each[0]
        if any(o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks for o in self._each):
            return False  # a hook may do other things on each replica
        attributes = own_attributes(first)
        if not all(map(_is_plain, attributes.values())):
            return False  # copies of it might hold what belongs to one replica
        return all(
            own_attributes(other) == attributes
            and all(map(_are_alike, first.param_groups, other.param_groups))
            for other in self._each[1:]
        )

    def _compare(self) -> bool:
        """Compare the weights and the states of all replicas."""
        first = self._each[0]
        if not first.state.keys() <= set(self._rows[0]):
            return False  # a state of all parameters together would be shared for good
        states = [_state_leaves(o, row) for o, row in zip(self._each, self._rows, strict=True)]
        return all(
            are_equal(self._rows[0], row) and _are_equal_leaves(states[0], state)
            for row, state in zip(self._rows[1:], states[1:], strict=True)
        )


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer keeps beside its groups, its state and the attributes of torch."""
    known = _attributes_of_torch()
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in known and not callable(getattr(type(optimizer), name, None))
    }


@cache
def _attributes_of_torch() -> frozenset[str]:
    return frozenset(vars(torch.optim.SGD([torch.zeros(())], lr=0.1)))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def _are_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two groups have the same plain settings."""
    return one.keys() == other.keys() and all(
        _is_plain(value) and value == other[key] for key, value in one.items() if key != "params"
    )


def _state_leaves(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[Any]:
    return tree_leaves([optimizer.state.get(parameter, {}) for parameter in parameters])


def _are_equal_leaves(ones: list[Any], others: list[Any]) -> bool:
    pairs = [pair for pair in zip(ones, others, strict=False) if pair[0] is not pair[1]]
    tensors = [pair for pair in pairs if isinstance(pair[0], Tensor)]
    if len(ones) != len(others) or not all(isinstance(other, Tensor) for _, other in tensors):
        return False
    rest = [pair for pair in pairs if not isinstance(pair[0], Tensor)]
    if not all(type(one) is type(other) and one == other for one, other in rest):
        return False
    return not tensors or are_equal(*map(list, zip(*tensors, strict=True)))
