"""The exchange at the end of a cycle: one gather, one host sync, and the same report everywhere."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import torch
from torch import Tensor

from hdet.replicas.protocol import Replicas
from hdet.signals.columns import (
    Columns,
    Status,
    equal_fingerprints,
    merge_parts,
    merge_scores,
    pack_fingerprints,
    pack_status,
    status_rows,
    unpack_scores,
)
from hdet.signals.training_loss import TrainingLoss
from hdet.weights.inventory import Agreed, TensorKind
from hdet.weights.replica_weights import ReplicaWeights


class CycleReport(NamedTuple):
    """How the replicas performed in a cycle; lists have one entry for each replica."""

    losses: list[float | None]
    """Mean loss since the last average; None where no loss was observed."""
    errors: list[float | None]
    """Standard error of the mean loss; None below two observations."""
    distances: list[float | None]
    """Distance of the weights from the mean of all replicas, relative to it, from a sample."""
    num_observed: list[int]
    """Number of losses."""
    finite: list[bool]
    """Whether weights and buffers are finite."""
    agreed: Agreed
    """The tensors that are equal on all replicas, bit for bit."""
    optimizer_states_match: bool
    """Whether the optimizer states have the same size everywhere, so that they can be averaged."""
    first_loss: float | None = None
    """Mean loss of the first step; None if it was not finite."""
    first_error: float = 0.0
    """Standard error of the first loss, from the differences between replicas."""
    scores: list[list[float]] | None = None
    """Scores of the probe, lower is better, one for each of its batches; None without a probe."""
    vanished: float = 0.0
    """Share of tensors whose gradients have vanished on all replicas since the first step."""
    metric: float | None = None
    """Mean of what the user's metric of the guard returned; None if it said nothing."""
    num_bad_buffers: int = 0
    """Elements of the buffers that are not finite on any replica."""

    def mean_of(self, replicas: Sequence[int]) -> tuple[float | None, float | None]:
        """The mean loss of some replicas and its standard error, None where unknown."""
        losses = [loss for r in replicas if (loss := self.losses[r]) is not None]
        errors = [error for r in replicas if (error := self.errors[r]) is not None]
        error = math.hypot(*errors) / len(errors) if len(errors) == len(replicas) else None
        return fmean(losses) if losses else None, error

    def require_losses(self, step: int) -> None:
        """Raise a ValueError if a replica observed no loss."""
        silent = [replica for replica, loss in enumerate(self.losses) if loss is None]
        if silent:
            raise ValueError(
                "`step(loss)` or `observe(loss)` must give a loss in every cycle, got none from "
                f"replica(s) {silent} in the cycle that ends at step {step}."
            )


def exchange_reports(
    replicas: Replicas,
    weights: ReplicaWeights,
    training_loss: TrainingLoss,
    *,
    step: int,
    compare: Sequence[TensorKind],
    measure_distances: bool = False,
    scores: Tensor | None = None,
    metric: Tensor | None = None,
) -> CycleReport:
    """Gather one row from every replica. All processes must call this together.

    Args:
        replicas: The engine that gathers.
        weights: The weights of the replicas of this process.
        training_loss: Their losses since the last average.
        step: The current step, which must be equal on all replicas.
        compare: The kinds of tensors to compare between replicas.
        measure_distances: Whether to measure how far apart the weights are.
        scores: Score rows of a probe, one for each replica of this process.
        metric: The number that the guard judges, for each replica of this process, or NaN.

    Returns:
        The report, equal on all processes.

    Raises:
        RuntimeError: Replicas are at different steps.
        ValueError: Replicas scored different batches, or returned different numbers of scores.
    """
    weights.refresh()
    own = _local_status(weights, training_loss, step, TensorKind.OPTIMIZER_STATE in compare)
    status = merge_parts(replicas.gather_parts(own))
    blocks = {"status": status}
    for kind in compare:
        blocks[kind] = _as_column(pack_fingerprints(weights.checks.fingerprints(kind)), status)
    if scores is not None:
        blocks["scores"] = merge_scores(replicas.gather_parts(_as_column(scores, status)))
    if metric is not None:
        parts = replicas.gather_parts(_as_column(metric, status)[:, None])
        blocks["metric"] = parts.nanmean(1)
    nothing = status[:, :0]
    sample = _as_column(weights.checks.sample(), status) if measure_distances else nothing
    gathered = _gather(replicas, {**blocks, "sample": sample})
    rows = status_rows(gathered["status"])
    _check_steps([int(row.step) for row in rows])
    return _report(
        rows,
        distances=gathered["distances"].flatten().tolist(),
        agreed={kind: equal_fingerprints(gathered[kind]) for kind in compare},
        scores=None if scores is None else unpack_scores(gathered["scores"].tolist()),
        metrics=[] if metric is None else gathered["metric"].flatten().tolist(),
    )


