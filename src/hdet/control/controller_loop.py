"""The controller loop: from the scores of a cycle to the moves of all knobs.

Plain Python, no torch: every process computes the same answer, bit for bit.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from hdet.control.controller import BaseController, Evidence, Move, decay_only, direction
from hdet.control.knob_state import KnobState
from hdet.control.regression import Noise, Slope, fit_slopes


class CycleMoves(NamedTuple):
    """What the controller made of one cycle.

    Attributes:
        weights: The weight of every replica; None if the controller gave none.
        moves: One move for each knob.
        slopes: What the joint fit of this cycle says about each knob.
    """

    weights: list[float] | None
    moves: list[Move]
    slopes: list[Slope | None]


class ControllerLoop:
    """Fits the slopes of all knobs and asks the controller about each of them."""

    def __init__(self, controller: BaseController | None) -> None:
        self._controller = controller
        self.noise = Noise()
        """What the fits of all cycles so far left unexplained."""

    def move_knobs(
        self,
        knobs: Sequence[KnobState],
        shown: Mapping[int, Sequence[float]],
        errors: Sequence[float | None],
        *,
        num_replicas: int,
        explores: bool,
        pause: str | None,
    ) -> CycleMoves:
        """Move every knob by what the replicas have shown.

        Args:
            knobs: The knobs, whose states are set.
            shown: The scores of each replica that can be compared.
            errors: The standard error of each replica's loss, if known.
            num_replicas: Replicas of this cycle.
            explores: Whether replicas used different values.
            pause: Why the controller is not asked in this cycle; None if it is.
        """
        used = [knob.factors() for knob in knobs]
        if list(shown) != list(range(num_replicas)):  # in most cycles all are
            used = [[factors[r] for r in shown] for factors in used]
        slopes = self._fit(knobs, shown, used, explores)
        if pause is None and len(shown) < 2:
            pause = "fewer than two replicas with a finite score"
        means = [fmean(row) for row in shown.values()]
        known = [errors[replica] for replica in shown] if errors else []
        moves = []
        for knob, slope, factors in zip(knobs, slopes, used, strict=True):
            evidence = Evidence(means, factors, known, knob.info.space, knob.width, slope)
            moves.append(self._move(knob, evidence, pause))
            knob.note_slope(slope)
        if self._controller is not None and self._controller.relative:
            moves = move_against_each_other(knobs, moves)
        for knob, move in zip(knobs, moves, strict=True):
            knob.state = move.state
        weights = None
        if self._controller is not None and pause is None:
            weights = self._controller.weigh(means)
        if weights is not None:
            named = dict(zip(shown, weights, strict=True))
            weights = [named.get(replica, 0.0) for replica in range(num_replicas)]
        return CycleMoves(weights, moves, slopes)

    def _fit(
        self,
        knobs: Sequence[KnobState],
        shown: Mapping[int, Sequence[float]],
        used: Sequence[Sequence[float]],
        explores: bool,
    ) -> list[Slope | None]:
        if len(shown) < 2 or not explores:
            return [None] * len(knobs)
        positions = [knob.positions(factors) for knob, factors in zip(knobs, used, strict=True)]
        before = [knob.slope for knob in knobs]
        found = fit_slopes(positions, list(shown.values()), self.noise, before)
        self.noise = found.noise
        for knob, slope in zip(knobs, found.slopes, strict=True):
            # A knob that rests keeps its last slope: where knobs take turns, nothing else shows
            # how slopes vary.
            knob.slope = knob.slope if slope is None else slope.slope
        return found.slopes

    def _move(self, knob: KnobState, evidence: Evidence, pause: str | None) -> Move:
        if self._controller is None or pause is not None:
            return decay_only(knob.state, pause or "")
        if not knob.info.spread:
            return decay_only(knob.state, "not spread")
        return self._controller.update(knob.state, evidence)


def comparable_scores(
    losses: Sequence[float | None],
    scores: Sequence[Sequence[float]] | None,
    comparable: Sequence[int],
) -> dict[int, Sequence[float]]:
    """The scores, or else the loss, of each healthy replica that has finite ones."""
    if scores is None:
        return {r: [loss] for r in comparable if (loss := losses[r]) is not None}
    return {r: scores[r] for r in comparable if scores[r] and all(map(math.isfinite, scores[r]))}


def move_against_each_other(knobs: Sequence[KnobState], moves: Sequence[Move]) -> list[Move]:
    """The moves without what the learning rates of all groups have in common."""
    rates = [place for place, knob in enumerate(knobs) if knob.info.groups]
    relative = list(moves)
    before = [knobs[place].state.scale for place in rates]
    pairs = zip(rates, before, strict=True)
    if not any(math.log(moves[place].state.scale / scale) for place, scale in pairs):
        return relative
    centred = _centred_scales([knobs[p] for p in rates], [moves[p].state.scale for p in rates])
    for place, scale, old in zip(rates, centred, before, strict=True):
        relative[place] = moves[place]._replace(
            state=moves[place].state._replace(scale=scale),
            decision=direction(scale, old),
            reason=f"{moves[place].reason}, against the other groups",
        )
    return relative


def _centred_scales(knobs: Sequence[KnobState], moved: Sequence[float]) -> list[float]:
    """The scales after moves that keep their mean. A knob at a bound leaves it to the others."""
    scales = list(moved)
    before = [knob.state.scale for knob in knobs]
    spaces = [knob.info.space for knob in knobs]
    for _ in knobs:
        excess = math.fsum(math.log(a / b) for a, b in zip(scales, before, strict=True))
        edges = [space.low if excess > 0 else space.high for space in spaces]
        free = [n for n, edge in enumerate(edges) if scales[n] != edge]
        if not free or not excess:
            break
        for n in free:
            scales[n] = spaces[n].clamped(scales[n] * math.exp(-excess / len(free)))
    return scales
