"""OneCycleHDET: the drop-in for torch's OneCycleLR, and the paper's auto-LR as it is printed."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet._validation import check_flag, check_positive
from hdet.control.one_cycle_bounds import OneCycleBounds
from hdet.control.paper import PaperController
from hdet.control.spike_guard import Guard
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
    """OneCycleLR with a spread: its 14 arguments in their order, then hdet's own by keyword.

    Until `warmup_steps` (by default the top of the cycle) every learning rate is that of
    OneCycleLR times the replica's multiplier. From the first sync after it, if `auto_lr` is on,
    the learning rate is constant within a cycle and moves at syncs only: it decays toward
    OneCycleLR's floor and follows the losses (paper, eqs. 4 to 9). Momentum keeps its schedule.
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
    ) -> None:
        def prepare(_: Replicas) -> tuple[BaseSchedule, Settings]:
            check_flag("auto_lr", auto_lr)
            _check_rates(max_lr, div_factor, final_div_factor)
            base = BaseSchedule(
                _one_cycle(
                    optimizer,
                    max_lr,
                    total_steps,
                    epochs,
                    steps_per_epoch,
                    pct_start,
                    anneal_strategy,
                    cycle_momentum,
                    base_momentum,
                    max_momentum,
                    div_factor,
                    final_div_factor,
                    three_phase,
                    last_epoch,
                )
            )
            assert base.total_steps is not None
            top = math.ceil(pct_start * base.total_steps)
            controller = PaperController(
                warmup_steps=min(top, base.total_steps - 1)
                if warmup_steps is None
                else warmup_steps,
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
            )
            return base, settings

        self._open(prepare, model, replicas, record)

    def _taken_over(self, base: BaseSchedule) -> OneCycleBounds | None:
        return base.cycle


def _one_cycle(*arguments: Any) -> OneCycleLR:
    try:
        return OneCycleLR(*arguments)
    except ZeroDivisionError as error:
        total_steps, epochs, steps_per_epoch, pct_start = arguments[2:6]
        total_steps = total_steps or epochs * steps_per_epoch
        raise ValueError(
            f"`total_steps` must leave every phase of the cycle a step, got {total_steps} with "
            f"`pct_start` {pct_start}."
        ) from error


def _check_rates(max_lr: Any, div_factor: Any, final_div_factor: Any) -> None:
    for lr in max_lr if isinstance(max_lr, (list, tuple)) else [max_lr]:
        check_positive("max_lr", float(lr) if isinstance(lr, Tensor) else lr)
    check_positive("div_factor", div_factor)
    check_positive("final_div_factor", final_div_factor)
