"""The mean loss of a micro-batch, from the share of a step's loss that Trainer computes of it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hdet.integrations._extras import extra

with extra("transformers"):
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss


def num_items(model: nn.Module, inputs: Mapping[str, Any]) -> int | None:
    """Return how many labels of a micro-batch count, as Trainer counts; None without labels."""
    labels = inputs.get("shift_labels")
    if labels is None:
        labels = inputs.get("labels")
        shifts = LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss
        config = getattr(model, "config", None)
        if labels is not None and shifts and not getattr(config, "is_encoder_decoder", False):
            labels = labels[..., 1:]
    return int(labels.ne(-100).sum()) if isinstance(labels, Tensor) else None


def mean_loss(trainer: Any, loss: Tensor, own: int | None, total: Any) -> tuple[Tensor, int]:
    """Return the mean loss of a micro-batch, and its weight in the mean of the cycle.

    Args:
        trainer: The trainer.
        loss: What its `training_step` returned: the micro-batch's part of the loss of a step.
        own: How many labels of the micro-batch count, if that is known.
        total: How many labels of the step count, on all processes; None where they do not matter.

    Returns:
        The loss, and its weight. 0 for a micro-batch without labels that count.
    """
    may_average = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)  # missing before transformers 5.20
    if is_scaled is None:
        has_total = trainer.model_accepts_loss_kwargs and total is not None
        is_scaled = has_total or trainer.compute_loss_func is not None
    if not is_scaled or total is None or own is None:
        return loss * trainer.current_gradient_accumulation_steps, 1
    # Trainer counts the labels of all processes, and DDP takes the mean over the processes.
    num_means = trainer.accelerator.num_processes // trainer.get_tp_size()
    if not (may_average and trainer.args.average_tokens_across_devices):
        num_means = 1
    return loss * total / (num_means * max(own, 1)), own
