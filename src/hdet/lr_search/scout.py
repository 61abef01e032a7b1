"""Scout: what a user sets of a learning-rate search."""

from dataclasses import dataclass
from typing import Literal

from hdet._validation import check_choice, check_flag, check_integer, check_range
from hdet.lr_search.constants import MIN_ROUND_STEPS


class AllRatesDiverged(RuntimeError):
    """Every learning rate that was tried blows up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scout:
    """Tries learning rates over some decades in the first steps of a run, then starts anew.

    Each replica trains alone with its own learning rate. The range is shifted while the best sits
    at its end, then a narrow one is tried around the choice, in at most `share` of the run's
    steps. Then the run begins from the weights it had, with what was found; the batches are spent.
    """

    decades: float = 4.0
    share: float = 0.03
    """Of the steps of the run, at most."""
    steps: int | None = None
    """Of every round; by default up to 12 over the whole range, and up to 24 around the choice."""
    batch_rule: Literal["auto", "sqrt", "linear", "none"] = "auto"
    """How a learning rate grows with the batch when gradients are shared again: with the number of
    replicas or its root; or ("auto") the more, the less the gradients of the replicas agree."""
    rewind: bool = True
    """Whether the run begins with the weights of before, or with those of the best replica."""
    restart: bool = False
    """Whether the given learning rate is kept unless it is hopeless: one look at the beginning
    whether far less would be better, and one after a change of the data; and if the run turns out
    to be stuck in its first cycles, it starts again from its first weights with what is far
    better."""

    def __post_init__(self) -> None:
        check_range("decades", self.decades, least=0.5, below=12.0001)
        check_range("share", self.share, least=1e-6, below=1.0)
        if self.steps is not None:
            check_integer("steps", self.steps, at_least=MIN_ROUND_STEPS)
        check_choice("batch_rule", self.batch_rule, ("auto", "sqrt", "linear", "none"))
        check_flag("rewind", self.rewind)
        check_flag("restart", self.restart)
