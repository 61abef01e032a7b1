"""The form of a compatibility rule, and the facts about a run that rules ask for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hdet.knobs.specs import LearningRate
from hdet.replicas.device_mesh import is_sharded
from hdet.replicas.error_feedback import AllToAll
from hdet.replicas.process import ProcessReplicas
from hdet.replicas.protocol import Replicas
from hdet.replicas.stacked.optimizer import StackedOptimizer
from hdet.replicas.stacked.replicas import StackedReplicas
from hdet.replicas.torchft import TorchftReplicas, is_of_torchft, shares_gradients
from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.settings import Settings


@dataclass(frozen=True)
class Setup:
    """Everything a run is made of. Rules ask its properties and never an engine's class."""

    settings: Settings
    base: BaseSchedule
    replicas: Replicas
    model: nn.Module | None

    @property
    def num_replicas(self) -> int:
        return self.replicas.size

    @property
    def is_elastic(self) -> bool:
        """Whether replicas can join and leave during the run."""
        return isinstance(self.replicas, TorchftReplicas)

    @property
    def spans_processes(self) -> bool:
        """Whether several fixed processes hold one replica each, or shards of one."""
        return isinstance(self.replicas, ProcessReplicas) and self.replicas.size > 1

    @property
    def can_compress(self) -> bool:
        """Whether the engine can send quantized weights, or has nothing to send."""
        return self.replicas.size == 1 or isinstance(self.replicas, AllToAll)

    @property
    def is_optimizer_without_engine(self) -> bool:
        """Whether the optimizer belongs to StackedReplicas and the run to another engine."""
        is_stacked = isinstance(self.replicas, StackedReplicas)
        return isinstance(self.base.optimizer, StackedOptimizer) and not is_stacked

    @property
    def has_every_model(self) -> bool:
        """Whether the run knows the module of each replica in this process."""
        return None not in self.replicas.modules(self.model)

    @property
    def has_lr_knob(self) -> bool:
        return any(isinstance(knob, LearningRate) for knob in self.settings.knobs)

    @property
    def has_torchft_optimizer(self) -> bool:
        return is_of_torchft(self.base.optimizer)

    @property
    def torchft_gradients(self) -> str:
        """The value of `gradients` that fits a model under a torchft manager."""
        return "shared" if shares_gradients(self.model) else "local"

    @property
    def has_sync_batch_norm(self) -> bool:
        return any(isinstance(module, nn.SyncBatchNorm) for module in self._modules())

    @property
    def is_under_ddp(self) -> bool:
        return any(isinstance(module, DistributedDataParallel) for module in self._modules())

    @property
    def has_static_graph(self) -> bool:
        ddp = (module for module in self._modules() if isinstance(module, DistributedDataParallel))
        return any(module.static_graph for module in ddp)

    @property
    def is_under_fsdp(self) -> bool:
        return self.model is not None and is_sharded(self.model)

    def _modules(self) -> Iterable[nn.Module]:
        return () if self.model is None else self.model.modules()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One combination that does not work.

    Attributes:
        name: The anchor of the rule in the docs.
        limit: What does not work with what, in one sentence for the docs.
        remedy: What to do instead, in one sentence for the docs.
        applies: Whether a setup breaks the rule.
        message: The text of the error or of the warning.
        is_warning: Whether the run starts all the same.
    """

    name: str
    limit: str
    remedy: str
    applies: Callable[[Setup], bool]
    message: Callable[[Setup], str]
    is_warning: bool = False


def first_broken(rules: Iterable[Rule], setup: Setup) -> Rule | None:
    """Return the first rule that the setup breaks."""
    return next((rule for rule in rules if rule.applies(setup)), None)
