"""Which replicas are fit to be averaged and compared. Plain Python, the same on every process."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class ReplicasLost(RuntimeError):
    """No replica is left with finite weights and a finite loss: there is nothing to go on from."""


class Triage(NamedTuple):
    """The replicas that are fit, and why each of the others is not."""

    fit: tuple[int, ...]
    excluded: dict[int, str]


def triage(losses: Sequence[float | None], finite_weights: Sequence[bool], *, step: int) -> Triage:
    """A replica is fit if its weights are finite and its loss, where it has one, is too.

    >>> triage([0.5, float("nan")], [True, True], step=10)
    Triage(fit=(0,), excluded={1: 'loss is nan'})
    """
    excluded: dict[int, str] = {}
    for replica, (loss, finite) in enumerate(zip(losses, finite_weights, strict=True)):
        if not finite:
            excluded[replica] = "weights are not finite"
        elif loss is not None and not math.isfinite(loss):
            excluded[replica] = f"loss is {loss}"
    fit = tuple(r for r in range(len(losses)) if r not in excluded)
    if not fit:
        raise ReplicasLost(_obituary(excluded, step))
    return Triage(fit, excluded)


def _obituary(excluded: dict[int, str], step: int) -> str:
    causes = "; ".join(f"replica {replica}: {reason}" for replica, reason in excluded.items())
    return (
        f"no replica is left at step {step} ({causes}). Resume from the last checkpoint with a "
        "lower learning rate. With shared gradients one non-finite gradient reaches all replicas "
        "at once; gradient clipping or torch.amp.GradScaler stops it."
    )
