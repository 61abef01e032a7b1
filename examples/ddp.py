"""An ordinary DDP script, with hdet in the lines marked so.

torchrun --nproc-per-node 4 examples/ddp.py

A small network on scikit-learn's handwritten digits; it needs no GPU and no download.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hdet  # hdet


def digits() -> tuple[TensorDataset, TensorDataset, Tensor, Tensor]:
    """1400 images to train on, 100 to compare replicas by, 297 to be judged by."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, held, test = order[:1400], order[1400:1500], order[1500:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[held], y[held]), x[test], y[test]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--max-lr", type=float, default=1e-4, help="far too low, on purpose")
    parser.add_argument("--out", default="runs/digits", help="folder for record and checkpoint")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    train_and_save(arguments)
    dist.barrier()  # no process leaves while another one still works
    dist.destroy_process_group()


def train_and_save(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, held_out, test_x, test_y = digits()
    sampler: DistributedSampler[Any] = DistributedSampler(train, seed=0)
    loader = DataLoader(train, batch_size=16, sampler=sampler, drop_last=True)
    network = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.max_lr)
    base = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=arguments.max_lr,
        epochs=arguments.epochs,
        steps_per_epoch=len(loader),
    )
    scheduler = hdet.HDET(  # hdet: around the schedule
        base, model=model, probe=probe_on(held_out), record=arguments.out
    )
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step(loss)  # hdet: was scheduler.step()
        with scheduler.consensus():  # hdet: what is judged is what all replicas agree on
            accuracy = evaluate(model, test_x, test_y)
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch + 1:2d}  loss {loss.item():.3f}  accuracy {accuracy:.3f}", flush=True
            )
    saved = hdet.save_checkpoint(  # hdet: on all processes; whole, or not there at all
        Path(arguments.out) / "checkpoints", model=model, optimizer=optimizer, scheduler=scheduler
    )
    if dist.get_rank() == 0:
        print(f"learning rate: {scheduler.get_knobs()['lr/group0']:.3g} times the given one")
        print(f"record in {arguments.out}, checkpoint in {saved}")


def probe_on(held_out: TensorDataset) -> Any:  # hdet: how replicas are compared
    x, y = held_out.tensors

    def probe(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    return probe


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return accuracy


if __name__ == "__main__":
    main()
