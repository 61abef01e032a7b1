"""StackedOptimizer: the optimizers of all replicas on a device, used like one."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas.protocol import EngineOptimizer
from hdet.replicas.stacked.clipping import clip_each
from hdet.replicas.stacked.equal_step import EqualStep, own_attributes
from hdet.replicas.stacked.forward import Forward
from hdet.replicas.stacked.shared_step import (
    SharedStep,
    moves_in_proportion,
    parameters_of,
    unshare_state,
)
from hdet.tensors.ops import copies, copy_all


class StackedOptimizer(EngineOptimizer):
    """Steps every replica with its own learning rates.

    Its groups have the names and settings of one replica's optimizer, so any schedule can wrap it.
    Under a plain schedule all replicas have the same learning rates. Its state is that of one
    replica: a checkpoint fits an ordinary optimizer and other engines.

    Args:
        each: The optimizer of each replica.
        modules: The module of each replica.
        forward: Says whether the replicas share their gradients.
    """

    def __init__(
        self, each: Sequence[Optimizer], modules: Sequence[nn.Module], forward: Forward
    ) -> None:
        _check_groups(each, modules)
        self.each = list(each)
        self.steered: set[str] = set()
        """The entries of parameter groups that hdet writes for each replica, such as "lr"."""
        self._forward = forward
        groups = [
            {**same[0], "params": [p for group in same for p in group["params"]]}
            for same in zip(*(optimizer.param_groups for optimizer in each), strict=True)
        ]
        super().__init__(groups, dict(each[0].defaults))
        self._shared: SharedStep | None = None
        self._equal = EqualStep(self.each)
        self._progress: list[dict[str, Any]] = [{} for _ in groups]
        """What the optimizer itself writes into each group, such as a counter of its steps."""
        self._in_proportion: bool | None = None
        self._tested_settings: list[dict[str, Any]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("`closure` must be None: all replicas are stepped together.")
        self._follow_settings()
        self._forward.follow_model()
        if not self._forward.shares_gradients:
            self._forward.gradient_check.check()
            unshare_state(self.each)
            for optimizer in self.each:
                optimizer.step()
            self._equal.forget()
        elif self._can_step_together():
            self._check_sharing()
            if self._shared is None:
                self._shared = SharedStep(self.each)
            self._shared.step()
        elif self._equal.applies():
            self._check_sharing()
            self._equal.step()
            self._equal.note_step(equal=True)
        else:
            self._step_one_by_one()
            self._equal.note_step(equal=False)
        self._note_progress()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.each:
            optimizer.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradient of every replica by its own norm. Returns the norms before, [N]."""
        clipped = self.each[:1] if self._forward.shares_gradients else self.each
        norms = clip_each(map(parameters_of, clipped), nn.utils.clip_grad_norm_, max_norm)
        return torch.stack(norms).expand(len(self.each))

    def __getattr__(self, name: str) -> Any:
        """Give what the optimizers of the replicas have beside torch's interface.

        A method such as `eval()` of Schedule-Free is called on all of them. Its result is that of
        the first replica, and so is the value of an attribute.
        """
        each: list[Optimizer] = self.__dict__.get("each", [])
        is_hidden = name.startswith("_") or name == "optimizer"  # the one inside of a wrapper
        if is_hidden or not each or not hasattr(each[0], name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(each[0], name)
        return partial(self._call_each, name) if callable(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        each: list[Optimizer] = self.__dict__.get("each", [])
        if name not in self.__dict__ and each and name in own_attributes(each[0]):
            for optimizer in each:
                setattr(optimizer, name, value)
        else:
            super().__setattr__(name, value)

    def _call_each(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        """Call a method of the optimizer of every replica. Returns what the first one returns."""
        self._follow_settings()
        unshare_state(self.each)
        results = [getattr(optimizer, name)(*arguments, **named) for optimizer in self.each]
        self._note_progress()
        return results[0]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_shared"):  # the constructor adds groups before this attribute exists
            raise ValueError(
                "`add_param_group` must come before `replicas.optimizer(...)`, got it after."
            )
        super().add_param_group(param_group)

    def select_(self, replica: int) -> None:
        """Copy the state of one replica to all. Their learning rates stay."""
        keys = self.steered | {"lr"}
        state = self.each[replica].state_dict()
        for optimizer in self.each:
            if optimizer is not self.each[replica]:
                own = [{k: g[k] for k in keys & g.keys()} for g in optimizer.param_groups]
                optimizer.load_state_dict(copy.deepcopy(state))
                for group, kept in zip(optimizer.param_groups, own, strict=True):
                    group.update(kept)

    def state_dict(self) -> dict[str, Any]:
        """The state of one replica, as an ordinary optimizer saves it."""
        self._follow_settings()
        return self.each[0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer in self.each:
            optimizer.load_state_dict(copy.deepcopy(state_dict))
        groups = zip(self.param_groups, self.each[0].param_groups, self._progress, strict=True)
        for mine, first, progress in groups:
            loaded = {key: value for key, value in first.items() if key != "params"}
            mine.update(loaded)
            progress.update(loaded)  # all replicas have it already
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _follow_settings(self) -> None:
        """Copy settings such as momentum, which a loop or a schedule sets here, to all replicas.

        What the optimizer itself writes stays, unless the loop sets it anew.
        """
        kept = {"params", *self.steered}
        for index, (mine, own) in enumerate(zip(self.param_groups, self._progress, strict=True)):
            given = {
                key: value
                for key, value in mine.items()
                if key not in kept and not (key in own and own[key] is value)
            }
            for optimizer in self.each:
                optimizer.param_groups[index].update(given)

    def _note_progress(self) -> None:
        """Show here what the optimizer of the first replica has written into its groups."""
        kept = {"params", *self.steered}
        groups = zip(self.param_groups, self.each[0].param_groups, self._progress, strict=True)
        for mine, first, progress in groups:
            for key, value in first.items():
                if key not in kept and mine.get(key) is not value:
                    mine[key] = progress[key] = value

    def _can_step_together(self) -> bool:
        """Whether one step serves all replicas.

        It is tested once, and again if a setting such as weight decay is switched on or off.
        """
        if not self.steered <= {"lr", "weight_decay"}:
            return False  # replicas differ in more than the length of their steps
        hooks = [one._optimizer_step_pre_hooks.keys() for one in self.each]
        settings: list[Any] = [{"hooks": [list(keys) for keys in hooks]}]
        settings += [
            {key: _is_on(value) for key, value in group.items() if key not in ("params", "lr")}
            for group in self.param_groups
        ]
        if self._in_proportion is None or settings != self._tested_settings:
            self._tested_settings = settings
            self._in_proportion = moves_in_proportion(self.each[0])
        return self._in_proportion

    def _step_one_by_one(self) -> None:
        self._check_sharing()
        unshare_state(self.each)
        first = parameters_of(self.each[0])
        shared = [own.grad for own in first]
        used = [gradient for gradient in shared if gradient is not None]
        kept = copies(used)
        for optimizer in self.each:
            mine = parameters_of(optimizer)
            if optimizer is not self.each[0]:  # some optimizers compute in the memory of gradients
                copy_all(used, kept)
            for own, gradient in zip(mine, shared, strict=True):
                own.grad = gradient  # a hook may have clipped the previous one
            optimizer.step()
            for own in mine:
                own.grad = None
        for own, gradient in zip(first, shared, strict=True):
            own.grad = gradient

    def _check_sharing(self) -> None:
        if any(own.grad is not None for other in self.each[1:] for own in parameters_of(other)):
            raise RuntimeError(
                "a gradient bypassed the averaging over replicas. Use activation checkpointing "
                "with use_reentrant=False, and `losses()` for every loss."
            )


def copy_for_module(one: Optimizer, names: Mapping[Tensor, str], module: nn.Module) -> Optimizer:
    """A copy of an optimizer for the parameters of the same names in another module."""
    memo: dict[int, Any] = {}
    for parameter in parameters_of(one):
        if parameter not in names:
            raise ValueError(
                "`one` must be an optimizer of the model's parameters, got one with a parameter "
                f"of shape {tuple(parameter.shape)} that is not the model's."
            )
        memo[id(parameter)] = module.get_parameter(names[parameter])
    copied = copy.deepcopy(one, memo)
    # torch copies groups and state alone; an optimizer may keep settings of its own beside them.
    for name in vars(one).keys() - vars(copied).keys():
        if not callable(getattr(type(one), name, None)):  # a schedule has wrapped `step` of `one`
            setattr(copied, name, copy.deepcopy(getattr(one, name), memo))
    return copied


def _is_on(value: Any) -> Any:
    """Whether a setting is on. Its value may change at every step without changing the method."""
    if isinstance(value, (tuple, list)):
        return [_is_on(entry) for entry in value]
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
