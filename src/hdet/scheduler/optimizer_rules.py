"""Which optimizers fit a model and an engine: together they train all of the model."""

from torch.optim import Adagrad

from hdet.scheduler.rules import Rule, Setup
from hdet.weights.coverage import (
    count_text,
    optimizers_of_others,
    plain_parameters_beside,
    untrained_parameters,
)


def _others(setup: Setup) -> list[str]:
    """Return the kinds of optimizers that have no parameter of the model."""
    found = optimizers_of_others(setup.network, setup.optimizers)
    return [type(one).__name__ for one in found]


def _untrained(setup: Setup) -> list[str]:
    """Return the names of the trainable parameters that no optimizer has."""
    return untrained_parameters(setup.network, setup.optimizers)


def _beside(setup: Setup) -> list[tuple[int, ...]]:
    """Return the shapes of the plain parameters that the model lacks."""
    return plain_parameters_beside(setup.network, setup.optimizers)


OPTIMIZER_RULES = (
    Rule(
        name="stacked-optimizer",
        limit="An optimizer of `StackedReplicas` works with that engine only.",
        remedy="Pass the engine as `replicas=`.",
        applies=lambda setup: setup.is_optimizer_without_engine,
        message=lambda _: "`replicas=` must be the StackedReplicas that made this optimizer.",
    ),
    Rule(
        name="model-of-the-optimizers",
        limit="Each optimizer must have parameters of the model.",
        remedy="Pass the model that trains, or join several in one `nn.ModuleDict`.",
        applies=lambda setup: bool(_others(setup)),
        message=lambda setup: (
            f"`model` must have the parameters of each optimizer, got a "
            f"{type(setup.network).__name__} without those of {' and '.join(_others(setup))}. Pass "
            "the model that trains; join several in one nn.ModuleDict."
        ),
    ),
    Rule(
        name="untrained-parameters",
        limit="Each trainable parameter of the model must belong to an optimizer of the run.",
        remedy="Pass the schedules of all optimizers as a list, or set `requires_grad=False`.",
        applies=lambda setup: bool(_untrained(setup)),
        message=lambda setup: (
            "each trainable parameter of `model` must belong to an optimizer of the run, got none "
            f"for {count_text(_untrained(setup))}. Give the schedules of all optimizers in one "
            "HDET([...], model=model), or set requires_grad=False for what must not train."
        ),
    ),
    Rule(
        name="parameters-beside-the-model",
        limit=(
            "Where a replica has several processes, `save_checkpoint` cannot save a plain "
            "parameter that the model lacks, such as one of a loss."
        ),
        remedy="Put the parameter into the model, for example in an `nn.ModuleDict`.",
        applies=lambda setup: setup.replicas.parts > 1 and bool(_beside(setup)),
        message=lambda setup: (
            f"save_checkpoint will refuse this run: the optimizer has {len(_beside(setup))} plain "
            f"parameter(s) that `model` lacks, the first of shape {_beside(setup)[0]}, and each "
            "process of a replica may have its own. Put them into the model, for example in an "
            "nn.ModuleDict."
        ),
        is_warning=True,
    ),
    Rule(
        name="adagrad-reset",
        limit="`optimizer_state='reset'` does not work with `Adagrad`.",
        remedy="Pass `'keep'` or `'average'`.",
        applies=lambda setup: (
            setup.settings.optimizer_state == "reset"
            and any(isinstance(one, Adagrad) for one in setup.optimizers)
        ),
        message=lambda _: (
            "`optimizer_state` must be 'keep' or 'average' for Adagrad, which makes its state "
            "in its constructor, got 'reset'."
        ),
    ),
)
