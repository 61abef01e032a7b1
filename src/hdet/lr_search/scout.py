"""Scout: the settings of a learning-rate search."""

from dataclasses import dataclass
from typing import Literal

from hdet._validation import check_choice, check_flag, check_integer, check_range
from hdet.lr_search.constants import MAX_DECADES, MIN_ROUND_STEPS


class AllRatesDiverged(RuntimeError):
    """Every learning rate that the scout tries blows up, also in a lower range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scout:
    """Searches for a learning rate in the first steps of a run.

    Each replica trains alone with its own learning rate. The learning rates cover some decades
    around the given one. The range shifts while the best lies at its end; then a narrow range is
    tried around the choice. The search takes at most `share` of the run's steps. The run starts
    with the choice and with the weights from before the search. The batches of the search are not
    repeated.

    Args:
        decades: The range of the first sweep, centred at the given learning rate.
        share: The share of the run's steps that the search may take.
        steps: The steps of each round. By default a round of a sweep takes up to 12 steps, and a
            round around the choice up to 24.
        batch_rule: How the learning rate grows when replicas share gradients again: with the
            number of replicas ("linear"), with its root ("sqrt"), or not at all ("none"). "auto"
            measures how far the gradients of the replicas agree: the less, the more it grows.
        rewind: Whether the run starts with the weights from before the search (True) or with those
            of the best replica (False).
        restart: Whether the given learning rate is kept unless it is hopeless. The search takes one
            sweep at the start, and one after a change of the data. A run that stalls in its first
            cycles starts again from its first weights, if a far better learning rate is found.

    Raises:
        TypeError: A flag is not a bool.
        ValueError: A number or a rule is out of its range.

    >>> Scout(share=0.02).decades
    4.0
    """

    decades: float = 4.0
    share: float = 0.03
    steps: int | None = None
    batch_rule: Literal["auto", "sqrt", "linear", "none"] = "auto"
    rewind: bool = True
    restart: bool = False

    def __post_init__(self) -> None:
        check_range("decades", self.decades, least=0.5, below=MAX_DECADES)
        check_range("share", self.share, least=1e-6, below=1.0)
        if self.steps is not None:
            check_integer("steps", self.steps, at_least=MIN_ROUND_STEPS)
        check_choice("batch_rule", self.batch_rule, ("auto", "sqrt", "linear", "none"))
        check_flag("rewind", self.rewind)
        check_flag("restart", self.restart)
