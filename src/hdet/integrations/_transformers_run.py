"""The run of hdet inside a Trainer of Hugging Face: what it refuses, its start, and its events."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from torch import Tensor, nn

from hdet.integrations._extras import extra
from hdet.integrations.tracking import scalars_now, scalars_of
from hdet.records.sinks import check_record
from hdet.replicas.stacked.replicas import StackedReplicas
from hdet.scheduler.hdet import HDET

with extra("transformers"):
    from transformers import TrainerCallback


class WaitingSchedule:
    """Stands for the scheduler until Trainer shows the wrapped model, and keeps a loaded state."""

    def __init__(self, base: Any, num_steps: int) -> None:
        self.base, self.num_steps = base, num_steps
        self.state: dict[str, Any] | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state of the checkpoint that the run continues from."""
        self.state = state


class LatestNumbers:
    """A sink that keeps the numbers of events for the next log of the trainer."""

    def __init__(self) -> None:
        self._numbers: dict[str, float] = {}

    def write(self, event: Mapping[str, Any]) -> None:
        self._numbers.update(scalars_of(event))

    def close(self) -> None:
        """Do nothing."""

    def take(self) -> dict[str, float]:
        """Return the numbers since the last call."""
        taken, self._numbers = self._numbers, {}
        return taken


def check_trainer(trainer: Any, options: Mapping[str, Any]) -> None:
    """Refuse what hdet cannot do inside a trainer.

    Raises:
        ValueError: With what to use instead.
    """
    if isinstance(trainer.lr_scheduler, HDET):
        raise ValueError(
            "`optimizers` must hold a plain schedule, got hdet.HDET, which HDETTrainer makes "
            "itself. Pass the schedule that it wraps, and its options as hdet_options={...}."
        )
    if isinstance(options.get("replicas"), StackedReplicas):
        raise ValueError(
            "`replicas` cannot be StackedReplicas inside a trainer of Hugging Face, which computes "
            "one loss for a batch and not one for each replica. Start one process for each GPU "
            "with torchrun, or use StackedReplicas in your own loop."
        )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"Trainer puts the model on {trainer.args.n_gpu} GPUs with DataParallel, which has "
            "one replica only. Start one process for each GPU: torchrun --nproc-per-node "
            f"{trainer.args.n_gpu} ..."
        )
    if trainer.args.fsdp or trainer.is_fsdp_enabled:
        raise ValueError(
            "hdet does not work with `fsdp` inside a trainer of Hugging Face, which does not tell "
            "it how the processes divide the weights. Train with DDP, or use FSDP2 in your own "
            "loop with hdet.ProcessReplicas."
        )
    if trainer.is_deepspeed_enabled:
        raise ValueError(
            "hdet does not work with DeepSpeed inside a trainer of Hugging Face, where DeepSpeed "
            "steps the schedule. Leave `deepspeed` out, or use hdet.integrations.deepspeed in "
            "your own loop."
        )


def start_run(trainer: Any, waiting: WaitingSchedule, numbers: LatestNumbers) -> HDET:
    """Make the scheduler of a trainer that has wrapped its model and loaded its checkpoint."""
    options = {"total_steps": waiting.num_steps, "scaler": trainer.accelerator.scaler}
    options |= trainer.hdet_options
    options["record"] = (*check_record(options.get("record")), numbers)
    scheduler = HDET(waiting.base, model=trainer.model_wrapped, **options)
    if waiting.state is not None:
        scheduler.load_state_dict(waiting.state)
    if trainer.hold_out and scheduler.is_scouting:
        _hold_out(trainer, scheduler)
    return scheduler


def _hold_out(trainer: Any, scheduler: HDET) -> None:
    def loss_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(model, dict(inputs))
        return loss

    if trainer.eval_dataset is None:
        raise ValueError("`hold_out` needs evaluation data. Pass eval_dataset to the trainer.")
    for batch in islice(trainer.get_eval_dataloader(), trainer.hold_out):
        scheduler.hold_out(loss_of, dict(batch))


class RunEvents(TrainerCallback):
    """What a scheduler needs at the end of a step and of the run."""

    def on_step_end(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        if said["optimizer"].step_was_skipped:  # by float16, in this process: Trainer skips step()
            said["lr_scheduler"].step()

    def on_train_end(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        if not (args.load_best_model_at_end and state.best_model_checkpoint):
            said["lr_scheduler"].converge()  # the best model is loaded, equal on all processes


class TrainerEvents(RunEvents):
    """What `HDETMixin` does at the events of its trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._numbers = LatestNumbers()
        self._rates: dict[str, float] = {}
        self._has_resumed = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        if isinstance(said["lr_scheduler"], WaitingSchedule):
            scheduler = start_run(self._trainer, said["lr_scheduler"], self._numbers)
            self._trainer.lr_scheduler = scheduler
            self._trainer.callback_handler.lr_scheduler = scheduler
        self._has_resumed = state.global_step > 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        scheduler = said["lr_scheduler"]
        if self._has_resumed:  # Trainer has loaded the random numbers by now
            scheduler.keep_random_state()
            self._has_resumed = False
        self._rates = {"learning_rate": scheduler.get_base_lr()[0], **scalars_now(scheduler)}

    def take_numbers(self) -> dict[str, float]:
        """Return what to log: the learning rates of this step, and scores since the last log."""
        return {**self._numbers.take(), **self._rates}
