"""Tracker: the noise-aware controller. It moves a knob on strong evidence, else it abstains.

Plain Python floats, no torch.
"""

import math
from dataclasses import dataclass

from hdet._validation import check_flag, check_integer, check_positive, check_range
from hdet.control.controller import (
    BaseController,
    Evidence,
    Move,
    ScaleState,
    decay_only,
    direction,
)

LONGER, SHORTER = 1.2, 0.5
"""Factors on the reach after a move in the same direction, and after one back."""
SHORTEST = 0.05
"""The shortest reach, in units of the spread."""
NARROWEST = 0.25
"""The smallest share of the spread that replicas use: without spread nothing can be compared."""
SUREST = 10.0
"""The most standard errors that one cycle may add, also where there is no noise at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracker(BaseController):
    """Moves each knob by its slope over the standard error, within a trust region.

    The evidence of a cycle is the slope of the joint fit in standard errors, so the scale of the
    loss does not matter. A knob stays where it is while the evidence is weak.

    Args:
        warmup_steps: Steps before the first sync that may move a knob.
        momentum: The share of the earlier evidence that stays with the next cycle.
        threshold: The evidence, in standard errors, below which a knob stays.
        trust: The longest move of a cycle, in units of the knob's spread.
        cooldown: The last share of a run, of known length, in which nothing is explored: all
            replicas use what was found.
        relative: Whether the learning rates of groups move only against each other, while a scout
            sets their mean. Short comparisons prefer lower learning rates for all groups together.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A number is out of its range.

    >>> Tracker(cooldown=0.2).threshold
    2.0
    """

    warmup_steps: int = 0
    momentum: float = 0.5
    threshold: float = 2.0
    trust: float = 2.0
    cooldown: float = 0.1
    relative: bool = False

    def __post_init__(self) -> None:
        check_integer("warmup_steps", self.warmup_steps, at_least=0)
        check_range("momentum", self.momentum, least=0, below=1)
        check_range("threshold", self.threshold, least=0, below=math.inf)
        check_positive("trust", self.trust)
        check_range("cooldown", self.cooldown, least=0, below=1)
        check_flag("relative", self.relative)

    def update(self, state: ScaleState, evidence: Evidence) -> Move:
        """Move u <- u + reach x tanh(z / 2), with z the faded sum of -slope / error.

        Args:
            state: The state of the knob.
            evidence: Slope and error of one cycle.

        Returns:
            The new state, and why.
        """
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
        evidence_text = f"slope {slope:+.3g} ± {error:.2g}: {sure:+.1f} standard errors"
        if abs(sure) < self.threshold:
            move = decay_only(
                state, f"abstained: {evidence_text}, fewer than {self.threshold:g}", "abstain"
            )
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
            reason=evidence_text + (", at its bound" if at_bound else ""),
            error=error,
        )

    def _reach(self, state: ScaleState, sure: float) -> float:
        if state.reach == 0:
            return min(1.0, self.trust)
        factor = LONGER if sure * state.velocity > 0 else SHORTER
        return min(max(state.reach * factor, SHORTEST), self.trust)
