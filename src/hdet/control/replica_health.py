"""Which replicas are healthy enough to be averaged. Plain Python, the same on every process."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

OUTLIER_DEVIATIONS = 6.0
"""An outlier lies this many standard deviations above the other replicas."""
MIN_REPLICAS_FOR_OUTLIERS = 4
"""Fewer replicas do not show which one is the outlier."""
MAD_TO_DEVIATION = 1.4826
"""The standard deviation over the median absolute deviation, of a normal distribution."""


class ReplicasLost(RuntimeError):
    """The run cannot go on: no replica is healthy, or the guard has used all its retries.

    A healthy replica has finite weights and a finite loss. The message names the step and the
    cause. After a guard has stopped the run, all replicas have its best weights: save them,
    and resume with a lower learning rate. Otherwise resume from the last checkpoint.
    """


class ReplicaHealth(NamedTuple):
    """The replicas that are averaged, and why each of the others is not.

    Attributes:
        healthy: The replicas that are averaged.
        excluded: The other replicas, each with the reason.
        comparable: The replicas with finite weights and losses: also outliers can be compared.
    """

    healthy: tuple[int, ...]
    excluded: dict[int, str]
    comparable: tuple[int, ...] = ()

    def without(self, outliers: Mapping[int, str]) -> "ReplicaHealth":
        """The same with outliers excluded, which can still be compared."""
        healthy = tuple(replica for replica in self.healthy if replica not in outliers)
        return self._replace(healthy=healthy, excluded={**self.excluded, **outliers})


def check_health(
    losses: Sequence[float | None], finite_weights: Sequence[bool], *, step: int
) -> ReplicaHealth:
    """Find the replicas with finite weights and a finite loss, where they have one.

    Raises:
        ReplicasLost: No replica has both.

    >>> check_health([0.5, float("nan")], [True, True], step=10)
    ReplicaHealth(healthy=(0,), excluded={1: 'loss is nan'}, comparable=(0,))
    """
    excluded: dict[int, str] = {}
    for replica, (loss, finite) in enumerate(zip(losses, finite_weights, strict=True)):
        if not finite:
            excluded[replica] = "weights are not finite"
        elif loss is not None and not math.isfinite(loss):
            excluded[replica] = f"loss is {loss}"
    healthy = tuple(r for r in range(len(losses)) if r not in excluded)
    if not healthy:
        raise ReplicasLost(_no_replica_left(excluded, step))
    return ReplicaHealth(healthy, excluded, healthy)


def _no_replica_left(excluded: dict[int, str], step: int) -> str:
    causes = "; ".join(f"replica {replica}: {reason}" for replica, reason in excluded.items())
    return (
        f"no replica has finite weights and a finite loss at step {step} ({causes}). Resume from "
        "the last checkpoint with a lower learning rate. With shared gradients, one non-finite "
        "gradient reaches all replicas: torch.amp.GradScaler skips such steps."
    )


def outliers(
    losses: Sequence[float | None],
    errors: Sequence[float | None],
    least: Callable[[float], float],
) -> dict[int, str]:
    """The replicas whose losses lie far above those of the others, each with a text.

    Args:
        losses: The loss of each replica; None where there is none.
        errors: The standard error of each loss.
        least: How far above the median of the losses an outlier lies, at least.
    """
    known = {r: loss for r, loss in enumerate(losses) if loss is not None and math.isfinite(loss)}
    if len(known) < MIN_REPLICAS_FOR_OUTLIERS:
        return {}
    middle = median(known.values())
    scatter = MAD_TO_DEVIATION * median(abs(loss - middle) for loss in known.values())
    own = median([error for error in errors if error is not None] or [0.0])
    limit = middle + max(OUTLIER_DEVIATIONS * max(scatter, own), least(middle))
    return {
        replica: f"loss {loss:.4g} lies far above {middle:.4g}, that of the others"
        for replica, loss in known.items()
        if loss > limit
    }
