"""What the tests of hdet under torchtitan run in real processes: its trainer on the digits.

torchtitan 0.3 is made for GPUs. On the CPU three of its parts are replaced, none of which trains:
the kernels of expert parallelism, which need triton; the name of the device; and the monitor of
the memory of a GPU.
"""

import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import spmd_types  # type: ignore[import-untyped]
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import hdet
from tests.integrations.digits import BAD_LR, NUM_TRAINED, digest, held_out_loss, network, tensors


class _NoKernels(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
sys.modules.setdefault(_KERNELS, _NoKernels(_KERNELS))
torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.components.validate import BaseValidator, Validator  # noqa: E402
from torchtitan.config import ConfigManager, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division  # noqa: E402
from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh  # noqa: E402
from torchtitan.models.common.decoder_sharding import dense_param_placement  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.protocols.model import BaseModel  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.protocols.sharding import ShardingConfig  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from hdet.integrations.torchtitan import with_hdet  # noqa: E402

_NO_MEMORY = types.SimpleNamespace(
    device_name="CPU",
    get_peak_stats=lambda: metrics.DeviceMemStats(0, 0, 0, 0, 0, 0),
    reset_peak_stats=lambda: None,
)
metrics.build_device_memory_monitor = lambda: _NO_MEMORY
dist_utils.set_pg_timeouts = lambda **_: None  # it asks for the number of the GPU


def linear(in_features: int, out_features: int) -> Any:
    """Return the config of a layer, and of the place of its parameters in a mesh."""
    whole = dense_param_placement(tp=spmd_types.R)
    places = ShardingConfig(state_shardings={"weight": whole, "bias": whole})
    return Linear.Config(
        in_features=in_features, out_features=out_features, bias=True, sharding_config=places
    )


class Digits(BaseModel):
    """The network of the digits as a model of torchtitan."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        first: Any = field(default_factory=lambda: linear(64, 128))
        second: Any = field(default_factory=lambda: linear(128, 10))

        def update_from_config(self, *, config: Any, **_: Any) -> None:
            pass

        def get_nparams_and_flops(self, model: Any, seq_len: int) -> tuple[int, int]:
            return sum(p.numel() for p in model.parameters()), 1

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.first, self.second = config.first.build(), config.second.build()

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.relu(self.first(x)))

    def init_weights(self, **_: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for parameter in self.parameters():
                whole = torch.empty(parameter.shape).uniform_(-1, 1)
                fan_in = parameter.shape[-1] if parameter.ndim > 1 else 64
                made = distribute_tensor(
                    whole / fan_in**0.5, parameter.device_mesh, parameter.placements
                )
                parameter.copy_(made)


def parallelize(model: Any, *, parallel_dims: Any, parallelism: Any, **_: Any) -> Any:
    """Wrap a model as torchtitan wraps its own."""
    if parallelism.spmd_backend == "partial_dtensor":
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        mesh, dims = parallel_dims.get_mesh(names), None
    else:
        model.parallelize(parallel_dims)
        mesh, dims = resolve_fsdp_mesh(parallel_dims)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    disable_fsdp_gradient_division(model)
    model.set_force_sum_reduction_for_comms(True)  # gloo can only sum
    return model


class DigitsLoader(BaseDataLoader):
    """Batches of the digits, which a checkpoint can go on with."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> None:
        x, y = tensors()
        self.rank, self.size, self.batch, self.at = dp_rank, dp_world_size, local_batch_size, 0
        self.x, self.y = x[:NUM_TRAINED, None], y[:NUM_TRAINED, None]

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            per_epoch = NUM_TRAINED // (self.batch * self.size)
            epoch, place = divmod(self.at, per_epoch)
            order = torch.randperm(NUM_TRAINED, generator=torch.Generator().manual_seed(epoch))
            start = (place * self.size + self.rank) * self.batch
            rows = order[start : start + self.batch]
            self.at += 1
            yield {"input": self.x[rows]}, self.y[rows]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 10


class Digest(BaseValidator):
    """A validator that keeps what it is shown."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseValidator.Config):
        enable: bool = True

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__(config)
        self.shown: list[str] = []

    def should_validate(self, step: int) -> bool:
        return step == self.config.freq

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        self.shown.append(digest(plain(*model_parts)))


class Logged:
    """A logger of torchtitan that keeps what it gets."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def log(self, numbers: dict[str, Any], step: int) -> None:
        self.lines.append({"step": step, **numbers})

    def close(self) -> None:
        pass


def config_of(
    folder: str,
    *,
    lr: float = BAD_LR,
    steps: int = 300,
    accumulate: int = 1,
    replicate: int = 2,
    shard: int = 1,
    save_every: int | None = None,
    validate_at: int | None = None,
    cuda_graphs: bool = False,
    backend: str = "partial_dtensor",
    pipeline: int = 1,
) -> Any:
    """Return a config of torchtitan's trainer, as functions of a config registry do."""
    validator = Validator.Config() if validate_at is None else Digest.Config(freq=validate_at)
    spec = ModelSpec("digits", "mlp", Digits.Config(), parallelize, None, None, None)
    return Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(),
        tokenizer=NoTokenizer.Config(),
        dataloader=DigitsLoader.Config(),
        validator=validator,
        optimizer=default_adamw(lr=lr),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=20),
        training=TrainingConfig(
            local_batch_size=16,
            global_batch_size=16 * replicate * shard * accumulate,
            seq_len=64,
            steps=steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=not cuda_graphs,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=replicate,
            data_parallel_shard_degree=shard,
            spmd_backend=backend,
            pipeline_parallel_degree=pipeline,
            pipeline_parallel_microbatch_size=16,
        ),
        checkpoint=CheckpointManager.Config(
            enable=save_every is not None,
            interval=save_every or 1,
            keep_latest_k=0,
            last_save_model_only=False,
        ),
        metrics=metrics.MetricsProcessor.Config(log_freq=10),
    )


