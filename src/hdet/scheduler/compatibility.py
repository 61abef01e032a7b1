"""Which options, schedules, models and engines work together."""

import warnings
from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adagrad

from hdet.control.controller import complete_controller
from hdet.control.knob_bank import KnobBank
from hdet.knobs.specs import DialKnob, LearningRate
from hdet.lr_search.budget import check_room, sweep_steps
from hdet.lr_search.constants import MIN_LOSS_ROUND_STEPS, MIN_MEAN_SHARE
from hdet.lr_search.scout import Scout
from hdet.replicas.device_mesh import is_sharded
from hdet.replicas.error_feedback import AllToAll
from hdet.replicas.process import ProcessReplicas
from hdet.replicas.protocol import Replicas
from hdet.replicas.stacked.optimizer import StackedOptimizer
from hdet.replicas.stacked.replicas import StackedReplicas
from hdet.replicas.torchft import TorchftReplicas, is_of_torchft, shares_gradients
from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.settings import Settings
from hdet.weights.outer_optimizer import describe_outer


def why_no_default_scout(
    scout: Scout,
    base: BaseSchedule,
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
    problem = why_no_scout(base, model, replicas, gradients)
    if problem is not None or model is None:
        return problem
    if gradients == "shared" and isinstance(replicas, ProcessReplicas) and not _ddp_modules(model):
        return "under FSDP2 it waits to be asked for: `scout=hdet.Scout()`"
    shares = base.shares(total_steps)
    if shares is not None and shares.mean < MIN_MEAN_SHARE:
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
    num = sweep_steps(scout, total_steps, size)
    if not probes and num < MIN_LOSS_ROUND_STEPS:
        return (
            f"{scout.share:.0%} of {total_steps} steps are rounds of {num} for {size} replicas, "
            f"and training losses tell nothing in fewer than {MIN_LOSS_ROUND_STEPS}: "
            "give a `probe=`"
        )
    return None


def why_no_scout(
    base: BaseSchedule, model: nn.Module | None, replicas: Replicas, gradients: str
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
    if any(module.static_graph for module in _ddp_modules(model)):
        return "gradients cannot be local under DDP(static_graph=True)"
    if gradients == "shared" and not (_ddp_modules(model) or is_sharded(model)):
        return (
            "`scout` must know what shares the gradients, got a model outside DDP and FSDP2: give "
            "the wrapped one, or `gradients='local'`"
        )
    return None


def _ddp_modules(model: nn.Module) -> list[DistributedDataParallel]:
    return [m for m in model.modules() if isinstance(m, DistributedDataParallel)]


def drop_impossible_scout(
    settings: Settings, base: BaseSchedule, replicas: Replicas, model: nn.Module | None
) -> Settings:
    """One that nobody has asked for is left out where it cannot be; and says so."""
    scout = settings.scout
    if scout is None:
        return settings
    if base.step > 0:  # it sets out at the first step or never
        return replace(settings, scout=None)
    problem = why_no_default_scout(
        scout,
        base,
        model,
        replicas,
        total_steps=settings.total_steps,
        gradients=settings.gradients,
        probes=settings.probe is not None,
    )
    if problem is None:
        return settings
    warnings.warn(f"no scout: {problem}. The learning rate is kept as given.", stacklevel=5)
    return replace(settings, scout=None)


def check_compatible(
    settings: Settings, base: BaseSchedule, replicas: Replicas, model: nn.Module | None
) -> None:
    """Settings that do not go with each other, with the schedule or with the model."""
    if isinstance(base.optimizer, StackedOptimizer) and not isinstance(replicas, StackedReplicas):
        raise ValueError("`replicas=` must be the StackedReplicas whose optimizer this is.")
    if settings.gradients == "local" and model is None:
        raise ValueError("`gradients='local'` needs `model=`, got None.")
    if settings.probe is not None and None in replicas.modules(model):
        raise ValueError("`probe` needs `model=`, got None.")
    if settings.optimizer_state == "reset" and isinstance(base.optimizer, Adagrad):
        raise ValueError(
            "`optimizer_state` must be 'keep' or 'average' for Adagrad, which makes its state "
            "in its constructor, got 'reset'."
        )
    if settings.scout is not None:
        problem = why_no_scout(base, model, replicas, settings.gradients)
        if problem is not None:
            raise ValueError(f"{problem}.")
    rates = any(isinstance(knob, LearningRate) for knob in settings.knobs)
    for name in ("scout", "guard"):
        if getattr(settings, name) is not None and not rates:
            raise ValueError(f"`{name}` needs hdet.lr() among the knobs, got none.")
    if isinstance(replicas, TorchftReplicas):
        _check_elastic(settings, base, model)
    if settings.probe is not None and settings.gradients == "shared":
        _check_dials(settings)
    if settings.overlap:
        _check_overlap(settings)
    if settings.compress is not None and replicas.size > 1 and not isinstance(replicas, AllToAll):
        raise ValueError(
            "`compress` must be None for replicas that share a device: nothing is sent, got "
            f"{settings.compress!r}."
        )
    if settings.outer is not None:
        describe_outer(settings.outer)  # refuses what makes no optimizer
    if settings.outer is not None and replicas.size == 1:
        warnings.warn(
            "`outer` needs several replicas: nothing converges here, and it makes no step.",
            stacklevel=5,
        )
    total, limit = settings.total_steps, base.total_steps
    if total is not None and limit is not None and total > limit:
        raise ValueError(
            f"`total_steps` must be at most that of the base schedule ({limit}), got {total}."
        )
    if total is not None and settings.sync_every > total and replicas.size > 1:
        warnings.warn(
            f"`sync_every` ({settings.sync_every}) is longer than the run ({total} "
            "steps): replicas converge once, at its end, and the scale is never moved.",
            stacklevel=5,
        )


def _check_elastic(settings: Settings, base: BaseSchedule, model: nn.Module | None) -> None:
    """What needs the same replicas from one cycle to the next, and who shares gradients."""
    if is_of_torchft(base.optimizer):
        raise ValueError(
            "`base` must be a schedule of the optimizer inside, got one of torchft's "
            f"{type(base.optimizer).__name__}: step that one in your loop."
        )
    shared = "shared" if shares_gradients(model) else "local"
    if settings.gradients != shared:
        raise ValueError(
            f"`gradients` must be {shared!r} for this model, got {settings.gradients!r}: over a "
            "torchft manager they are shared by torchft.DistributedDataParallel, and else local."
        )
    for name, usual in (
        ("scout", None),
        ("guard", None),
        ("outer", None),
        ("overlap", 0),
        ("compress", None),
        ("optimizer_state", "keep"),
    ):
        if (value := getattr(settings, name)) != usual:
            raise ValueError(
                f"`{name}` must be {usual!r} for replicas that come and go, got {value!r}."
            )


def _check_dials(settings: Settings) -> None:
    """Replicas that share gradients have the same weights, whatever they train with."""
    dials = [k.name for k in settings.knobs if isinstance(k, DialKnob) and k.trains_only]
    if dials:
        warnings.warn(
            f"a probe cannot tell the values of {', '.join(dials)} apart where gradients are "
            "shared: all replicas have the same weights, whatever their own. Use "
            "`gradients='local'`.",
            stacklevel=6,
        )


def _check_overlap(settings: Settings) -> None:
    if 2 * settings.overlap > settings.sync_every:
        raise ValueError(
            "`overlap` must be at most half of `sync_every` "
            f"({settings.sync_every}), got {settings.overlap}."
        )
    if settings.optimizer_state != "keep":
        raise ValueError(
            "`overlap` needs optimizer_state='keep': states that train on cannot be averaged, got "
            f"{settings.optimizer_state!r}."
        )


def check_knobs(
    settings: Settings, knob_bank: KnobBank, groups: Sequence[str], num_replicas: int
) -> None:
    """Knobs must have names of their own, and should not be more than can be told apart."""
    rates = {knob.name for knob in knob_bank.knobs if knob.info.groups}
    for knob in knob_bank.knobs:
        # A record knows learning rates by their groups, a state all knobs by their names.
        if not knob.info.groups and knob.name in {*rates, *groups}:
            raise ValueError(
                f"`knobs` must have names that no parameter group has, got {knob.name!r}."
            )
    most, num = num_replicas - 1, knob_bank.num_spread
    controller = settings.controller
    # A controller that wants permutations judges each knob alone; any other tells them apart.
    alone = controller is None or complete_controller(controller).default_design == "permutation"
    if num <= most or most == 0 or (alone and settings.design == "permutation"):
        return
    remedy = f"they take turns, {most} in every cycle."
    if settings.design == "permutation":
        remedy = "none will move. Leave `design` to hdet, or use more replicas."
    warnings.warn(
        f"{num_replicas} replicas can tell {most} knob(s) apart, got {num}: {remedy}", stacklevel=5
    )
