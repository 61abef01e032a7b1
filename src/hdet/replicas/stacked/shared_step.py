"""One optimizer step for all replicas that share their gradients.

With equal gradients N optimizers keep N equal states. Most optimizers also move a weight by the
learning rate times an update that does not depend on the weight, apart from decoupled weight decay.
For these, one state and one step suffice: the update is computed once, for a learning rate of one,
and every replica applies it with its own learning rate. That saves N - 1 states and most of the
memory traffic.

A test on small weights finds out whether one of torch's optimizers is of this kind with its
settings. Other optimizers step replica by replica while replicas differ: a short test cannot tell
what they do later.
"""

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

TEST_STEPS = 12
TEST_DECAY = 0.3  # the effect of a small one would hide in rounding


def moves_in_proportion(optimizer: Optimizer) -> bool:
    """Whether each step adds lr x (an update that depends neither on lr nor on the weights)."""
    parameters = parameters_of(optimizer)
    if not type(optimizer).__module__.startswith("torch.optim."):
        return False
    if any(p.dtype not in (torch.float32, torch.float64) for p in parameters):
        return False  # the update would be rounded before it is applied
    if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    try:
        return all(_test_group(optimizer, index) for index in range(len(optimizer.param_groups)))
    except Exception:  # an optimizer that cannot be tested steps replica by replica
        return False


def _test_group(optimizer: Optimizer, index: int) -> bool:
    """Compare two optimizers of different weights and learning rates with one for the update."""
    group = dict(optimizer.param_groups[index])
    decay = TEST_DECAY if group.get("weight_decay") else 0.0
    if "weight_decay" in group:
        group["weight_decay"] = decay
    device = group["params"][0].device
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(6, 4, generator=generator, dtype=torch.float64).to(device)

    both = [_on_small_weight(optimizer, group, 10 * draw()) for _ in range(2)]
    unit = _on_small_weight(optimizer, group, torch.zeros_like(both[0].weight), unit=True)
    for step in range(TEST_STEPS):
        gradient = draw()
        unit.step(gradient, 1.0)
        for one, lr in zip(both, (0.1 / (1 + step % 3), 0.02 * (1 + step % 4)), strict=True):
            expected = one.weight * (1 - lr * decay) + lr * unit.weight
            one.step(gradient, lr)
            if not torch.allclose(one.weight, expected, rtol=1e-9, atol=1e-9):
                return False
        unit.weight.zero_()
    return True


class _SmallOptimizer:
    """An optimizer of the same kind and settings for one small weight."""

    def __init__(self, optimizer: Optimizer, parameter: nn.Parameter) -> None:
        self._optimizer, self._parameter = optimizer, parameter
        self.weight = parameter.detach()

    def step(self, gradient: Tensor, lr: float) -> None:
        self._parameter.grad = gradient.clone()
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()


def _on_small_weight(
    optimizer: Optimizer, group: dict[str, Any], weight: Tensor, *, unit: bool = False
) -> _SmallOptimizer:
    parameter = nn.Parameter(weight.clone())
    return _SmallOptimizer(
        without_state(optimizer, [{**group, "params": [parameter]}], unit), parameter
    )


def without_state(optimizer: Optimizer, groups: list[dict[str, Any]], unit: bool) -> Optimizer:
    """The same optimizer for other parameters. With `unit`, it has no weight decay."""
    other = copy.copy(optimizer)
    other.state = defaultdict(dict)
    other.param_groups = [{**group, "params": list(group["params"])} for group in groups]
    for group in other.param_groups if unit else ():
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    return other


class SharedStep:
    """Steps all replicas with one state and one update."""

    def __init__(self, each: Sequence[Optimizer]) -> None:
        self._each = each
        groups = [
            {**group, "params": [nn.Parameter(torch.zeros_like(p)) for p in group["params"]]}
            for group in each[0].param_groups
        ]
        self._unit = without_state(each[0], groups, unit=True)

    @torch.no_grad()
    def step(self) -> None:
        """Step all replicas with the gradients of the first one's parameters."""
        self._share_state()
        self._follow_settings()
        self._unit.step()
        for index in range(len(self._unit.param_groups)):
            self._apply_update(index)
        for group in self._unit.param_groups:
            torch._foreach_zero_(group["params"])
            for update in group["params"]:
                update.grad = None

    def _share_state(self) -> None:
        """Give all optimizers the same state objects."""
        pairs = zip(self._unit.param_groups, self._each[0].param_groups, strict=True)
        for index, (unit, first) in enumerate(pairs):
            columns = [optimizer.param_groups[index]["params"] for optimizer in self._each]
            for update, own, *same in zip(unit["params"], first["params"], *columns, strict=True):
                update.grad = own.grad
                if own.grad is None:
                    continue
                state = self._each[0].state[own]
                self._unit.state[update] = state
                for optimizer, parameter in zip(self._each, same, strict=True):
                    optimizer.state[parameter] = state

    def _follow_settings(self) -> None:
        for unit, first in zip(self._unit.param_groups, self._each[0].param_groups, strict=True):
            kept = {"params", "lr", "weight_decay"}
            unit.update({key: value for key, value in first.items() if key not in kept})
            unit["lr"] = 1.0

    def _apply_update(self, index: int) -> None:
        """Update a group of every replica: w <- w (1 - lr x decay) + lr x update."""
        updated = [
            number
            for number, update in enumerate(self._unit.param_groups[index]["params"])
            if update.grad is not None
        ]
        updates = [self._unit.param_groups[index]["params"][number].detach() for number in updated]
        if not updates:
            return
        decays = {float(one.param_groups[index].get("weight_decay", 0.0)) for one in self._each}
        decay = decays.pop() if len(decays) == 1 else None
        if decay:
            torch._foreach_div_(updates, decay)
        for optimizer in self._each:
            group = optimizer.param_groups[index]
            weights = [group["params"][number].detach() for number in updated]
            if decay:  # in one pass: w + (lr x decay) (update / decay - w)
                torch._foreach_lerp_(weights, updates, group["lr"] * decay)
                continue
            if decay is None:  # every replica has its own
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=group["lr"])


def unshare_state(each: Sequence[Optimizer]) -> None:
    """Give every optimizer a state of its own again."""
    for optimizer in each[1:]:
        for own, parameter in zip(parameters_of(optimizer), parameters_of(each[0]), strict=True):
            state = each[0].state.get(parameter)
            if state and optimizer.state.get(own) is state:
                optimizer.state[own] = copy.deepcopy(state)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
