"""Scout: the settings of a learning-rate search."""

from dataclasses import dataclass

from hdet._validation import check_flag, check_integer, check_range
from hdet.lr_search.constants import MAX_DECADES, MIN_ROUND_STEPS


class AllRatesDiverged(RuntimeError):
    """Every learning rate that the scout tries blows up, also in a lower range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scout:
    """Searches for a learning rate in the first steps of a run.

    Each replica trains alone with its own learning rate. A single replica tries one after the
    other. The learning rates cover some decades around what is usual for the optimizer, or around
    the given one if that is not known. In mid-run they cover those around the present one. A second
    sweep follows where the best lies at the end of the range. Three pieces of evidence decide
    together, each with its error: what is usual, where short rounds gain most, and where they
    explode. The run starts with the weights from before the search. The batches of the search are
    not repeated.

    Args:
        decades: The range of a sweep.
        share: The share of the run's steps that the search may take.
        steps: The steps of each round; up to 8 by default.
        rewind: Whether the run starts with the weights from before the search (True) or with those
            of the best replica (False).
        restart: Whether the given learning rate is kept unless it is far off: by a factor of 4 and
            by two errors of the estimate. Then the search is made after a change of the data, too.

    Raises:
        TypeError: A flag is not a bool.
        ValueError: A number or a rule is out of its range.

    >>> Scout(share=0.02).decades
    4.0
    """

    decades: float = 4.0
    share: float = 0.03
    steps: int | None = None
    rewind: bool = True
    restart: bool = False

    def __post_init__(self) -> None:
        check_range("decades", self.decades, least=0.5, below=MAX_DECADES)
        check_range("share", self.share, least=1e-6, below=1.0)
        if self.steps is not None:
            check_integer("steps", self.steps, at_least=MIN_ROUND_STEPS)
        check_flag("rewind", self.rewind)
        check_flag("restart", self.restart)
