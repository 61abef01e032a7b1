"""Which replicas are healthy enough to be averaged. Plain Python, the same on every process."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class ReplicasLost(RuntimeError):
    """No replica is left with finite weights and a finite loss: there is nothing to go on from."""


class ReplicaHealth(NamedTuple):
    """The replicas that are fit to be averaged, and why each of the others is not."""

    fit: tuple[int, ...]
    excluded: dict[int, str]
    sound: tuple[int, ...] = ()
    """Those that can be compared: what is finite tells something, also where it is far worse."""

    def without(self, outliers: Mapping[int, str]) -> "ReplicaHealth":
        fit = tuple(replica for replica in self.fit if replica not in outliers)
        return self._replace(fit=fit, excluded={**self.excluded, **outliers})


def check_health(
    losses: Sequence[float | None], finite_weights: Sequence[bool], *, step: int
) -> ReplicaHealth:
    """A replica is fit if its weights are finite and its loss, where it has one, is too.

    >>> check_health([0.5, float("nan")], [True, True], step=10)
    ReplicaHealth(fit=(0,), excluded={1: 'loss is nan'}, sound=(0,))
    """
    excluded: dict[int, str] = {}
    for replica, (loss, finite) in enumerate(zip(losses, finite_weights, strict=True)):
        if not finite:
            excluded[replica] = "weights are not finite"
        elif loss is not None and not math.isfinite(loss):
            excluded[replica] = f"loss is {loss}"
    fit = tuple(r for r in range(len(losses)) if r not in excluded)
    if not fit:
        raise ReplicasLost(_no_replica_left(excluded, step))
    return ReplicaHealth(fit, excluded, fit)


def _no_replica_left(excluded: dict[int, str], step: int) -> str:
    causes = "; ".join(f"replica {replica}: {reason}" for replica, reason in excluded.items())
    return (
        f"no replica is left at step {step} ({causes}). Resume from the last checkpoint with a "
        "lower learning rate. With shared gradients one non-finite gradient reaches all replicas "
        "at once; gradient clipping or torch.amp.GradScaler stops it."
    )
