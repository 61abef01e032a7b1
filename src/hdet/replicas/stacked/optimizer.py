"""The optimizers of all replicas on a device, in the shape of one."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas.stacked.forward import Forward
from hdet.replicas.stacked.shared_step import (
    SharedStep,
    moves_in_proportion,
    parameters_of,
    unshare_state,
)


class StackedOptimizer(Optimizer):
    """Steps every replica with its own learning rates.

    Its groups have the names and settings of a single replica's; a schedule wraps it as it would
    wrap that one, and then all replicas have its learning rates. Under hdet every replica has its
    own. Its state is that of one replica, so that a checkpoint fits an ordinary optimizer and
    other engines.
    """

    def __init__(
        self, each: Sequence[Optimizer], modules: Sequence[nn.Module], forward: Forward
    ) -> None:
        self.each = list(each)
        self.steered: set[str] = set()
        """The entries of groups that hdet writes for every replica, such as learning rates."""
        self._forward = forward
        _check_groups(self.each, modules)
        groups = [
            {**same[0], "params": [p for group in same for p in group["params"]]}
            for same in zip(*(optimizer.param_groups for optimizer in each), strict=True)
        ]
        super().__init__(groups, dict(each[0].defaults))
        self._shared: SharedStep | None = None
        self._in_proportion: bool | None = None
        self._tried_with: list[dict[str, Any]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("`closure` must be None: replicas are stepped together.")
        self._follow_settings()
        self._forward.follow_the_model()
        if not self._forward.shares_gradients:
            unshare_state(self.each)
            for optimizer in self.each:
                optimizer.step()
        elif self._can_step_together():
            self._check_sharing()
            if self._shared is None:
                self._shared = SharedStep(self.each)
            self._shared.step()
        else:
            self._step_one_by_one()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.each:
            optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradient of every replica by its own norm; the norms before, [N]."""
        clipped = self.each[:1] if self._forward.shares_gradients else self.each
        norms = [nn.utils.clip_grad_norm_(parameters_of(one), max_norm) for one in clipped]
        return torch.stack(norms).expand(len(self.each))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_shared"):  # beyond the constructor, which adds the groups there are
            raise ValueError(
                "`add_param_group` must come before `replicas.optimizer(...)`, got it after."
            )
        super().add_param_group(param_group)

    def select_(self, replica: int) -> None:
        """All replicas take the state of one; their learning rates stay."""
        keys = self.steered | {"lr"}
        state = self.each[replica].state_dict()
        for optimizer in self.each:
            if optimizer is not self.each[replica]:
                own = [{key: group[key] for key in keys} for group in optimizer.param_groups]
                optimizer.load_state_dict(copy.deepcopy(state))
                for group, kept in zip(optimizer.param_groups, own, strict=True):
                    group.update(kept)

    def state_dict(self) -> dict[str, Any]:
        """That of one replica, as an ordinary optimizer would save it."""
        self._follow_settings()
        return self.each[0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer in self.each:
            optimizer.load_state_dict(copy.deepcopy(state_dict))
        for mine, first in zip(self.param_groups, self.each[0].param_groups, strict=True):
            mine.update({key: value for key, value in first.items() if key != "params"})
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _follow_settings(self) -> None:
        """A loop or a schedule that sets momentum or weight decay sets them for all replicas."""
        kept = {"params", *self.steered}
        for optimizer in self.each:
            for mine, theirs in zip(self.param_groups, optimizer.param_groups, strict=True):
                theirs.update({k: v for k, v in mine.items() if k not in kept})

    def _can_step_together(self) -> bool:
        """Tried once, and again if a setting is switched on or off, such as a weight decay."""
        if not self.steered <= {"lr", "weight_decay"}:
            return False  # replicas differ in more than how far they go
        hooks = [one._optimizer_step_pre_hooks.keys() for one in self.each]
        settings: list[Any] = [{"hooks": [list(keys) for keys in hooks]}]
        settings += [
            {key: _switched(value) for key, value in group.items() if key not in ("params", "lr")}
            for group in self.param_groups
        ]
        if self._in_proportion is None or settings != self._tried_with:
            self._tried_with = settings
            self._in_proportion = moves_in_proportion(self.each[0])
        return self._in_proportion

    def _step_one_by_one(self) -> None:
        self._check_sharing()
        unshare_state(self.each)
        first = parameters_of(self.each[0])
        shared = [own.grad for own in first]
        for optimizer in self.each:
            mine = parameters_of(optimizer)
            for own, gradient in zip(mine, shared, strict=True):
                own.grad = gradient  # also where a hook has clipped the one that was there
            optimizer.step()
            for own in mine:
                own.grad = None
        for own, gradient in zip(first, shared, strict=True):
            own.grad = gradient

    def _check_sharing(self) -> None:
        if any(own.grad is not None for other in self.each[1:] for own in parameters_of(other)):
            raise RuntimeError(
                "a gradient went past the sharing of gradients: use activation checkpointing "
                "with use_reentrant=False, and `losses()` for every loss."
            )


def like(one: Optimizer, places: Mapping[Tensor, str], module: nn.Module) -> Optimizer:
    """A copy of an optimizer, for the parameters of the same names in another module."""
    memo: dict[int, Any] = {}
    for parameter in parameters_of(one):
        if parameter not in places:
            raise ValueError(
                "`one` must be an optimizer of the model's parameters, got one with a parameter "
                f"of shape {tuple(parameter.shape)} that is not the model's."
            )
        memo[id(parameter)] = module.get_parameter(places[parameter])
    return copy.deepcopy(one, memo)


def _switched(value: Any) -> Any:
    """Whether a setting is on: schedules change momenta at every step, but not the kind of step."""
    if isinstance(value, (tuple, list)):
        return [_switched(entry) for entry in value]
    return bool(value) if isinstance(value, (int, float)) else value


def _check_groups(each: Sequence[Optimizer], modules: Sequence[nn.Module]) -> None:
    for optimizer, module in zip(each, modules, strict=True):
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"`one` must make a torch optimizer, got {optimizer!r}.")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("`one` must step without a closure, got LBFGS.")
        known = {id(parameter) for parameter in module.parameters()}
        if not all(id(parameter) in known for parameter in parameters_of(optimizer)):
            raise ValueError(
                "`one` must make an optimizer of the parameters of the module it is given, got "
                "one of other parameters."
            )
