"""The form of a compatibility rule, and the facts about a run that rules ask for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from hdet.knobs.specs import LearningRate
from hdet.replicas.device_mesh import ddp_modules, is_sharded
from hdet.replicas.protocol import EngineOptimizer, Replicas, is_elastic
from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.settings import Settings
from hdet.tensors.joined_optimizer import members_of


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
        return self.replicas.capabilities.is_elastic

    @property
    def spans_processes(self) -> bool:
        """Whether several fixed processes hold one replica each, or shards of one."""
        return self.replicas.capabilities.needs_wrapped_model and self.replicas.size > 1

    @property
    def can_compress(self) -> bool:
        """Whether the engine can send quantized weights, or has nothing to send."""
        return self.replicas.size == 1 or self.replicas.capabilities.can_compress

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that the user's loop steps."""
        return members_of(self.base.optimizer)

    @property
    def is_optimizer_without_engine(self) -> bool:
        """Whether an optimizer belongs to StackedReplicas and the run to another engine."""
        is_of_engine = any(isinstance(one, EngineOptimizer) for one in self.optimizers)
        return is_of_engine and not self.replicas.capabilities.has_own_optimizer

    @property
    def network(self) -> nn.Module | None:
        """The module of the first replica in this process, as far as the run knows it."""
        return self.replicas.modules(self.model)[0]

    @property
    def has_every_model(self) -> bool:
        """Whether the run knows the module of each replica in this process."""
        return None not in self.replicas.modules(self.model)

    @property
    def has_lr_knob(self) -> bool:
        return any(isinstance(knob, LearningRate) for knob in self.settings.knobs)

    @property
    def has_torchft_optimizer(self) -> bool:
        replicas = self.replicas
        return is_elastic(replicas) and any(map(replicas.wraps, self.optimizers))

    @property
    def torchft_gradients(self) -> str:
        """The value of `gradients` that fits a model under a torchft manager."""
        shares = is_elastic(self.replicas) and self.replicas.shares_gradients_of(self.model)
        return "shared" if shares else "local"

    @property
    def has_sync_batch_norm(self) -> bool:
        modules = () if self.model is None else self.model.modules()
        return any(isinstance(module, nn.SyncBatchNorm) for module in modules)

    @property
    def is_under_ddp(self) -> bool:
        return self.model is not None and bool(ddp_modules(self.model))

    @property
    def has_static_graph(self) -> bool:
        ddp = [] if self.model is None else ddp_modules(self.model)
        return any(module.static_graph for module in ddp)

    @property
    def is_under_fsdp(self) -> bool:
        return self.model is not None and is_sharded(self.model)


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
        is_about_model: Whether the run would obey it with another model, which may come later.
    """

    name: str
    limit: str
    remedy: str
    applies: Callable[[Setup], bool]
    message: Callable[[Setup], str]
    is_warning: bool = False
    is_about_model: bool = False


def first_broken(rules: Iterable[Rule], setup: Setup) -> Rule | None:
    """Return the first rule that the setup breaks."""
    return next((rule for rule in rules if rule.applies(setup)), None)
