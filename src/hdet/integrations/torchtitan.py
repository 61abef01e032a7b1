"""torchtitan: the config of a trainer with hdet.

`with_hdet(config)` puts `HDETSchedulers` in place of the schedule, and `HDETMixin` before the
trainer. Public names of torchtitan are used, and two private ones: `Config._owner`, the class that
a config builds, of which the trainer is derived; and `CheckpointManager._should_save`, since no
public name tells of a save before it begins.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hdet.integrations._torchtitan_schedules import NO_PIPELINE, HDETSchedulers
from hdet.scheduler.hdet import HDET
from hdet.tensors.dtensor import local

__all__ = ["HDETMixin", "HDETSchedulers", "with_hdet"]


def with_hdet(config: Any, **options: Any) -> Any:
    """Return a trainer's config with hdet around its learning-rate schedule.

    Call it in a function of a config registry, on what the function returned before.

    Args:
        config: The config of a `torchtitan.trainer.Trainer`, or of a class derived from it.
        **options: The options of `hdet.HDET`.

    Returns:
        A config with the same fields, which builds a trainer with hdet.
    """
    kind = type(config)
    own = dataclasses.make_dataclass("Config", [], bases=(kind,), kw_only=True, slots=True)
    trainer: Any = type(f"HDET{kind._owner.__name__}", (HDETMixin, kind._owner), {"Config": own})
    schedule = HDETSchedulers.Config(options=options, **_fields(config.lr_scheduler))
    return trainer.Config(**(_fields(config) | {"lr_scheduler": schedule}))


def _fields(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


class HDETMixin:
    """What a trainer of torchtitan does for hdet. Derive from it first, then from the trainer.

    It gives hdet the loss of each micro-batch, converges before a checkpoint, validates the
    consensus, and logs nothing while the scout runs.

    Args:
        config: The config of the trainer, with `HDETSchedulers.Config` as `lr_scheduler`.

    Raises:
        ValueError: If CUDA graphs or pipeline parallelism are on.
    """

    def __init__(self, config: Any) -> None:
        if config.parallelism.pipeline_parallel_degree > 1:
            raise ValueError(NO_PIPELINE)
        if not config.training.disable_cuda_graphs:
            raise ValueError(
                "hdet switches how gradients are averaged, which a CUDA graph would not follow. "
                "Set training.disable_cuda_graphs to True."
            )
        super().__init__(config)  # type: ignore[call-arg]
        self.hdet: HDET = self.lr_schedulers.hdet
        processor = self.metrics_processor
        processor.should_log = functools.partial(self._should_log, processor.should_log)
        if config.validator.enable:
            validator = self.validator
            validator.validate = functools.partial(self._validate, validator.validate)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # the attributes of the trainer

    def _should_log(self, should_log: Any, step: int) -> bool:
        """Losses of a search are not those of the run, and torchtitan ends at one that is inf."""
        return not self.hdet.is_scouting and should_log(step)

    def _validate(self, validate: Any, *args: Any, **named: Any) -> None:
        with self.hdet.consensus():
            validate(*args, **named)

    def forward_backward_step(self, *, global_valid_tokens: Tensor, **batch: Any) -> Tensor:
        """Train on a micro-batch, and give its mean loss to hdet.

        Args:
            global_valid_tokens: The number of tokens in the step, of all processes.
            **batch: The rest that the trainer passes.

        Returns:
            The loss of this process, divided by the number of tokens.
        """
        dims = self.parallel_dims
        parts = dims.dp_shard * dims.cp * self.gradient_accumulation_steps
        if self.hdet.is_scouting or self.lr_schedulers.is_local:
            # torchtitan sums gradients over all processes. Here a replica has only its own.
            global_valid_tokens = global_valid_tokens / dims.dp_replicate
        else:
            parts *= dims.dp_replicate
        loss: Tensor = super().forward_backward_step(  # type: ignore[misc]
            global_valid_tokens=global_valid_tokens, **batch
        )
        self.hdet.observe(local(loss.detach()) * parts)
        return loss

    def train_step(self, data_iterator: Any) -> None:
        """Make a step. If a checkpoint follows, all replicas become one model.

        Args:
            data_iterator: The batches of this process.
        """
        super().train_step(data_iterator)  # type: ignore[misc]
        is_last = self.step == self.config.training.steps
        if self.checkpointer.enable and self.checkpointer._should_save(self.step, is_last):
            self.hdet.converge()
            self.optimizers.zero_grad()
