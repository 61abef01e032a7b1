"""GroupKnob: a knob on a setting of the optimizer's parameter groups, such as weight decay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hdet.knobs.binding import BindingContext, BoundKnob, is_at_edge
from hdet.knobs.param_groups import Key, read_setting, use_tensor, write_setting
from hdet.knobs.specs import KnobSpec, chosen_groups
from hdet.tensors.joined_optimizer import kinds_of


@dataclass(frozen=True, kw_only=True)
class GroupKnob(KnobSpec):
    """A setting of the optimizer's parameter groups.

    Attributes:
        key: The setting: an entry of the groups, or "momentum", "beta1" or "beta2".
        groups: Names of parameter groups; None for all.
        shared: Whether all groups share one knob.
    """

    key: str
    groups: Sequence[str] | None = None
    shared: bool = True

    def bind(self, context: BindingContext) -> list[BoundKnob]:
        names = chosen_groups(self.name, self.groups, context.names)
        chosen = [context.names.index(name) for name in names]
        groups = context.optimizers[0].param_groups
        key = _find_key(self.key, groups[chosen[0]])
        for index in chosen:
            if _lacks(groups[index], key):
                raise ValueError(
                    f"knob {self.name!r} needs an optimizer with {key[0]!r} in its groups, got "
                    f"{kinds_of(context.optimizers[0])}."
                )
        space = self.make_space()
        movable = [i for i in chosen if not is_at_edge(space, _start(context, i, key))]
        if not movable or (self.groups is not None and len(movable) < len(chosen)):
            raise ValueError(
                f"knob {self.name!r} must start above 0 in a {self.space} space, got 0 in "
                f"{'one of its' if movable else 'all'} groups."
            )
        parts = [movable] if self.shared else [[index] for index in movable]
        return [self._bind_groups(context, key, part) for part in parts]

    def _bind_groups(self, context: BindingContext, key: Key, indices: list[int]) -> BoundKnob:
        """One bound knob for some groups, given by their indices."""

        def write(target: int, values: Sequence[float], centre: float) -> None:
            for optimizer, value in zip(context.optimizers, values, strict=True):
                group = optimizer.param_groups[indices[target]]
                use_tensor(group, key)
                write_setting(group, key, value)

        def read(target: int) -> list[float]:
            each = [optimizer.param_groups[indices[target]] for optimizer in context.optimizers]
            return [read_setting(group, key) for group in each]

        return BoundKnob(
            name=self.name if self.shared else f"{self.name}/{context.names[indices[0]]}",
            space=self.make_space(),
            spread=self.spread,
            bases=[_start(context, index, key) for index in indices],
            write=write,
            read=read,
            schedule=self.schedule,
            writes=frozenset((key, index) for index in indices),
            setting=key[0],
            momentum_groups=indices if _is_scheduled(context, indices, key) else (),
        )

    def describe(self) -> dict[str, Any]:
        groups = None if self.groups is None else list(self.groups)
        return {**super().describe(), "groups": groups, "shared": self.shared}


def _start(context: BindingContext, index: int, key: Key) -> float:
    """The start value of a group's setting.

    A scheduled value comes from the schedule itself: stacked replicas have it in their groups only
    after the first step.
    """
    if (value := _scheduled_value(context, index, key)) is not None:
        return value
    return read_setting(context.optimizers[0].param_groups[index], key)


def _scheduled_value(context: BindingContext, index: int, key: Key) -> float | None:
    """The value of a setting of a group, if the base schedule cycles it."""
    if context.momenta is None or key not in (("momentum", None), ("betas", 0)):
        return None
    return context.momenta[index]


def _is_scheduled(context: BindingContext, indices: Sequence[int], key: Key) -> bool:
    return any(_scheduled_value(context, index, key) is not None for index in indices)


def _find_key(name: str, group: Mapping[str, Any]) -> Key:
    """Where a setting lies: momentum is an entry of SGD, and the first of Adam's betas."""
    if name == "momentum" and "betas" in group:
        return "betas", 0
    if name in ("beta1", "beta2"):
        return "betas", int(name[-1]) - 1
    return name, None


def _lacks(group: Mapping[str, Any], key: Key) -> bool:
    value, place = group.get(key[0]), key[1]
    if place is None:
        return not isinstance(value, (int, float, Tensor))
    return not isinstance(value, (tuple, list)) or len(value) <= place
