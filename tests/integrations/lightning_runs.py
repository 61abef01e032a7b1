"""Runs with Lightning's Trainer, in the processes of a launch."""

import os
import re
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

import hdet
from hdet.integrations.lightning import HDETCallback
from tests.integrations import digits
from tests.integrations.events import Events

PAGE = Path(__file__).parents[2] / "docs/how-to/lightning.md"
BATCH = 16
NUM_BATCHES = 45
"""Batches of an epoch, for each of two processes."""
SCOUT = hdet.Scout(share=0.25)
"""Room for a usual search in a run of a few hundred steps."""
FULL = StateDictOptions(full_state_dict=True)
Batch = tuple[Tensor, Tensor]


class Batches:
    """The batches of this process. A checkpoint of Lightning has its place in them."""

    def __init__(self, num: int = NUM_BATCHES) -> None:
        self._num, self._place = num, 0
        self._rank, self._size = (
            int(os.environ.get("RANK", 0)),
            int(os.environ.get("WORLD_SIZE", 1)),
        )

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Batch]:
        x, y = digits.tensors()
        for place in range(self._place % self._num, self._num):
            self._place = place + 1
            start = (place * self._size + self._rank) * BATCH
            yield x[start : start + BATCH], y[start : start + BATCH]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = state["place"]


def validation() -> DataLoader[Any]:
    """Four batches, of this process."""
    return DataLoader(list(Batches(4)), batch_size=None)  # type: ignore[arg-type]


class Digits(LightningModule):
    """A module as the docs of Lightning show it."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.network = digits.network()
        self.shown: list[str] = []
        """The digest of the network at each validation."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def on_validation_epoch_start(self) -> None:
        self.shown.append(digits.digest(self.network))

    def loss_of(self, batch: Batch) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(optimizer, self.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer_of(*callbacks: Any, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "strategy": "ddp",
        "devices": int(os.environ.get("WORLD_SIZE", 1)),
        "use_distributed_sampler": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
        "limit_val_batches": 0,
        "callbacks": list(callbacks),
    }
    return Trainer(**{**given, **options})


def fitted(lr: float, *callbacks: Any, **options: Any) -> Digits:
    """Return the trained module."""
    module = Digits(lr)
    trainer_of(*callbacks, **options).fit(module, Batches())
    return module


class Watch(Callback):
    """Sees the weights and the gradients of this replica after each batch."""

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}
        self.largest_norm = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Digits, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.digests[trainer.global_step] = digits.digest(pl_module.network)

    def on_before_zero_grad(self, trainer: Trainer, pl_module: Digits, optimizer: Any) -> None:
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        if grads and trainer.global_step:
            norm = float(nn.utils.get_total_norm(grads))
            self.largest_norm = max(self.largest_norm, norm)


def three_ways(epochs: int) -> dict[str, Any]:
    """Train without hdet at a bad and at a good learning rate, and with hdet at the bad one."""
    callback = HDETCallback(scout=SCOUT)
    runs = {
        "bad": fitted(digits.BAD_LR, max_epochs=epochs),
        "good": fitted(digits.GOOD_LR, max_epochs=epochs),
        "hdet": fitted(digits.BAD_LR, callback, max_epochs=epochs),
    }
    losses = {name: digits.held_out_loss(module.network) for name, module in runs.items()}
    return {
        **losses,
        "clock": callback.scheduler.last_epoch,
        "digest": digits.digest(runs["hdet"].network),
    }


EXPLORING: dict[str, Any] = {"spread": 0.5, "sync_every": 20, "scout": None}
"""Replicas with learning rates of their own, which differ in mid-cycle."""


def accumulating(folder: str, steps: int) -> dict[str, Any]:
    """Accumulate two micro-batches and clip, at a learning rate that is far too low."""
    events, watch = Events(), Watch()
    callback = HDETCallback(scout=SCOUT, record=events)
    module = fitted(
        digits.BAD_LR,
        callback,
        watch,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        max_epochs=-1,
        max_steps=steps,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="", version=""),
    )
    cycles = events.of("cycle")
    return {
        "loss": digits.held_out_loss(module.network),
        "clock": callback.scheduler.last_epoch,
        "steps": module.trainer.global_step,
        "norm": watch.largest_norm,
        "first_losses": cycles[0]["losses"] if cycles else None,
    }


def validating(folder: str) -> dict[str, Any]:
    """Validate in the middle of cycles, and log; the same run without both."""
    plain, watch = HDETCallback(**EXPLORING), Watch()
    expected = fitted(digits.GOOD_LR, plain, max_steps=70)
    callback = HDETCallback(**EXPLORING)
    module = Digits(digits.GOOD_LR)
    trainer = trainer_of(
        callback,
        watch,
        LearningRateMonitor(),
        max_steps=70,
        val_check_interval=27,
        check_val_every_n_epoch=None,
        limit_val_batches=2,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="", version=""),
    )
    trainer.fit(module, Batches(), validation())
    return {
        "expected": digits.digest(expected.network),
        "digest": digits.digest(module.network),
        "shown": module.shown,
        "before": [watch.digests[step] for step in (27, 54)],
        "lrs": callback.scheduler.get_replica_lrs(),
    }


