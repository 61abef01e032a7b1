"""The slope of the score along every knob, by one joint least-squares fit, with standard errors.

Plain Python floats, no torch. The fit separates the knobs, so a noisy knob cannot move another.
"""

import math
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

MIN_LEFT_OVER_SHARE = 1e-6
"""A column of which the others explain all but this share cannot be separated from them."""
ROUNDING = 1e-12
"""Columns with a smaller correlation count as orthogonal."""
MAX_SCORE = 1e100
"""Squares of larger scores overflow; a run with such a loss is lost in any case."""
SLOPE_MEMORY = 0.9
"""The weight of a cycle's slope one cycle later."""
NOISE_MEMORY = 0.85
"""The weight of a cycle's noise one cycle later."""
MIN_RELATIVE_ERROR = 1e-3
"""The smallest error of a slope, as a share of it: it limits the weight of noiseless slopes."""
MIN_ERROR = 1e-100
"""A slope with a smaller error is left out: its weight overflows."""


class Noise(NamedTuple):
    """The variance that earlier fits left unexplained: its sum of squares, and its freedom."""

    squares: float = 0.0
    freedom: float = 0.0

    @property
    def variance(self) -> float | None:
        return self.squares / self.freedom if self.freedom > 0 else None


class Slope(NamedTuple):
    """d score / d position of one knob.

    Attributes:
        slope: The slope.
        error: Its standard error; None while the noise is not known.
        freedom: The degrees of freedom of the error.
    """

    slope: float
    error: float | None
    freedom: float = math.inf

    @property
    def in_errors(self) -> float | None:
        """The slope in standard errors, lower if the error has few degrees of freedom.

        Student's t is converted to the normal deviate that is as rare, within a few percent.

        >>> round(Slope(2.57, 1.0, freedom=5).in_errors, 1)
        1.9
        """
        if self.error is None:
            return None
        if self.error == 0:
            return math.copysign(math.inf, self.slope) if self.slope else 0.0
        t = self.slope / self.error
        return t * (1 - 1 / (4 * max(self.freedom, 1))) / math.sqrt(1 + t * t / (2 * self.freedom))


class DecayedSlope(NamedTuple):
    """The mean slope of many cycles, weighted by certainty; old cycles fade.

    Attributes:
        total: The sum of the weights.
        weighted: The sum of the weighted slopes.
        squares: The sum of the squared weights, each times the variance of its slope.
        num: The number of cycles that count.
    """

    total: float = 0.0
    weighted: float = 0.0
    squares: float = 0.0
    num: float = 0.0

    def and_then(self, slope: float, error: float) -> "DecayedSlope":
        """The mean with one more cycle.

        >>> felt = DecayedSlope().and_then(1.0, 0.5).and_then(1.0, 0.5)
        >>> felt.slope
        1.0
        """
        error = max(error, MIN_RELATIVE_ERROR * abs(slope))
        if error < MIN_ERROR:
            return self
        weight = 1 / error**2
        # Slopes change during a run, and the first ones are small and precise. So all earlier
        # cycles together weigh no more than as many cycles as precise as this one.
        most = weight * SLOPE_MEMORY / (1 - SLOPE_MEMORY)
        keep = SLOPE_MEMORY if SLOPE_MEMORY * self.total <= most else most / self.total
        return DecayedSlope(
            keep * self.total + weight,
            keep * self.weighted + weight * slope,
            keep**2 * self.squares + weight,
            SLOPE_MEMORY * self.num + 1,
        )

    @property
    def slope(self) -> float:
        return self.weighted / self.total if self.total else 0.0

    @property
    def error(self) -> float:
        return math.sqrt(self.squares) / self.total if self.total else math.inf


class Fit(NamedTuple):
    """One slope per knob, None for a knob without its own spread; and the noise so far."""

    slopes: list[Slope | None]
    noise: Noise


def fit_slopes(
    positions: Sequence[Sequence[float]],
    scores: Sequence[Sequence[float]],
    noise: Noise = Noise(),  # noqa: B008 (it is a tuple)
    before: Sequence[float | None] = (),
) -> Fit:
    """Fit the slope of every knob.

    Two things make a slope uncertain: the chance of the replicas (the residuals of the fit, pooled
    with earlier cycles) and the choice of the batches (the slopes of single batches). A fit with as
    many knobs as replicas minus one has no residuals. Then the change of the slopes since the cycle
    before shows how much they vary.

    Args:
        positions: The position of each replica, for each knob.
        scores: The scores of each replica, one per batch.
        noise: The noise of earlier cycles.
        before: The slope of each knob in the cycle before.

    >>> one = fit_slopes([[-1.0, 1.0, -1.0, 1.0]], [[3.0], [5.0], [3.0], [5.0]])
    >>> one.slopes[0].slope, one.slopes[0].error, one.slopes[0].freedom
    (1.0, 0.0, 2.0)
    """
    if max(map(max, scores)) > MAX_SCORE or min(map(min, scores)) < -MAX_SCORE:
        return Fit([None] * len(positions), noise)
    columns = [_centred(column) for column in positions]
    # Centred, since a large common value would cost precision.
    means = _centred([sum(row) / len(row) for row in scores])
    left, powers = _left_over(columns)
    slopes = [
        None if column is None else _dot(column, means) / power
        for column, power in zip(left, powers, strict=True)
    ]
    rest = _unexplained(columns, slopes, means)
    freedom = len(means) - 1 - sum(slope is not None for slope in slopes)
    found = Noise(_dot(rest, rest), freedom) if freedom > 0 else _from(before, slopes, powers)
    pooled = Noise(
        NOISE_MEMORY * noise.squares + found.squares, NOISE_MEMORY * noise.freedom + found.freedom
    )
    batches = [_centred(batch) for batch in zip(*scores, strict=True)]
    answers = [
        None
        if column is None or slope is None
        else Slope(slope, *_error(column, power, batches, pooled))
        for column, power, slope in zip(left, powers, slopes, strict=True)
    ]
    return Fit(answers, pooled)


