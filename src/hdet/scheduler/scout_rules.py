"""When a scout cannot run, and when the default scout is left out.

The messages end without a full stop: the caller puts them into a longer text.
"""

from hdet.lr_search.budget import check_room
from hdet.lr_search.constants import MIN_MEAN_SHARE
from hdet.scheduler.rules import Rule, Setup


def _no_room(setup: Setup) -> str:
    """Return why one sweep does not fit into the run; empty if it fits."""
    scout, total = setup.settings.scout, setup.settings.total_steps
    assert scout is not None
    try:
        check_room(scout, num_replicas=setup.num_replicas, total_steps=total)
    except ValueError as short:
        return str(short).rstrip(".")
    return ""


def _mean_share(setup: Setup) -> float | None:
    """Return the mean of the schedule in units of its peak; None if it is unknown."""
    shares = setup.base.shares(setup.settings.total_steps)
    return None if shares is None else shares.mean


def _is_low(share: float | None) -> bool:
    return share is not None and share < MIN_MEAN_SHARE


SCOUT_RULES = (
    Rule(
        name="scout-needs-model",
        limit="A scout needs the model.",
        remedy="Pass `model=`.",
        applies=lambda setup: setup.model is None,
        message=lambda _: "`scout` needs `model=`, got None",
        is_about_model=True,
    ),
    Rule(
        name="scout-sync-batch-norm",
        limit="A scout does not work with `SyncBatchNorm`, which mixes the replicas' activations.",
        remedy="Use plain `BatchNorm`, or pass `scout=None`.",
        applies=lambda setup: setup.has_sync_batch_norm,
        message=lambda _: (
            "`scout` does not support SyncBatchNorm, which mixes the batches of the replicas"
        ),
    ),
    Rule(
        name="scout-plateau",
        limit="A scout does not work with `ReduceLROnPlateau`.",
        remedy="Use another base schedule, or pass `scout=None`.",
        applies=lambda setup: setup.base.wants_metric,
        message=lambda _: (
            "`scout` does not support ReduceLROnPlateau, whose course is unknown in advance"
        ),
    ),
    Rule(
        name="scout-static-graph",
        limit="A scout does not work with `DDP(static_graph=True)`, which always shares gradients.",
        remedy="Leave `static_graph` out, or pass `scout=None`.",
        applies=lambda setup: setup.spans_processes and setup.has_static_graph,
        message=lambda _: "gradients cannot be local under DDP(static_graph=True)",
    ),
    Rule(
        name="scout-unwrapped-model",
        limit="A scout with shared gradients needs the model that DDP or FSDP2 wraps.",
        remedy="Pass the wrapped model, or `gradients='local'`.",
        applies=lambda setup: (
            setup.spans_processes
            and setup.settings.gradients == "shared"
            and not (setup.is_under_ddp or setup.is_under_fsdp)
        ),
        message=lambda _: (
            "`scout` needs a model wrapped in DDP or FSDP2, got a plain module. Pass the wrapped "
            "model, or gradients='local'"
        ),
        is_about_model=True,
    ),
    Rule(
        name="scout-unknown-length",
        limit="A scout needs the length of the run.",
        remedy="Pass `total_steps=`.",
        applies=lambda setup: setup.settings.total_steps is None,
        message=lambda _: (
            "the length of the run is unknown, and `scout` depends on it. Pass total_steps= to HDET"
        ),
    ),
)
"""A scout cannot run under these conditions, requested or not."""

DEFAULT_SCOUT_RULES = (
    Rule(
        name="default-scout-elastic",
        limit="A run with `TorchftReplicas` starts without a scout.",
        remedy="Pass a learning rate that an earlier run found.",
        applies=lambda setup: setup.is_elastic,
        message=lambda _: "TorchftReplicas does not support a scout",
    ),
    *SCOUT_RULES,
    Rule(
        name="default-scout-fsdp",
        limit="A run under FSDP2 with shared gradients starts without a scout.",
        remedy="Pass `scout=hdet.Scout()` to request one.",
        applies=lambda setup: (
            setup.settings.gradients == "shared"
            and setup.spans_processes
            and not setup.is_under_ddp
        ),
        message=lambda _: "it is off by default under FSDP2. Pass scout=hdet.Scout() to turn it on",
    ),
    Rule(
        name="default-scout-low-schedule",
        limit="A run starts without a scout if its schedule stays far below the learning rate.",
        remedy="Let a `LambdaLR` return factors, and divide Noam's schedule by its peak.",
        applies=lambda setup: _is_low(_mean_share(setup)),
        message=lambda setup: (
            f"the schedule averages {_mean_share(setup):.2g} of the given learning rate, so the "
            "given one is not its peak. Return factors near 1 from LambdaLR, and divide a Noam "
            "schedule by its peak"
        ),
    ),
    Rule(
        name="default-scout-no-room",
        limit="A run that is too short for one sweep starts without a scout.",
        remedy="Train longer, use more replicas, or raise the scout's `share`.",
        applies=lambda setup: bool(_no_room(setup)),
        message=_no_room,
    ),
)
"""A scout that is not requested is left out under these conditions."""
