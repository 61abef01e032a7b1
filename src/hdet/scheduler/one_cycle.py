"""OneCycleHDET: the drop-in replacement for OneCycleLR, with the paper's controller."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet._validation import check_flag, check_positive
from hdet.control.guard import Guard
from hdet.control.one_cycle_bounds import OneCycleBounds
from hdet.control.paper import PaperController
from hdet.knobs.specs import LearningRate, flatten_knobs
from hdet.lr_search.scout import Scout
from hdet.records.sinks import Record
from hdet.replicas.protocol import Replicas
from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.hdet import HDET
from hdet.scheduler.settings import Settings
from hdet.signals.probe import Probe, as_probe
from hdet.weights.outer_optimizer import OptimizerFactory


class OneCycleHDET(HDET):
    """Takes the place of torch's `OneCycleLR` and trains as the paper does.

    The first 14 arguments are those of `OneCycleLR`, in their order. The arguments of hdet follow
    by keyword. `HDET` defines the terms replica, cycle, spread and knob.

    Up to `warmup_steps`, the learning rate of a replica is that of `OneCycleLR` times the
    replica's multiplier. After the next sync the controller takes over if `auto_lr` is on. Then
    the learning rate is constant within a cycle. At each sync it decays toward the floor of
    `OneCycleLR` and follows the losses (paper, equations 4 to 9). Momentum keeps its schedule.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> scheduler = OneCycleHDET(optimizer, max_lr=0.1, total_steps=100)
        >>> round(scheduler.get_last_lr()[0], 9)
        0.004

    Args:
        optimizer: The optimizer to schedule.
        max_lr: The highest learning rate of the cycle, one number or one for each group.
        total_steps: Steps of the run. None takes `epochs` times `steps_per_epoch`.
        epochs: Epochs of the run, if `total_steps` is None.
        steps_per_epoch: Steps in an epoch, if `total_steps` is None.
        pct_start: Share of the run in which the learning rate rises, from 0 to 1.
        anneal_strategy: Shape of the cycle: `"cos"` or `"linear"`.
        cycle_momentum: Whether momentum moves opposite to the learning rate.
        base_momentum: The lowest momentum of the cycle, one number or one for each group.
        max_momentum: The highest momentum of the cycle, one number or one for each group.
        div_factor: The cycle starts at `max_lr / div_factor`.
        final_div_factor: The cycle ends at its first learning rate divided by this factor.
        three_phase: Whether the cycle falls to its first learning rate before the last phase.
        last_epoch: The last step of a run that continues, -1 for a new run.
        model: The model that trains, as the loop calls it: wrapped in DDP or FSDP2 if it is. The
            scout, the probe and local gradients need it. hdet averages its buffers too. Each of
            its trainable parameters must belong to an optimizer of the run. Where it is wrapped
            later, call `attach(model)` then.
        spread: Relative half-width of the learning rates that replicas explore, in [0, 1).
        sync_every: Steps in a cycle. Replicas are compared and averaged at its end.
        auto_lr: Whether the controller takes over after the warm-up. If not, the run follows
            `OneCycleLR`, and replicas differ by their multipliers only.
        warmup_steps: Steps before the controller takes over. None takes the top of the cycle.
        momentum: Momentum of the controller's velocity, beta in the paper, in [0, 1).
        temperature: Temperature of the softmax over the losses, sigma in the paper.
        step_size: Step size of the controller, lambda in the paper.
        knobs: The scalars to explore, such as `[hdet.lr(), hdet.weight_decay()]`. None explores
            the learning rate of each parameter group.
        probe: Scores the replicas on held-out data. A function of the model, or `hdet.Probe`.
            None compares replicas by their training losses.
        scout: The search at the start, `hdet.Scout()`. None searches nothing.
        guard: The protection against failures, `hdet.Guard()`. None protects nothing.
        gradients: `"shared"` if all replicas step with the mean gradient, as under DDP.
            `"local"` if each replica steps with its own.
        optimizer_state: What happens to optimizer states when weights are averaged: `"keep"`,
            `"average"` or `"reset"`.
        outer: Makes an outer optimizer from a list of parameters, as DiLoCo uses one. It treats
            the change of the mean weights over a cycle as a gradient.
        overlap: Steps that training continues while the average is computed. 0 waits for it.
        compress: Quantizes the weights that replicas send to `"bf16"` or `"int8"`. None sends
            them as they are.
        replicas: The engine that holds the replicas. None takes the processes of the default
            process group, or a single replica without one.
        on_overrun: What happens after `total_steps`. `"hold"` keeps the learning rate, `"extend"`
            keeps it and explores on, and `"raise"` raises an error.
        record: The folder for the file `record.jsonl`. None writes no record.
        seed: Seed of the assignment of multipliers to replicas.
        scaler: The `GradScaler` of the loop. Its loss scale is restored with the weights, and kept
            equal on all replicas. Save its state yourself.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a bad value, if options do not work together, or if the
            replicas have different settings or weights. It is raised on all replicas.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | list[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | list[float] = 0.85,
        max_momentum: float | list[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
        *,
        model: nn.Module | None = None,
        spread: float = 1 / 9,
        sync_every: int = 1000,
        auto_lr: bool = True,
        warmup_steps: int | None = None,
        momentum: float = 0.9,
        temperature: float = 0.1,
        step_size: float = 0.5,
        knobs: Sequence[Any] | None = None,
        probe: Probe | Callable[[Any], Any] | None = None,
        scout: Scout | None = None,
        guard: Guard | None = None,
        gradients: Literal["shared", "local"] = "shared",
        optimizer_state: Literal["keep", "average", "reset"] = "keep",
        outer: OptimizerFactory | None = None,
        overlap: int = 0,
        compress: Literal["bf16", "int8"] | None = None,
        replicas: Replicas | None = None,
        on_overrun: Literal["hold", "extend", "raise"] = "hold",
        record: Record | None = None,
        seed: int = 0,
        scaler: GradScaler | None = None,
    ) -> None:
        def prepare(*_: Any) -> tuple[BaseSchedule, Settings]:
            check_flag("auto_lr", auto_lr)
            _check_rates(max_lr, div_factor, final_div_factor)
            length = (total_steps, epochs, steps_per_epoch, pct_start)
            momenta = (cycle_momentum, base_momentum, max_momentum)
            ends = (div_factor, final_div_factor, three_phase, last_epoch)
            cycle = _one_cycle(optimizer, max_lr, *length, anneal_strategy, *momenta, *ends)
            base = BaseSchedule(cycle)
            controller = PaperController(
                warmup_steps=_top_of(base, pct_start) if warmup_steps is None else warmup_steps,
                momentum=momentum,
                temperature=temperature,
                step_size=step_size,
            )
            settings = Settings(
                spread=spread,
                sync_every=sync_every,
                controller=controller if auto_lr else None,
                gradients=gradients,
                optimizer_state=optimizer_state,
                outer=outer,
                overlap=overlap,
                compress=compress,
                total_steps=base.total_steps,
                on_overrun=on_overrun,
                seed=seed,
                knobs=(LearningRate(),) if knobs is None else tuple(flatten_knobs(knobs)),
                probe=as_probe(probe),
                scout=scout,
                guard=guard,
                scaler=scaler,
            )
            return base, settings

        self._open(prepare, model, replicas, record)

    def _taken_over(self, base: BaseSchedule) -> OneCycleBounds | None:
        """Return the bounds of the cycle, whose decay the controller takes over."""
        return base.cycle


def _one_cycle(*arguments: Any) -> OneCycleLR:
    """Make a OneCycleLR. torch divides by zero if a phase of the cycle has no step."""
    try:
        return OneCycleLR(*arguments)
    except ZeroDivisionError as error:
        total_steps, epochs, steps_per_epoch, pct_start = arguments[2:6]
        total_steps = total_steps or epochs * steps_per_epoch
        raise ValueError(
            f"`total_steps` is too small: each phase of the cycle needs a step, got {total_steps} "
            f"with `pct_start` {pct_start}."
        ) from error


def _top_of(base: BaseSchedule, pct_start: float) -> int:
    """Return the step at which the cycle is highest, before the end of the run."""
    assert base.total_steps is not None
    return min(math.ceil(pct_start * base.total_steps), base.total_steps - 1)


def _check_rates(max_lr: Any, div_factor: Any, final_div_factor: Any) -> None:
    for lr in max_lr if isinstance(max_lr, (list, tuple)) else [max_lr]:
        check_positive("max_lr", float(lr) if isinstance(lr, Tensor) else lr)
    check_positive("div_factor", div_factor)
    check_positive("final_div_factor", final_div_factor)
