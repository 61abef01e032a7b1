"""Runs with Accelerate, in the processes of a launch."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hdet
from hdet.integrations.accelerate import prepare_hdet
from hdet.integrations.tracking import scalars_now
from tests.integrations import digits, own_loop
from tests.integrations.events import Events
from tests.integrations.own_loop import END, EXPLORING, IN_CYCLE, SCOUT

BATCH = 16


class Training:
    """A loop as the docs of Accelerate show it. Without options of hdet, it is a plain run."""

    def __init__(
        self,
        lr: float,
        num_steps: int,
        *,
        accumulation: int = 1,
        clip: float | None = None,
        scaler: Any = None,
        network: Callable[[], nn.Module] = digits.network,
        **options: Any,
    ) -> None:
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulation,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        )
        self.accelerator.scaler = scaler
        x, y = digits.tensors()
        trained = TensorDataset(x[: digits.NUM_TRAINED], y[: digits.NUM_TRAINED])
        loader: DataLoader[Any] = DataLoader(trained, BATCH, shuffle=True)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.num_steps, self.clip = num_steps, clip
        self.step = self.num_batches = self.num_updates = 0
        self.highest_norm, self.losses = 0.0, list[float]()
        optimizer.register_step_pre_hook(self._before_update)
        base = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, lr, total_steps=num_steps)
        self.scheduler: Any = base
        self.is_hdet = bool(options)
        if self.is_hdet:
            self.scheduler = prepare_hdet(self.accelerator, base, self.model, **options)

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in parameters if p.grad is not None]
        self.num_updates += 1
        self.highest_norm = max(self.highest_norm, nn.utils.get_total_norm(grads).item())

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of all epochs, from the one that is due."""
        while True:
            epoch, done = divmod(self.num_batches, len(self.loader))
            loader = self.accelerator.skip_first_batches(self.loader, done) if done else self.loader
            loader.set_epoch(epoch)
            for batch in loader:
                self.num_batches += 1
                yield batch

    def run(self, until: int | None = None) -> None:
        """Train up to a number of optimizer steps."""
        accelerator, batches = self.accelerator, self.batches()
        while self.step < (until or self.num_steps):
            x, y = next(batches)
            with accelerator.accumulate(self.model):
                loss = self.loss_of(self.model, x, y)
                accelerator.backward(loss)
                if self.clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.optimizer.step()
                if self.is_hdet:
                    self.scheduler.step(loss)
                elif accelerator.sync_gradients:
                    self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.step += accelerator.sync_gradients

    def loss_of(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch; with a scaler through float16, which overflows by rank."""
        logits = model(x)
        if self.accelerator.scaler is not None:
            factor = 64**self.accelerator.process_index
            logits = (logits / factor).half().float() * factor
        return nn.functional.cross_entropy(logits, y)

    def save(self, folder: str) -> None:
        self.accelerator.save_state(folder)

    def load(self, folder: str, step: int) -> None:
        self.accelerator.load_state(folder)
        self.step = self.num_batches = step  # the runs that load do not accumulate

    def loss(self) -> float:
        return digits.held_out_loss(self.accelerator.unwrap_model(self.model))

    def digest(self) -> str:
        return digits.digest(self.accelerator.unwrap_model(self.model))

    def end(self) -> None:
        """Free the run, so that another one can begin in this process."""
        self.scheduler = None
        self.accelerator.free_memory()


def three_ways(num_steps: int) -> dict[str, float]:
    return own_loop.three_ways(Training, num_steps)


class Kept(GeneralTracker):
    """A tracker that keeps what is logged."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[int, dict[str, float]] = {}

    @property
    def tracker(self) -> Any:
        return self.logged

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    @on_main_process
    def log(self, values: dict[str, float], step: int, **_: Any) -> None:
        self.logged[step] = values


def accumulates(num_steps: int) -> dict[str, Any]:
    """Train with two micro-batches, clipping and the scout; say what was counted and logged."""
    training = Training(digits.BAD_LR, num_steps, scout=SCOUT, accumulation=2, clip=0.5)
    accelerator, rates = training.accelerator, []
    kept = Kept()
    accelerator.log_with = [kept]
    accelerator.init_trackers("digits")
    for step in range(1, num_steps + 1):
        training.run(step)
        accelerator.log(scalars_now(training.scheduler), step=step)
        rates.append(training.optimizer.param_groups[0]["lr"])
    return {
        "clock": training.scheduler.last_epoch,
        "updates": training.num_updates,
        "batches": training.num_batches,
        "loss": training.loss(),
        "norm": training.highest_norm,
        "rates": rates,
        "logged": list(kept.logged.values()),
    }


def observes() -> dict[str, Any]:
    """Train an epoch with two micro-batches; return the losses of the cycles and of the loop."""
    sink = Events()
    training = Training(digits.GOOD_LR, 20, scout=None, record=sink, sync_every=10, accumulation=2)
    training.run()
    own = torch.tensor(training.losses, dtype=torch.float64).reshape(2, 20).mean(1)
    return {"recorded": [event["losses"] for event in sink.of("cycle")], "own": own.tolist()}


def resumes(folder: str) -> dict[str, Any]:
    return own_loop.resumes(Training, folder)


def scales(num_steps: int) -> dict[str, Any]:
    """Train with a loss scale that overflows on one process more often than on the other."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=5)
    training = Training(digits.BAD_LR, num_steps, scout=SCOUT, scaler=scaler)
    training.run()
    return {
        "clock": training.scheduler.last_epoch,
        "updates": training.num_updates,
        "loss": training.loss(),
        "scale": scaler.get_scale(),
        "digest": training.digest(),
    }


def holds_out(num_steps: int) -> dict[str, Any]:
    """Give the scout two batches that nobody trains on."""
    sink = Events()
    training = Training(digits.BAD_LR, num_steps, scout=SCOUT, record=sink)
    x, y = digits.tensors()
    for part in range(2):
        first = digits.NUM_TRAINED + 100 * (2 * training.accelerator.process_index + part)
        rows = slice(first, min(first + 100, len(x)))
        training.scheduler.hold_out(training.loss_of, x[rows], y[rows])
    training.run()
    return {"by": [event["compared_by"] for event in sink.of("scout")], "loss": training.loss()}


def refuses() -> list[str]:
    """What hdet says to schedulers and models at the wrong place."""
    said = []
    training = Training(digits.GOOD_LR, END)
    accelerator, base, model = training.accelerator, training.scheduler, training.model
    prepared = accelerator.prepare(hdet.HDET(base, model=model, scout=None))
    attempts: list[Any] = [
        prepared.step,
        lambda: prepare_hdet(accelerator, accelerator.prepare(base), model),
        lambda: prepare_hdet(accelerator, base, accelerator.unwrap_model(model)),
    ]
    for attempt in attempts:
        try:
            attempt()
        except (AttributeError, TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def lora_network() -> nn.Module:
    """A network whose layers train with LoRA."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)  # of the LoRA weights
    model: Any = digits.network()
    return get_peft_model(model, LoraConfig(r=16, target_modules=["0", "2"]))


def trains_lora(num_steps: int) -> dict[str, float]:
    """The loss of LoRA at a bad learning rate, without hdet and with it."""
    found = {}
    ways: list[tuple[str, dict[str, Any]]] = [("bad", {}), ("hdet", {"scout": SCOUT})]
    for name, options in ways:
        training = Training(digits.BAD_LR, num_steps, network=lora_network, **options)
        training.run()
        found[name] = training.loss()
        training.end()
    return found


def shard(replicas: int) -> None:
    """Let Accelerate use FSDP2. Its launcher does this on accelerators, but not on the CPU."""
    state = Accelerator(cpu=True).state
    config = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=4 // replicas)
    PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    state.parallelism_config, state.device_mesh = config, config.build_device_mesh("cpu")


def shards_digest(training: Training) -> str:
    """A hash of the shards of this process."""
    shards: list[Any] = list(training.model.parameters())
    return digits.digest(nn.ParameterList(shard.to_local().detach() for shard in shards))


def shards(folder: str) -> dict[str, Any]:
    """Train two replicas of two shards each; save in mid-cycle, and go on from there."""
    shard(replicas=2)
    first = Training(digits.BAD_LR, END, **EXPLORING)
    first.run(IN_CYCLE)
    found: dict[str, Any] = {"mid-cycle": shards_digest(first)}
    first.save(folder)
    found["saved"] = shards_digest(first)
    first.run()
    first.scheduler.converge()
    found["end"], found["loss"] = shards_digest(first), sum(first.losses[-20:]) / 20

    second = Training(digits.BAD_LR, END, **EXPLORING)
    second.load(folder, IN_CYCLE)
    found["loaded"] = shards_digest(second)
    second.run()
    second.scheduler.converge()
    found["end again"] = shards_digest(second)

    shard(replicas=1)
    try:
        Training(digits.BAD_LR, END, **EXPLORING)
    except ValueError as error:
        found["one replica"] = str(error)
    return found


def stacks(num_steps: int) -> dict[str, Any]:
    """Train four replicas on one device, at a bad learning rate."""
    os.environ.pop("LOCAL_RANK")  # of torchrun, which a script of one process is not started with
    accelerator = Accelerator(cpu=True)
    x, y = digits.tensors()
    trained = TensorDataset(x[: digits.NUM_TRAINED], y[: digits.NUM_TRAINED])
    loader: DataLoader[Any] = DataLoader(trained, BATCH, shuffle=True)
    model, loader = accelerator.prepare(digits.network(), loader)
    ensemble = hdet.StackedReplicas(model, 4)
    adamw = torch.optim.AdamW(model.parameters(), lr=digits.BAD_LR)
    optimizer = accelerator.prepare(ensemble.optimizer(adamw))
    base = torch.optim.lr_scheduler.OneCycleLR(optimizer, digits.BAD_LR, total_steps=num_steps)
    scheduler = prepare_hdet(accelerator, base, model, replicas=ensemble, scout=SCOUT)
    while scheduler.last_epoch < num_steps:
        for x, y in loader:
            with accelerator.accumulate(model):
                losses = ensemble.losses(loss_of, x, y)
                accelerator.backward(losses.sum())
                optimizer.step()
                scheduler.step(losses)
                optimizer.zero_grad()
    with scheduler.consensus():
        return {"loss": digits.held_out_loss(model)}


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)
