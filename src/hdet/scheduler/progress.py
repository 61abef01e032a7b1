"""Progress: where a run is, and what it waits for."""

from dataclasses import dataclass

from hdet.scheduler.search_trial import SearchTrial


@dataclass
class Progress:
    """The step of a run, and its place in cycles, in a search and in an average under way."""

    step: int
    """Optimizer steps that were attempted."""
    sync_every: int
    total_steps: int | None
    replicas_differ: bool = False
    """Whether the weights of replicas may differ, whatever this cycle does to them."""
    has_trained: bool = False
    """Whether this cycle has made a step."""
    is_partial_cycle: bool = False
    """Whether the cycle started in the middle of another one: it has seen fewer losses."""
    quiet_until: int = 0
    """Steps that end before this one or at it only advance the schedule."""
    trial: SearchTrial | None = None
    """The learning-rate search under way; none in an ordinary cycle."""
    average_due_at: int | None = None
    """The step at which an average under way is applied (`overlap=`)."""
    found_lr: float | None = None
    """What the last search chose for the first group: the peak of the schedule."""
    forward_due_at: int | None = None
    """The step, half-way there, at which a compressed average is forwarded."""

    def steps_left(self, step: int) -> int:
        """Steps until the end of the cycle; the last cycle may be short."""
        left = -step % self.sync_every
        total = self.total_steps
        return left if total is None or total < step else min(left, total - step)

    def is_over(self) -> bool:
        return self.total_steps is not None and self.step >= self.total_steps
