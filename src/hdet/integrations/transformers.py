"""hdet in the Trainer of Hugging Face: `HDETTrainer` in the place of `Trainer`.

No private name of transformers is used.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hdet.integrations._extras import extra
from hdet.integrations._transformers_callback import HDETCallback
from hdet.integrations._transformers_losses import mean_loss, num_items
from hdet.integrations._transformers_run import TrainerEvents, WaitingSchedule, check_trainer
from hdet.scheduler.hdet import HDET

with extra("transformers"):
    from transformers import Trainer

__all__ = ["HDETCallback", "HDETMixin", "HDETTrainer"]

_Base: Any = Trainer if TYPE_CHECKING else object


class HDETMixin(_Base):
    """Lets any subclass of `transformers.Trainer` train with hdet, one replica in each process.

    hdet wraps the schedule of the trainer and gets the loss of every micro-batch. Evaluation and
    prediction show the consensus. Before each save the replicas become one model; checkpoints
    contain hdet's state. Logs have the learning rate of the consensus as `learning_rate`, and those
    of the replicas as `hdet/lr/...`. While the scout tries learning rates, the logged loss is that
    of the weights that it starts from.

    Args:
        args: Of the trainer.
        hdet_options: Options of `hdet.HDET`, such as `{"preset": "paper"}`. None takes the class
            attribute of this name.
        hold_out: Batches of each process, from the evaluation data, on which the scout compares
            learning rates. 0 compares by training losses. None takes the class attribute.
        kwargs: Of the trainer.

    Raises:
        ValueError: If the trainer or an option does not work with hdet.

    Example:
        >>> from transformers import Seq2SeqTrainer
        >>> class MyTrainer(HDETMixin, Seq2SeqTrainer):
        ...     pass
    """

    hdet_options: Mapping[str, Any] = {}
    hold_out: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class in which a trainer comes first: the mixin would do nothing."""
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(HDETMixin):
            raise TypeError(
                "`HDETMixin` must come before the trainer, as in class "
                f"{cls.__name__}(HDETMixin, {cls.__bases__[0].__name__})."
            )

    lr_scheduler: Any

    def __init__(
        self,
        *args: Any,
        hdet_options: Mapping[str, Any] | None = None,
        hold_out: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.hdet_options = dict(self.hdet_options if hdet_options is None else hdet_options)
        self.hold_out = self.hold_out if hold_out is None else hold_out
        super().__init__(*args, **kwargs)
        check_trainer(self, self.hdet_options)
        self._events = TrainerEvents(self)
        self.add_callback(self._events)
        self._start_loss: Tensor | None = None
        self._is_showing = False

    @property
    def hdet_scheduler(self) -> HDET | None:
        """The scheduler of the run; None before the training starts."""
        return self.lr_scheduler if isinstance(self.lr_scheduler, HDET) else None

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule of the trainer. It waits for the model that Trainer wraps."""
        self.callback_handler.lr_scheduler = None  # it would keep an earlier run alive
        base = super().create_scheduler(num_training_steps, optimizer)
        if not isinstance(base, HDET):  # else `train()` goes on with a schedule of the user
            self.lr_scheduler = WaitingSchedule(base, num_training_steps)
        return self.lr_scheduler

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Train on a micro-batch, and give its loss to hdet."""
        own = None if num_items_in_batch is None else num_items(self.model, inputs)
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        value, weight = mean_loss(self, loss, own, num_items_in_batch)
        scheduler: Any = self.lr_scheduler
        if weight:
            scheduler.observe(value, weight=weight)
        if not scheduler.is_scouting:
            self._start_loss = None
        elif self._start_loss is None:
            self._start_loss = loss.clone()
        return loss if self._start_loss is None else self._start_loss

    @contextmanager
    def _consensus(self) -> Iterator[None]:
        """Show the consensus, in training. Evaluations of several sets are nested."""
        scheduler = self.hdet_scheduler
        if scheduler is None or not self.is_in_train or self._is_showing:
            yield
            return
        self._is_showing = True
        try:
            with scheduler.consensus():
                yield
        finally:
            self._is_showing = False

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the consensus."""
        with self._consensus():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict with the consensus."""
        with self._consensus():
            return super().predict(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save one model. In training, all processes must call it: replicas become one model."""
        if self.is_in_train and self.hdet_scheduler is not None and not self._is_showing:
            self.hdet_scheduler.converge()
        super().save_model(*args, **kwargs)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log what Trainer logs, with the learning rates and scores of hdet."""
        if "loss" in logs and self.hdet_scheduler is not None:
            logs.update(self._events.take_numbers())
            if self._start_loss is not None:
                logs.pop("grad_norm", None)  # it explodes in rounds of the scout
        super().log(logs, *args, **kwargs)


class HDETTrainer(HDETMixin, Trainer):
    """`transformers.Trainer` with hdet. `HDETMixin` has the details."""
