"""A DDP script that computes its learning rate by hand and accumulates gradients, with hdet.

torchrun --nproc-per-node 2 examples/by_hand.py

Lines of hdet are marked so. Without them, the loop wrote `get_lr(step)` into every parameter group.
A small network learns to predict the next character; it needs no GPU and no download.
"""

import argparse
import inspect
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet  # hdet

CONTEXT, BATCH, ACCUMULATION = 8, 16, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=1e-5, help="far too low, on purpose")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    train(arguments.steps, arguments.lr)
    dist.barrier()  # no process leaves while another one still works
    dist.destroy_process_group()


def train(steps: int, max_lr: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train_data, test_data, num_characters = characters()
    network = nn.Sequential(
        nn.Embedding(num_characters, 16),
        nn.Flatten(),
        nn.Linear(16 * CONTEXT, 64),
        nn.Tanh(),
        nn.Linear(64, num_characters),
    )
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=max_lr, weight_decay=0.1)
    warmup = steps // 20

    def get_lr(step: int) -> float:
        if step < warmup:
            return max_lr * (step + 1) / (warmup + 1)
        share = (step - warmup) / (steps - warmup)
        return max_lr * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))

    scheduler = hdet.HDET(optimizer, schedule=get_lr, total_steps=steps, model=model)  # hdet
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        for micro_step in range(ACCUMULATION):
            model.require_backward_grad_sync = micro_step == ACCUMULATION - 1
            x, y = batch(train_data, draw)
            loss = nn.functional.cross_entropy(model(x), y)
            (loss / ACCUMULATION).backward()
            scheduler.observe(loss)  # hdet
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()  # hdet: was group["lr"] = get_lr(step), before the step
        if dist.get_rank() == 0 and (step + 1) % 100 == 0:
            print(
                f"step {step + 1:4d}  loss {loss.item():.3f}  lr {scheduler.get_last_lr()[0]:.2e}"
            )
    with torch.no_grad():
        x, y = batch(test_data, torch.Generator().manual_seed(0), 1000)
        loss = nn.functional.cross_entropy(network(x), y)
    if dist.get_rank() == 0:
        print(f"peak of the learning rate {scheduler.found_lr or max_lr:.2e}")
        print(f"test loss {loss.item():.3f}", flush=True)


def characters() -> tuple[Tensor, Tensor, int]:
    """The source of a module, as numbers: nine tenths to train on, the rest to test."""
    text = inspect.getsource(argparse)
    known = sorted(set(text))
    data = torch.tensor([known.index(character) for character in text])
    split = len(data) * 9 // 10
    return data[:split], data[split:], len(known)


def batch(data: Tensor, draw: torch.Generator, size: int = BATCH) -> tuple[Tensor, Tensor]:
    places = torch.randint(len(data) - CONTEXT, (size, 1), generator=draw)
    rows = data[places + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, -1]


if __name__ == "__main__":
    main()