def _local_status(
    weights: ReplicaWeights, training_loss: TrainingLoss, step: int, with_state: bool
) -> Tensor:
    """One packed `Status` for each replica of this process, of this process alone."""
    losses = training_loss.rows().double()
    loss, num_observed, error = losses.unbind(1)
    checks = weights.checks
    sizes = checks.state_numels() if with_state else [0] * len(losses)
    return pack_status(
        Status(
            loss=loss,
            num_observed=num_observed,
            loss_error=error,
            # Numbers are filled in on the device: a copy from the host would make it wait.
            step=loss.new_full((len(loss),), step),
            is_finite=_as_column(checks.are_finite(with_state=with_state), loss),
            num_bad_buffers=_as_column(checks.num_bad_buffers(), loss),
            state_numel=torch.stack([loss.new_full((), size) for size in sizes]),
            first_loss=_as_column(training_loss.first(), loss),
            vanished=loss.new_full((len(loss),), 0.0) + weights.gradient_watch.vanished(),
        )
    )


def _as_column(values: Tensor, like: Tensor) -> Tensor:
    return values.to(device=like.device, dtype=torch.float64)


def _gather(replicas: Replicas, blocks: dict[str, Tensor]) -> dict[str, Tensor]:
    """The blocks of all replicas in host memory, with distances instead of samples.

    Distances are computed on the device, so that samples need no copy to the host.
    """
    columns = Columns.of(blocks)
    gathered = columns.unpack(replicas.gather(columns.pack(blocks)))
    gathered["distances"] = _distances(gathered.pop("sample"))[:, None]
    columns = Columns.of(gathered)
    return columns.unpack(columns.pack(gathered).cpu())  # the only host sync


def _report(
    rows: Sequence[Status[float]],
    *,
    distances: Sequence[float],
    agreed: Agreed,
    scores: list[list[float]] | None,
    metrics: list[float],
) -> CycleReport:
    # Buffers may hold infinities by design; those that only some replicas have are damage.
    least_bad = min(row.num_bad_buffers for row in rows)
    return CycleReport(
        losses=[row.loss if row.num_observed else None for row in rows],
        num_observed=[int(row.num_observed) for row in rows],
        errors=[_known_error(row) for row in rows],
        distances=[distance if math.isfinite(distance) else None for distance in distances],
        finite=[bool(row.is_finite) and row.num_bad_buffers == least_bad for row in rows],
        agreed=agreed,
        optimizer_states_match=len({row.state_numel for row in rows}) == 1,
        first_loss=_mean_of_finite([row.first_loss for row in rows]),
        first_error=_error_of_first(rows),
        scores=scores,
        vanished=min(row.vanished for row in rows),
        metric=_mean_of_finite(metrics),
        num_bad_buffers=int(least_bad),
    )


def _known_error(row: Status[float]) -> float | None:
    return row.loss_error if row.num_observed > 1 and math.isfinite(row.loss_error) else None


def _mean_of_finite(values: list[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else None


def _error_of_first(rows: Sequence[Status[float]]) -> float:
    """The error of the mean first loss: how replicas differ.

    One replica shows it by its later losses. A loss that explodes shows more than there is, so the
    error is at most the loss itself.
    """
    finite = [row.first_loss for row in rows if math.isfinite(row.first_loss)]
    if len(rows) == 1 and finite:
        within = (_known_error(rows[0]) or 0.0) * math.sqrt(rows[0].num_observed)
        return min(within, abs(finite[0]))
    return stdev(finite) / math.sqrt(len(finite)) if len(finite) > 1 else 0.0


def _distances(samples: Tensor) -> Tensor:
    """RMS distance of each row from the mean of the finite ones, relative to the mean's RMS."""
    finite = samples.isfinite().all(1, keepdim=True)
    mean = torch.where(finite, samples, 0).sum(0) / finite.sum()
    distances: Tensor = (samples - mean).norm(dim=1) / mean.norm()
    return distances


def _check_steps(steps: list[int]) -> None:
    if len(set(steps)) > 1 or steps[0] < 0:
        raise RuntimeError(
            f"replicas must call `step()` equally often, got the steps {steps}, one for each "
            "replica (-1 where its own processes differ). Call it once for every attempted "
            "optimizer step, also for one that GradScaler skipped."
        )
