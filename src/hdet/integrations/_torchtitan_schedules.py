"""torchtitan: its learning-rate component with hdet around it, for the config registry."""

import dataclasses
from collections.abc import Iterator
from io import BytesIO
from typing import Annotated, Any

import torch
from torch import nn

from hdet.integrations._extras import extra
from hdet.integrations.tracking import scalars_now
from hdet.lr_search.scout import Scout
from hdet.replicas.process import ProcessReplicas
from hdet.scheduler.hdet import HDET

with extra("torchtitan"):
    import tyro
    from torchtitan.components.optimizer import LRSchedulersContainer

REPLICATE = "dp_replicate"
"""What torchtitan calls the mesh dimension of the replicas."""
NO_PIPELINE = (
    "hdet needs the whole loss in each process. Set parallelism.pipeline_parallel_degree to 1."
)


class HDETSchedulers(LRSchedulersContainer):
    """The schedules of torchtitan with hdet around them: one factor for all optimizers.

    Replicas are the dimension `dp_replicate` of the mesh. The trainer must give the losses and
    converge before it saves, as one with `HDETMixin` does.

    Attributes:
        hdet: The `hdet.HDET` of the run.
        is_local: Whether each replica always steps with its own gradient.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        """The fields of torchtitan's schedule, and `options` of `hdet.HDET`."""

        options: Annotated[dict[str, Any], tyro.conf.Suppress] = dataclasses.field(
            default_factory=dict
        )

        def build(self, *, optimizers: Any, training_steps: int) -> "HDETSchedulers":
            """Build the schedules, as torchtitan's trainer asks for them.

            Args:
                optimizers: The optimizers of the run, an `OptimizersContainer`.
                training_steps: The steps of the run.

            Returns:
                The schedules with hdet.

            Raises:
                ValueError: If a process has a part of the model, or if there is one replica.
            """
            plain = LRSchedulersContainer.Config.build(
                self, optimizers=optimizers, training_steps=training_steps
            )
            steps = self.total_steps if self.total_steps is not None else training_steps
            return HDETSchedulers(plain, optimizers, {"total_steps": steps} | self.options)

    def __init__(self, plain: Any, optimizers: Any, options: dict[str, Any]) -> None:
        if len(optimizers.model_parts) > 1:
            raise ValueError(NO_PIPELINE)
        self.schedulers = plain.schedulers
        _materialize(optimizers)
        (model,) = optimizers.model_parts
        defaults = {"scout": Scout(), "replicas": _replicas(model)}
        bases = self.schedulers[0] if len(self.schedulers) == 1 else self.schedulers
        self.hdet = HDET(bases, model=model, **(defaults | options))
        self.is_local = options.get("gradients") == "local"

    def get_metrics(self) -> dict[str, float]:
        """Return the learning rates of this replica, of the consensus and of all replicas."""
        return dict(self._own_rates()) | scalars_now(self.hdet)

    def _own_rates(self) -> Iterator[tuple[str, float]]:
        for optimizer in (scheduler.optimizer for scheduler in self.schedulers):
            name, groups = f"lr/{type(optimizer).__name__}", optimizer.param_groups
            for index, group in enumerate(groups):
                yield name if len(groups) == 1 else f"{name}/{index}", float(group["lr"])

    def step(self) -> None:
        """Advance the run by one step, after the step of the optimizers."""
        self.hdet.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in one piece: torch's checkpoint loads only what it expects."""
        file = BytesIO()
        torch.save(self.hdet.state_dict(), file)
        return {"last_epoch": self.hdet.last_epoch, "hdet": file.getvalue()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state. All processes must call it."""
        self.hdet.load_state_dict(torch.load(BytesIO(state_dict["hdet"]), weights_only=True))


def _materialize(optimizers: Any) -> None:
    """Make the optimizer states now, as torchtitan does before it saves.

    A search returns to the states from before it. A checkpoint in mid-search must have the same.
    """
    optimizers.state_dict()
    for state in (state for optimizer in optimizers for state in optimizer.state.values()):
        if "step" in state:
            state["step"].zero_()  # torchtitan has made a step without gradients


def _replicas(model: nn.Module) -> ProcessReplicas | None:
    meshes = [p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")]
    for mesh in meshes:
        if REPLICATE in (mesh.mesh_dim_names or ()):
            return ProcessReplicas(mesh[REPLICATE])
    if all(mesh.size() == 1 for mesh in meshes):
        return None
    raise ValueError(
        "hdet compares replicas of the model, and this run has one. Set "
        "parallelism.data_parallel_replicate_degree to 2 or more."
    )
