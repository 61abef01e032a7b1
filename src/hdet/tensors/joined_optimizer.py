"""JoinedOptimizer: several optimizers seen as one, for code that needs their groups and hooks."""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class JoinedOptimizer(Optimizer):
    """The optimizers of one run. The training loop steps its members.

    The members own the parameter groups, the states and the hooks. So everything is found anew at
    each access: a member that loads a checkpoint replaces its groups.

    Args:
        members: The optimizers, each with parameters of its own.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        # Not the constructor of torch, which makes groups, a state and hooks.
        self.members = tuple(members)
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all members, in their order."""
        return [group for member in self.members for group in member.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all members."""
        for member in self.members:
            member.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all members."""
        for member in self.members:
            member.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all members."""
        return {"members": [member.state_dict() for member in self.members]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of all members."""
        for member, state in zip(self.members, state_dict["members"], strict=True):
            member.load_state_dict(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse the group: it would belong to no member."""
        raise ValueError(
            "`add_param_group` must be called on one of the optimizers of the run, got it for all."
        )

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """Call a function before each step of a member, with this member."""
        return _JoinedHandle([member.register_step_pre_hook(hook) for member in self.members])

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        """Call a function after each step of a member, with this member."""
        return _JoinedHandle([member.register_step_post_hook(hook) for member in self.members])

    def register_load_state_dict_post_hook(
        self, hook: Any, prepend: bool = False
    ) -> RemovableHandle:
        """Call a function after a member has loaded a state, with this member."""
        return _JoinedHandle(
            [member.register_load_state_dict_post_hook(hook, prepend) for member in self.members]
        )


class _JoinedHandle(RemovableHandle):
    """Removes a hook from all members."""

    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers that are seen as one; a plain optimizer is its only member."""
    return optimizer.members if isinstance(optimizer, JoinedOptimizer) else (optimizer,)


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """Return the identities of the parameters in all groups."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def kinds_of(optimizer: Optimizer) -> str:
    """Return the class name of each member, for messages and the record."""
    return " + ".join(type(member).__name__ for member in members_of(optimizer))
