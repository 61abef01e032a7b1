"""hdet with DeepSpeed: a scheduler for an engine that does not split the optimizer (ZeRO stage 0).

It uses no private name of DeepSpeed. It replaces two methods of the engine, which has no hooks:

- `save_checkpoint` converges first.
- `clip_fp32_gradients` takes the norm of this process. DeepSpeed takes the mean over all processes.
  In the scout, one learning rate that is too high would then stop the others.
"""

from collections.abc import Sequence
from functools import wraps
from typing import Any

from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet.integrations._extras import extra
from hdet.replicas.process import ProcessReplicas
from hdet.scheduler.given_schedule import Base
from hdet.scheduler.hdet import HDET

with extra("deepspeed"):
    from deepspeed import DeepSpeedEngine, PipelineEngine

SPLIT = (
    "ZeRO splits the optimizer over the processes, so no process can try a learning rate of its "
    'own. Set "stage" to 0, or use FSDP2 with several replicas'
)
MASTER_WEIGHTS = (
    "DeepSpeed then keeps the weights twice, and hdet would average one copy only. Use "
    '"torch_autocast" instead'
)


class EngineHDET(HDET):
    """The scheduler of a DeepSpeed engine. `attach_hdet` makes it."""

    def step(self, loss: Any = None) -> None:
        """Advance the run by one step. `engine.step()` calls it after every optimizer step.

        Args:
            loss: The training loss, as for `observe()`. None adds no loss.

        Raises:
            Exception: As `hdet.HDET.step()`.
        """
        try:
            super().step(loss)
        except TypeError as error:
            # DeepSpeed takes a TypeError for another signature: it would step with a batch size.
            raise RuntimeError(f"a step of hdet failed: {error}") from error


def attach_hdet(engine: DeepSpeedEngine, base: Base | None = None, **options: Any) -> EngineHDET:
    """Make the scheduler of a DeepSpeed engine.

    Call it on all processes after `deepspeed.initialize`, and before `engine.load_checkpoint`.
    Then call `scheduler.observe(loss)` after each `engine.backward(loss)`. `engine.step()` steps
    the scheduler after each optimizer step. `engine.save_checkpoint` converges first, and saves the
    state of the scheduler. `engine.load_checkpoint` loads it.

    Args:
        engine: The engine, with ZeRO stage 0 and data parallelism only.
        base: The schedule to wrap, or the optimizer, as for `hdet.HDET`. None takes the schedule
            that `deepspeed.initialize` got.
        **options: Options of `hdet.HDET`.

    Returns:
        The scheduler. It is also `engine.lr_scheduler`.

    Raises:
        ValueError: If the engine splits or copies the weights, or if there is no schedule. Also as
            `hdet.HDET`.
        TypeError: As `hdet.HDET`.
    """
    if (problem := _problem_of(engine)) is not None:
        raise ValueError(f"hdet cannot train this DeepSpeed engine: {problem}.")
    base = engine.lr_scheduler if base is None else base
    if base is None:
        raise ValueError(
            "`base` must be a schedule or an optimizer where `deepspeed.initialize` got no "
            "`lr_scheduler`, got None."
        )

    _check_base(base)

    def share_gradients(shared: bool) -> None:
        engine.enable_backward_allreduce = shared

    if engine.world_size > 1 and options.get("replicas") is None:
        options["replicas"] = ProcessReplicas(share_gradients=share_gradients)
    options.setdefault("scaler", engine.torch_autocast_z0_gradscaler)
    scheduler = EngineHDET(base, model=engine.module, **options)
    engine.lr_scheduler = scheduler
    _replace_methods(engine, scheduler)
    return scheduler


def _replace_methods(engine: DeepSpeedEngine, scheduler: HDET) -> None:
    save_checkpoint = engine.save_checkpoint

    @wraps(save_checkpoint)
    def converge_and_save(*args: Any, **kwargs: Any) -> Any:
        scheduler.converge()
        return save_checkpoint(*args, **kwargs)

    def clip_own_gradients() -> None:
        clip_grad_norm_(engine.module.parameters(), engine.gradient_clipping())

    engine.save_checkpoint = converge_and_save
    engine.clip_fp32_gradients = clip_own_gradients


def _check_base(base: Any) -> None:
    """Refuse a schedule of which DeepSpeed has made something else.

    Raises:
        ValueError: With what to write instead.
    """
    if isinstance(base, HDET):
        raise ValueError(
            "`base` must be a plain torch schedule, got an HDET. Call attach_hdet once, and give "
            "`deepspeed.initialize` the schedule inside of it."
        )
    if not isinstance(base, (LRScheduler, Optimizer)) and not isinstance(base, Sequence):
        raise ValueError(
            f"`base` must be a plain torch schedule, got {type(base).__name__}. Leave "
            '"scheduler" out of the config of DeepSpeed, and pass lr_scheduler= of torch.'
        )
    if isinstance(base, LRScheduler) and not callable(base.step):
        raise ValueError(
            "`base` has loaded a checkpoint of hdet, which replaced its method `step`. Call "
            "attach_hdet before `engine.load_checkpoint`."
        )


def _problem_of(engine: DeepSpeedEngine) -> str | None:
    """Return why replicas of this engine cannot have learning rates of their own."""
    if (stage := engine.zero_optimization_stage()) > 0:
        return f"it has ZeRO stage {stage}. {SPLIT}"
    if engine.fp16_enabled() or engine.bfloat16_enabled():
        return f'"fp16" or "bf16" is enabled in its config. {MASTER_WEIGHTS}'
    if isinstance(engine, PipelineEngine) or engine.dp_world_size != engine.world_size:
        return "it splits the model over processes. Use data parallelism only"
    if engine.has_moe_layers:
        return "its experts exist once for several processes. Use a model without MoE layers"
    return None
