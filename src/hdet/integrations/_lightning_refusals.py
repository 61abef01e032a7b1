"""What HDETCallback refuses in Lightning's Trainer, with what to write instead."""

from typing import Any

from hdet.integrations._extras import extra
from hdet.scheduler.hdet import HDET

with extra("lightning"):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.types import LRSchedulerConfig


def check_fit(trainer: Trainer, module: LightningModule, replicas: Any) -> None:
    """Refuse a fit in which hdet cannot work.

    Args:
        trainer: The trainer.
        module: The module.
        replicas: The option `replicas` of `hdet.HDET`.

    Raises:
        TypeError: If the trainer or the module is of the package pytorch_lightning.
        ValueError: If hdet cannot work, with what to write instead.
    """
    _check_package(trainer, module)
    problem = _problem_of(trainer, module, replicas)
    if problem:
        raise ValueError(f"HDETCallback cannot be used here: {problem}.")


def _problem_of(trainer: Trainer, module: LightningModule, replicas: Any) -> str:
    """Return why hdet cannot work here, and what to write instead; empty if it can."""
    if not module.automatic_optimization:
        return (
            "with manual optimization, as for several optimizers, only the module knows its steps. "
            "Make hdet.HDET in its `on_fit_start`, and call `step(loss)` after each of them"
        )
    if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
        return (
            f"{type(trainer.strategy).__name__} keeps parameters in a form of its own. Use "
            'strategy="ddp", or ModelParallelStrategy with fully_shard'
        )
    if len(getattr(replicas, "local", ())) > 1:
        return (
            "`training_step` returns one loss, and `StackedReplicas` needs one for each replica. "
            "Start several processes, or write the loop yourself, as in examples/one_device.py"
        )
    if len([one for one in trainer.callbacks if type(one).__name__ == "HDETCallback"]) > 1:
        return "the trainer has two of it. Leave one out"
    if any(isinstance(one, StochasticWeightAveraging) for one in trainer.callbacks):
        return "StochasticWeightAveraging replaces the schedule in mid-run. Leave it out"
    if any(isinstance(one, WeightAveraging) for one in trainer.callbacks):
        return "WeightAveraging takes in what the scout tries, up to NaN. Leave it out"
    if is_overridden("lr_scheduler_step", module):
        return "the module overrides `lr_scheduler_step`. Leave that method out"
    configs = trainer.lr_scheduler_configs
    if len(configs) > 1:
        return f"it needs one schedule, got {len(configs)}. Join them in a ChainedScheduler"
    return _problem_of_schedule(configs[0]) if configs else ""


def _check_package(*given: Trainer | LightningModule) -> None:
    for one in given:
        if not isinstance(one, (Trainer, LightningModule)):
            raise TypeError(
                f"HDETCallback needs a Trainer and a module of the package `lightning`, got a "
                f"{type(one).__module__}.{type(one).__name__}. Import both from "
                "lightning.pytorch, not from pytorch_lightning."
            )


def _problem_of_schedule(config: LRSchedulerConfig) -> str:
    schedule, name = config.scheduler, type(config.scheduler).__name__
    if isinstance(schedule, HDET):
        return (
            "`configure_optimizers` returned an HDET. Return the schedule inside of it, and give "
            "the options to HDETCallback"
        )
    if config.reduce_on_plateau:
        return f"{name} waits for a metric of the module. Use a schedule that counts steps"
    if config.interval == "epoch" and hasattr(schedule, "total_steps"):
        return f'{name} counts steps. Return {{"scheduler": schedule, "interval": "step"}} for it'
    if config.interval == "step" and config.frequency != 1:
        return f'with "interval": "step", "frequency" must be 1, got {config.frequency}'
    return ""
