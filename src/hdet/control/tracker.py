"""Noise-aware tracking: move a knob as far as the evidence is beyond doubt, else abstain.

Plain Python floats, no torch. The evidence of a cycle is the slope of the joint fit in units of its
standard error, so that nothing depends on the scale of the loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hdet._validation import check_flag, check_integer, check_positive, check_range
from hdet.control.controller import Evidence, Move, ScaleState, decay_only, direction

# A direction that is confirmed makes the next move longer, one that is reversed makes it shorter.
LONGER, SHORTER = 1.2, 0.5
SHORTEST = 0.05
"""The least reach, in units of the spread."""
NARROWEST = 0.25
"""The least share of the spread that replicas use: with none there is nothing to compare."""
SUREST = 10.0
"""Where there is no noise at all, a sign is as sure as can be, and no surer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracker:
    """Steps in each knob's own space by slope / standard error, within a trust region."""

    warmup_steps: int = 0
    """Steps before the first sync that may move a knob."""
    momentum: float = 0.5
    """Share of the earlier evidence that stays with the next cycle."""
    threshold: float = 2.0
    """Evidence, in standard errors, below which a knob stays where it is."""
    trust: float = 2.0
    """The longest move of a cycle, in units of the knob's spread."""
    cooldown: float = 0.1
    """The last share of a run, of known length, in which all replicas use what was found."""
    relative: bool = False
    """Whether the learning rates of groups move against each other alone, and leave their mean to a
    scout: what is better at once is lower for all of them (docs/settle.md), higher for some."""

    def __post_init__(self) -> None:
        check_integer("warmup_steps", self.warmup_steps, at_least=0)
        check_range("momentum", self.momentum, least=0, below=1)
        check_range("threshold", self.threshold, least=0, below=math.inf)
        check_positive("trust", self.trust)
        check_range("cooldown", self.cooldown, least=0, below=1)
        check_flag("relative", self.relative)

    def weigh(self, losses: Sequence[float]) -> None:
        """It looks at slopes, not at replicas."""

    def update(self, state: ScaleState, evidence: Evidence) -> Move:
        """u <- u + reach x tanh(z / 2), with z the faded sum of -slope / error."""
        if evidence.slope is None:
            return decay_only(state, "abstained: no spread of its own to compare", "abstain")
        sure_now = evidence.slope.in_errors
        if sure_now is None:
            return decay_only(state, "abstained: nothing is known about the noise yet", "abstain")
        slope, error = evidence.slope.slope, evidence.slope.error
        pull = self.momentum * state.pull - min(max(sure_now, -SUREST), SUREST)
        mass = self.momentum**2 * state.mass + 1
        state = state._replace(pull=pull, mass=mass)
        sure = pull / math.sqrt(mass)
        told = f"slope {slope:+.3g} ± {error:.2g}: {sure:+.1f} standard errors"
        if abs(sure) < self.threshold:
            move = decay_only(state, f"abstained: {told}, fewer than {self.threshold:g}", "abstain")
            return move._replace(hypergradient=-slope, error=error)
        reach = self._reach(state, sure)
        decayed = state.scale * (1 - state.decay)
        wanted = evidence.space.shifted(decayed, reach * evidence.width * math.tanh(sure / 2))
        scale = max(wanted, min(state.floor, decayed))
        at_bound = scale in (evidence.space.low, evidence.space.high)
        return Move(
            state._replace(
                scale=scale,
                reach=reach,
                velocity=math.copysign(1.0, sure),
                narrow=min(max(reach, NARROWEST), 1.0),
            ),
            hypergradient=-slope,
            decision=direction(scale, decayed),
            reason=told + (", at its bound" if at_bound else ""),
            error=error,
        )

    def _reach(self, state: ScaleState, sure: float) -> float:
        if state.reach == 0:
            return min(1.0, self.trust)
        factor = LONGER if sure * state.velocity > 0 else SHORTER
        return min(max(state.reach * factor, SHORTEST), self.trust)
