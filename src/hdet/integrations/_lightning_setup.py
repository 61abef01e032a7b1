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
from hdet.integrations._lightning_refusals import check_fit
from hdet.scheduler.hdet import HDET

with extra("lightning"):
    from lightning.pytorch import LightningModule, Trainer
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
        TypeError: If the trainer or the module is of the package pytorch_lightning.
    """
    check_fit(trainer, module, options.get("replicas"))
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
