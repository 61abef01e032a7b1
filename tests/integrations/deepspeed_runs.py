"""Runs with DeepSpeed on the CPU, in the processes of a launch."""

import os
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from hdet.integrations.deepspeed import attach_hdet
from hdet.integrations.tracking import scalars_now
from tests.integrations import digits, own_loop
from tests.integrations.events import Events
from tests.integrations.own_loop import END, SCOUT

BATCH = 16


def start() -> None:
    """Start DeepSpeed without its kernels for the CPU, which take minutes to compile."""
    vars(deepspeed.ops)["__compatible_ops__"] = {}
    deepspeed.init_distributed("gloo")


class Training:
    """A loop as the docs of DeepSpeed show it. Without options of hdet, it is a plain run."""

    def __init__(self, lr: float, num_steps: int, **options: Any) -> None:
        model = digits.network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        optimizer.register_step_pre_hook(self._before_update)
        base = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=num_steps)
        self.accumulation = options.pop("accumulation", 1)
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=base,
            config={
                "train_micro_batch_size_per_gpu": BATCH,
                "gradient_accumulation_steps": self.accumulation,
                "gradient_clipping": options.pop("clip", 0.0),
                "zero_optimization": {"stage": 0},
                "steps_per_print": 10**9,
            },
        )
        self.num_steps, self.num_batches = num_steps, 0
        self.num_updates, self.highest_norm = 0, 0.0
        self.losses: list[float] = []
        self.is_hdet = bool(options)
        self.scheduler: Any = attach_hdet(self.engine, **options) if self.is_hdet else base
        self.x, self.y = digits.tensors()
        self.share = digits.NUM_TRAINED // int(os.environ["WORLD_SIZE"])

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.num_updates += 1
        self.highest_norm = max(self.highest_norm, nn.utils.get_total_norm(grads).item())

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """The batch of this process."""
        generator = torch.Generator().manual_seed(number)
        first = self.share * int(os.environ["RANK"])
        chosen = first + torch.randint(self.share, (BATCH,), generator=generator)
        return self.x[chosen], self.y[chosen]

    def run(self, until: int | None = None) -> None:
        """Train up to a number of optimizer steps."""
        while self.engine.global_steps < (until or self.num_steps):
            x, y = self.batch(self.num_batches)
            loss = nn.functional.cross_entropy(self.engine(x), y)
            self.engine.backward(loss)
            if self.is_hdet:
                self.scheduler.observe(loss)
            self.engine.step()
            self.losses.append(loss.item())
            self.num_batches += 1

    def save(self, folder: str) -> None:
        self.engine.save_checkpoint(folder)

    def load(self, folder: str, step: int) -> None:
        self.engine.load_checkpoint(folder)
        assert self.engine.global_steps == step
        self.num_batches = step * self.accumulation

    def loss(self) -> float:
        return digits.held_out_loss(self.engine.module)

    def digest(self) -> str:
        return digits.digest(self.engine.module)

    def end(self) -> None:
        """Nothing else is in the way of another run."""


def three_ways(num_steps: int) -> dict[str, float]:
    start()
    return own_loop.three_ways(Training, num_steps)


def accumulates(num_steps: int) -> dict[str, Any]:
    """Train with two micro-batches, clipping and the scout; say what was counted and logged."""
    start()
    training = Training(digits.BAD_LR, num_steps, scout=SCOUT, accumulation=2, clip=0.5)
    logged = []
    for step in range(1, num_steps + 1):
        training.run(step)
        rates = scalars_now(training.scheduler)
        mine = rates[f"hdet/lr/group0/replica{os.environ['RANK']}"]
        logged.append(mine == training.engine.get_lr()[0] and "hdet/lr/group0" in rates)
    return {
        "clock": training.scheduler.last_epoch,
        "updates": training.num_updates,
        "batches": training.num_batches,
        "loss": training.loss(),
        "norm": training.highest_norm,
        "logged": all(logged),
    }


def observes() -> dict[str, Any]:
    """Train with two micro-batches; return the losses of hdet's cycles and those of the loop."""
    start()
    sink = Events()
    options = {"scout": None, "record": sink, "sync_every": 10, "accumulation": 2}
    training = Training(digits.GOOD_LR, 30, **options)
    training.run()
    own = torch.tensor(training.losses, dtype=torch.float64).reshape(3, 20).mean(1)
    return {"recorded": [event["losses"] for event in sink.of("cycle")], "own": own.tolist()}


def holds_out(num_steps: int) -> dict[str, Any]:
    """Give the scout a batch of each process that nobody trains on."""
    start()
    sink = Events()
    training = Training(digits.BAD_LR, num_steps, scout=SCOUT, record=sink)
    first = digits.NUM_TRAINED + 100 * int(os.environ["RANK"])
    rows = slice(first, first + 100)
    training.scheduler.hold_out(loss_of, training.x[rows], training.y[rows])
    training.run()
    return {"by": [event["compared_by"] for event in sink.of("scout")], "loss": training.loss()}


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def resumes(folder: str) -> dict[str, Any]:
    start()
    return own_loop.resumes(Training, folder)


def refuses() -> list[str]:
    """What hdet says to engines that it cannot train."""
    start()
    kinds: list[dict[str, Any]] = [{"zero_optimization": {"stage": stage}} for stage in (1, 2, 3)]
    said = []
    for config in [*kinds, {"bf16": {"enabled": True}}]:
        model = digits.network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=digits.GOOD_LR)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": BATCH,
                "zero_allow_untested_optimizer": True,
                **config,
            },
        )
        try:
            attach_hdet(engine, optimizer, total_steps=END)
        except ValueError as error:
            said.append(str(error))
    training = Training(digits.GOOD_LR, END, scout=None)
    loaded = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(digits.network().parameters()))
    loaded.load_state_dict(training.scheduler.state_dict())  # as DeepSpeed does before attach_hdet
    bases: list[Any] = [None, object(), loaded]
    for base in bases:
        try:
            attach_hdet(training.engine, base)
        except ValueError as error:
            said.append(str(error))
    x, y = training.batch(0)
    training.engine.backward(nn.functional.cross_entropy(training.engine(x), y))
    try:
        training.engine.step(lr_kwargs={"loss": "low"})
    except RuntimeError as error:
        said.append(str(error))
    return said
