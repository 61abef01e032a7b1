"""An FSDP2 script with two replicas, trained with hdet.

torchrun --nproc-per-node 2 examples/fsdp2.py

Lines of hdet are marked so. The mesh has one process a replica here. On GPUs write (N, M) for N
replicas of M processes each. A small network learns to predict the next character.
"""

import argparse
import inspect

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import OneCycleLR

import hdet  # hdet

CONTEXT, BATCH = 8, 32


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
    model = nn.Sequential(
        nn.Embedding(num_characters, 16),
        nn.Flatten(),
        nn.Linear(16 * CONTEXT, 64),
        nn.Tanh(),
        nn.Linear(64, num_characters),
    )
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=names)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=max_lr)
    schedule = OneCycleLR(optimizer, max_lr=max_lr, total_steps=steps)
    replicas = hdet.ProcessReplicas(mesh["replicate"])  # hdet
    scheduler = hdet.HDET(schedule, model=model, replicas=replicas, scout=hdet.Scout())  # hdet

    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(train_data, draw)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step(loss)  # hdet: was schedule.step()
        if dist.get_rank() == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1:4d}  loss {loss.item():.3f}")
    with torch.no_grad():
        x, y = batch(test_data, torch.Generator().manual_seed(0), 1000)
        loss = nn.functional.cross_entropy(model(x), y)
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
