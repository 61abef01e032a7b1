"""Everything that is checked before the first step, on every replica alike.

A bad argument on one replica, or two replicas that disagree, is an error on all of them: nobody
is left waiting for a replica that has already gone.
"""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, NoReturn

from torch import nn
from torch.optim import Adagrad

from hdet.base import Base
from hdet.codec import CODECS
from hdet.controller import Controller, PaperController
from hdet.design import DESIGNS
from hdet.elastic import TorchftReplicas, is_of_torchft, shares_gradients
from hdet.guard import Guard
from hdet.knobs import DialKnob, LearningRate
from hdet.ledger import Traders
from hdet.outer import Make, describe_outer
from hdet.parameters import Parameters
from hdet.preset import scout_problem, unfit_for_scouts
from hdet.probe import Probe
from hdet.replicas import Replicas
from hdet.scout import Scout
from hdet.stacked import StackedReplicas
from hdet.stacked_optimizer import StackedOptimizer
from hdet.steering import Steering
from hdet.validation import check_choice, check_integer, check_range

GRADIENTS = ("shared", "local")
OPTIMIZER_STATES = ("keep", "average", "reset")
OVERRUNS = ("hold", "extend", "raise")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a run is set to; equal on all replicas."""

    spread: float
    sync_every: int
    controller: Controller | None
    gradients: str
    optimizer_state: str
    total_steps: int | None
    on_overrun: str
    seed: int
    knobs: tuple[Any, ...] = (LearningRate(),)
    probe: Probe | None = None
    scout: Scout | None = None
    guard: Guard | None = None
    outer: Make | None = None
    overlap: int = 0
    compress: str | None = None
    design: str | None = None
    """Who explores what; by default the paper's permutations for its controller."""

    def __post_init__(self) -> None:
        if self.design is None:
            object.__setattr__(self, "design", self._default_design())
        check_choice("design", self.design, DESIGNS)
        for knob in self.knobs:
            if isinstance(knob, LearningRate) and knob.spread and self.design == "permutation":
                # The paper's multipliers reach from 1 - spread.
                check_range("spread", knob.spread, least=0, below=1)
        check_range("spread", self.spread, least=0, below=1)
        check_integer("sync_every", self.sync_every, at_least=1)
        check_integer("seed", self.seed, at_least=0)
        check_integer("overlap", self.overlap, at_least=0)
        if self.compress is not None:
            check_choice("compress", self.compress, list(CODECS))
        check_choice("gradients", self.gradients, GRADIENTS)
        check_choice("optimizer_state", self.optimizer_state, OPTIMIZER_STATES)
        check_choice("on_overrun", self.on_overrun, OVERRUNS)
        is_one = hasattr(self.controller, "update") and not isinstance(self.controller, type)
        if self.controller is not None and not is_one:
            raise TypeError(
                "`controller` must be a controller such as hdet.PaperController(), None or "
                f"'auto', got {self.controller!r}."
            )
        if self.scout is not None and not isinstance(self.scout, Scout):
            raise TypeError(
                f"`scout` must be hdet.Scout(), None, 'auto' or 'restart', got {self.scout!r}."
            )
        if self.guard is not None and not isinstance(self.guard, Guard):
            raise TypeError(f"`guard` must be hdet.Guard(), None or 'auto', got {self.guard!r}.")
        if self.total_steps is not None:
            check_integer("total_steps", self.total_steps, at_least=1)
            if self.controller is not None and self.controller.warmup_steps >= self.total_steps:
                raise ValueError(
                    f"`warmup_steps` must be less than `total_steps` ({self.total_steps}), "
                    f"got {self.controller.warmup_steps}."
                )

    def _default_design(self) -> str:
        only_lr = all(isinstance(knob, LearningRate) for knob in self.knobs)
        paper = isinstance(self.controller, PaperController)
        return "permutation" if paper or (self.controller is None and only_lr) else "orthogonal"


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What one replica says of itself at the door."""

    settings: dict[str, Any]
    parameters: dict[str, tuple[tuple[int, ...], str, tuple[int, ...], int | None]]
    perturbed: bool


def describe(settings: Settings, schedule: dict[str, Any], parameters: Parameters) -> Description:
    return Description(
        settings={**plain(settings), **schedule},
        parameters=parameters.describe(),
        perturbed=parameters.are_perturbed(),
    )


def plain(settings: Settings) -> dict[str, Any]:
    """The settings as data that can be compared and written down."""
    entries = {field.name: getattr(settings, field.name) for field in fields(settings)}
    controller = settings.controller
    if controller is not None:
        own = asdict(controller) if is_dataclass(controller) else vars(controller)
        entries["controller"] = {"kind": type(controller).__name__, **own}
    entries["knobs"] = [knob.describe() for knob in settings.knobs]
    for name in ("scout", "guard"):
        entries[name] = None if entries[name] is None else asdict(entries[name])
    entries["outer"] = None if settings.outer is None else describe_outer(settings.outer)
    entries["probe"] = None if settings.probe is None else settings.probe.describe()
    return entries


def without_a_useless_scout(
    settings: Settings, base: Base, replicas: Replicas, model: nn.Module | None
) -> Settings:
    """One that nobody has asked for is left out where it cannot be; and says so."""
    scout = settings.scout
    if scout is None:
        return settings
    if base.step > 0:  # it sets out at the first step or never
        return replace(settings, scout=None)
    problem = scout_problem(
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


def check_together(
    settings: Settings, base: Base, replicas: Replicas, model: nn.Module | None
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
        problem = unfit_for_scouts(base, model, replicas, settings.gradients)
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
    if settings.compress is not None and replicas.size > 1 and not isinstance(replicas, Traders):
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


def _check_elastic(settings: Settings, base: Base, model: nn.Module | None) -> None:
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
    settings: Settings, steering: Steering, groups: Sequence[str], num_replicas: int
) -> None:
    """Knobs must have names of their own, and should not be more than can be told apart."""
    rates = {knob.name for knob in steering.knobs if knob.about.members}
    for knob in steering.knobs:
        # A record knows learning rates by their groups, a state all knobs by their names.
        if not knob.about.members and knob.name in {*rates, *groups}:
            raise ValueError(
                f"`knobs` must have names that no parameter group has, got {knob.name!r}."
            )
    most, num = num_replicas - 1, steering.num_spread
    # The paper's rule looks at each knob alone; any other must tell them apart.
    alone = isinstance(settings.controller, PaperController | None)
    if num <= most or most == 0 or (alone and settings.design == "permutation"):
        return
    remedy = f"they take turns, {most} in every cycle."
    if settings.design == "permutation":
        remedy = "none will move. Leave `design` to hdet, or use more replicas."
    warnings.warn(
        f"{num_replicas} replicas can tell {most} knob(s) apart, got {num}: {remedy}", stacklevel=5
    )


def refuse(replicas: Replicas, problem: Exception) -> NoReturn:
    """This replica cannot start: tell the others, so that nobody waits for it."""
    replicas.gather_objects(f"{type(problem).__name__}: {problem}")
    raise problem


def agree(replicas: Replicas, mine: Description) -> bool:
    """Raise on all replicas if one of them has a problem or differs; whether weights differ."""
    everyone = replicas.gather_objects(mine)
    for process, theirs in enumerate(everyone):
        if isinstance(theirs, str):
            raise ValueError(f"replica {process // replicas.parts} could not start: {theirs}")
    on_purpose = all(theirs.perturbed for theirs in everyone)
    weights_differ = False
    for process, theirs in enumerate(everyone):
        replica, part = divmod(process, replicas.parts)
        first = everyone[part]  # parts of one replica may hold other tensors
        difference = (
            _different_settings(first.settings, theirs.settings, replica)
            or _different_settings(_common(everyone[0]), _common(theirs), replica)
            or _different_parameters(first.parameters, theirs.parameters, replica)
        )
        weights = _different_weights(first.parameters, theirs.parameters, replica)
        if difference or (weights and not on_purpose):
            raise ValueError(f"replicas must be alike: {difference or weights}")
        weights_differ |= weights is not None
    return weights_differ or (on_purpose and replicas.size > 1)


def _common(told: Description) -> dict[str, Any]:
    """What also the parts of one replica must agree in."""
    return {name: value for name, value in told.settings.items() if name != "groups"}


def _different_settings(first: Any, other: Any, replica: int, name: str = "") -> str | None:
    """The first entry in which two settings differ, however deep it lies."""
    if isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        first, other = dict(enumerate(first)), dict(enumerate(other))
    if isinstance(first, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*first, *other]):
            inner = f"{name}.{key}" if name else f"{key}"
            found = _different_settings(first.get(key), other.get(key), replica, inner)
            if found:
                return found
        return None
    if first == other:
        return None
    return f"`{name}` is {first!r} on replica 0 and {other!r} on replica {replica}."


def _different_parameters(first: dict[str, Any], other: dict[str, Any], replica: int) -> str | None:
    for name in [*first, *other]:
        if name not in first or name not in other:
            there, missing = (0, replica) if name in first else (replica, 0)
            return f"parameter {name!r} exists on replica {there} but not on replica {missing}."
        if first[name][:3] != other[name][:3]:
            return (
                f"parameter {name!r} is {_shape(first[name])} on replica 0 "
                f"and {_shape(other[name])} on replica {replica}."
            )
    return None


def _shape(entry: tuple[tuple[int, ...], str, tuple[int, ...], int | None]) -> str:
    return f"{entry[0]} {entry[1]} with strides {entry[2]}"


def _different_weights(first: dict[str, Any], other: dict[str, Any], replica: int) -> str | None:
    for name, entry in first.items():
        if name in other and entry[3] != other[name][3]:
            return (
                f"parameter {name!r} does not start from the same values on replicas 0 and "
                f"{replica}. Seed, load or broadcast the weights first (DDP broadcasts them), "
                "or perturb them on purpose with hdet.perturb_."
            )
    return None
