"""hdet in a Trainer of Hugging Face that cannot be subclassed: `HDETCallback`.

No private name of transformers is used.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hdet.integrations._transformers_losses import num_items
from hdet.integrations._transformers_run import RunEvents, WaitingSchedule
from hdet.scheduler.hdet import HDET


class HDETCallback(RunEvents):
    """Lets a trainer that cannot be subclassed explore learning rates, with a guard.

    Make `TrainingArguments` first, since they connect the processes. Then make the optimizer and
    `hdet.HDET(base, scout=None, ...)`, with the length of the run. Give both to the trainer as
    `optimizers=(optimizer, scheduler)`, beside this callback.

    - It gives hdet the loss that the model returns in training.
    - It makes the replicas one model before each evaluation and each save, and at the end. This
      ends the cycle, so that evaluations change the run. With `HDETMixin` they do not.
    - It refuses a scout, since it cannot see the model that Trainer wraps.
    - It refuses `save_strategy="best"`, since it cannot see a save that follows an evaluation.
    - It does not change logs: `learning_rate` is that of the first replica.

    A loss that the model does not return, such as that of `compute_loss_func`, needs `HDETMixin`.

    Example:
        >>> def trainer_of(model, optimizer, base, **arguments):
        ...     scheduler = hdet.HDET(base, preset="paper", total_steps=1000)
        ...     pair, callbacks = (optimizer, scheduler), [HDETCallback()]
        ...     return transformers.Trainer(
        ...         model, optimizers=pair, callbacks=callbacks, **arguments
        ...     )
    """

    _scheduler: HDET
    _hook: Any

    def on_train_begin(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        """Check the trainer, and begin to listen to the losses of the model.

        Raises:
            TypeError: If the schedule of the trainer is not `hdet.HDET`.
            ValueError: If the scheduler has a scout or was made too early, or if the trainer saves
                the best model.
        """
        scheduler = said["lr_scheduler"]
        if isinstance(scheduler, WaitingSchedule):
            raise TypeError("`HDETCallback` must not be a callback of HDETTrainer. Leave it out.")
        if not isinstance(scheduler, HDET):
            raise TypeError(
                "`HDETCallback` needs hdet.HDET as the schedule of the trainer, got "
                f"{type(scheduler).__name__}. Pass optimizers=(optimizer, hdet.HDET(base, "
                "scout=None)), or use HDETTrainer."
            )
        if args.world_size > len(scheduler.get_replica_lrs()):
            raise ValueError(
                f"`HDETCallback` needs a replica in each of the {args.world_size} processes, got a "
                "scheduler that was made before they were connected. Make TrainingArguments "
                "before hdet.HDET."
            )
        if scheduler.is_scouting:
            raise ValueError(
                "`HDETCallback` cannot run a scout: Trainer does not show it the model that it "
                "wraps. Pass scout=None to HDET, or use HDETTrainer."
            )
        if args.save_strategy == "best":
            raise ValueError(
                "`HDETCallback` cannot see a save that follows an evaluation. Pass "
                "save_strategy='steps' or 'epoch', or use HDETTrainer."
            )
        self._scheduler = scheduler
        self._hook = said["model"].register_forward_hook(self._observe, with_kwargs=True)

    def _observe(self, model: nn.Module, _: Any, inputs: Mapping[str, Any], outputs: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                "`HDETCallback` needs a model that returns its loss, got one that does not. Use "
                "HDETTrainer."
            )
        total, own = inputs.get("num_items_in_batch"), num_items(model, inputs)
        if total is None or own is None:
            self._scheduler.observe(loss)
        elif own:  # the model divides by the labels of the whole step
            self._scheduler.observe(loss * total / own, weight=own)

    def on_step_end(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        """Make the replicas one model where an evaluation or a save follows."""
        super().on_step_end(args, state, control, **said)
        self._prepare(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        """Make the replicas one model where an evaluation or a save follows."""
        self._prepare(control)

    def _prepare(self, control: Any) -> None:
        if control.should_evaluate or control.should_save:
            self._scheduler.converge()

    def on_train_end(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        """Make the replicas one model."""
        self._hook.remove()
        super().on_train_end(args, state, control, **said)