def _from(
    before: Sequence[float | None], now: Sequence[float | None], powers: Sequence[float]
) -> Noise:
    """The noise from the change of slopes, whose variance is twice that of one slope.

    var(slope) = variance / power.
    """
    changes = [
        (b - a) ** 2 * power / 2
        for a, b, power in zip(before, now, powers, strict=False)
        if a is not None and b is not None
    ]
    return Noise(math.fsum(changes), float(len(changes)))


def _error(
    column: Sequence[float], power: float, batches: Sequence[Sequence[float]], noise: Noise
) -> tuple[float | None, float]:
    """The standard error of a slope, and its degrees of freedom (Welch and Satterthwaite).

    Batches alone do not show it: all of them score the same replicas.
    """
    if noise.variance is None:
        return None, math.inf
    total = noise.variance / power
    doubt = total * total / noise.freedom
    num_batches = len(batches)
    if num_batches > 1:
        each = [_dot(column, batch) / power for batch in batches]
        centre = sum(each) / num_batches
        spread = sum([(slope - centre) ** 2 for slope in each])
        spread /= (num_batches - 1) * num_batches
        total += spread
        doubt += spread * spread / (num_batches - 1)
    return math.sqrt(total), total * total / doubt if doubt else noise.freedom


def _left_over(
    columns: Sequence[list[float]],
) -> tuple[list[list[float] | None], list[float]]:
    """The part of each column that the others do not explain, and its sum of squares."""
    powers = [_dot(column, column) for column in columns]
    if _are_orthogonal(columns, powers):
        pairs = zip(columns, powers, strict=True)
        return [column if power else None for column, power in pairs], powers
    left = [_unlike_others(columns, knob) for knob in range(len(columns))]
    return left, [0.0 if column is None else _dot(column, column) for column in left]


def _are_orthogonal(columns: Sequence[list[float]], powers: Sequence[float]) -> bool:
    """Whether columns are orthogonal, in a hundredth of the time of making them so.

    The columns are summed with irrational weights. The sum has the summed power of the columns only
    if all products of two columns are zero.
    """
    sizes = [math.sqrt(2 + place) for place in range(len(columns))]
    together = [_dot(sizes, row) for row in zip(*columns, strict=True)]
    alone = sum(size * size * power for size, power in zip(sizes, powers, strict=True))
    return abs(_dot(together, together) - alone) <= ROUNDING * alone


def _unlike_others(columns: Sequence[list[float]], knob: int) -> list[float] | None:
    """The part of a column that the others do not explain (Frisch and Waugh); None if too small."""
    own = columns[knob]
    power = _dot(own, own)
    if power == 0:
        return None
    basis: list[list[float]] = []
    for other in [*columns[:knob], *columns[knob + 1 :]]:
        rest = orthogonal_residual(other, basis)
        if _dot(rest, rest) > MIN_LEFT_OVER_SHARE * _dot(other, other):
            basis.append(rest)
    rest = orthogonal_residual(own, basis)
    return rest if _dot(rest, rest) > MIN_LEFT_OVER_SHARE * power else None


def orthogonal_residual(column: Sequence[float], basis: Sequence[list[float]]) -> list[float]:
    """The residual of a column after a fit by columns that are orthogonal to each other."""
    rest = list(column)
    for one in basis:
        share = _dot(rest, one) / _dot(one, one)
        rest = [a - share * b for a, b in zip(rest, one, strict=True)]
    return rest


def _unexplained(
    columns: Sequence[list[float]], slopes: Sequence[float | None], scores: Sequence[float]
) -> list[float]:
    known = [slope or 0.0 for slope in slopes]
    fitted = [_dot(known, row) for row in zip(*columns, strict=True)]
    return [a - b for a, b in zip(_centred(scores), fitted, strict=True)]


def _centred(values: Sequence[float]) -> list[float]:
    # Equal values have no spread; their rounded mean may differ from them.
    if all(value == values[0] for value in values):
        return [0.0] * len(values)
    centre = sum(values) / len(values)
    return [value - centre for value in values]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    total: float = sum(map(mul, one, other))
    return total