def saving(folder: str, steps: Sequence[int], hold_out: int) -> dict[str, Any]:
    """Save with ModelCheckpoint, and resume from the checkpoints of these steps."""

    def run(name: str, path: Path | None = None) -> dict[str, Any]:
        save = ModelCheckpoint(
            f"{folder}/{name}", "{step}", every_n_train_steps=steps[0], save_top_k=-1
        )
        events = Events()
        callback = HDETCallback(scout=SCOUT, hold_out=hold_out, record=events)
        module = Digits(digits.BAD_LR)
        trainer = trainer_of(
            callback, save, max_epochs=6, enable_checkpointing=True, limit_val_batches=1
        )
        trainer.fit(module, Batches(), validation(), ckpt_path=path)
        return {
            "digest": digits.digest(module.network),
            "loss": digits.held_out_loss(module.network),
            "clock": callback.scheduler.last_epoch,
            "compared_by": sorted({event["compared_by"] for event in events.of("scout")}),
        }

    found = {"whole": run("whole")}
    for step in steps:
        path = Path(folder, "whole", f"step={step}.ckpt")
        saved = torch.load(path, weights_only=True)["lr_schedulers"][0]
        found[f"{step}"] = {**run(f"from-{step}", path), "scouts": "search" in saved}
    return found


class Sharded(Digits):
    """A module under FSDP2, with two replicas of one process each."""

    def configure_model(self) -> None:
        self.mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(self.network, mesh=self.mesh)


def sharded(folder: str) -> dict[str, Any]:
    """Train under FSDP2, save after the scout, and resume."""

    def run(name: str, path: Path | None = None) -> dict[str, Any]:
        callback = HDETCallback(
            scout=SCOUT, replicas=lambda module: hdet.ProcessReplicas(module.mesh["replicate"])
        )
        save = ModelCheckpoint(f"{folder}/{name}", "{step}", every_n_train_steps=104, save_top_k=-1)
        module = Sharded(digits.BAD_LR)
        trainer = trainer_of(
            callback,
            save,
            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            enable_checkpointing=True,
            max_epochs=5,
        )
        trainer.fit(module, Batches(), ckpt_path=path)
        whole = digits.network()
        whole.load_state_dict(get_model_state_dict(module.network, options=FULL))
        return {"digest": digits.digest(whole), "loss": digits.held_out_loss(whole)}

    return {"whole": run("whole"), "resumed": run("from", Path(folder, "whole", "step=104.ckpt"))}


class Kept(Digits):
    """Knows its weights right after each checkpoint."""

    def on_fit_start(self) -> None:
        self.after: dict[int, str] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        self.after[self.trainer.global_step] = digits.digest(self.network)


def keeping(folder: str) -> dict[str, Any]:
    """Keep the best model and the weights alone, and stop early, with replicas that differ."""
    module, callback = Kept(digits.GOOD_LR), HDETCallback(**EXPLORING)
    best = ModelCheckpoint(f"{folder}/best", monitor="val_loss")
    light = ModelCheckpoint(
        f"{folder}/light", "{step}", every_n_train_steps=33, save_weights_only=True
    )
    trainer = trainer_of(
        callback,
        EarlyStopping("val_loss", min_delta=10, patience=2),
        best,
        light,
        max_steps=200,
        val_check_interval=27,
        check_val_every_n_epoch=None,
        limit_val_batches=4,
        enable_checkpointing=True,
    )
    trainer.fit(module, Batches(), validation())
    file = torch.load(f"{folder}/light/step=66.ckpt", weights_only=True)
    alone, score = Digits(0.0), best.best_model_score
    alone.load_state_dict(file["state_dict"])
    after = digits.digest(module.network)
    assert score is not None
    (tested,) = trainer.validate(module, validation(), ckpt_path="best", verbose=False)
    return {
        "clock": callback.scheduler.last_epoch,
        "digest": after,
        "saved_alone": digits.digest(alone.network),
        "after_saving": module.after[66],
        "in_mid_cycle": module.after[65],
        "file_has_optimizer": "optimizer_states" in file,
        "best": score.item(),
        "best_loaded": tested["val_loss"],
    }


class Float16(MixedPrecision):
    """The loss scale of float16. The products stay in float32, for CPUs without float16."""

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        yield


