"""What a run is set to where nobody has said: the best that is known, or what the paper has."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hdet.base import Base
from hdet.controller import Controller, PaperController
from hdet.elastic import TorchftReplicas
from hdet.guard import Guard
from hdet.knobs import LearningRate
from hdet.mesh import is_sharded
from hdet.replicas import ProcessReplicas, Replicas
from hdet.scout import Scout, check_room, coarse_steps
from hdet.tracker import Tracker
from hdet.validation import check_choice, check_integer

Auto = Literal["auto"]
Restart = Literal["restart"]
PRESETS = ("best", "paper")
SPREAD, SYNC_EVERY = 1 / 9, 1000
"""Those of the paper."""
LEAST_STEPS = 6
"""Of a round that is judged by training losses, where nobody has asked for it."""
LEAST_SHARE = 0.02
"""Of the given learning rate: a schedule whose mean is less is about another one."""
CYCLES = 30
"""A guard looks after a run so many times, or every thousand steps if that is more often."""


class Given(NamedTuple):
    """What somebody has said, or "auto" (none for numbers) where nobody has."""

    spread: float | None = None
    sync_every: int | None = None
    controller: Controller | Auto | None = "auto"
    scout: Scout | Auto | Restart | None = "auto"
    guard: Guard | Auto | None = "auto"
    knobs: Sequence[Any] | None = None


class Chosen(NamedTuple):
    spread: float
    sync_every: int
    controller: Controller | None
    scout: Scout | None
    guard: Guard | None


def choose(preset: str, given: Given, *, total_steps: int | None, num_replicas: int) -> Chosen:
    """Fill in what nobody has said.

    >>> choose("best", Given(), total_steps=3000, num_replicas=8)[:3]
    (0.0, 100, None)
    >>> choose("paper", Given(), total_steps=3000, num_replicas=8)[1]
    1000
    """
    check_choice("preset", preset, PRESETS)
    if isinstance(given.scout, str):
        check_choice("scout", given.scout, ("auto", "restart"))
    if total_steps is not None:
        check_integer("total_steps", total_steps, at_least=1)
    usual = Chosen(SPREAD, SYNC_EVERY, PaperController(), None, None)
    if preset == "best":
        usual = _best(given, total_steps)
        if total_steps is None and given.sync_every is None and usual.spread and num_replicas > 1:
            warnings.warn(
                f"nobody knows how long the run is: cycles have {SYNC_EVERY} steps, and nothing "
                "moves before the first ends; give `total_steps=` or `sync_every=`.",
                stacklevel=5,
            )
    if num_replicas == 1:
        usual = usual._replace(guard=None)  # one replica is the base schedule, and nothing else
    return Chosen(
        usual.spread if given.spread is None else given.spread,
        usual.sync_every if given.sync_every is None else given.sync_every,
        usual.controller if given.controller == "auto" else given.controller,
        {"auto": usual.scout, "restart": Scout(restart=True)}[given.scout]
        if isinstance(given.scout, str)
        else given.scout,
        usual.guard if given.guard == "auto" else given.guard,
    )


def _best(given: Given, total_steps: int | None) -> Chosen:
    """A scout and a guard; replicas differ only where somebody wants to explore."""
    steers = given.controller not in ("auto", None)
    explores = given.knobs is not None or bool(given.spread) or steers
    rates = given.knobs is None or any(isinstance(knob, LearningRate) for knob in given.knobs)
    return Chosen(
        SPREAD if explores else 0.0,
        SYNC_EVERY if total_steps is None else max(min(SYNC_EVERY, total_steps // CYCLES), 1),
        Tracker(relative=rates and given.scout is not None) if explores else None,
        Scout() if rates else None,
        Guard(offload=True) if rates else None,
    )


def on_its_own(controller: Controller | None) -> Controller | None:
    """The same without a scout: then nobody else finds how high learning rates are."""
    return replace(controller, relative=False) if isinstance(controller, Tracker) else controller


def scout_problem(
    scout: Scout,
    base: Base,
    model: nn.Module | None,
    replicas: Replicas,
    *,
    total_steps: int | None,
    gradients: str,
    probes: bool,
) -> str | None:
    """Why a scout that nobody has asked for is left out; none if it is not."""
    if isinstance(replicas, TorchftReplicas):
        return "replicas that come and go cannot wait for each other's rounds"
    if replicas.size == 1:
        return "there is one replica (on one device, hdet.StackedReplicas makes several of it)"
    problem = unfit_for_scouts(base, model, replicas, gradients)
    if problem is not None or model is None:
        return problem
    if gradients == "shared" and isinstance(replicas, ProcessReplicas) and not _wrapped(model):
        return "under FSDP2 it waits to be asked for: `scout=hdet.Scout()`"
    shares = base.shares(total_steps)
    if shares is not None and shares.mean < LEAST_SHARE:
        return (
            f"the schedule is at {shares.mean:.2g} of the given learning rate on average, which is "
            "not the one it is about: a LambdaLR must return factors, and Noam's be divided by its "
            "peak"
        )
    return _too_short(scout, total_steps, replicas.size, probes)


def _too_short(scout: Scout, total_steps: int | None, size: int, probes: bool) -> str | None:
    if total_steps is None:
        return "nobody knows how long the run is: give `total_steps=`"
    try:
        check_room(scout, num_replicas=size, total_steps=total_steps)
    except ValueError as short:
        return str(short).rstrip(".")
    num = coarse_steps(scout, total_steps, size)
    if not probes and num < LEAST_STEPS:
        return (
            f"{scout.share:.0%} of {total_steps} steps are rounds of {num} for {size} replicas, "
            f"and training losses tell nothing in fewer than {LEAST_STEPS}: give a `probe=`"
        )
    return None


def unfit_for_scouts(
    base: Base, model: nn.Module | None, replicas: Replicas, gradients: str
) -> str | None:
    """What no scout can work with, asked for or not."""
    if model is None:
        return "`scout` needs `model=`, got None"
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "a scout cannot be used with SyncBatchNorm, which mixes what replicas compute"
    if base.wants_metric:
        return "a scout cannot be used under ReduceLROnPlateau"
    if not isinstance(replicas, ProcessReplicas) or replicas.size == 1:
        return None
    if any(module.static_graph for module in _wrapped(model)):
        return "gradients cannot be local under DDP(static_graph=True)"
    if gradients == "shared" and not (_wrapped(model) or is_sharded(model)):
        return (
            "`scout` must know what shares the gradients, got a model outside DDP and FSDP2: give "
            "the wrapped one, or `gradients='local'`"
        )
    return None


def _wrapped(model: nn.Module) -> list[DistributedDataParallel]:
    return [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
