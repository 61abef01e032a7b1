"""Prior: which learning rates are usual for an optimizer, before anything is tried."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from hdet.lr_search.constants import (
    ADAFACTOR_PRIOR,
    ADAM_PRIOR,
    GAIN_SIZE,
    LION_PRIOR,
    MUON_PRIOR,
    PRIOR_ERROR,
    SGD_MOMENTUM_PRIOR,
    SGD_PRIOR,
    SIZE_ERROR,
    SIZE_POWER,
    USUAL_SIZE,
)

FAMILIES: dict[str, tuple[float, str]] = {
    "Adam": (
        ADAM_PRIOR,
        "Adam AdamW Adamax NAdam RAdam SparseAdam AdaBelief AdamP StableAdamW Adam_mini "
        "Adan Lamb FusedAdam FusedAdamW FusedLAMB DeepSpeedCPUAdam HybridAdam AnyPrecisionAdamW "
        "Adam8bit AdamW8bit Adam4bit AdamW4bit AdamFp8 AdamWFp8 LAMB8bit "
        "PagedAdam PagedAdamW PagedAdam8bit PagedAdamW8bit "
        "AdamWScheduleFree AdamWScheduleFreeClosure AdamWScheduleFreeReference "
        "AdamWScheduleFreePaper RAdamScheduleFree RAdamScheduleFreeClosure",
    ),
    "Adafactor": (ADAFACTOR_PRIOR, "Adafactor AdafactorBigVision"),
    "Lion": (LION_PRIOR, "Lion FusedLion Lion8bit PagedLion PagedLion8bit"),
    "Muon": (MUON_PRIOR, "Muon MuonWithAuxAdam SingleDeviceMuon SingleDeviceMuonWithAuxAdam"),
}
"""Family -> its prior, and the classes of optimizers that belong to it."""
MEAN_OF_CLASS = {name: mean for mean, names in FAMILIES.values() for name in names.lower().split()}
SGD_FAMILY = ("sgd", "asgd")


class Prior(NamedTuple):
    """The usual mean learning rate of a run: its logarithm to base 10, and its error.

    Attributes:
        mean: The logarithm.
        error: Its error.
        decades: The model is larger by so many factors of ten than those whose gains are known.
    """

    mean: float
    error: float
    decades: float = 0.0


def prior_of(*classes: str, momentum: float = 0.0, num_parameters: int = 0) -> Prior | None:
    """The prior of an optimizer; None if it is not known.

    Larger models want lower learning rates, except with SGD. How much lower is not known well, so
    the error grows with the size.

    Args:
        *classes: The names of its class and of those that it inherits from, the nearest first. The
            first that is known counts. A part of a name says nothing: DAdaptAdam multiplies a
            learning rate of its own by that of its groups.
        momentum: Its momentum.
        num_parameters: The size of the model; 0 if not known.

    >>> prior_of("AdamW") == prior_of("Adam"), prior_of("MyOwn")
    (True, None)
    >>> prior_of("MyAdam", "AdamW", "Optimizer") == prior_of("AdamW")
    True
    >>> small, large = (prior_of("AdamW", num_parameters=size) for size in (30_000, 85_000_000))
    >>> large.mean < small.mean, large.error > small.error
    (True, True)
    """
    for name in map(str.lower, classes):
        if name in SGD_FAMILY:
            return Prior(SGD_MOMENTUM_PRIOR if momentum else SGD_PRIOR, PRIOR_ERROR)
        if name in MEAN_OF_CLASS:
            return _of_size(MEAN_OF_CLASS[name], num_parameters)
    return None


def prior_of_members(members: Sequence[tuple[Prior | None, int]]) -> Prior | None:
    """The prior of a factor on the learning rates of several optimizers.

    Each optimizer counts by its share of the parameters, as far as it is known. Where they want
    different factors, none fits all, and the error grows by the difference.

    Args:
        members: The prior of each optimizer for the common factor, and its number of parameters.

    >>> adam, sgd = Prior(0.0, 0.3), Prior(1.0, 0.3)
    >>> prior_of_members([(adam, 100)]) == adam, prior_of_members([(None, 100)])
    (True, None)
    >>> together = prior_of_members([(adam, 50), (sgd, 50)])
    >>> together.mean, round(together.error, 3)
    (0.5, 0.583)
    """
    if len(members) == 1:
        return members[0][0]
    known = [(prior, size) for prior, size in members if prior is not None and size]
    total = sum(size for _, size in known)
    if not total:
        return None
    mean = sum(size * prior.mean for prior, size in known) / total
    squares = [size * (prior.error**2 + (prior.mean - mean) ** 2) for prior, size in known]
    share = total / sum(size for _, size in members)
    decades = max(prior.decades for prior, _ in known)
    return Prior(mean, math.sqrt(sum(squares) / total / share), decades)


def _of_size(mean: float, num_parameters: int) -> Prior:
    decades = _decades_above(USUAL_SIZE, num_parameters)
    error = math.hypot(PRIOR_ERROR, SIZE_ERROR * decades)
    return Prior(mean - SIZE_POWER * decades, error, _decades_above(GAIN_SIZE, num_parameters))


def _decades_above(size: float, num_parameters: int) -> float:
    return math.log10(max(num_parameters / size, 1.0))