def train(folder: str, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train once with each of the arguments, and return what each run came to."""
    return [train_once(**({"folder": f"{folder}/{i}"} | run)) for i, run in enumerate(runs)]


def train_once(
    folder: str, with_it: bool = True, load_step: int | None = None, **settings: Any
) -> dict[str, Any]:
    """Train as torchtitan's own script does, and return what the run came to."""
    config = config_of(folder, **settings)
    if with_it:
        config = with_hdet(config, scout=hdet.Scout(share=99 / config.training.steps))
    trainer = config.build()
    result: dict[str, Any] = {}
    if load_step is not None:
        config.checkpoint.load_step = load_step
        trainer.checkpointer.load(step=load_step)
        result["scouting"] = trainer.hdet.is_scouting
    trainer.metrics_processor.logger = logged = Logged()
    trainer.train()
    trainer.close()
    model = plain(*trainer.model_parts)
    if with_it:
        result |= {"steps": trainer.hdet.last_epoch, "found": trainer.hdet.found_lr}
        result["lr"] = trainer.optimizers.optimizers[0].param_groups[0]["lr"]
        result["shown"] = trainer.validator.shown if config.validator.enable else []
    return {**result, "loss": held_out_loss(model), "digest": digest(model), "log": logged.lines}


def gradient_errors(folder: str) -> dict[str, float]:
    """Return how far the gradients of the first step are from those of the mean loss.

    In the scout that is the mean over the batch of this process, and else over both batches.
    """
    errors: dict[str, float] = {}
    for name, ranks in (("scout", [int(os.environ["RANK"])]), ("run", [0, 1])):
        config = config_of(f"{folder}/{name}")
        config.training.max_norm = 1e9
        scout = hdet.Scout(share=0.33) if name == "scout" else None
        trainer = with_hdet(config, scout=scout).build()
        model = plain(*trainer.model_parts)
        loaders = [
            DigitsLoader(None, dp_world_size=2, dp_rank=r, local_batch_size=16) for r in ranks
        ]
        batches = [next(iter(loader)) for loader in loaders]
        losses = [F.cross_entropy(model(x["input"])[:, 0], y[:, 0]) for x, y in batches]
        torch.stack(losses).mean().backward()
        trainer.step = 1
        trainer.train_step(trainer.batch_generator(trainer.dataloader))
        errors[name] = 0.0
        pairs: Any = zip(trainer.model_parts[0].parameters(), model.parameters(), strict=True)
        for own, expected in pairs:
            difference = own.grad.full_tensor() - expected.grad
            errors[name] = max(errors[name], (difference.norm() / expected.grad.norm()).item())
        trainer.close()
    return errors


def refused(folder: str, runs: list[dict[str, Any]]) -> list[str]:
    """Return the errors that these settings raise."""
    errors = []
    for settings in runs:
        try:
            with_hdet(config_of(folder, **settings)).build()
        except ValueError as error:
            errors.append(str(error))
    return errors


def plain(model: nn.Module) -> nn.Module:
    """Return the network of the digits with the weights of a model of torchtitan."""
    found = network()
    with torch.no_grad():
        for own, parameter in zip(found.parameters(), model.parameters(), strict=True):
            own.copy_(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
    return found


def digits_with_hdet() -> Any:
    """A function of a config registry."""
    return with_hdet(config_of("outputs"), guard=None)


def parsed() -> list[Any]:
    """Return what torchtitan's command line makes of that config."""
    words = ["--module", "tests.integrations.torchtitan_runs", "--config", "digits_with_hdet"]
    config = ConfigManager().parse_args([*words, "--training.steps", "7"])
    schedule = config.lr_scheduler
    return [type(schedule).__qualname__, schedule.options, config.training.steps]
