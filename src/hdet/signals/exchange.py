"""What replicas tell each other before a converge: one row each, and one host sync for all."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import torch
from torch import Tensor

from hdet.replicas.protocol import Replicas
from hdet.signals.training_loss import TrainingLoss
from hdet.tensors.score_rows import NUM_BATCH_WORDS
from hdet.weights.averaging import ReplicaWeights
from hdet.weights.inventory import Agreed


class CycleReport(NamedTuple):
    """One entry for each replica, except for what they have in common."""

    losses: list[float | None]
    """Mean loss since the last converge; none where no loss was observed."""
    errors: list[float | None]
    """Its standard error; none below two observations."""
    distances: list[float | None]
    """How far the weights are from the mean of all, relative to it; from a sample of them."""
    num_observed: list[int]
    finite: list[bool]
    agreed: Agreed
    """What is known to be equal on all replicas, bit for bit."""
    optimizer_states_match: bool
    """Whether the optimizer states have the same size everywhere, so that they can be averaged."""
    first_loss: float | None = None
    """The mean loss of the first step; none if it was not finite."""
    first_error: float = 0.0
    """Its standard error, by how far replicas lie apart."""
    scores: list[list[float]] | None = None
    """What a probe found, lower is better, one for each of its batches; none without a probe."""

    def mean_of(self, replicas: Sequence[int]) -> tuple[float | None, float | None]:
        """The mean loss of some replicas, and its standard error, where they are known."""
        losses = [loss for r in replicas if (loss := self.losses[r]) is not None]
        errors = [error for r in replicas if (error := self.errors[r]) is not None]
        error = math.hypot(*errors) / len(errors) if len(errors) == len(replicas) else None
        return fmean(losses) if losses else None, error

    def require_losses(self, step: int) -> None:
        silent = [replica for replica, loss in enumerate(self.losses) if loss is None]
        if silent:
            raise ValueError(
                "`step(loss)` or `observe(loss)` must give a loss in every cycle, got none from "
                f"replica(s) {silent} in the cycle that ends at step {step}."
            )


def exchange_reports(
    replicas: Replicas,
    parameters: ReplicaWeights,
    signal: TrainingLoss,
    *,
    step: int,
    compare: Sequence[str],
    measures: bool = False,
    probed: Tensor | None = None,
) -> CycleReport:
    """Gather one row from every replica. `compare` names the parts that may be equal on all.

    With `measures`, also how far they are apart; with `probed`, also what they scored.
    """
    parameters.refresh()
    rows = signal.rows().double()
    with_state = "state" in compare

    def column(value: Tensor) -> Tensor:
        return value.to(device=rows.device, dtype=torch.float64)

    sizes = parameters.state_numels() if with_state else [0] * len(rows)
    own = [
        # Filled on the device: a copy from the host would make it wait.
        rows.new_full((len(rows),), step),
        column(parameters.are_finite(with_state=with_state)),
        column(parameters.num_bad_buffers()),
        torch.stack([rows.new_full((), size) for size in sizes]),
        column(signal.first()),
    ]
    rows = _of_parts(replicas.gather_parts(torch.column_stack([rows, *own])))
    columns: list[Tensor] = []
    prints = {part: parameters.fingerprints(part) for part in compare}
    for values in prints.values():
        # A float64 holds 53 bits: the 64 of a fingerprint travel in two columns.
        columns += [column(values >> 32), column(values & 0xFFFFFFFF)]
    sample = column(parameters.sample()) if measures else rows[:, :0]
    scored = rows[:, :0] if probed is None else _of_probes(replicas.gather_parts(column(probed)))
    everyone = replicas.gather(torch.column_stack([rows, *columns, scored, sample]))
    told, samples = everyone.split([everyone.shape[1] - sample.shape[1], sample.shape[1]], dim=1)
    lines = torch.column_stack([_distances(samples), told]).tolist()
    table = [line[: len(line) - scored.shape[1]] for line in lines]
    _check_steps([int(row[4]) for row in table])
    least_bad = min(row[6] for row in table)
    return CycleReport(
        losses=[row[1] if row[2] else None for row in table],
        num_observed=[int(row[2]) for row in table],
        errors=[row[3] if row[2] > 1 and math.isfinite(row[3]) else None for row in table],
        distances=[row[0] if math.isfinite(row[0]) else None for row in table],
        finite=[bool(row[5]) and row[6] == least_bad for row in table],
        agreed=_compare([row[9:] for row in table], {p: v.shape[1] for p, v in prints.items()}),
        optimizer_states_match=len({row[7] for row in table}) == 1,
        first_loss=_mean_of_finite([row[8] for row in table]),
        first_error=_error_of_mean([row[8] for row in table]),
        scores=None if probed is None else _scores([line[-scored.shape[1] :] for line in lines]),
    )


def _of_parts(pooled: Tensor) -> Tensor:
    """One row for each replica of what its parts say, [replicas, parts, columns], in the order of
    `roll_call`. Parts with batches of their own know the loss better together; those that compute
    one loss together have all seen the same."""
    if pooled.shape[1] == 1:
        return pooled[:, 0]
    means, counts, errors, steps, finite, bad, sizes, firsts = pooled.unbind(2)
    mean = (means * counts).sum(1) / counts.sum(1).clamp(min=1)
    heard = counts > 0  # of the stages of a pipeline, the last one alone
    least = means.masked_fill(~heard, math.inf).amin(1)
    most = means.masked_fill(~heard, -math.inf).amax(1)
    known = errors.masked_fill(~heard, 0)
    together = known.square().sum(1).sqrt() / heard.sum(1).clamp(min=1)
    error = torch.where(least == most, known.amax(1), together)
    step = torch.where((steps == steps[:, :1]).all(1), steps[:, 0], -1.0)
    ends = [finite.amin(1), bad.sum(1), sizes.sum(1), firsts.nanmean(1)]
    return torch.stack([mean, counts.amax(1), error, step, *ends], dim=1)


def _of_probes(pooled: Tensor) -> Tensor:
    """The mean of what the parts of a replica scored, and which batches all of them saw."""
    if pooled.shape[1] == 1:
        return pooled[:, 0]
    scores, words = pooled[:, :, :-NUM_BATCH_WORDS], pooled[:, :, -NUM_BATCH_WORDS:]
    # Words of 32 bits, each times a number of its own: exact in a float64 up to 2^20 parts.
    places = torch.arange(1, pooled.shape[1] + 1, device=pooled.device, dtype=pooled.dtype)
    return torch.cat([scores.mean(1), (words * places[:, None]).sum(1)], dim=1)


def _mean_of_finite(values: list[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else None


def _error_of_mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return stdev(finite) / math.sqrt(len(finite)) if len(finite) > 1 else 0.0


def _scores(rows: list[list[float]]) -> list[list[float]]:
    """One list for each replica, if all of them have scored the same; none that is lost did."""
    seen = {
        r: words
        for r, row in enumerate(rows)
        if math.isfinite((words := row[-NUM_BATCH_WORDS:])[0])
    }
    first = min(seen, default=0)
    for replica, words in seen.items():
        if words != seen[first]:
            raise ValueError(
                "`probe` must score the same batches on all replicas, got different ones on "
                f"replicas {first} and {replica}: fix the order of its loader, or keep the batches "
                "in a list."
            )
    scores = [[score for score in row[:-NUM_BATCH_WORDS] if not math.isnan(score)] for row in rows]
    lengths = [len(scores[replica]) for replica in seen]
    if len(set(lengths)) > 1:
        raise ValueError(
            "`score` of the probe must return equally many numbers on all replicas, got "
            f"{lengths} in their order."
        )
    return [each if replica in seen else [math.inf] for replica, each in enumerate(scores)]


def _distances(samples: Tensor) -> Tensor:
    """RMS distance of each row from the mean of the finite ones, relative to the mean's RMS."""
    finite = samples.isfinite().all(1, keepdim=True)
    mean = torch.where(finite, samples, 0).sum(0) / finite.sum()
    distances: Tensor = (samples - mean).norm(dim=1) / mean.norm()
    return distances


def _compare(table: list[list[float]], sizes: dict[str, int]) -> Agreed:
    """Where all rows are alike: for each part its high words, then its low words."""
    alike = [len(set(column)) == 1 for column in zip(*table, strict=True)]
    agreed = {}
    for part, size in sizes.items():
        high, low, alike = alike[:size], alike[size : 2 * size], alike[2 * size :]
        agreed[part] = [a and b for a, b in zip(high, low, strict=True)]
    return agreed


def _check_steps(steps: list[int]) -> None:
    if len(set(steps)) > 1 or steps[0] < 0:
        raise RuntimeError(
            f"replicas must call `step()` equally often, got the steps {steps}, one for each "
            "replica (-1 where its own processes differ). Call it once for every attempted "
            "optimizer step, also for one that GradScaler skipped."
        )
