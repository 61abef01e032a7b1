"""hdet with Accelerate: a scheduler for the prepared model and optimizer.

It uses no private name of Accelerate. With FSDP2, a function that converges first replaces
`save_state`, because Accelerate calls its hooks there after it has written the model.
"""

from collections.abc import Sequence
from functools import wraps
from typing import Any

from torch import nn

from hdet.integrations._extras import extra
from hdet.replicas.factory import local_replicas
from hdet.replicas.process import ProcessReplicas
from hdet.replicas.protocol import SingleReplica
from hdet.scheduler.given_schedule import Base
from hdet.scheduler.hdet import HDET

with extra("accelerate"):
    from accelerate import Accelerator
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DistributedType


class AcceleratedHDET(HDET):
    """The scheduler of a loop with Accelerate. `prepare_hdet` makes it."""

    def __init__(self, accelerator: Accelerator, *args: Any, **options: Any) -> None:
        self._accelerator = accelerator
        super().__init__(*args, **options)

    def step(self, loss: Any = None) -> None:
        """Observe the loss of a micro-batch, and advance the run after an optimizer step.

        Call it after every `optimizer.step()`, inside `accelerator.accumulate(model)`. It raises
        what `hdet.HDET.step()` raises.

        Args:
            loss: The training loss, as for `observe()`. None adds no loss.
        """
        if loss is not None:
            self.observe(loss)
        if self._accelerator.sync_gradients:
            super().step()


def prepare_hdet(
    accelerator: Accelerator, base: Base | Sequence[Base], model: nn.Module, **options: Any
) -> AcceleratedHDET:
    """Make the scheduler of a loop that trains with Accelerate.

    Call it on all processes after `accelerator.prepare(model, optimizer, ...)`. Leave `base` and
    the result out of `accelerator.prepare`. The length of the run counts optimizer steps. Do not
    multiply it by the number of processes.

    `accelerator.save_state()` converges first, and saves the state of the scheduler.
    `accelerator.load_state()` loads it. The loss scale of float16 is passed on. With FSDP2, each
    index of the dimension `dp_replicate` is a replica.

    Args:
        accelerator: The accelerator of the loop.
        base: The schedule to wrap, or the optimizer, as for `hdet.HDET`. Its optimizer may be the
            prepared one, or the one inside.
        model: The model that `accelerator.prepare` returned.
        **options: Options of `hdet.HDET`.

    Returns:
        The scheduler.

    Raises:
        TypeError: If `base` has the wrong type, or was prepared by Accelerate.
        ValueError: If the model was not prepared, if Accelerate trains with DeepSpeed or
            Megatron-LM, or if FSDP2 leaves a single replica. Also as `hdet.HDET`.

    Example:
        >>> import torch
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> base = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4000)
        >>> scheduler = prepare_hdet(accelerator, base, model)
        >>> scheduler.is_scouting
        True
    """
    _check_engine(accelerator)
    _check_base(base)
    _check_prepared(accelerator, model)
    options.setdefault("scaler", accelerator.scaler)
    if accelerator.is_fsdp2 and options.get("replicas") is None:
        options["replicas"] = _replicas_of(accelerator)
    scheduler = AcceleratedHDET(accelerator, base, model=model, **options)
    accelerator.register_for_checkpointing(scheduler)
    _converge_before_saving(accelerator, scheduler)
    return scheduler


def _converge_before_saving(accelerator: Accelerator, scheduler: HDET) -> None:
    if accelerator.distributed_type != DistributedType.FSDP:
        accelerator.register_save_state_pre_hook(lambda *_: scheduler.converge())
        return
    save_state = accelerator.save_state

    @wraps(save_state)
    def converge_and_save(*args: Any, **kwargs: Any) -> Any:
        scheduler.converge()
        return save_state(*args, **kwargs)

    accelerator.save_state = converge_and_save


def _replicas_of(accelerator: Accelerator) -> ProcessReplicas:
    mesh = accelerator.torch_device_mesh
    if mesh is None or "dp_replicate" not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            "FSDP2 must keep several replicas of the model, got a mesh without `dp_replicate`. "
            "Pass parallelism_config=ParallelismConfig(dp_replicate_size=..., dp_shard_size=...) "
            "to Accelerator."
        )
    return ProcessReplicas(mesh["dp_replicate"])


def _check_engine(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"`accelerator` must train with DDP or FSDP2, got {kind.value}. For DeepSpeed, use "
            "hdet.integrations.deepspeed without Accelerate."
        )


def _check_base(base: Any) -> None:
    given = base if isinstance(base, Sequence) else [base]
    if any(isinstance(one, AcceleratedScheduler) for one in given):
        raise TypeError(
            "`base` must be a schedule that Accelerate has not prepared, got an "
            "AcceleratedScheduler. Leave the schedule out of `accelerator.prepare`."
        )


def _check_prepared(accelerator: Accelerator, model: nn.Module) -> None:
    is_alone = local_replicas() is SingleReplica.local or accelerator.is_fsdp2
    if not is_alone and accelerator.unwrap_model(model) is model:
        raise ValueError(
            "`model` must be the one that `accelerator.prepare` has wrapped in DDP, got a "
            f"{type(model).__name__}. On a machine without GPU, pass cpu=True to Accelerator."
        )
