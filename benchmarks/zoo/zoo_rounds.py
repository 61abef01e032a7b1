"""What do short rounds show, at any learning rate? -> zoo_rounds.json

    HDET_DATA=FOLDER python -m benchmarks.zoo.zoo_rounds [--only TASK] [--out FILE]

For each task of the setting half and three seeds: from the first weights, with an eighth of the
batch as each of eight replicas has it, some steps at each of 21 learning rates; then the loss of
the mean of the last half of the weights on held-out parts of batches, against that of the first
weights. `zoo_fit` sets the constants of the search by these rows, in minutes.
"""

import argparse
import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.result_file import RESULTS, read_result, write_result
from benchmarks.zoo.small.catalogue import SETTING, TASKS
from benchmarks.zoo.small.task import SmallTask
from benchmarks.zoo.small.train import one_thread

PATH = RESULTS / "zoo_rounds.json"
REPLICAS, SEEDS = 8, (0, 1, 2)
LENGTHS = (3, 6, 12, 24)
LOG_LRS = tuple(-4.25 + 0.25 * place for place in range(21))
HELD_OUT_BATCHES = 4

Batch = tuple[Tensor, ...]


def rows_of(name: str, seed: int) -> list[dict[str, Any]]:
    """The rounds of a task and a seed, one row for each learning rate and length."""
    task, rows = TASKS[name], []
    model, batches = task.make_model(seed), task.batches(seed)
    held = [
        part(batches(task.steps - 1 - batch), replica)
        for batch in range(HELD_OUT_BATCHES)
        for replica in range(REPLICAS)
    ]
    start = losses_on(task, model, held)
    for place, log_lr in enumerate(LOG_LRS):
        scores = scores_of_round(task, model, 10**log_lr, seed, place % REPLICAS, held)
        for length in LENGTHS:
            score = scores.get(length)
            gains = None if score is None else start - score
            rows.append(
                {
                    "task": name,
                    "seed": seed,
                    "log_lr": log_lr,
                    "steps": length,
                    "start": float(start.mean()),
                    "gain": None if gains is None else float(gains.mean()),
                    "error": None if gains is None else float(gains.std() / math.sqrt(len(gains))),
                }
            )
    return rows


def scores_of_round(
    task: SmallTask, model: nn.Module, lr: float, seed: int, replica: int, held: Sequence[Batch]
) -> dict[int, Tensor]:
    """Length of a round -> the losses on the held-out parts; none once a loss is not finite."""
    model, batches = copy.deepcopy(model), task.batches(seed)
    optimizer = task.make_optimizer(model, lr)
    parameters = [p for p in model.parameters() if p.requires_grad]
    means: dict[int, list[Tensor]] = {}
    scores: dict[int, Tensor] = {}
    for step in range(1, max(LENGTHS) + 1):
        optimizer.zero_grad()
        loss = task.loss(model, *part(batches(step - 1), replica))
        if not bool(loss.detach().isfinite()):
            break
        loss.backward()
        if task.clip is not None:
            nn.utils.clip_grad_norm_(parameters, task.clip)
        optimizer.step()
        for length in LENGTHS:
            first = length - math.ceil(length / 2)
            if first < step <= length:
                add_to_mean(means, length, parameters, step - first)
            if step == length:
                scores[length] = losses_at(task, model, parameters, means.pop(length), held)
    return scores


def add_to_mean(
    means: dict[int, list[Tensor]], length: int, parameters: Sequence[Tensor], count: int
) -> None:
    """Add the present weights as number `count` to the mean of a round's tail."""
    now = [p.detach() for p in parameters]
    if count == 1:
        means[length] = [tensor.clone() for tensor in now]
    else:
        torch._foreach_lerp_(means[length], now, 1 / count)


@torch.no_grad()
def losses_at(
    task: SmallTask,
    model: nn.Module,
    parameters: Sequence[Tensor],
    values: Sequence[Tensor],
    held: Sequence[Batch],
) -> Tensor:
    """The losses with other weights, which are put back."""
    own = [p.clone() for p in parameters]
    torch._foreach_copy_(list(parameters), list(values))
    losses = losses_on(task, model, held)
    torch._foreach_copy_(list(parameters), own)
    return losses


@torch.no_grad()
def losses_on(task: SmallTask, model: nn.Module, held: Sequence[Batch]) -> Tensor:
    """The loss on each part, as in training; buffers stay as they are."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    losses = torch.stack([task.loss(model, *batch).double() for batch in held])
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return losses


def part(batch: Batch, replica: int) -> Batch:
    """The part of a batch that one replica gets."""
    return tuple(tensor[replica::REPLICAS] for tensor in batch)


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How much was tried."""
    return {"tasks": len({row["task"] for row in rows}), "rounds": len(rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=SETTING, action="append")
    parser.add_argument("--out", type=Path, default=PATH)
    options = parser.parse_args()
    kept = read_result(options.out)
    rows: list[dict[str, Any]] = list(kept.get("rows", []))
    known = {(row["task"], row["seed"]) for row in rows}
    for name in options.only or SETTING:
        for seed in SEEDS:
            if (name, seed) in known:
                continue
            with one_thread():
                rows += rows_of(name, seed)
            print(f"{name}, seed {seed}: {len(rows)} rounds", flush=True)
            settings = {"replicas": REPLICAS, "lengths": LENGTHS}
            write_result(
                options.out,
                headline=headline(rows),
                settings=settings,
                seeds=SEEDS,
                kept=kept or None,
                rows=rows,
            )


if __name__ == "__main__":
    main()
