"""One optimizer step for all replicas that share their gradients.

With the same gradients N optimizers keep the same state, N times. Most of them also move a weight
by its learning rate times something that does not depend on the weight (apart from decoupled weight
decay). Then one state and one step are enough: the move is computed once, for a learning rate of
one, and every replica takes it at its own. That saves N - 1 states and most of the memory traffic.
Whether one of torch's optimizers is of this kind, with the settings it has, is tried. Others take
the ordinary way: what they do after a thousand steps no trial can tell.
"""

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

TRIAL_STEPS = 12
TRIAL_DECAY = 0.3  # a small one would hide what it does behind rounding


def moves_in_proportion(optimizer: Optimizer) -> bool:
    """Whether each step adds lr x (a move that neither lr nor the weights change)."""
    parameters = parameters_of(optimizer)
    if not type(optimizer).__module__.startswith("torch.optim."):
        return False
    if any(p.dtype not in (torch.float32, torch.float64) for p in parameters):
        return False  # the move would be rounded before it is taken
    if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    try:
        return all(_tried(optimizer, index) for index in range(len(optimizer.param_groups)))
    except Exception:  # one that cannot be tried takes the ordinary way
        return False


def _tried(optimizer: Optimizer, index: int) -> bool:
    """Two optimizers with weights and learning rates of their own, beside one for the move."""
    group = dict(optimizer.param_groups[index])
    decay = TRIAL_DECAY if group.get("weight_decay") else 0.0
    if "weight_decay" in group:
        group["weight_decay"] = decay
    device = group["params"][0].device
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(6, 4, generator=generator, dtype=torch.float64).to(device)

    both = [_alone(optimizer, group, 10 * draw()) for _ in range(2)]
    unit = _alone(optimizer, group, torch.zeros_like(both[0].weight), unit=True)
    for step in range(TRIAL_STEPS):
        gradient = draw()
        unit.take(gradient, 1.0)
        for one, lr in zip(both, (0.1 / (1 + step % 3), 0.02 * (1 + step % 4)), strict=True):
            want = one.weight * (1 - lr * decay) + lr * unit.weight
            one.take(gradient, lr)
            if not torch.allclose(one.weight, want, rtol=1e-9, atol=1e-9):
                return False
        unit.weight.zero_()
    return True


class _Alone:
    """An optimizer of the same kind and settings, with one small weight of its own."""

    def __init__(self, optimizer: Optimizer, parameter: nn.Parameter) -> None:
        self._optimizer, self._parameter = optimizer, parameter
        self.weight = parameter.detach()

    def take(self, gradient: Tensor, lr: float) -> None:
        self._parameter.grad = gradient.clone()
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()


def _alone(
    optimizer: Optimizer, group: dict[str, Any], weight: Tensor, *, unit: bool = False
) -> _Alone:
    parameter = nn.Parameter(weight.clone())
    return _Alone(without_state(optimizer, [{**group, "params": [parameter]}], unit), parameter)


def without_state(optimizer: Optimizer, groups: list[dict[str, Any]], unit: bool) -> Optimizer:
    """The same optimizer for other parameters; a `unit` one does not decay them."""
    other = copy.copy(optimizer)
    other.state = defaultdict(dict)
    other.param_groups = [{**group, "params": list(group["params"])} for group in groups]
    for group in other.param_groups if unit else ():
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    return other


class SharedStep:
    """Steps the replicas of some optimizers together."""

    def __init__(self, each: Sequence[Optimizer]) -> None:
        self._each = each
        groups = [
            {**group, "params": [nn.Parameter(torch.zeros_like(p)) for p in group["params"]]}
            for group in each[0].param_groups
        ]
        self._unit = without_state(each[0], groups, unit=True)

    @torch.no_grad()
    def step(self) -> None:
        """The gradients are those of the first replica's parameters."""
        self._link()
        self._follow_settings()
        self._unit.step()
        for index in range(len(self._unit.param_groups)):
            self._take(index)
        for group in self._unit.param_groups:
            torch._foreach_zero_(group["params"])
            for move in group["params"]:
                move.grad = None

    def _link(self) -> None:
        """One state for all: the entries of every optimizer are the same objects."""
        pairs = zip(self._unit.param_groups, self._each[0].param_groups, strict=True)
        for index, (unit, first) in enumerate(pairs):
            columns = [optimizer.param_groups[index]["params"] for optimizer in self._each]
            for move, own, *same in zip(unit["params"], first["params"], *columns, strict=True):
                move.grad = own.grad
                if own.grad is None:
                    continue
                state = self._each[0].state[own]
                self._unit.state[move] = state
                for optimizer, parameter in zip(self._each, same, strict=True):
                    optimizer.state[parameter] = state

    def _follow_settings(self) -> None:
        for unit, first in zip(self._unit.param_groups, self._each[0].param_groups, strict=True):
            kept = {"params", "lr", "weight_decay"}
            unit.update({key: value for key, value in first.items() if key not in kept})
            unit["lr"] = 1.0

    def _take(self, index: int) -> None:
        """Every replica's weights of a group: w <- w (1 - lr x decay) + lr x move."""
        moving = [
            place
            for place, move in enumerate(self._unit.param_groups[index]["params"])
            if move.grad is not None
        ]
        moves = [self._unit.param_groups[index]["params"][place].detach() for place in moving]
        if not moves:
            return
        decays = {float(one.param_groups[index].get("weight_decay", 0.0)) for one in self._each}
        decay = decays.pop() if len(decays) == 1 else None
        if decay:
            torch._foreach_div_(moves, decay)
        for optimizer in self._each:
            group = optimizer.param_groups[index]
            weights = [group["params"][place].detach() for place in moving]
            if decay:  # in one pass: w + (lr x decay) (move / decay - w)
                torch._foreach_lerp_(weights, moves, group["lr"] * decay)
                continue
            if decay is None:  # every replica has its own
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, moves, alpha=group["lr"])


def unshare_state(each: Sequence[Optimizer]) -> None:
    """Every optimizer gets a state of its own again."""
    for optimizer in each[1:]:
        for own, parameter in zip(parameters_of(optimizer), parameters_of(each[0]), strict=True):
            state = each[0].state.get(parameter)
            if state and optimizer.state.get(own) is state:
                optimizer.state[own] = copy.deepcopy(state)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
