"""Where every knob stands: scales, multipliers, and when the controller is asked.

Plain Python, no torch: every process computes the same answer, bit for bit.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from hdet.control.assignment import levels, spread_out
from hdet.control.controller import Controller, Evidence, Move, ScaleState, decay_only, direction
from hdet.control.knob_state import KnobInfo, KnobState, first_state
from hdet.control.one_cycle_bounds import OneCycleBounds
from hdet.control.paper import decay_rate
from hdet.control.regression import DecayedSlope, Noise, Slope
from hdet.control.regression import fit_slopes as joint_fit


class CycleMoves(NamedTuple):
    """What the controller made of one cycle."""

    weights: list[float] | None
    """The weight of every replica; none if the controller was not asked, or does not weigh."""
    moves: list[Move]
    """One for each knob."""
    slopes: list[Slope | None]
    """What the joint fit says about each knob in this cycle."""


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
        self.knobs = [KnobState(about, first_state(about)) for about in explored]
        self.cycle = 0
        self.started = False
        """Whether the controller has taken over."""
        self.closed = False
        """Whether exploration has ended: everyone uses the centre of the spread."""
        self.held: list[float] | None = None
        """The learning rates at the hand-over, if the controller took over from the base."""
        self._noise = Noise()
        self._num_replicas = num_replicas
        self._design = design
        self._sync_every = sync_every
        self._seed = seed
        self._controller = controller if num_replicas > 1 else None
        self._total_steps = total_steps
        # If set, the controller takes the decay over from this base schedule (paper, eq. 8).
        self._one_cycle_bounds = one_cycle

    @property
    def needs_losses(self) -> bool:
        return self._controller is not None and not self.closed

    @property
    def num_spread(self) -> int:
        """Knobs that are explored; N replicas tell N - 1 of them apart in one cycle."""
        return sum(knob.info.spread != 0 for knob in self.knobs)

    def is_spread(self) -> bool:
        return any(knob.is_spread() for knob in self.knobs)

    def scales(self) -> dict[str, float]:
        """The centre of every knob."""
        return {knob.name: knob.state.scale for knob in self.knobs}

    def fan_out(self) -> None:
        """Give every replica its place in the spread of every knob (paper, eqs. 1 and 9)."""
        if self._design == "permutation":
            for knob in self.knobs:
                self._permute(knob)
            return
        rests = self.closed or self._is_cooling()
        spread = [knob for knob in self.knobs if knob.info.spread and not rests]
        columns = levels(
            self._design,
            self._num_replicas,
            [knob.name for knob in spread],
            seed=self._seed,
            cycle=self.cycle,
        )
        for knob in self.knobs:
            knob.levels = (0.0,) * self._num_replicas
        for knob, column in zip(spread, columns, strict=True):
            knob.levels = column

    def _is_cooling(self) -> bool:
        """Whether the run is in the last share in which nothing is explored."""
        share = getattr(self._controller, "cooldown", 0.0)
        if not share or self._total_steps is None:
            return False
        return self.cycle >= _cycles_until(self._total_steps, self._sync_every) * (1 - share)

    def _permute(self, knob: KnobState) -> None:
        rests = self.closed or self._is_cooling()
        fan = spread_out(
            self._num_replicas,
            0.0 if rests else knob.info.spread if knob.info.groups else 1.0,
            seed=self._seed,
            # Before the hand-over in the order of the replicas, as in the paper.
            cycle=self.cycle if self.started else None,
            knob=knob.name,
        )
        if knob.info.groups:
            knob.multipliers = fan
        else:
            knob.levels = tuple(multiplier - 1 for multiplier in fan)

    def factors_of_groups(self, replica: int | None, num_groups: int) -> list[float]:
        """What the learning rate of each group is multiplied by: of a replica, or in the centre."""
        factors = [1.0] * num_groups
        for knob in self.knobs:
            factor = knob.state.scale if replica is None else knob.factor(replica)
            for group in knob.info.groups:
                factors[group] = factor
        return factors

    def lrs(self, base: Sequence[float], replica: int | None = None) -> list[float]:
        """base x scale x multiplier, for every group; without a replica those of the centre."""
        pairs = zip(self.base_lrs(base), self.factors_of_groups(replica, len(base)), strict=True)
        return [lr * factor for lr, factor in pairs]

    def base_lrs(self, base: Sequence[float]) -> list[float]:
        """The base schedule's learning rates, or those held at the hand-over.

        Only what is explored is handed over: the rest goes on with its schedule.
        """
        if self.held is None:
            return list(base)
        handed = {group for knob in self.knobs for group in knob.info.groups}
        pairs = enumerate(zip(base, self.held, strict=True))
        return [held if group in handed else lr for group, (lr, held) in pairs]

    def move_knobs(
        self,
        losses: Sequence[float | None],
        fit: Sequence[int],
        errors: Sequence[float | None] = (),
        scores: Sequence[Sequence[float]] | None = None,
    ) -> CycleMoves:
        """Ask the controller about every knob, with what the replicas that are fit have shown.

        They are compared by `scores`, one for each batch of a probe, or else by their losses.
        """
        shown = _compared_by(losses, scores, fit)
        stood = [knob.factors() for knob in self.knobs]
        if list(shown) != list(range(self._num_replicas)):  # most often everyone is
            stood = [[factors[r] for r in shown] for factors in stood]
        slopes = self._fit(shown, stood)
        pause = self._pause(complete=len(shown) == len(fit) or scores is not None)
        if pause is None and len(shown) < 2:
            pause = "fewer than two replicas with a finite score"
        means = {replica: fmean(row) for replica, row in shown.items()}
        known = [errors[replica] for replica in means] if errors else []
        told = list(means.values())
        moves = []
        for knob, slope, factors in zip(self.knobs, slopes, stood, strict=True):
            moves.append(self._move(knob, slope, told, factors, known, pause))
            knob.note_slope(slope)
        if getattr(self._controller, "relative", False):
            moves = self._against_each_other(moves)
        for knob, move in zip(self.knobs, moves, strict=True):
            knob.state = move.state
        weights = None
        if self._controller is not None and pause is None:
            weights = self._controller.weigh(list(means.values()))
        if weights is None:
            return CycleMoves(None, moves, slopes)
        named = dict(zip(shown, weights, strict=True))
        return CycleMoves([named.get(r, 0.0) for r in range(self._num_replicas)], moves, slopes)

    def _fit(
        self, shown: Mapping[int, Sequence[float]], stood: Sequence[Sequence[float]]
    ) -> list[Slope | None]:
        if len(shown) < 2 or self.closed or not self.is_spread():
            return [None] * len(self.knobs)
        pairs = zip(self.knobs, stood, strict=True)
        positions = [knob.positions(factors) for knob, factors in pairs]
        before = [knob.slope for knob in self.knobs]
        found = joint_fit(positions, list(shown.values()), self._noise, before)
        self._noise = found.noise
        for knob, slope in zip(self.knobs, found.slopes, strict=True):
            # One that rests in this cycle keeps what it had: where knobs take turns, nothing else
            # would ever tell how slopes vary.
            knob.slope = knob.slope if slope is None else slope.slope
        return found.slopes

    def _move(
        self,
        knob: KnobState,
        slope: Slope | None,
        means: Sequence[float],
        factors: Sequence[float],
        errors: Sequence[float | None],
        pause: str | None,
    ) -> Move:
        if self._controller is None or pause is not None:
            return decay_only(knob.state, pause or "")
        if not knob.info.spread:
            return decay_only(knob.state, "not spread")
        return self._controller.update(
            knob.state,
            Evidence(
                means,
                factors,
                errors,
                knob.info.space,
                knob.width,
                slope,
            ),
        )

    def _against_each_other(self, moves: Sequence[Move]) -> list[Move]:
        """The same without what the learning rates of all groups have in common."""
        rates = [place for place, knob in enumerate(self.knobs) if knob.info.groups]
        told = list(moves)
        steps = [math.log(moves[p].state.scale / self.knobs[p].state.scale) for p in rates]
        if not any(steps):
            return told
        before = [self.knobs[place].state.scale for place in rates]
        for place, scale in zip(rates, self._centred(rates, moves), strict=True):
            told[place] = moves[place]._replace(
                state=moves[place].state._replace(scale=scale),
                decision=direction(scale, before[rates.index(place)]),
                reason=f"{moves[place].reason}, against the other groups",
            )
        return told

    def _centred(self, rates: Sequence[int], moves: Sequence[Move]) -> list[float]:
        """Where they come to if their mean stays; what is at a bound leaves it to the others."""
        scales = [moves[place].state.scale for place in rates]
        before = [self.knobs[place].state.scale for place in rates]
        for _ in rates:
            excess = math.fsum(math.log(a / b) for a, b in zip(scales, before, strict=True))
            spaces = [self.knobs[place].info.space for place in rates]
            edges = [space.low if excess > 0 else space.high for space in spaces]
            free = [n for n, edge in enumerate(edges) if scales[n] != edge]
            if not free or not excess:
                break
            for n in free:
                scales[n] = spaces[n].clamped(scales[n] * math.exp(-excess / len(free)))
        return scales

    def rest(self) -> None:
        """All replicas in the centre of every spread."""
        for knob in self.knobs:
            knob.multipliers = (1.0,) * (self._num_replicas if knob.multipliers else 0)
            knob.levels = (0.0,) * self._num_replicas

    def resize(self, num_replicas: int) -> None:
        """So many replicas from now on, and all in the centre until they fan out again."""
        self._num_replicas = num_replicas
        self.rest()

    def rescale(self, factor: float) -> None:
        """All learning rates begin this many times higher."""
        for knob in self.knobs:
            if knob.info.groups:
                scale = knob.info.space.clamped(knob.state.scale * factor)
                knob.state = knob.state._replace(scale=scale)

    def start_if_due(self, step: int, base: Sequence[float], base_step: int | None = None) -> None:
        """Hand over to the controller at the first sync at which its warm-up is over.

        The warm-up is that of the base schedule, which may be at another step than the run.
        """
        due = step if base_step is None else base_step
        if self._controller is None or self.started or due < self._controller.warmup_steps:
            return
        self.started = True
        if self._one_cycle_bounds is not None:
            self.held = list(base)
            self.set_decays(step)

    def set_decays(self, step: int) -> None:
        """From what is left of the run: every knob's way to its floor (paper, eq. 8)."""
        if self._one_cycle_bounds is None or self._total_steps is None:
            return
        num_cycles = _cycles_until(self._total_steps, self._sync_every)
        num_cycles -= step // self._sync_every
        for knob in self.knobs:
            if self.held is not None and knob.info.groups:
                group = knob.info.groups[0]
                held, floor = self.held[group], self._one_cycle_bounds.floors[group]
                knob.state = knob.state._replace(
                    decay=decay_rate(held * knob.state.scale, floor, num_cycles),
                    floor=floor / held,
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
            "peaks": None if self._one_cycle_bounds is None else list(self._one_cycle_bounds.peaks),
            "held": self.held,
            "noise": list(self._noise),
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
        self._noise = Noise(*state["noise"])
        for knob, saved in zip(self.knobs, state["knobs"], strict=True):
            told = ScaleState(**{name: saved[name] for name in ScaleState._fields})
            # Bounds are what the run is set to now.
            knob.state = told._replace(scale=knob.info.space.clamped(told.scale))
            knob.slope = saved["slope"]
            knob.recent_slope = DecayedSlope(*saved["felt"])
        if self._one_cycle_bounds is not None and state["peaks"] not in (
            None,
            self._one_cycle_bounds.peaks,
        ):
            # The run is set to another learning rate now: what is held moves along with it.
            pairs = zip(state["peaks"], self._one_cycle_bounds.peaks, strict=True)
            shifted_by = [new / old for old, new in pairs]
            if self.held is not None:
                self.held = [lr * by for lr, by in zip(self.held, shifted_by, strict=True)]

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
        if self._is_cooling():
            return "cool-down: all replicas use what was found"
        return None if complete else "no loss since the converge on demand"


def _compared_by(
    losses: Sequence[float | None],
    scores: Sequence[Sequence[float]] | None,
    fit: Sequence[int],
) -> dict[int, Sequence[float]]:
    """What each replica that is fit is compared by; without those that have no finite number."""
    if scores is None:
        return {r: [loss] for r in fit if (loss := losses[r]) is not None}
    return {r: scores[r] for r in fit if scores[r] and all(map(math.isfinite, scores[r]))}


def _cycles_until(step: int, sync_every: int) -> int:
    """Cycles that have ended at the end of a run of so many steps; the last may be short.

    >>> _cycles_until(100, 50), _cycles_until(101, 50)
    (2, 3)
    """
    return -(-step // sync_every)
