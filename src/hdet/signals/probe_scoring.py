"""Scores the replicas of this process by a probe, and leaves no trace in the run."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hdet.knobs.dial import running
from hdet.signals.probe import Probe
from hdet.signals.watched_model import WatchedModel
from hdet.tensors.dtensor import local
from hdet.tensors.ops import are_finite
from hdet.tensors.score_rows import MAX_SCORES, NUM_BATCH_WORDS, pad_scores


@torch.no_grad()
def score_replicas(
    probe: Probe,
    modules: Sequence[nn.Module],
    gather_parts: Callable[[Tensor], Tensor] = lambda rows: rows[:, None],
    *,
    together: bool = False,
    sync_every: int,
    cycle: int,
    seed: int,
    fresh: bool = False,
    equal: bool = False,
) -> Tensor:
    """Score every replica of this process on the same batches, with the same random numbers.

    Args:
        probe: The score and its batches.
        modules: The model of each replica of this process.
        gather_parts: Gathers rows from all processes of a replica (`Replicas.gather_parts`).
        together: Whether replicas share a parameter. Then all run, also those that are lost.
        sync_every: The number of steps of a cycle.
        cycle: The index of the cycle, which says where in the batches to start.
        seed: The seed of the run.
        fresh: Whether replicas have trained for a few steps only. Then running statistics say
            little, and normalisation uses those of the batch.
        equal: Whether all replicas have the same weights. Then one is scored for all.

    Returns:
        One row for each replica: its scores, lower is better, padded with nan, then words that say
        which batches it saw. All entries are inf for a replica without finite weights.
    """
    device = next(iter(modules[0].parameters())).device
    scored, times = (modules[:1], len(modules)) if equal else (modules, 1)
    finite = [True] * len(modules)
    if fresh:  # all processes of a replica score it, or none does
        flags = torch.stack([are_weights_finite(module)[None] for module in scored] * times)
        finite = gather_parts(flags).flatten(1).all(1).tolist()
    rows = []
    with equal_random_numbers(device, seed, cycle):
        batches = None
        if probe.batches is not None:
            batches = probe.take(cycle, sync_every, seed, len(modules))
        for index, module in enumerate(scored):
            which = nullcontext() if len(modules) == 1 else of_replica(index, device)
            row = lost_row(device)
            # What a lost replica would do with the batches is unknown.
            if finite[index] or together:
                with which, eval_mode(module, fresh), equal_random_numbers(device, seed, cycle):
                    found = _score(probe, bare_module(module), batches, device)
                row = found if finite[index] else row
            rows.append(row)
    return torch.stack(rows * times)


def of_replica(replica: int, device: torch.device) -> running:
    """Inside, dials have the value of one replica of this process."""
    return running(torch.tensor(replica, device=device))


def _score(
    probe: Probe, module: nn.Module, batches: list[Any] | None, device: torch.device
) -> Tensor:
    """The row of one replica."""
    model = WatchedModel(module)
    if batches is None:
        scores = _flat(probe.score(model))
    else:
        scores = torch.stack([_flat(probe.score(model, batch)).mean() for batch in batches])
    model.check_used()
    if len(scores) > MAX_SCORES:
        scores = group_means(scores, MAX_SCORES)
    scores = scores.to(device) if probe.mode == "min" else -scores.to(device)
    batch_words = torch.stack([model.fingerprint >> 32, model.fingerprint & 0xFFFFFFFF])
    return pad_scores(scores, batch_words.to(scores))


def are_weights_finite(module: nn.Module) -> Tensor:
    """1 if all weights of a module in this process are finite, else 0; on the device."""
    return are_finite([local(parameter) for parameter in module.parameters()]).double()


def lost_row(device: torch.device) -> Tensor:
    """The row of a replica without finite weights."""
    return torch.full((MAX_SCORES + NUM_BATCH_WORDS,), math.inf, device=device, dtype=torch.float64)


def _flat(score: Any) -> Tensor:
    if not isinstance(score, (Tensor, int, float)):
        raise TypeError(f"`score` of the probe must return a tensor or a number, got {score!r}.")
    flat = torch.as_tensor(score, dtype=torch.float64).detach().reshape(-1)
    if not flat.numel():
        raise ValueError("`score` of the probe must return at least one number, got none.")
    return flat


def group_means(scores: Tensor, num: int) -> Tensor:
    """The means of `num` groups of nearly equal size; the first groups may have one more."""
    length, longer = divmod(len(scores), num)
    first, rest = scores.tensor_split([longer * (length + 1)])
    return torch.cat([first.view(longer, length + 1).mean(1), rest.view(-1, length).mean(1)])


def bare_module(module: nn.Module) -> nn.Module:
    """The module inside of DDP, which would broadcast its buffers in a forward pass."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module


@contextmanager
def eval_mode(module: nn.Module, fresh: bool = False) -> Iterator[None]:
    """Inside, a module is in eval mode.

    With `fresh`, normalisation uses the statistics of each batch, and its buffers are restored
    afterwards.
    """
    parts = list(bare_module(module).modules())
    flags = [part.training for part in parts]
    kind = nn.modules.batchnorm._NormBase
    normalising = [p for p in parts if fresh and p.training and isinstance(p, kind)]
    bare_module(module).eval()
    kept = [[buffer.clone() for buffer in part.buffers()] for part in normalising]
    for layer in normalising:
        layer.train()
    try:
        yield
    finally:
        for part, flag in zip(parts, flags, strict=True):
            part.training = flag
        for layer, buffers in zip(normalising, kept, strict=True):
            for buffer, own in zip(layer.buffers(), buffers, strict=True):
                buffer.copy_(own)


@contextmanager
def equal_random_numbers(device: torch.device, seed: int, cycle: int) -> Iterator[None]:
    """Inside, all replicas draw the same random numbers; afterwards the run goes on with its own.

    A score may draw, as a sampler or a noise schedule does. Replicas are compared fairly only if
    they draw the same.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed((seed * 1_000_003 + cycle) & 0x7FFFFFFF)
        yield
