"""Training loops that overhead.py times, and the waits of a host that it counts."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks.zoo.models import GPT, Size, gpt_loss

PROCESSES, STACKED, CYCLE, FEW_STEPS = 2, 8, 10, 3
WAITS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")
"""What makes the host wait for a device."""


class Settings(NamedTuple):
    size: Size
    batch: int
    rounds: int


def wait() -> None:
    """Until the device is idle, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Loop:
    """One training loop, a step at a time, with the time of its parts."""

    def __init__(self, train: Callable[[], Tensor], schedule: Any) -> None:
        self._train, self.schedule = train, schedule
        self.steps: list[float] = []
        self.calls: list[float] = []
        self.ends: list[float] = []
        self.device: list[float] = []
        """How long the device was at each call, without waiting."""
        self.ahead: list[bool] = []
        """Whether the device had yet to come to it when the host was done."""

    def step(self) -> None:
        begin = time.perf_counter()
        loss = self._train()
        wait()
        self.steps.append(time.perf_counter() - begin)
        is_end = (
            isinstance(self.schedule, hdet.HDET) and (self.schedule.last_epoch + 1) % CYCLE == 0
        )
        if is_end and dist.is_initialized():
            dist.barrier()  # a late process must not count
        (self.ends if is_end else self.calls).append(seconds(lambda: self._advance(loss)))

    def window(self) -> float:
        """Seconds for a step between two cycles when nothing waits for the device."""
        marks: list[tuple[Any, Any]] = []

        def steps() -> None:
            for _ in range(CYCLE - 1):
                loss = self._train()
                before = mark()
                self._advance(loss)
                marks.append((before, mark()))
                # The first steps after a wait have nothing to run ahead of.
                if len(marks) > FEW_STEPS and marks[-1][1] is not None:
                    self.ahead.append(not marks[-1][1].query())

        taken = seconds(steps)
        self._advance(self._train())
        wait()
        self.device += [
            1e-3 * before.elapsed_time(after)
            for before, after in marks[FEW_STEPS:]
            if before is not None
        ]
        return taken / (CYCLE - 1)

    def waits(self) -> float:
        """Of the host, in the calls between two cycles, for each of them."""
        seen = 0
        for _ in range(CYCLE - 1):
            loss = self._train()
            seen += max(waits_of(partial(self._advance, loss)).values())
        self._advance(self._train())
        return seen / (CYCLE - 1)

    def control(self) -> dict[str, int]:
        """What is counted where there is a wait: who sees none here has seen nothing before."""
        loss = self._train()
        seen = waits_of(loss.mean().item)
        if not any(seen.values()):
            raise RuntimeError("a wait was not counted.")
        return seen

    def _advance(self, loss: Tensor) -> None:
        if isinstance(self.schedule, hdet.HDET):
            self.schedule.step(loss)
        else:
            self.schedule.step()


def mark() -> Any:
    """A point in what the device does; none where there is no such device."""
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def waits_of(call: Callable[[], Any]) -> dict[str, int]:
    """Of the host, as a profiler sees them, and where there is a GPU as CUDA itself does."""
    with noted_by_cuda() as noted, profile(use_kineto=False) as results:
        call()
    seen = {"profiler": sum(event.name in WAITS for event in results.function_events or [])}
    return {**seen, "cuda": len(noted)} if torch.cuda.is_available() else seen


@contextmanager
def noted_by_cuda() -> Iterator[list[Any]]:
    if not torch.cuda.is_available():
        yield []
        return
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield noted
        finally:
            torch.cuda.set_sync_debug_mode("default")


def step_of(
    optimizer: Any, settings: Settings, losses: Callable[[Tensor], Tensor], device: str
) -> Callable[[], Tensor]:
    shape = (settings.batch, settings.size.context + 1)

    def train() -> Tensor:
        tokens = torch.randint(settings.size.vocabulary, shape, device=device)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda"):
            found = losses(tokens)
        found.sum().backward()
        optimizer.step()
        return found.detach()

    return train


def schedule_of(optimizer: Any, model: nn.Module, folder: str | None, replicas: Any = None) -> Any:
    """OneCycleLR, or with a folder for the record hdet around it."""
    base = OneCycleLR(optimizer, 1e-3, total_steps=100_000)
    if folder is None:
        return base
    return hdet.HDET(
        base,
        model=model,
        preset="paper",
        controller=hdet.PaperController(),
        sync_every=CYCLE,
        replicas=replicas,
        record=folder,
    )


def ddp(settings: Settings, folder: str | None, device: str = "cpu") -> tuple[Loop, nn.Module]:
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(settings.size).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
    train = step_of(optimizer, settings, lambda tokens: gpt_loss(model, tokens), device)
    return Loop(train, schedule_of(optimizer, model, folder)), model


def stacked(settings: Settings, folder: str | None, device: str) -> tuple[Loop, Any]:
    torch.manual_seed(0)
    model = GPT(settings.size).to(device)
    ensemble = hdet.StackedReplicas(model, STACKED)
    if device == "cuda":
        ensemble.compile()
    one = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
    optimizer = ensemble.optimizer(one)
    train = step_of(optimizer, settings, lambda tokens: ensemble.losses(gpt_loss, tokens), device)
    return Loop(train, schedule_of(optimizer, model, folder, ensemble)), ensemble


def seconds(call: Callable[[], Any]) -> float:
    """Until the device is idle again."""
    begin = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begin
