"""The paper's controller: softmax weights, hypergradient, velocity and decay (eqs. 4 to 8)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from hdet._validation import check_integer, check_positive, check_range
from hdet.control.controller import BaseController, Evidence, Move, ScaleState, direction

LARGEST_MOVE = 2.0
"""One sync may halve or double the scale, no more. The paper's update has no such bound: where the
decay is faster than the velocity forgets (1 - gamma < beta), an old velocity carries the shrunken
learning rate through zero."""


def softmax_weights(losses: Sequence[float], temperature: float) -> list[float]:
    """Compute w = softmax((mean(L) - L) / temperature) without overflow (eq. 4).

    >>> softmax_weights([1.0, 1.0], temperature=0.1)
    [0.5, 0.5]
    """
    # A softmax ignores a common shift: measured from the best loss, every exponent is <= 0.
    best = min(losses)
    raw = [math.exp((best - loss) / temperature) for loss in losses]
    total = math.fsum(raw)
    return [value / total for value in raw]


def hypergradient(weights: Sequence[float], factors: Sequence[float]) -> float:
    """Delta = sum_r w_r f_r - mean(f): where the losses pull the centre (eqs. 5 and 6).

    >>> hypergradient([0.25, 0.75], [0.5, 1.5])
    0.25
    """
    centre = fmean(factors)
    return math.fsum(w * (f - centre) for w, f in zip(weights, factors, strict=True))


def hypergradient_error(
    weights: Sequence[float],
    factors: Sequence[float],
    errors: Sequence[float | None],
    temperature: float,
) -> float | None:
    """The standard error of the hypergradient, to first order in those of the losses.

    A loss that is higher by e lowers its weight: d Delta / d L_r = -w_r (f_r - sum w f) / sigma.

    >>> hypergradient_error([0.5, 0.5], [0.5, 1.5], [0.3, 0.4], temperature=0.5)
    0.25
    """
    known = [error for error in errors if error is not None]
    if not known or len(known) < len(weights):
        return None
    preferred = math.fsum(w * f for w, f in zip(weights, factors, strict=True))
    terms = zip(weights, factors, known, strict=True)
    return math.hypot(*(w * (f - preferred) * e / temperature for w, f, e in terms))


def decay_rate(start: float, floor: float, num_cycles: int) -> float:
    """The gamma with which `start` reaches `floor` after `num_cycles` syncs without signal (eq. 8).

    The paper prints 1 - exp(-log(div_factor / final_div_factor) / K), which is negative for
    PyTorch's defaults: there the "decay" multiplies the learning rate by 400 over the run.

    >>> round(1.0 * (1 - decay_rate(1.0, 0.25, 2)) ** 2, 12)
    0.25
    """
    if num_cycles < 1 or start <= 0:
        return 0.0
    return 1 - math.pow(floor / start, 1 / num_cycles)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperController(BaseController):
    """Auto-LR as the paper defines it, with the sign of eq. 8 corrected.

    Replicas with lower losses get larger weights (eq. 4). The weighted mean of their factors pulls
    the scale (eqs. 5 to 7), which decays to its floor at the end of the run (eq. 8).

    Args:
        warmup_steps: Steps before the first sync that may move the scale (paper: S_warm).
        momentum: The share of the old velocity that stays (paper: beta).
        temperature: The loss difference that changes a weight by a factor e (paper: sigma).
        step_size: How far the velocity moves the scale (paper: lambda).

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A number is out of its range.

    >>> PaperController(temperature=0.2).momentum
    0.9
    """

    warmup_steps: int = 0
    momentum: float = 0.9
    temperature: float = 0.1
    step_size: float = 0.5

    # The permutations of the paper (eq. 9): this controller judges each knob alone.
    default_design = "permutation"

    def __post_init__(self) -> None:
        check_integer("warmup_steps", self.warmup_steps, at_least=0)
        check_range("momentum", self.momentum, least=0, below=1)
        check_positive("temperature", self.temperature)
        check_positive("step_size", self.step_size)

    def weigh(self, losses: Sequence[float]) -> list[float]:
        """Return the weight of each healthy replica (paper, eq. 4).

        Args:
            losses: The losses of the healthy replicas.

        Returns:
            The weights, which add up to 1.
        """
        return softmax_weights(losses, self.temperature)

    def update(self, state: ScaleState, evidence: Evidence) -> Move:
        """Set v <- beta v + (1 - beta) Delta and scale <- (1 - gamma) scale + lambda v (eq. 7).

        Args:
            state: The state of the knob.
            evidence: Losses and factors of one cycle.

        Returns:
            The new state, and why.
        """
        weights = self.weigh(evidence.losses)
        pull = hypergradient(weights, evidence.factors)
        velocity = self.momentum * state.velocity + (1 - self.momentum) * pull
        decayed = state.scale * (1 - state.decay)
        wanted = decayed + self.step_size * velocity
        scale = wanted
        if evidence.space.kind == "log":
            scale = min(max(wanted, decayed / LARGEST_MOVE), decayed * LARGEST_MOVE)
        scale = min(max(scale, state.floor, evidence.space.low), evidence.space.high)
        return Move(
            state=state._replace(scale=scale, velocity=velocity),
            hypergradient=pull,
            decision=direction(scale, decayed),
            reason=_reason(evidence, pull, velocity, bounded=scale != wanted),
            error=hypergradient_error(weights, evidence.factors, evidence.errors, self.temperature),
        )


def _reason(evidence: Evidence, pull: float, velocity: float, *, bounded: bool) -> str:
    best = min(range(len(evidence.losses)), key=evidence.losses.__getitem__)
    text = (
        f"lowest loss {evidence.losses[best]:.6g} at factor {evidence.factors[best]:.4g}: "
        f"pull {pull:+.3g}, velocity {velocity:+.3g}"
    )
    return text + ", bounded" if bounded else text