class HalfDigits(Digits):
    """Its gradients pass through float16, and overflow where the loss scale is high."""

    def loss_of(self, batch: Batch) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.network(x).half().float(), y)


def scaling(steps: int) -> dict[str, Any]:
    """Train with a loss scale that is too high at first, so that steps are skipped."""
    events, scaler = Events(), torch.amp.GradScaler("cpu", init_scale=2.0**24)
    callback = HDETCallback(scout=SCOUT, record=events)
    module = HalfDigits(digits.BAD_LR)
    trainer = trainer_of(callback, plugins=[Float16("16-mixed", "cpu", scaler)], max_steps=steps)
    trainer.fit(module, Batches())
    return {
        "loss": digits.held_out_loss(module.network),
        "clock": callback.scheduler.last_epoch,
        "steps": trainer.global_step,
        "scale": scaler.get_scale(),
        "losses": [event["losses"] for event in events.of("cycle")][:1],
    }


class Misused(Digits):
    """hdet in the natural place, without the callback."""

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        return [found["optimizer"]], [hdet.HDET(found["lr_scheduler"]["scheduler"], model=self)]


def misused() -> list[str]:
    """Return the warnings of a run that gives hdet the module itself, and steps by epoch."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer_of(max_steps=3300, limit_train_batches=40, max_epochs=1).fit(
            Misused(digits.BAD_LR), Batches()
        )
    return [
        str(one.message)
        for one in seen
        if "hdet" in str(one.message) or "scout" in str(one.message)
    ]


def fabric_block() -> str:
    """The code of the page for Fabric."""
    found = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [code for code in found if "fabric.launch()" in code]
    return block


def fabric(folder: str, epochs: int) -> dict[str, Any]:
    """Run what the page shows, and load what it has saved."""
    os.chdir(folder)
    names: dict[str, Any] = {
        "torch": torch,
        "F": nn.functional,
        "hdet": hdet,
        "Fabric": Fabric,
        "OneCycleLR": OneCycleLR,
        "model": digits.network(),
        "batches": [batch for _ in range(epochs) for batch in Batches()],
    }
    exec(fabric_block(), names)
    saved = torch.load("fabric.ckpt", weights_only=True)
    alone = digits.network()
    alone.load_state_dict(saved["model"])
    return {
        "found": names["scheduler"].found_lr,
        "loss": digits.held_out_loss(names["model"]),
        "digest": digits.digest(alone),
        "trained": digits.digest(names["model"]),
        "clock": saved["scheduler"]["step"],
    }


class Stopped(Digits):
    """All its processes are stopped after a step, by SIGTERM or by an error."""

    how = ""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step != 33:
            return
        if self.how == "error":
            raise RuntimeError("stopped")
        if self.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)


def stopped(folder: str) -> dict[str, Any]:
    """Return what a run that was stopped has saved, and what it has become."""
    found = {}
    for how in ("signal", "error"):
        module = Stopped(digits.GOOD_LR)
        module.how = how
        save = ModelCheckpoint(f"{folder}/{how}", "last", save_on_exception=True)
        trainer = trainer_of(
            HDETCallback(**EXPLORING), save, max_steps=70, enable_checkpointing=True
        )
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                trainer.fit(module, Batches())
            except (SystemExit, RuntimeError) as error:
                found[f"{how} raised"] = type(error).__name__
        saved = Digits(0.0)
        saved.load_state_dict(torch.load(f"{folder}/{how}/last.ckpt")["state_dict"])
        found[f"{how} saved"] = digits.digest(saved.network)
        found[how] = digits.digest(module.network)
        found[f"{how} warned"] = " ".join(str(one.message) for one in seen)
        found[f"{how} steps"] = trainer.global_step
    return found


def alone(steps: int) -> dict[str, Any]:
    """Train in a single process, which tries one learning rate after the other."""
    callback = HDETCallback(scout=hdet.Scout(share=0.5))
    module = fitted(digits.BAD_LR, callback, strategy="auto", max_steps=steps)
    return {"loss": digits.held_out_loss(module.network), "found": callback.scheduler.found_lr}


class Adapted(Digits):
    """Trains adapters of low rank, as PEFT adds them."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        config = LoraConfig(r=8, target_modules=["0", "2"])
        self.network = get_peft_model(digits.network(), config)


def adapting(epochs: int) -> dict[str, Any]:
    """Train adapters without hdet at two learning rates, and with hdet at the bad one."""
    found = {}
    for name, lr in (("bad", digits.BAD_LR), ("good", digits.GOOD_LR), ("hdet", digits.BAD_LR)):
        module = Adapted(lr)
        callbacks = [HDETCallback(scout=SCOUT)] if name == "hdet" else []
        trainer_of(*callbacks, max_epochs=epochs).fit(module, Batches())
        found[name] = digits.held_out_loss(module.network)
    return found
