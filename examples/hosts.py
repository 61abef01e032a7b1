r"""Several hosts, a slow link between them: replicas train alone, and are averaged every 20 steps.

On every host, with the address of the first one:

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or a restart uses old addresses
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
    --max-restarts 3 examples/hosts.py --out /shared/run

Gradients are local. Every 20 steps the weights are averaged, and an outer optimizer steps along
their change (DiLoCo). The script saves checkpoints: if a host fails, torchrun starts all hosts
again, and they continue from the last checkpoint. The digits are scikit-learn's.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order[:1500]], y[order[:1500]], x[order[1500:]], y[order[1500:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--gradients", choices=("local", "shared"), default="local")
    parser.add_argument("--save-every", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("runs/hosts"), help="a shared folder")
    chosen = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    network = nn.Sequential(nn.Linear(64, chosen.width), nn.ReLU(), nn.Linear(chosen.width, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = hdet.HDET(
        OneCycleLR(optimizer, 3e-3, total_steps=chosen.steps),
        model=model,
        scout=None,  # 3e-3 is known to be good
        sync_every=20,
        gradients=chosen.gradients,
        outer=partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
        if chosen.gradients == "local"
        else None,
        record=chosen.out,
    )
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    last = [hdet.latest_checkpoint(chosen.out)]
    dist.broadcast_object_list(last)  # a shared folder may look different on another host
    if last[0] is not None:
        hdet.load_checkpoint(last[0], **parts)  # all hosts load the same one
        say(f"going on from step {scheduler.last_epoch}")
    while scheduler.last_epoch < chosen.steps:
        draw = torch.Generator().manual_seed(1000 * scheduler.last_epoch + dist.get_rank())
        batch = torch.randint(len(x), (16,), generator=draw)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        if scheduler.last_epoch % chosen.save_every == 0:
            hdet.save_checkpoint(chosen.out, **parts)
            fail_once(scheduler.last_epoch)
    with torch.no_grad():
        accuracy = (network(test_x).argmax(1) == test_y).float().mean().item()
    total = sum(p.double().sum().item() for p in network.parameters())
    say(f"accuracy {accuracy:.3f}  sum of all weights {total!r}")
    dist.destroy_process_group()


def fail_once(step: int) -> None:
    """To try the restart: HDET_STUMBLE=300 ends the last process after step 300, but only once."""
    is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if is_first_start and is_last and os.environ.get("HDET_STUMBLE") == str(step):
        os._exit(1)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
