"""What the replicas' scores say about every knob at once: slopes and their standard errors.

Plain Python floats, no torch. A joint least-squares fit: the effect of a knob is what is left of
it when all the others are held, so that a noisy knob cannot move another.
"""

import math
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

# A column of which the others explain all but this share cannot be told apart from them.
MIN_LEFT_OVER_SHARE = 1e-6
# Columns whose correlation is less than this have none.
ROUNDING = 1e-12
# Beyond it squares leave the range of a float: a run with such a loss is lost anyway.
MAX_ERROR_RATIO = 1e100
# How much of a cycle's slope counts one cycle later.
SLOPE_MEMORY = 0.9
# How much of what was known about the noise is kept from one cycle to the next.
NOISE_MEMORY = 0.85


class Noise(NamedTuple):
    """What the fits of earlier cycles left unexplained: a variance, and how well it is known."""

    squares: float = 0.0
    freedom: float = 0.0

    @property
    def variance(self) -> float | None:
        return self.squares / self.freedom if self.freedom > 0 else None


class Slope(NamedTuple):
    """d score / d position of one knob."""

    slope: float
    error: float | None
    """Its standard error; none where nothing is known about the noise."""
    freedom: float = math.inf
    """How well the error is known: its degrees of freedom."""

    @property
    def in_errors(self) -> float | None:
        """The slope in standard errors, less where those are themselves known badly.

        Student's t as the normal variable that is as rare (to a few percent; never more).

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
    """The mean of the slopes of many cycles, each by its certainty, in which old ones fade."""

    total: float = 0.0
    """Of the weights."""
    weighted: float = 0.0
    """Of the weighted slopes."""
    squares: float = 0.0
    """Of the squared weights, each times the variance of its slope."""
    num: float = 0.0
    """So many cycles' worth of evidence."""

    def and_then(self, slope: float, error: float) -> "DecayedSlope":
        """With one cycle more.

        >>> felt = DecayedSlope().and_then(1.0, 0.5).and_then(1.0, 0.5)
        >>> felt.slope
        1.0
        """
        # Where there is no noise at all, a slope still counts no more than a thousand others.
        error = max(error, 1e-3 * abs(slope))
        if error < 1e-100:
            return self
        weight = 1 / error**2
        # Slopes change in a run, and those of its first steps are small and sure: all before count
        # no more together than as many cycles that are as sure as this one.
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
    """One answer for each knob; none for a knob that was not spread or cannot be told apart."""

    slopes: list[Slope | None]
    noise: Noise


def fit_slopes(
    positions: Sequence[Sequence[float]],
    scores: Sequence[Sequence[float]],
    noise: Noise = Noise(),  # noqa: B008 (it is a tuple)
    before: Sequence[float | None] = (),
) -> Fit:
    """`positions[knob][replica]`, `scores[replica][batch]` -> the slope of every knob.

    Two things make a slope uncertain: what replicas do by chance (what the fit leaves, pooled with
    earlier cycles), and which batches they were scored on (the slopes of single batches). As many
    knobs as replicas can tell apart leave nothing: then the slopes of the cycle `before` tell how
    much they vary.

    >>> one = fit_slopes([[-1.0, 1.0, -1.0, 1.0]], [[3.0], [5.0], [3.0], [5.0]])
    >>> one.slopes[0].slope, one.slopes[0].error, one.slopes[0].freedom
    (1.0, 0.0, 2.0)
    """
    if max(map(max, scores)) > MAX_ERROR_RATIO or min(map(min, scores)) < -MAX_ERROR_RATIO:
        return Fit([None] * len(positions), noise)
    columns = [_centred(column) for column in positions]
    # From their middle: what all have in common would be rounded, and that is no evidence.
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
    """What the change of slopes says about the noise: it has twice the variance of one slope, and
    var(slope) = variance / power."""
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

    Batches alone cannot tell it: all of them see the same replicas, with the same luck.
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
    """What each of them has of its own, and its power; of a design as it was dealt all of it."""
    powers = [_dot(column, column) for column in columns]
    if _are_orthogonal(columns, powers):
        pairs = zip(columns, powers, strict=True)
        return [column if power else None for column, power in pairs], powers
    left = [_unlike_others(columns, knob) for knob in range(len(columns))]
    return left, [0.0 if column is None else _dot(column, column) for column in left]


def _are_orthogonal(columns: Sequence[list[float]], powers: Sequence[float]) -> bool:
    """Most are, and to see it takes a hundredth of the time that it takes to make them so.

    Then a sum of all, each times a number that has nothing to do with the others, has the sum of
    their powers: as many products cannot cancel by chance.
    """
    sizes = [math.sqrt(2 + place) for place in range(len(columns))]
    together = [_dot(sizes, row) for row in zip(*columns, strict=True)]
    alone = sum(size * size * power for size, power in zip(sizes, powers, strict=True))
    return abs(_dot(together, together) - alone) <= ROUNDING * alone


def _unlike_others(columns: Sequence[list[float]], knob: int) -> list[float] | None:
    """What the other columns do not explain of this one (Frisch and Waugh); none if nothing."""
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
    """What columns that are orthogonal to each other leave of another."""
    rest = list(column)
    for one in basis:
        share = _dot(rest, one) / _dot(one, one)
        rest = [a - share * b for a, b in zip(rest, one, strict=True)]
    return rest


def _unexplained(
    columns: Sequence[list[float]], slopes: Sequence[float | None], scores: Sequence[float]
) -> list[float]:
    known = [slope or 0.0 for slope in slopes]
    told = [_dot(known, row) for row in zip(*columns, strict=True)]
    return [a - b for a, b in zip(_centred(scores), told, strict=True)]


def _centred(values: Sequence[float]) -> list[float]:
    # Equal values have no spread, whatever rounding makes of their mean.
    if all(value == values[0] for value in values):
        return [0.0] * len(values)
    centre = sum(values) / len(values)
    return [value - centre for value in values]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    total: float = sum(map(mul, one, other))
    return total
