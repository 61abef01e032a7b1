"""The run that is killed while it saves: a tiny network, in DDP or stacked, that draws at random.

What it draws comes from the generators of Python, NumPy and torch, and its batches from a position
that it saves as `extra`. So it ends bit-equal only if a checkpoint has all of them.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.checkpoint import folders, parts, save

STEPS, SAVE_EVERY, SYNC_EVERY, BATCH = 60, 6, 10, 8
REPLICAS = 2
ENGINES = ("ddp", "stacked")
POINTS = {
    "after a delay": 1,
    "half-way through a file": 2,
    "in a tensor": 20,
    "before fsync": 8,
    "before a rename": 3,
    "after the rename": 1,
    "while an old one is removed": 5,
    "in load": 2,
}
"""Where a process can be killed, and how many times it passes there in about one save."""


class Kill(NamedTuple):
    """One kill -9, of one process or of all.

    Attributes:
        point: One of `POINTS`.
        save: The save of this life in which it happens, from 0.
        passes: How often the process passes the point in that save, before it is killed.
        delay: The seconds from the beginning of the save, for a kill after a delay.
        rank: The process. The others are killed with it if `everyone`.
        everyone: Whether all processes are killed.
    """

    point: str
    save: int
    passes: int
    delay: float
    rank: int
    everyone: bool


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The training loss."""
    return nn.functional.cross_entropy(model(x), y)


class TinyRun:
    """A run of two replicas: one in each of two processes, or both stacked in this one."""

    def __init__(self, engine: str, rank: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        draw = torch.Generator().manual_seed(7)
        self._x = torch.randn(64, 8, generator=draw)
        self._y = (self._x @ torch.randn(8, 3, generator=draw)).argmax(1)
        layers = (
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(16, 3),
        )
        self.model: nn.Module = nn.Sequential(*layers)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._losses: Callable[..., Tensor] = lambda loss, *batch: loss(self.model, *batch)
        replicas: Any = None
        if engine == "ddp":
            self.model = DistributedDataParallel(self.model)
        else:
            replicas = hdet.StackedReplicas(self.model, REPLICAS)
            self.optimizer = replicas.optimizer(self.optimizer)
            self._losses = replicas.losses
        base = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-4, total_steps=STEPS)
        self.scheduler = hdet.HDET(
            base,
            model=self.model,
            replicas=replicas,
            probe=lambda m: nn.functional.cross_entropy(m(self._x), self._y, reduction="none"),
            scout=hdet.Scout(share=0.2),
            sync_every=SYNC_EVERY,
            spread=0.2,
        )
        for module in (torch.manual_seed, random.seed, np.random.seed):
            module(seed + rank)
        self._position = 0
        self._batch = BATCH if engine == "ddp" else BATCH * REPLICAS

    @property
    def parts(self) -> dict[str, Any]:
        """What a checkpoint is made of."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def save(self, folder: Path) -> Path:
        """Save a checkpoint."""
        return hdet.save_checkpoint(folder, **self.parts, extra={"position": self._position})

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        self._position = hdet.load_checkpoint(path, **self.parts)["position"]

    def step(self) -> None:
        """Train on a batch that all three generators choose."""
        chosen = torch.randint(64, (self._batch,))
        chosen[0] = random.randrange(64)
        chosen[1] = int(np.random.randint(64))
        chosen[2] = self._position = (self._position + 3) % 64
        self.optimizer.zero_grad()
        losses = self._losses(loss_of, self._x[chosen], self._y[chosen])
        losses.sum().backward()
        self.optimizer.step()
        self.scheduler.step(losses)

    def digest(self) -> str:
        """A checksum of everything that the rest of the run depends on."""
        digest = hashlib.sha256(json.dumps(self.scheduler.state_dict(), sort_keys=True).encode())
        state = self.optimizer.state_dict()["state"]
        moments = {f"{p}/{key}": value for p, own in state.items() for key, value in own.items()}
        for _, tensor in sorted({**self.model.state_dict(), **moments}.items()):
            digest.update(torch.as_tensor(tensor).contiguous().numpy().tobytes())
        generators = random.getstate(), repr(np.random.get_state(legacy=False)), self._position
        digest.update(torch.get_rng_state().numpy().tobytes() + repr(generators).encode())
        return digest.hexdigest()


# One life of a run ------------------------------------------------------------------------------


def live(folder: Path, engine: str, rank: int, size: int, life: int, kill: Kill | None) -> None:
    """Go on from the newest checkpoint to the end, unless this life is killed before."""
    if size > 1:
        store = f"file://{folder}/store-{life}"
        patience = timedelta(seconds=30)
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=size, timeout=patience
        )
    run, saves = TinyRun(engine, rank), 0
    strike = _Strike(kill) if kill is not None and kill.rank == rank else None
    if strike is not None and strike.kill.point == "in load":
        strike.arm()
    if (path := hdet.latest_checkpoint(folder / "saved")) is not None:
        run.load(path)
    while run.scheduler.last_epoch < STEPS:
        run.step()
        if run.scheduler.last_epoch % SAVE_EVERY == 0:
            if strike is not None and saves == strike.kill.save:
                strike.arm()
            run.save(folder / "saved")
            saves += 1
            if rank == 0:
                (folder / "saved-step").write_text(str(run.scheduler.last_epoch))
    (folder / f"digest-{rank}").write_text(run.digest())
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


class _Strike:
    """Kills this process where a plan says so."""

    def __init__(self, kill: Kill) -> None:
        self.kill = kill
        self._left = kill.passes

    def arm(self) -> None:
        """From now on, count how often the process passes the point."""
        point = self.kill.point
        if point == "after a delay":
            threading.Timer(self.kill.delay, _die).start()
        elif point == "half-way through a file":
            for module in (save, folders):
                setattr(module, "write_file", self._write_half)  # noqa: B010
        elif point == "in a tensor":
            self._patch(filesystem, "_write_item")
        elif point == "before fsync":
            self._patch(os, "fsync")
        elif point == "before a rename":
            self._patch(Path, "rename")
        elif point == "after the rename":
            self._patch(folders, "_remove")
        elif point == "while an old one is removed":
            self._patch(os, "unlink" if hasattr(shutil, "_rmtree_safe_fd") else "remove")
        else:
            self._patch(parts.OptimizerPart, "load")

    def _patch(self, owner: Any, name: str) -> None:
        before = getattr(owner, name)

        def passing(*arguments: Any, **named: Any) -> Any:
            self._pass()
            return before(*arguments, **named)

        setattr(owner, name, passing)

    def _write_half(self, path: Path, content: bytes) -> None:
        self._left -= 1
        with path.open("wb") as file:
            file.write(content[: len(content) // 2] if self._left <= 0 else content)
        if self._left <= 0:
            _die()

    def _pass(self) -> None:
        self._left -= 1
        if self._left <= 0:
            _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
