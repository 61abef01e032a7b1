"""Settings: the options of a run."""

from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from torch.amp import GradScaler

from hdet._validation import check_bounds, check_choice, check_integer, check_range
from hdet.control.assignment import DESIGNS
from hdet.control.controller import Controller, complete_controller
from hdet.control.guard import Guard
from hdet.knobs.specs import LearningRate
from hdet.lr_search.scout import Scout
from hdet.replicas.quantization import CODECS
from hdet.signals.probe import Probe
from hdet.weights.outer_optimizer import OptimizerFactory, describe_outer

GRADIENTS = ("shared", "local")
OPTIMIZER_STATES = ("keep", "average", "reset")
OVERRUNS = ("hold", "extend", "raise")
CONTROLLER_MEMBERS = ("warmup_steps", "weigh", "update")
"""What a controller must have; the other members of `BaseController` have defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The options of a run, checked one by one. They are equal on all replicas.

    `HDET` describes the options. `check_compatible` checks how they work together.
    """

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
    outer: OptimizerFactory | None = None
    overlap: int = 0
    compress: str | None = None
    lr_bounds: tuple[float, float] | None = None
    scaler: GradScaler | None = None
    design: str | None = None
    """How multipliers are assigned to replicas. None becomes the design of the controller."""

    def __post_init__(self) -> None:
        self._check_parts()  # first: the controller names the default design
        if self.design is None:
            object.__setattr__(self, "design", self._default_design())
        self._check_exploration()
        self._check_numbers_and_choices()
        self._check_length()
        if self.lr_bounds is not None:
            check_bounds("lr_bounds", self.lr_bounds)

    def _check_exploration(self) -> None:
        check_choice("design", self.design, DESIGNS)
        for knob in self.knobs:
            if isinstance(knob, LearningRate) and self.design == "permutation":
                for spread in knob.spreads.values():
                    # The paper's multipliers start at 1 - spread, which must be above 0.
                    check_range("spread", spread, least=0, below=1)
        check_range("spread", self.spread, least=0, below=1)

    def _check_numbers_and_choices(self) -> None:
        check_integer("sync_every", self.sync_every, at_least=1)
        check_integer("seed", self.seed, at_least=0)
        check_integer("overlap", self.overlap, at_least=0)
        if self.compress is not None:
            check_choice("compress", self.compress, list(CODECS))
        check_choice("gradients", self.gradients, GRADIENTS)
        check_choice("optimizer_state", self.optimizer_state, OPTIMIZER_STATES)
        check_choice("on_overrun", self.on_overrun, OVERRUNS)

    def _check_parts(self) -> None:
        controller = self.controller
        missing = [name for name in CONTROLLER_MEMBERS if not hasattr(controller, name)]
        if controller is not None and (missing or isinstance(controller, type)):
            raise TypeError(
                "`controller` must be a controller such as hdet.PaperController(), None or "
                f"'auto', got {controller!r}"
                + (f" without {', '.join(missing)}." if missing else ".")
            )
        if self.scout is not None and not isinstance(self.scout, Scout):
            raise TypeError(
                f"`scout` must be hdet.Scout(), None, 'auto' or 'restart', got {self.scout!r}."
            )
        if self.guard is not None and not isinstance(self.guard, Guard):
            raise TypeError(f"`guard` must be hdet.Guard(), None or 'auto', got {self.guard!r}.")
        if self.scaler is not None and not isinstance(self.scaler, GradScaler):
            raise TypeError(
                f"`scaler` must be a torch.amp.GradScaler or None, got {self.scaler!r}."
            )

    def _check_length(self) -> None:
        if self.total_steps is None:
            return
        check_integer("total_steps", self.total_steps, at_least=1)
        if self.controller is not None and self.controller.warmup_steps >= self.total_steps:
            raise ValueError(
                f"`warmup_steps` must be less than `total_steps` ({self.total_steps}), "
                f"got {self.controller.warmup_steps}."
            )

    def _default_design(self) -> str:
        """Return the paper's permutations for its controller, else an orthogonal design."""
        only_lr = all(isinstance(knob, LearningRate) for knob in self.knobs)
        if self.controller is None:
            return "permutation" if only_lr else "orthogonal"
        return complete_controller(self.controller).default_design


def as_plain_data(settings: Settings) -> dict[str, Any]:
    """Return the settings as plain data, for the comparison of replicas and for the record."""
    entries = {field.name: getattr(settings, field.name) for field in fields(settings)}
    controller = settings.controller
    if controller is not None:
        own = asdict(controller) if is_dataclass(controller) else vars(controller)
        entries["controller"] = {"kind": type(controller).__name__, **own}
    entries["knobs"] = [knob.describe() for knob in settings.knobs]
    entries["scout"] = None if settings.scout is None else asdict(settings.scout)
    entries["guard"] = None if settings.guard is None else settings.guard.describe()
    entries["outer"] = None if settings.outer is None else describe_outer(settings.outer)
    entries["scaler"] = None if settings.scaler is None else settings.scaler.state_dict()
    entries["probe"] = None if settings.probe is None else settings.probe.describe()
    return entries
