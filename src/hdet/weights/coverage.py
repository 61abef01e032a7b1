"""Which parameters of a model the optimizers of a run have.

hdet averages and restores whole models. A parameter that another optimizer trains would have a
state that hdet does not know.
"""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from hdet.tensors.dtensor import layout, sharded_modules
from hdet.tensors.joined_optimizer import parameter_ids

NUM_NAMED = 3
"""Names of parameters in a message, at most."""


def untrained_parameters(model: nn.Module | None, optimizers: Sequence[Optimizer]) -> list[str]:
    """Return the names of the trainable parameters that no optimizer has; none without a model."""
    if model is None:
        return []
    known = set().union(*map(parameter_ids, optimizers))
    named = _resharded(model).named_parameters()
    return [name for name, p in named if p.requires_grad and id(p) not in known]


def optimizers_of_others(
    model: nn.Module | None, optimizers: Sequence[Optimizer]
) -> list[Optimizer]:
    """Return the optimizers without a parameter of the model; none without a model."""
    if model is None:
        return []
    known = {id(parameter) for parameter in _resharded(model).parameters()}
    return [optimizer for optimizer in optimizers if not known & parameter_ids(optimizer)]


def plain_parameters_beside(
    model: nn.Module | None, optimizers: Sequence[Optimizer]
) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters that optimizers have, the model lacks, and are whole.

    Without a model there are none.
    """
    if model is None:
        return []
    known = {id(parameter) for parameter in _resharded(model).parameters()}
    trained = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    return [tuple(p.shape) for p in trained if id(p) not in known and layout(p) is None]


def count_text(names: Sequence[str]) -> str:
    """Return the first names, and how many there are beside them.

    >>> count_text(["a", "b"]), count_text(list("abcde"))
    ("'a', 'b'", "'a', 'b', 'c' and 2 more")
    """
    more = len(names) - NUM_NAMED
    first = ", ".join(map(repr, names[:NUM_NAMED]))
    return f"{first} and {more} more" if more > 0 else first


def _resharded(model: nn.Module) -> nn.Module:
    """Return the model with the parameters that its optimizers have."""
    for module in sharded_modules(model):
        module.reshard()  # between forward and backward FSDP2 has whole parameters in their place
    return model
