"""Which optimizers fit a model and an engine: together they train all of the model."""

from torch.optim import Adagrad

from hdet.scheduler.rules import Rule, Setup
from hdet.weights.coverage import count_text, optimizers_of_others, untrained_parameters


def _others(setup: Setup) -> list[str]:
    """Return the kinds of optimizers that have no parameter of the model."""
    found = optimizers_of_others(setup.network, setup.optimizers)
    return [type(one).__name__ for one in found]


def _untrained(setup: Setup) -> list[str]:
    """Return the names of the trainable parameters that no optimizer has."""
    return untrained_parameters(setup.network, setup.optimizers)


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
