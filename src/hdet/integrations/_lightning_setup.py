"""What HDETCallback does before the first step: take over the schedule, and hold out batches.

It uses one private name of Lightning: `fit_loop._combined_loader`. Lightning loads the place of a
resumable loader only while it makes the loader, and asking for the length of the run makes it too
early. Without the loader, Lightning makes it again.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from hdet.integrations._extras import extra
from hdet.scheduler.hdet import HDET

with extra("lightning"):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from lightning.pytorch.utilities.types import LRSchedulerConfig


def take_over(trainer: Trainer, module: LightningModule, options: Mapping[str, Any]) -> HDET:
    """Put hdet in the place of the schedule, as one that Lightning steps after every step.

    Args:
        trainer: The trainer, with the wrapped model and its optimizer.
        module: The module.
        options: The options of `hdet.HDET`.

    Returns:
        The scheduler that Lightning steps, saves and loads now.

    Raises:
        ValueError: If hdet cannot work here, with what to write instead.
    """
    problem = _problem_of(trainer, module, options.get("replicas"))
    if problem:
        raise ValueError(f"HDETCallback cannot be used here: {problem}.")
    found = {**options, "scaler": getattr(trainer.precision_plugin, "scaler", None)}
    if callable(found.get("replicas")):
        found["replicas"] = found["replicas"](module)
    configs = trainer.lr_scheduler_configs
    base = configs[0].scheduler if configs else trainer.optimizers[0]
    length = trainer.estimated_stepping_batches
    if 0 < length < math.inf:
        found.setdefault("total_steps", int(min(length, getattr(base, "total_steps", length))))
    if configs and configs[0].interval == "epoch":
        trainer.fit_loop.setup_data()
        if math.isinf(trainer.num_training_batches):
            raise ValueError(
                "HDETCallback cannot be used here: the schedule counts epochs, and the loader has "
                'no length. Return a schedule in steps with "interval": "step".'
            )
        steps = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        found["steps_per_epoch"] = steps * configs[0].frequency
    if trainer.ckpt_path or trainer.strategy.restore_checkpoint_after_setup:
        trainer.fit_loop.teardown()
        trainer.fit_loop._combined_loader = None
    scheduler = HDET(base, model=trainer.model, **found)
    name = configs[0].name if configs else None
    configs[:] = [LRSchedulerConfig(scheduler, name=name, interval="step")]
    return scheduler


def hold_out(trainer: Trainer, scheduler: HDET, num_batches: int) -> None:
    """Give the scout batches of the validation loader.

    Args:
        trainer: The trainer, with its loaders.
        scheduler: The scheduler of the run.
        num_batches: How many this process gives.

    Raises:
        ValueError: If there is no validation loader.
    """
    loaders = trainer.val_dataloaders
    if loaders is None:
        raise ValueError("`hold_out` needs a validation loader. Pass one to `trainer.fit`.")
    loader = loaders[0] if isinstance(loaders, Sequence) else loaders
    for batch in islice(loader, num_batches):
        moved = trainer.strategy.batch_to_device(batch)
        with trainer.precision_plugin.train_step_context():
            scheduler.hold_out(_loss_of, moved)


def _loss_of(module: LightningModule, batch: Any) -> Tensor:
    """Return the loss of a training step that logs nothing."""
    has_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    log, module.log = module.log, _log_nothing
    try:
        output = module.training_step(*((batch, 0) if has_index else (batch,)))
    finally:
        module.log = log
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def _log_nothing(*_: Any, **__: Any) -> None:
    pass


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
    if any(isinstance(one, StochasticWeightAveraging) for one in trainer.callbacks):
        return "StochasticWeightAveraging replaces the schedule in mid-run. Leave it out"
    if is_overridden("lr_scheduler_step", module):
        return "the module overrides `lr_scheduler_step`. Leave that method out"
    configs = trainer.lr_scheduler_configs
    if len(configs) > 1:
        return f"it needs one schedule, got {len(configs)}. Join them in a ChainedScheduler"
    return _problem_of_schedule(configs[0]) if configs else ""


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
