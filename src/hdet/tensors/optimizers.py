"""Optimizers around other optimizers: wrappers of trainers, and optimizers that keep inner ones."""

from torch.optim import Optimizer


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of the wrappers that trainers put around it.

    A wrapper keeps the optimizer as `.optimizer` and has no state of its own. It has no step hooks
    either: those of the optimizer inside run at every step.
    """
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, Optimizer) and inner.state is optimizer.state:
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that an optimizer keeps, and whose state is a part of its own.

    ZeroRedundancyOptimizer keeps the one that steps its share of the parameters.
    """
    kept = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    return [one for one in kept if one is not optimizer and one.state is not optimizer.state]


def class_names(optimizer: Optimizer) -> list[str]:
    """The names of its class and of the classes that it inherits from, the nearest first.

    Those of the optimizers that it keeps follow.
    """
    kinds = [type(one) for one in (optimizer, *inner_optimizers(optimizer))]
    return [base.__name__ for kind in kinds for base in kind.__mro__]
