"""Where every knob stands: scales, multipliers, and when the controller is asked.

Plain Python, no torch: every process computes the same answer, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hdet.controller import Controller, Evidence, Move, ScaleState, coast, decay_rate
from hdet.spread import spread_out


class Cycle(NamedTuple):
    """Where OneCycleLR peaks and where it ends, for each knob."""

    peaks: list[float]
    floors: list[float]


class Steered(NamedTuple):
    """What the controller made of one cycle."""

    weights: list[float] | None
    """The weight of every replica; none if the controller was not asked."""
    moves: list[Move]
    """One for each knob."""


@dataclass
class Knob:
    """One explored learning rate: that of a parameter group."""

    name: str
    state: ScaleState = field(default_factory=ScaleState)
    held: float | None = None
    """The learning rate at the hand-over, if the controller took over from the base schedule."""
    fan: tuple[float, ...] = ()
    """The multiplier of every replica."""

    def factor(self, replica: int) -> float:
        return self.state.scale * self.fan[replica]

    def factors(self) -> list[float]:
        return [self.factor(replica) for replica in range(len(self.fan))]


class Steering:
    """The knobs of a run, from the first fan-out to the last cycle."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        num_replicas: int,
        spread: float,
        sync_every: int,
        seed: int,
        controller: Controller | None,
        total_steps: int | None,
        takes_over: Cycle | None = None,
    ) -> None:
        self.knobs = [Knob(name) for name in names]
        self.cycle = 0
        self.started = False
        """Whether the controller has taken over."""
        self.closed = False
        """Whether exploration has ended: everyone uses the centre of the spread."""
        self._num_replicas = num_replicas
        self._spread = spread
        self._sync_every = sync_every
        self._seed = seed
        self._controller = controller if num_replicas > 1 else None
        self._total_steps = total_steps
        # If set, the controller takes the decay over from this base schedule (paper, eq. 8).
        self._takes_over = takes_over

    @property
    def needs_losses(self) -> bool:
        return self._controller is not None and not self.closed

    def is_spread(self) -> bool:
        return any(multiplier != 1.0 for knob in self.knobs for multiplier in knob.fan)

    def fan_out(self) -> None:
        """Give every replica its multiplier for every knob (paper, eqs. 1 and 9)."""
        for knob in self.knobs:
            knob.fan = spread_out(
                self._num_replicas,
                0.0 if self.closed else self._spread,
                seed=self._seed,
                # Before the hand-over in the order of the replicas, as in the paper.
                cycle=self.cycle if self.started else None,
                knob=f"lr/{knob.name}",
            )

    def lrs(self, base: Sequence[float], replica: int) -> list[float]:
        """base x scale x multiplier, for every knob."""
        pairs = zip(self.base_lrs(base), self.knobs, strict=True)
        return [lr * knob.factor(replica) for lr, knob in pairs]

    def base_lrs(self, base: Sequence[float]) -> list[float]:
        """The base schedule's learning rates, or those held at the hand-over."""
        pairs = zip(base, self.knobs, strict=True)
        return [lr if knob.held is None else knob.held for lr, knob in pairs]

    def steer(
        self,
        losses: Sequence[float | None],
        fit: Sequence[int],
        errors: Sequence[float | None] = (),
    ) -> Steered:
        """Ask the controller about every knob, with the losses of the replicas that are fit."""
        known = [loss for r in fit if (loss := losses[r]) is not None]
        pause = self._pause(complete=len(known) == len(fit))
        moves = []
        for knob in self.knobs:
            if self._controller is None or pause is not None:
                move = coast(knob.state, pause or "")
            else:
                factors = knob.factors()
                evidence = Evidence(
                    known, [factors[r] for r in fit], [errors[r] for r in fit] if errors else ()
                )
                move = self._controller.update(knob.state, evidence)
            knob.state = move.state
            moves.append(move)
        if self._controller is None or pause is not None:
            return Steered(None, moves)
        weights = dict(zip(fit, self._controller.weigh(known), strict=True))
        return Steered([weights.get(r, 0.0) for r in range(self._num_replicas)], moves)

    def start_if_due(self, step: int, base: Sequence[float]) -> None:
        """Hand over to the controller at the first sync at which its warm-up is over."""
        if self._controller is None or self.started or step < self._controller.warmup_steps:
            return
        self.started = True
        if self._takes_over is not None:
            for knob, lr in zip(self.knobs, base, strict=True):
                knob.held = lr
            self.set_decays(step)

    def set_decays(self, step: int) -> None:
        """From what is left of the run: every knob's way to its floor (paper, eq. 8)."""
        if self._takes_over is None or self._total_steps is None:
            return
        num_cycles = _cycles_until(self._total_steps, self._sync_every)
        num_cycles -= step // self._sync_every
        for knob, floor in zip(self.knobs, self._takes_over.floors, strict=True):
            if knob.held is not None:
                knob.state = knob.state._replace(
                    decay=decay_rate(knob.held * knob.state.scale, floor, num_cycles),
                    floor=floor / knob.held,
                )

    def end(self, *, close: bool) -> None:
        """The schedule is over: no decay any more, and no spread if it is to `close`."""
        self.closed = close
        for knob in self.knobs:
            knob.state = knob.state._replace(decay=0.0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "cycle": self.cycle,
            "started": self.started,
            "closed": self.closed,
            "peaks": None if self._takes_over is None else list(self._takes_over.peaks),
            "knobs": [
                {"name": knob.name, **knob.state._asdict(), "held": knob.held}
                for knob in self.knobs
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cycle, self.started = state["cycle"], state["started"]
        self.closed = state["closed"]
        for knob, saved in zip(self.knobs, state["knobs"], strict=True):
            knob.state = ScaleState(**{name: saved[name] for name in ScaleState._fields})
            knob.held = saved["held"]
        if self._takes_over is not None and state["peaks"] not in (None, self._takes_over.peaks):
            # The run is set to another learning rate now: what is held moves along with it.
            peaks = zip(self.knobs, state["peaks"], self._takes_over.peaks, strict=True)
            for knob, old, new in peaks:
                knob.held = knob.held if knob.held is None else knob.held * new / old

    def _pause(self, *, complete: bool) -> str | None:
        """Why the controller is not asked in this cycle, if it is not."""
        if self._num_replicas == 1:
            return "one replica: nothing to compare"
        if self._controller is None:
            return "no controller"
        if not self.started:
            return f"warm-up until step {self._controller.warmup_steps}"
        if self.closed:
            return "the schedule has ended"
        return None if complete else "no loss since the converge on demand"


def _cycles_until(step: int, sync_every: int) -> int:
    """Cycles that have ended at the end of a run of so many steps; the last may be short.

    >>> _cycles_until(100, 50), _cycles_until(101, 50)
    (2, 3)
    """
    return -(-step // sync_every)
