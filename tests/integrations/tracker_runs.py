"""A run of DDP whose processes all make the sinks of trackers."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.integrations.tensorboard import TensorBoardSink
from tests.integrations.digits import BAD_LR, network, tensors

STEPS = 400


def ddp(folder: str) -> bool:
    """Train with a scout; return whether this process has made a file."""
    dist.init_process_group("gloo")
    own = Path(folder) / str(dist.get_rank())
    x, y = tensors()
    model = DistributedDataParallel(network())
    base = OneCycleLR(torch.optim.AdamW(model.parameters(), lr=BAD_LR), BAD_LR, total_steps=STEPS)
    scheduler = hdet.HDET(base, model=model, record=TensorBoardSink(own))
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        batch = torch.randint(1440, (32,), generator=draw)
        base.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        base.optimizer.step()
        scheduler.step(loss.detach())
    del scheduler
    dist.destroy_process_group()
    return own.exists()
