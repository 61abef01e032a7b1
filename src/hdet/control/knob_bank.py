"""The knobs of a run: their scales, and when the controller takes over.

Plain Python, no torch: every process computes the same answer, bit for bit.
"""

from collections.abc import Sequence
from typing import Any

from hdet.control.controller import Controller, ScaleState, complete_controller
from hdet.control.controller_loop import ControllerLoop, CycleMoves, comparable_scores
from hdet.control.exploration import Exploration, num_cycles
from hdet.control.knob_state import KnobInfo, KnobState, first_state
from hdet.control.one_cycle_bounds import OneCycleBounds
from hdet.control.paper import decay_rate
from hdet.control.regression import DecayedSlope, Noise


class KnobBank:
    """The knobs of a run, from the first fan-out to the last cycle."""

    def __init__(
        self,
        explored: Sequence[KnobInfo],
        *,
        num_replicas: int,
        design: str,
        sync_every: int,
        seed: int,
        controller: Controller | None,
        total_steps: int | None,
        one_cycle: OneCycleBounds | None = None,
    ) -> None:
        """Set up from plain values.

        Args:
            explored: The knobs.
            num_replicas: Replicas of the run.
            design: Which replica explores what: one of `assignment.DESIGNS`.
            sync_every: Steps of a cycle.
            seed: The seed of the assignments.
            controller: What moves the knobs; None keeps them where they are.
            total_steps: Steps of the run; None if not known.
            one_cycle: The bounds of the base schedule whose decay the controller takes over
                (paper, eq. 8); None leaves the decay to the base schedule.
        """
        self.knobs = [KnobState(about, first_state(about)) for about in explored]
        self.cycle = 0
        self.started = False
        """Whether the controller has taken over."""
        self.closed = False
        """Whether exploration has ended: all replicas use the centre of the spread."""
        self.held: list[float] | None = None
        """The learning rates at the hand-over, if the controller took over the decay."""
        self._num_replicas = num_replicas
        self._sync_every = sync_every
        self._total_steps = total_steps
        self._one_cycle_bounds = one_cycle
        self._controller = None
        if controller is not None and num_replicas > 1:
            self._controller = complete_controller(controller)
        self._loop = ControllerLoop(self._controller)
        self._exploration = Exploration(
            design,
            seed=seed,
            sync_every=sync_every,
            total_steps=total_steps,
            cooldown=0.0 if self._controller is None else self._controller.cooldown,
        )

    @property
    def needs_losses(self) -> bool:
        """Whether the controller compares the losses of replicas."""
        return self._controller is not None and not self.closed

    @property
    def num_spread(self) -> int:
        """Knobs that are explored; N replicas tell N - 1 of them apart in one cycle."""
        return sum(knob.info.spread != 0 for knob in self.knobs)

    def is_spread(self) -> bool:
        """Whether replicas use different values of any knob in this cycle."""
        return any(knob.is_spread() for knob in self.knobs)

    def scales(self) -> dict[str, float]:
        """The centre of every knob."""
        return {knob.name: knob.state.scale for knob in self.knobs}

    def fan_out(self) -> None:
        """Give every replica its place in the spread of every knob (paper, eqs. 1 and 9)."""
        self._exploration.assign(
            self.knobs,
            self._num_replicas,
            cycle=self.cycle,
            started=self.started,
            closed=self.closed,
        )

    def factors_of_groups(self, replica: int | None, num_groups: int) -> list[float]:
        """The factor on the learning rate of each group, for a replica or for the centre (None)."""
        factors = [1.0] * num_groups
        for knob in self.knobs:
            factor = knob.state.scale if replica is None else knob.factor(replica)
            for group in knob.info.groups:
                factors[group] = factor
        return factors

    def lrs(self, base: Sequence[float], replica: int | None = None) -> list[float]:
        """Return base x scale x multiplier for each group, or the centre without a replica."""
        pairs = zip(self.base_lrs(base), self.factors_of_groups(replica, len(base)), strict=True)
        return [lr * factor for lr, factor in pairs]

    def base_lrs(self, base: Sequence[float]) -> Sequence[float]:
        """The base schedule's learning rates, or those held at the hand-over.

        Only explored groups are handed over; the others go on with their schedule.
        """
        if self.held is None:
            return base
        handed = {group for knob in self.knobs for group in knob.info.groups}
        pairs = enumerate(zip(base, self.held, strict=True))
        return [held if group in handed else lr for group, (lr, held) in pairs]

    def move_knobs(
        self,
        losses: Sequence[float | None],
        comparable: Sequence[int],
        errors: Sequence[float | None] = (),
        scores: Sequence[Sequence[float]] | None = None,
    ) -> CycleMoves:
        """Ask the controller about every knob, and move the knobs.

        Args:
            losses: The mean training loss of each replica; None if it has none.
            comparable: The replicas that can be compared.
            errors: The standard error of each loss.
            scores: The scores of each replica, one per batch of a probe; None to compare losses.
        """
        shown = comparable_scores(losses, scores, comparable)
        return self._loop.move_knobs(
            self.knobs,
            shown,
            errors,
            num_replicas=self._num_replicas,
            explores=not self.closed and self.is_spread(),
            pause=self._pause(complete=len(shown) == len(comparable) or scores is not None),
        )

    def _pause(self, *, complete: bool) -> str | None:
        """Why the controller is not asked in this cycle; None if it is."""
        if self._num_replicas == 1:
            return "one replica: nothing to compare"
        if self._controller is None:
            return "no controller"
        if not self.started:
            return f"warm-up until step {self._controller.warmup_steps}"
        if self.closed:
            return "the schedule has ended"
        if self._exploration.is_cooling(self.cycle):
            return "cool-down: all replicas use what was found"
        return None if complete else "no loss since the converge on demand"

    def rest(self) -> None:
        """Put all replicas in the centre of every spread."""
        for knob in self.knobs:
            knob.multipliers = (1.0,) * (self._num_replicas if knob.multipliers else 0)
            knob.levels = (0.0,) * self._num_replicas

    def resize(self, num_replicas: int) -> None:
        """Change the number of replicas. All are in the centre before the next fan-out."""
        self._num_replicas = num_replicas
        self.rest()

    def rescale(self, factor: float) -> None:
        """Multiply the scale of all learning rates."""
        for knob in self.knobs:
            if knob.info.groups:
                scale = knob.info.space.clamped(knob.state.scale * factor)
                knob.state = knob.state._replace(scale=scale)

    def start_if_due(self, step: int, base: Sequence[float], base_step: int | None = None) -> None:
        """Hand over to the controller at the first sync at which its warm-up is over.

        Args:
            step: The step of the run.
            base: The learning rates of the base schedule.
            base_step: The step of the base schedule, which counts for the warm-up, if it differs.
        """
        due = step if base_step is None else base_step
        if self._controller is None or self.started or due < self._controller.warmup_steps:
            return
        self.started = True
        if self._one_cycle_bounds is not None:
            self.held = list(base)
            self.set_decays(step)

    def set_decays(self, step: int) -> None:
        """Set the decay of every knob to its floor over the rest of the run (paper, eq. 8)."""
        if self._one_cycle_bounds is None or self._total_steps is None:
            return
        cycles_left = num_cycles(self._total_steps, self._sync_every) - step // self._sync_every
        for knob in self.knobs:
            if self.held is not None and knob.info.groups:
                group = knob.info.groups[0]
                held, floor = self.held[group], self._one_cycle_bounds.floors[group]
                knob.state = knob.state._replace(
                    decay=decay_rate(held * knob.state.scale, floor, cycles_left),
                    floor=floor / held,
                )

    def end(self, *, close: bool) -> None:
        """End the decay with the schedule, and the spread too if it is to `close`."""
        self.closed = close
        for knob in self.knobs:
            knob.state = knob.state._replace(decay=0.0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "cycle": self.cycle,
            "started": self.started,
            "closed": self.closed,
            "peaks": None if self._one_cycle_bounds is None else list(self._one_cycle_bounds.peaks),
            "held": self.held,
            "noise": list(self._loop.noise),
            "knobs": [
                {
                    "name": knob.name,
                    "start": knob.info.start,
                    **knob.state._asdict(),
                    "slope": knob.slope,
                    "felt": list(knob.recent_slope),
                }
                for knob in self.knobs
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cycle, self.started = state["cycle"], state["started"]
        self.closed, self.held = state["closed"], state["held"]
        self._loop.noise = Noise(*state["noise"])
        for knob, saved in zip(self.knobs, state["knobs"], strict=True):
            loaded = ScaleState(**{name: saved[name] for name in ScaleState._fields})
            # The bounds are those of the current settings.
            knob.state = loaded._replace(scale=knob.info.space.clamped(loaded.scale))
            knob.slope = saved["slope"]
            knob.recent_slope = DecayedSlope(*saved["felt"])
        bounds, old_peaks = self._one_cycle_bounds, state["peaks"]
        if self.held is None or bounds is None or old_peaks in (None, bounds.peaks):
            return
        # The settings have another learning rate now, so the held ones move along with it.
        factors = [new / old for old, new in zip(old_peaks, bounds.peaks, strict=True)]
        self.held = [lr * factor for lr, factor in zip(self.held, factors, strict=True)]
