"""Guard: the settings of the protection against failures. Plain Python."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from hdet._validation import check_flag, check_integer, check_positive, check_range


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Restores the best weights of a run that fails, and caps its learning rate.

    The guard judges the mean training loss of all replicas at the end of every cycle. A cycle
    fails if its loss lies far above the lowest level so far, if it is not finite, or if the model
    is dead. Then the run returns to the weights of its best cycle, and the rest of the schedule is
    scaled so that its peak is a quarter of the learning rate that failed: the *ceiling*. No batch
    is repeated. A learning rate that has trained well is spared once: it may be the data.

    Args:
        deviations: A failure lies at least this many standard errors above the level.
        share: A failure gives back at least this share of the gain of the run so far.
        lower: The ceiling, in units of the learning rate that failed. It counts twice if the next
            cycle fails as well.
        retries: Rollbacks in a row before the run stops with `ReplicasLost`.
        offload: Whether the best weights are kept in the memory of the host.
        metric: A function without arguments that returns the number to judge instead of the
            training loss; lower is better. Every process calls it at the end of every cycle, and
            the mean over the replicas counts. None or a number that is not finite says nothing.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A number is out of its range.

    >>> Guard(retries=3).lower
    0.25
    """

    deviations: float = 4.0
    share: float = 0.1
    lower: float = 0.25
    retries: int = 8
    offload: bool = False
    metric: Callable[[], float | None] | None = None

    def __post_init__(self) -> None:
        check_positive("deviations", self.deviations)
        check_positive("share", self.share)
        check_range("lower", self.lower, least=1e-6, below=1)
        check_integer("retries", self.retries, at_least=1)
        check_flag("offload", self.offload)
        if self.metric is not None and not callable(self.metric):
            raise TypeError(
                "`metric` must be a function without arguments that returns a number, got "
                f"{self.metric!r}."
            )

    def describe(self) -> dict[str, Any]:
        """Return the settings, which must be equal on all replicas and which the record keeps.

        Returns:
            Plain data.
        """
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        given = settings.pop("metric") is not None
        return {**settings, "metric": "given"} if given else settings
