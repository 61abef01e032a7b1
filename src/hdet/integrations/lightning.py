"""hdet in Lightning's Trainer, as a callback: `Trainer(callbacks=[HDETCallback()])`.

While a fit runs, it stands in for two public methods, since no hook comes in time:

- `trainer.save_checkpoint`: replicas become one model before Lightning collects the weights.
  `on_save_checkpoint` comes after that, and with `save_weights_only` not at all.
- `module.log`: in the scout a metric of training keeps its first value. Learning rates that diverge
  on purpose would fill the log, and EarlyStopping would end the run.

It uses no private name of Lightning, and `_lightning_setup.py` one.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any

from torch import Tensor

from hdet.integrations._extras import extra
from hdet.integrations._lightning_setup import hold_out, take_over
from hdet.integrations.tracking import scalars_now, scalars_of, step_of

with extra("lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.exceptions import SIGTERMException


class HDETCallback(Callback):
    """Puts hdet around the schedule that `configure_optimizers` returns.

    Args:
        hold_out: Batches that each process takes from the validation loader. The scout compares
            replicas on them, by `training_step`. 0 compares them by their training losses.
        **options: Options of `hdet.HDET`. `replicas` may also be a function of the module, which
            is called when the processes are connected.
    """

    def __init__(self, *, hold_out: int = 0, **options: Any) -> None:
        self.scheduler: Any = None
        """The `hdet.HDET` of this fit, or of the last one. None before the first."""
        self._hold_out, self._options = hold_out, options
        self._shown, self._undo = ExitStack(), ExitStack()
        self._first_logged: dict[str, Any] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the schedule: the model is wrapped, and no state is loaded yet."""
        self._end()
        self.scheduler = None  # of an earlier fit, which trained the same parameters
        options = dict(self._options)
        if trainer.loggers:
            given = options.get("record")
            sinks = given if isinstance(given, (list, tuple)) else [given] if given else []
            options["record"] = [*sinks, _Loggers(trainer.loggers)]
        self.scheduler = take_over(trainer, pl_module, options)
        self._stand_in(trainer, pl_module)

    def _stand_in(self, trainer: Trainer, module: LightningModule) -> None:
        save, log = trainer.save_checkpoint, module.log

        @wraps(save)
        def save_one_model(*args: Any, **named: Any) -> None:
            self._shown.close()
            self.scheduler.converge()
            save(*args, **named)

        @wraps(log)
        def log_calmly(name: str, value: Any, *args: Any, **named: Any) -> None:
            is_number = isinstance(value, (Tensor, float, int))
            if trainer.training and is_number and self.scheduler.is_scouting:
                now = value.detach() if isinstance(value, Tensor) else value
                value = self._first_logged.setdefault(name, now)
            log(name, value, *args, **named)

        trainer.save_checkpoint, module.log = save_one_model, log_calmly
        self._undo.callback(delattr, trainer, "save_checkpoint")
        self._undo.callback(delattr, module, "log")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hold out batches: the loaders exist now."""
        if self._hold_out and self.scheduler.is_scouting:
            hold_out(trainer, self.scheduler, self._hold_out)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Log the learning rates of this step, where Lightning logs its losses."""
        if not self.scheduler.is_scouting:
            self._first_logged.clear()
        every, step = trainer.log_every_n_steps, trainer.global_step
        is_first = batch_idx % trainer.accumulate_grad_batches == 0
        if trainer.loggers and every and (step + 1) % every == 0 and is_first:
            _log(trainer.loggers, scalars_now(self.scheduler), step)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Observe the loss of a micro-batch, without the factors that Lightning gave it."""
        loss = loss.detach() * trainer.accumulate_grad_batches
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:  # `get_scale()` would wait for the device
            loss = loss / scaler.scale(loss.new_ones(()))
        self.scheduler.observe(loss)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the consensus."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._shown.enter_context(self.scheduler.consensus())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go back to the weights of this replica."""
        self._shown.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave one model."""
        self.scheduler.converge()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Let a process that fails alone save what it has. SIGTERM stops all of them."""
        self._shown.close()
        if not isinstance(exception, SIGTERMException):
            self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the methods back."""
        self._end()

    def _end(self) -> None:
        self._shown.close()
        self._undo.close()
        self._first_logged.clear()


class _Loggers:
    """A sink that sends the numbers of events to the loggers of a trainer."""

    def __init__(self, loggers: Sequence[Any]) -> None:
        self._loggers = loggers

    def write(self, event: Mapping[str, Any]) -> None:
        _log(self._loggers, scalars_of(event), step_of(event))

    def close(self) -> None:
        """Do nothing: the loggers belong to the trainer."""


def _log(loggers: Sequence[Any], numbers: Mapping[str, float], step: int) -> None:
    for logger in loggers if numbers else ():
        logger.log_metrics(numbers, step=step)
